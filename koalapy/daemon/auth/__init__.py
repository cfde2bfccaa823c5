"""Authentication: tokens, logins, identity providers."""
