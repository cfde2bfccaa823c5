"""Authentication: tokens, logins from head nodes and browsers, OpenID providers, and rate limits.

Start at ``identities.py``. ``login.py`` maps an account that an agent attests to a user and issues a short-lived
token; ``oidc.py`` verifies tokens of a provider; ``pace.py`` limits requests and guesses of tokens. ``api/access.py``
authorizes what a token may do.
"""
