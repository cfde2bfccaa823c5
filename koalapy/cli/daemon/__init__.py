"""Commands for operators of the daemon."""
