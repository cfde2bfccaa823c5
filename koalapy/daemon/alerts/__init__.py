"""Alerts: checks that find what is wrong, alerts that last until it is over, health, and notifications.

Start at ``alerts.py``, which asks every check of ``*_checks.py`` every two seconds. ``health.py`` decides whether the
daemon is ready. ``notifications.py`` sends mail and webhooks to configured recipients only.
"""
