"""The process at a cluster that drives the resource manager, the runners and the files of components.

Imports ``model``, ``protocol``, ``config`` and ``system``. Start at ``main.py``, which builds an agent, and
``core/agent.py``, its loop: connect to the daemon, report the cluster and every component, carry out commands.
"""
