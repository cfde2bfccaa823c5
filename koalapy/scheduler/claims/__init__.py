"""From a placement to nodes: claiming tries, preemption, and the files that a job waits for (semantics 5).

Start at ``claim.py``. It decides; ``attempts/attempts.py`` carries out.
"""
