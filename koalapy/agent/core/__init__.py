"""The agent's loop, journal, questions to the resource manager, timeouts and settings.

Start at ``agent.py``. What follows from an entry of the journal (``spool.py``) happens only when the entry is on the
disk. A lost entry makes its component a lost one; an entry that cannot be written for lack of space fails it.
``lrm_polling.py`` decides when the resource manager is polled, ``leases.py`` counts the silence of the daemon.
"""
