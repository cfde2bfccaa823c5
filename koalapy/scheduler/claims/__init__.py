"""Turn a placement into allocated nodes: claiming tries, preemption, and file transfers (semantics 5).

Start at ``claim.py``. It decides on changes; ``attempts/attempts.py`` applies them.
"""
