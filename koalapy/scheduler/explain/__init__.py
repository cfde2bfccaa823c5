"""Why a job is where it is, what would start now, and the smallest change with which a job would be placed.

Only asks ``queries.py``; changes nothing. Start at ``explain.py``.
"""
