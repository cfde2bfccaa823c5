"""Schedule jobs: take events and the time, return effects. There is no clock, socket, thread or database here.

Imports ``policies``, ``validation`` and ``model``. Start at ``cycle.py``: ``Cycle.run`` lists the steps of a scheduling
cycle. Each step is one file: ``event_handler.py``, ``attempts/deadlines.py``, ``queue/candidates.py``,
``queue/policy_question.py``, ``claims/claim.py``, ``ledger.py``. ``scheduler.py`` constructs the components;
``queries.py`` is the read-only interface for other packages.
"""
