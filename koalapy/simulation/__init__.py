"""Simulated clusters, users, run times and time around the production scheduler. No rule is copied.

Imports ``scheduler``, ``workload`` and what they import. Start at ``simulation.py``.
"""
