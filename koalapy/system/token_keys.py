"""Derive keys from the token of an agent."""

import hashlib

SCRYPT_COST = 2**14
"""Cost of guessing a token from a derived key: 50 ms per attempt."""


def derive_token_key(token: str, purpose: str) -> bytes:
    """Return the key for a purpose, 32 bytes. It takes long by design, since a token may be weak."""
    return hashlib.scrypt(token.encode(), salt=f"koala {purpose}".encode(), n=SCRYPT_COST, r=8, p=1, dklen=32)
