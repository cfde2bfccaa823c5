"""The scheduler: events in, effects out, time as an argument; no clock, socket, thread or database.

Imports ``policies``, ``validation`` and ``model``. Start at ``cycle.py``: its ``run`` is the order of one step, whose
parts are one file each: ``event_handler.py``, ``attempts/deadlines.py``, ``queue/candidates.py``,
``queue/policy_calls.py``, ``claims/claim.py``, ``ledger.py``. ``scheduler.py`` builds the parts; ``queries.py`` is what
others may ask.
"""
