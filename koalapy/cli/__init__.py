"""The ``koala`` command: modules of commands by topic, which print tables, JSON and live views.

Commands use the REST API only and start fast: ``main.py`` maps each command to its module, which is imported when the
command runs. ``serve``, ``agent`` and ``check`` import the daemon and the agent inside. Start at ``main.py``.
"""
