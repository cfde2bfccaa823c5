"""The waiting jobs: their order, the choice of jobs to try, and the calls of their policies (semantics 4 and 8).

Start at ``candidates.py``. ``placement_queues.py`` holds each job's position, ``queue.py`` scans by job groups,
``reservation.py`` reserves nodes for jobs that waited long. ``questions.py`` asks the policies of jobs, each by a
``PolicyQuestion`` within what ``eligibility.py`` allows.
"""
