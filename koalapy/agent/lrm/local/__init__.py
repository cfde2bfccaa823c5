"""The embedded resource manager, for clusters that are processes of this machine.

``locald.py`` runs as a separate process. It has nodes with loopback addresses, each exclusive to one job, and a strict
queue that grid jobs share with local users (``koala local-run``). It outlives agents and daemons, and ends when it is
idle and unused. Its parent, the keeper, ends the processes that a killed ``locald`` leaves.
"""
