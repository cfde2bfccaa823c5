"""Domain types: jobs and their state machine, requests, components, clusters, users, links, errors.

Frozen dataclasses; imports nothing of ours. ``job.py`` defines each field of a job once: type, default, bounds,
option and help, from which API, store and command line derive (docs/adr/0013). Start at ``job.py`` and
``request.py``.
"""
