"""The dashboard: in a real browser where there is one, and by what the daemon answers to it."""
