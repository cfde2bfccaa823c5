"""Authentication: tokens, logins by head node and browser, OpenID providers, and the rate of attempts.

Start at ``identities.py``. ``login.py`` maps an account that an agent vouches for to a user and issues a short-lived
token; ``oidc.py`` verifies tokens of a provider; ``pace.py`` limits guesses. What a token may do is decided in
``api/access.py``.
"""
