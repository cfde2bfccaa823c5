"""The lines by which the relays of nodes, heads and the hub authenticate each other and agree about streams.

See docs/adr/0034-relayed-links.md for the lines and the keys.
"""

from __future__ import annotations

import hmac
import reprlib

from koalapy.runner.connections import Refused, encode, get_text
from koalapy.runner.session import TAG_LENGTH, TAG_SIZE, derive_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

MAX_STREAM = 2**53
MAX_NODES = 1_000_000
REPLAY_WINDOW = 65_536
"""Stream numbers of one node that are remembered. Lower numbers are refused."""


def derive_node_key(secret: bytes, attempt: str) -> bytes:
    """Return the key of a node's relay from the secret that its runner and its agent share."""
    return derive_key(secret, "relay", attempt)


def derive_pair_key(attempt_key: bytes, one: str, other: str) -> bytes:
    """Return the key that the heads of two clusters share in an attempt."""
    return derive_key(attempt_key, "pair", *sorted((one, other)))


def derive_direct_key(pair_key: bytes, opener: str, taker: str) -> bytes:
    """Return the key for first lines of streams that one cluster's head opens directly at another's."""
    return derive_key(pair_key, "direct", opener, taker)


def make_ticket(pair_key: bytes, stream: tuple[str, int, int], target: int, port: int) -> str:
    """Return the proof that the head of the opening node's cluster opens a stream.

    ``stream``: attempt, opening node, number.
    """
    return derive_key(pair_key, "ticket", *map(str, stream), str(target), str(port))[:TAG_SIZE].hex()


def check_ticket(ticket: str, pair_key: bytes, stream: tuple[str, int, int], target: int, port: int) -> None:
    """Raise ``Refused`` if a ticket is not for this stream."""
    if not hmac.compare_digest(ticket.encode(), make_ticket(pair_key, stream, target, port).encode()):
        raise Refused("ticket", "the ticket of a stream is wrong: its two sites were given other keys")


def seal_line(key: bytes, message: dict[str, Any]) -> bytes:
    """Return a first line with its tag and its end."""
    content = encode(message).encode()
    return _make_tag(key, content) + content + b"\n"


def _make_tag(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, "sha256").digest()[:TAG_SIZE].hex().encode()


def check_seal(key: bytes, line: bytes) -> None:
    """Raise ``Refused`` if a first line was not made with this key."""
    if not hmac.compare_digest(_make_tag(key, line[TAG_LENGTH:]), line[:TAG_LENGTH]):
        raise Refused("unauthenticated", "a peer has sent a line with a wrong tag: it has another key")


def get_number(message: dict[str, Any], name: str, first: int, last: int) -> int:
    """Return an integer of a message. Raise ``Refused`` if it is missing or out of bounds."""
    value = message.get(name)
    if type(value) is int and first <= value <= last:
        return value
    raise Refused(
        "malformed", f"a peer has sent {reprlib.repr(value)[:50]} as {name}, which must be from {first} to {last}"
    )


def get_stream(message: dict[str, Any]) -> tuple[str, int, int]:
    """Return the attempt, opening node and number of a stream. Raise ``Refused``."""
    source = get_number(message, "from", 0, MAX_NODES)
    return get_text(message, "attempt"), source, get_number(message, "stream", 0, MAX_STREAM)


def get_target(message: dict[str, Any]) -> tuple[int, int]:
    """Return the node and the port that a stream goes to. Raise ``Refused``."""
    return get_number(message, "to", 0, MAX_NODES), get_number(message, "port", 1, 65535)


class UsedNumbers:
    """Stream numbers of one node, of which each may be used once."""

    def __init__(self, window: int = REPLAY_WINDOW) -> None:
        self._window, self._used, self._highest = window, set[int](), -1

    def use(self, number: int) -> bool:
        """Return whether a number was not used before, and record its use."""
        if number in self._used or number <= self._highest - self._window:
            return False
        self._used.add(number)
        self._highest = max(self._highest, number)
        if len(self._used) > 2 * self._window:
            self._used = {n for n in self._used if n > self._highest - self._window}
        return True


class TokenBucket:
    """A limit on events: ``burst`` at once, then ``rate`` per second."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._tokens, self._at = rate, burst, burst, now

    def take(self, now: float) -> bool:
        """Return whether an event is allowed now, and count it."""
        # The clock of a loop goes back when it notices that its process was stopped.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_time(self) -> float:
        """Return the seconds from the last event until the next one is allowed."""
        return max(0.0, (1 - self._tokens) / self._rate)


class Ranges:
    """Ranges of ports."""

    def __init__(self, pairs: Iterable[Iterable[int]]) -> None:
        """``pairs``: the first and last port of each range. Raise ``ValueError`` for others than ports."""
        self._ranges: list[tuple[int, int]] = []
        for first, last in pairs:
            if not (type(first) is int and type(last) is int and 0 < first <= last < 65536):
                raise ValueError(f"{first!r} to {last!r} is no range of ports")
            self._ranges.append((first, last))

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and any(first <= port <= last for first, last in self._ranges)
