"""The operators' pages, rendered by the daemon: pages, charts in SVG, templates, static files.

Imports the daemon's parts, ``api`` and ``model``. A page is one function that returns one frozen dataclass; it
becomes the page, its parts and the JSON at ``PATH.json``. Each page and form is named by the REST operation that does
the same, so that access and audit follow. Pages learn of changes by ``/events`` and ask for themselves again. Start
at ``dashboard.py``.
"""
