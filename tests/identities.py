"""Identities of users for tests of other areas."""

from koalapy.daemon.auth.identities import Identities
from koalapy.model.identity import Identity, Role
from koalapy.store.service_tables import TokenStore


def administrators(*tokens: str, user: str = "ada", store: TokenStore | None = None) -> Identities:
    """Return identities in which each of these tokens is an administrator's; ``store`` has other tokens."""
    return Identities({token: Identity(user, Role.ADMIN, "a token of the test") for token in tokens}, store)


ADA = Identity("ada", Role.USER, "a test")
DIRECTOR = Identity("director", Role.OPERATOR, "a test")
