"""Placement policies: a function from a request and a view of the grid to a placement, or to a refusal with reasons.

Policies are pure functions and import only ``model``. Each policy has one file. ``registry.py`` lists the built-in
policies and those of installed packages. Start at ``policy.py``.
"""
