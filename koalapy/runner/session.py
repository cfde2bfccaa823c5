"""Authenticate the lines between a runner and its agent, and the files that a runner leaves for it.

Runner and agent share the node's secret, which is never sent. From it, from a nonce of each side for this connection,
and from the component's name and the node's index they derive two keys, one for each direction. Each line begins with
a tag, made with the key of its direction and the number of the line. So no other process can send, repeat, reorder or
reflect a line. Lines are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from hashlib import sha256

NONCE_SIZE = 32
TAG_SIZE = 16
"""Bytes, half of an HMAC-SHA256; a line begins with twice as many hexadecimal digits."""
TAG_LENGTH = 2 * TAG_SIZE
FILE_TAG_LENGTH = 2 * sha256().digest_size + 1
"""Bytes of the tag before the content of a file: a line of hexadecimal digits."""


def derive_key(key: bytes, *parts: str) -> bytes:
    """Return the HMAC-SHA256 of texts, each with its length before it, so that no two lists of texts collide."""
    texts = [part.encode("utf-8", "surrogateescape") for part in parts]
    return hmac.new(key, b"".join(b"%d:%s" % (len(text), text) for text in texts), "sha256").digest()


def make_nonce() -> str:
    return os.urandom(NONCE_SIZE).hex()


def seal_file(secret: bytes, name: str, content: bytes | bytearray) -> bytes:
    """Return the content of a file with its tag, for a folder in which other jobs of the account may write."""
    return _file_tag(secret, name, content) + content


def open_file(secret: bytes, name: str, sealed: bytes) -> bytes:
    """Return the content of a sealed file. Raise ``ValueError`` if the node's runner or agent did not write it."""
    content = sealed[FILE_TAG_LENGTH:]
    if not hmac.compare_digest(_file_tag(secret, name, content), sealed[:FILE_TAG_LENGTH]):
        raise ValueError(f"{name} was changed, or was not written by the runner of its node: its tag is wrong")
    return content


def _file_tag(secret: bytes, name: str, content: bytes | bytearray) -> bytes:
    return hmac.new(derive_key(secret, "file", name), content, "sha256").hexdigest().encode() + b"\n"


class Line:
    """A message and its digest, computed once for all runners that it is sent to."""

    __slots__ = ("content", "digest", "ended")

    def __init__(self, content: bytes) -> None:
        self.content, self.ended, self.digest = content, content + b"\n", sha256(content).digest()


class Direction:
    """The key and the number of lines of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        self._count = 0

    def tag_next(self, line: Line) -> bytes:
        """Return the tag of the next line."""
        mac = self._mac.copy()
        mac.update(self._count.to_bytes(8, "big") + line.digest)
        self._count += 1
        return mac.digest()[:TAG_SIZE].hex().encode()


class Session:
    """One authenticated connection, from the time at which both sides know both nonces."""

    def __init__(self, secret: bytes, component: str, node: int, nonces: tuple[str, str], *, is_agent: bool) -> None:
        """``nonces``: the runner's and the agent's. ``is_agent``: this side is the agent."""
        keys = [derive_key(secret, "line", side, component, str(node), *nonces) for side in ("runner", "agent")]
        self._outgoing, self._incoming = (Direction(key) for key in (reversed(keys) if is_agent else keys))

    def seal(self, line: Line) -> bytes:
        """Return the bytes to send for a line."""
        return self._outgoing.tag_next(line) + line.ended

    def open(self, sealed: bytes) -> bytes:
        """Return the content of a received line. Raise ``ValueError`` if the other side did not send it next."""
        line = Line(sealed[TAG_LENGTH:])
        if not hmac.compare_digest(self._incoming.tag_next(line), sealed[:TAG_LENGTH]):
            raise ValueError("a received line was changed, repeated or not sent by the other side: its tag is wrong")
        return line.content


SCRYPT_COST = 2**14
"""Cost of guessing a token from a derived key: 50 ms per attempt."""


def derive_token_key(token: str, purpose: str) -> bytes:
    """Return the key for a purpose, 32 bytes. It takes long by design, since a token may be weak."""
    return hashlib.scrypt(token.encode(), salt=f"koala {purpose}".encode(), n=SCRYPT_COST, r=8, p=1, dklen=32)
