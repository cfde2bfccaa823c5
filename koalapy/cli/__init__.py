"""The ``koala`` command: one module a command, by topic; prints tables, JSON and live views.

Talks REST only and imports nothing heavy at start: ``main.py`` names each command's module, which is imported when it
is called. ``serve``, ``agent`` and ``check`` import the daemon and the agent inside. Start at ``main.py``.
"""
