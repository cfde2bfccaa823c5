"""``koala check``: find out on a head node whether an agent could work there, and list the problems.

Start at ``head_node.py``; ``trial.py`` tries accounts and the runner for real, and removes all files and jobs it made.
"""
