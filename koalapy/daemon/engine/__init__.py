"""The loop around the scheduler: collect events, step, write one transaction, then send commands.

Start at ``engine.py``. Its ``Outbox`` has a command until the agent acknowledges it. ``duties.py`` runs periodic
work by the monotonic clock, ``database.py`` runs queries in threads.
"""
