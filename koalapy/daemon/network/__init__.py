"""Links between clusters: measured by jobs of low priority, learned from transfers, reported to the scheduler.

Start at ``network.py``; ``links.py`` decides which value counts.
"""
