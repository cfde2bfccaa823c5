"""Metrics, spans, figures, the audit log and the job log.

Start at ``instruments.py``: counters and timings of the engine's loop, without a lock, labelled by kinds that code or
configuration names. ``audit.py`` writes who changed what in the transaction of the change.
"""
