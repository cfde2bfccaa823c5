"""The waiting jobs: which are tried, and what their policies answer (semantics 4 and 8).

Start at ``candidates.py``. ``placement_queues.py`` holds each job's position, ``queue.py`` scans by job groups,
``reservation.py`` reserves nodes for jobs that waited long, and ``policy_calls.py`` calls policies within
``eligibility.py``.
"""
