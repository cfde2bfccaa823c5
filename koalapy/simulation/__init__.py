"""A discrete-event simulation of clusters, users and run times around the production scheduler, and its record.

It uses the scheduler's code and duplicates no rule. Imports ``scheduler``, ``workload`` and their dependencies. Start
at ``simulation.py``, and at ``record/`` for the inputs of a live scheduler and their replay.
"""
