"""The papers' tables and figures, made again by the production scheduler in the simulated world.

The package is not installed: run ``python -m experiments`` in a checkout. It may import ``koalapy.simulation``,
``koalapy.workload`` and what these import; nothing imports it but tests. Start with ``experiment.py``, then a paper's
module, for example ``mohamed_2005.py``.
"""
