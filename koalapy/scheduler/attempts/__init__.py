"""A job's attempt on its clusters: submission, barrier, end, failures, and contact with the clusters (semantics 6).

``attempts.py`` acts and asks no reason; ``components.py`` (reports), ``deadlines.py`` (time), ``contact.py`` (silence)
and ``failures.py`` decide and call it. ``health.py`` counts what speaks against a cluster.
"""
