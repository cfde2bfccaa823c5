"""The agent's loop, journal, questions, resource manager jobs, and settings.

Start at ``agent.py``. An effect of a journal entry (``spool.py``) happens only when the entry is on the disk. If an
entry is lost, its component is reported as lost; if an entry cannot be written for lack of space, its component fails.
``lrm_monitor.py`` polls the resource manager, ``leases.py`` measures the daemon's silence.
"""
