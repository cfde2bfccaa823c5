"""Workloads: generate streams of jobs from the papers' parameters or a trace, run them and measure them.

Imports ``model``, ``validation`` and ``policies``. ``cli`` supplies the connection to a daemon. Start at
``generate.py``.
"""
