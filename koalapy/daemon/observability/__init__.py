"""Metrics, figures and the audit log.

Start at ``instruments.py``: counters and timings of the engine's loop, without a lock. Their labels come from code or
configuration. ``audit.py`` writes each change and its user in the transaction of the change.
"""
