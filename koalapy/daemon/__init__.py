"""The daemon: one process that owns the scheduler, the database, and the connections of agents and clients.

``main.py`` builds the parts in order, each by its own function: ``core.py`` (stores, scheduler, engine), ``access.py``
(tokens and logins), ``services.py`` and ``web_server.py``. The folders hold the parts; they import the layers below
(``store``, ``scheduler``, ``simulation``, ``protocol``, ``model``, ``config``, ``system``). Only ``core.py`` opens the
stores. Start at ``engine/engine.py``.
"""
