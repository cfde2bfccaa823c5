"""What is learned of applications: run times and slowdowns over clusters, for policies that learn (docs/advisor.md).

Start at ``experience.py``; ``knowledge.py`` hands policies what is known of one job.
"""
