"""Placement policies: (request, view of the grid) to a placement, or a refusal with reasons.

Pure functions; imports ``model`` only. One file a policy; ``registry.py`` names them, ``installed.py`` adds those of
installed packages. Start at ``policy.py``.
"""
