"""The REST API: a router for each resource, errors as problem+json, and the WebSocket of agents.

Imports the daemon's parts, ``validation`` and ``model``. Start at ``app.py`` and ``jobs.py``. ``guard.py`` checks the
host, origin and token of every request. ``access.py`` is the table of routes and roles; a route that it does not list
is for administrators. ``job_views.py`` hides the details of other users' jobs. ``audit.py`` records requests.
``derived.py`` derives request and response bodies from the dataclasses of ``model``.
"""
