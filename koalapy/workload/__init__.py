"""Workloads: generate streams of jobs from the papers' parameters or a trace, run them, measure them.

Imports ``model``, ``validation`` and ``policies``; talks to a daemon over what ``cli`` gives it. Start at
``generate.py``.
"""
