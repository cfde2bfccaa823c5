"""Who somebody is by the token that they show."""

from collections.abc import Mapping
from hashlib import sha256

from koalapy.model.identity import Identity


def digest_of_token(token: str) -> str:
    """How a token is kept; whoever reads that has no token."""
    return sha256(token.encode(errors="surrogateescape")).hexdigest()


class Identities:
    """Knows tokens by their digests only, so that neither a look at them nor the time that one takes tells a token."""

    def __init__(self, fixed: Mapping[str, Identity]) -> None:
        """``fixed``: tokens that hold while the daemon lives."""
        self._fixed = {digest_of_token(token): identity for token, identity in fixed.items()}

    def of(self, token: str) -> Identity | None:
        """None when nobody has such a token."""
        return self._fixed.get(digest_of_token(token))
