"""HTTP client of the REST API: connections, logins, retries, errors and the types of answers.

The command line is built on it and starts fast: it imports the standard library, ``model`` and ``system`` only. Start
at ``client.py``; ``access.py`` finds the token for a daemon. ``grid.py`` is the Python interface, ``koalapy.connect``.
"""
