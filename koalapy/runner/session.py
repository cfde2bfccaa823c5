"""How a runner and its agent prove to each other who they are, and how each line they say after that is held to it.

Both know the node's secret, which is never sent. From it, from a number that each made up for this connection, and from
the name of the component and the index of the node follow two keys, one for each direction; every line begins with its
tag, made with the key of its direction and its place in the order. So nothing can be said by anybody else, nor be said
twice, nor be turned back upon its sender; what is said can be read on the way.
"""

from __future__ import annotations

import hmac
import os
from hashlib import sha256

NONCE_SIZE = 32
"""Bytes."""
TAG_SIZE = 16
"""Bytes, half of an HMAC-SHA256; twice as many hexadecimal digits before each line."""
TAG_LENGTH = 2 * TAG_SIZE
FILE_TAG_LENGTH = 2 * sha256().digest_size + 1
"""Bytes before the content of a file: a line of its own."""


def derive(key: bytes, *parts: str) -> bytes:
    """HMAC-SHA256 over texts, none of which runs into the next."""
    texts = [part.encode("utf-8", "surrogateescape") for part in parts]
    return hmac.new(key, b"".join(b"%d:%s" % (len(text), text) for text in texts), "sha256").digest()


def make_nonce() -> str:
    return os.urandom(NONCE_SIZE).hex()


def seal_file(secret: bytes, name: str, content: bytes | bytearray) -> bytes:
    """The content of a file of that name as a runner leaves it, where others of its account may write, too."""
    return _file_tag(secret, name, content) + content


def open_file(secret: bytes, name: str, sealed: bytes) -> bytes:
    """What a node's runner, or its agent, wrote into a file of that name; ``ValueError`` when they did not."""
    content = sealed[FILE_TAG_LENGTH:]
    if not hmac.compare_digest(_file_tag(secret, name, content), sealed[:FILE_TAG_LENGTH]):
        raise ValueError(f"{name} was not written by its runner")
    return content


def _file_tag(secret: bytes, name: str, content: bytes | bytearray) -> bytes:
    return hmac.new(derive(secret, "file", name), content, "sha256").hexdigest().encode() + b"\n"


class Line:
    """A message as it is sent, and its digest: made once for all the runners that are told the same."""

    __slots__ = ("content", "digest", "ended")

    def __init__(self, content: bytes) -> None:
        self.content, self.ended, self.digest = content, content + b"\n", sha256(content).digest()


class Direction:
    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._count = 0

    def tag(self, line: Line) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(self._count.to_bytes(8, "big") + line.digest)
        self._count += 1
        return keyed.digest()[:TAG_SIZE].hex().encode()


class Session:
    """One connection, from the moment at which both sides know each other's nonce."""

    def __init__(self, secret: bytes, component: str, node: int, nonces: tuple[str, str], *, is_agent: bool) -> None:
        """``nonces`` are the runner's and the agent's."""
        keys = [derive(secret, "line", who, component, str(node), *nonces) for who in ("runner", "agent")]
        self._said, self._heard = (Direction(key) for key in (reversed(keys) if is_agent else keys))

    def seal(self, line: Line) -> bytes:
        return self._said.tag(line) + line.ended

    def open(self, sealed: bytes) -> bytes:
        """What was said by the other side, and by nobody else; ``ValueError``."""
        line = Line(sealed[TAG_LENGTH:])
        if not hmac.compare_digest(self._heard.tag(line), sealed[:TAG_LENGTH]):
            raise ValueError("a line that is not from the other side of this connection")
        return line.content
