"""The web pages for users and operators, rendered by the daemon: pages, SVG charts, templates and static files.

Imports the daemon's parts, ``api`` and ``model``. A page is a function that returns one frozen dataclass, from which
the HTML page, its live updates and the JSON at ``PATH.json`` are rendered. Each page and form names the REST operation
that it corresponds to, which decides access and audit. Pages receive changes by ``/events`` and then reload their
content. Start at ``dashboard.py``.
"""
