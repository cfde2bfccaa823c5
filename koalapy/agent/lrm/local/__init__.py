"""The embedded resource manager, for clusters that are processes of this machine.

``locald.py`` is a process of its own: nodes with loopback addresses, each exclusive to one job, a strict queue that
it shares with local users (``koala local-run``). It outlives agents and daemons and ends when it is idle and unused.
Its parent, the keeper, ends what a killed ``locald`` leaves.
"""
