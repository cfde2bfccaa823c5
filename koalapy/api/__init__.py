"""The REST API: one router a resource, problem+json errors, the WebSocket of agents.

Imports the daemon's parts, ``validation`` and ``model``. Start at ``app.py`` and ``jobs.py``. ``guard.py`` stands
before every route: host, origin and token; ``access.py`` is the table of routes and roles, in which a missing route
is for administrators; ``job_views.py`` hides what is not the caller's; ``audit.py`` records requests. Bodies and
answers of jobs derive from ``model`` (``derived.py``).
"""
