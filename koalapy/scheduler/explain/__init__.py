"""Explain the states of jobs, the current capacity, and the smallest change with which a job would be placed.

All functions are read-only and use ``queries.py``. Start at ``explain.py``.
"""
