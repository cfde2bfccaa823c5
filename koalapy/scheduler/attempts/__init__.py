"""The attempt of a job on its clusters: submission, common start, end, failures, and contact (semantics 6).

``attempts.py`` changes the state of attempts. ``components.py`` (reports), ``deadlines.py`` (time), ``contact.py``
(silence) and ``failures.py`` decide on the changes and call it. ``health.py`` counts the errors of clusters, and
``drains.py`` applies the orders of operators to place nothing on them.
"""
