"""The daemon: one process that owns the scheduler, the database, and the connections of agents and clients.

``main.py`` starts it and ``assembly.py`` builds the parts, one folder each. The parts import the layers below
(``scheduler``, ``record``, ``protocol``, ``model``, ``config``, ``system``) and the protocols of ``ports.py``; the
SQL store is chosen in ``assembly.py`` only. Start at ``engine/engine.py``.
"""
