"""People for tests whose matter is something else."""

from koalapy.model.identity import Identity, Role
from koalapy.service.identities import Identities


def administrators(*tokens: str, user: str = "ada") -> Identities:
    """Whoever shows one of these tokens is an administrator."""
    return Identities({token: Identity(user, Role.ADMIN, "a token of the test") for token in tokens})
