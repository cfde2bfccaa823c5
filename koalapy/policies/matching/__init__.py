"""Exact matching of one job with nodes and uplinks (lerida-2008), for the policy ``resource-matching``.

Start at ``problem.py``.
"""
