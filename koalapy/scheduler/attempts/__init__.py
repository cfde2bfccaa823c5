"""The attempt of a job on its clusters: submission, barrier, end, failures, and contact with clusters (semantics 6).

``attempts.py`` carries out; ``components.py`` (reports), ``deadlines.py`` (time), ``contact.py`` (silence) and
``failures.py`` decide and call it. ``health.py`` counts the errors of clusters.
"""
