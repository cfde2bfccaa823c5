"""Alerts: checks for problems, alerts that last while a problem does, health, and notifications.

Start at ``alerts.py``, which runs every check of ``*_checks.py`` every two seconds. ``health.py`` decides whether the
daemon is ready. ``notifications.py`` sends mail and webhooks to configured recipients only.
"""
