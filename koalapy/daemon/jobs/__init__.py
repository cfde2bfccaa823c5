"""Jobs as clients see them: submission, actions, search, limits, quotas, output, history, retention, the record.

Start at ``jobs.py``. ``retention.py`` removes jobs after ``jobs_keep``: files first, rows last; numbers are never
reused. ``changes.py`` tells pages that something has changed, at most once a second.
"""
