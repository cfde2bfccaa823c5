"""The web pages for users and operators, rendered by the daemon: pages, templates and static files.

Imports the daemon's parts, ``api`` and ``model``. A page is a function that returns the variables of its template, from
which the HTML page, its live updates and the JSON at ``PATH.json`` are rendered. Each page and form names the REST
operation that it corresponds to, which decides access and audit. An open page receives its content anew by the stream
``PATH.events``; ``shared_pages.py`` renders it once for all viewers. Start at ``dashboard.py``.
"""
