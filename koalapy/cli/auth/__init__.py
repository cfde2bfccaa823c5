"""Commands for logins, tokens and access."""
