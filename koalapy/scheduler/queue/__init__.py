"""Which jobs wait, which are tried, and what their policies answer (semantics 4 and 8).

Start at ``candidates.py``. ``placement_queues.py`` has each job's place, ``queue.py`` scans by shapes of jobs,
``reservation.py`` keeps nodes for jobs that waited long, ``policy_calls.py`` asks policies within ``eligibility.py``.
"""
