"""The attempt of a job on its clusters: submission, barrier, end, failures, and contact with clusters (semantics 6).

``attempts.py`` changes the state of attempts. ``components.py`` (reports), ``deadlines.py`` (time), ``contact.py``
(silence) and ``failures.py`` decide on the changes and call it. ``health.py`` counts the errors of clusters.
"""
