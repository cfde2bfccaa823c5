"""Domain types: jobs and their state machine, requests, components, clusters, users, links, errors.

Frozen dataclasses; imports no other package of koalapy. ``job.py`` defines each field of a job once: type, default,
bounds, option and help. API, store and command line derive from it (docs/adr/0013). Start at ``job.py`` and
``request.py``.
"""
