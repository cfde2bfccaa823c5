"""Alerts: their checks, their states, and notifications."""
