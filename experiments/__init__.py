"""Reproduce the tables and figures of the papers with the production scheduler in simulation.

The package is not installed: run ``python -m experiments`` in a checkout. It may import ``koalapy.simulation``,
``koalapy.workload`` and their imports; only tests import it. Start with ``experiment.py``, then read the module of a
paper, for example ``mohamed_2005.py``.
"""
