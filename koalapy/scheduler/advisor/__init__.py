"""Learn run times and slowdowns of applications over several clusters, for learning policies (docs/advisor.md).

Start at ``experience.py``; ``knowledge.py`` prepares what a policy gets about one job.
"""
