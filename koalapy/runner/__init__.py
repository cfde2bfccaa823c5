"""Run on the nodes that a resource manager gives to a job: the runner, launchers, the launch agent of mpirun.

Imports the standard library only and keeps to Python 3.9, so that a node needs nothing but Python. Start at
``runner.py``: it connects to its agent, waits at the barrier, and checks that it reaches all nodes of the plan
(``preflight.py``). Then it starts the program or mpirun (``launchers``, ``openmpi.py``), and sends output in
acknowledged pieces (``program_output.py``). It ends all its processes at the end, when its lease is over
(``lease.py``) or when its agent says so. Each line on the connection (``connections.py``) is authenticated with a
secret of that node and attempt (``session.py``).
"""
