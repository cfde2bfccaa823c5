"""A discrete-event simulation of clusters, users and run times around the production scheduler.

It uses the scheduler's code and duplicates no rule. Imports ``scheduler``, ``workload`` and their dependencies. Start
at ``simulation.py``.
"""
