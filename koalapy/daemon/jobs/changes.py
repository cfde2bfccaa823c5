"""Signal to clients that jobs or clusters have changed, at a limited rate. Clients then read the changes."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

Topic = Literal["jobs", "clusters"]
TOPICS: tuple[Topic, ...] = get_args(Topic)

MIN_INTERVAL = 1.0
"""The least seconds between two signals."""
IDLE_INTERVAL = 10.0
"""Seconds after which a client gets an empty signal if nothing changed, so that it updates ages."""


@dataclass(slots=True, eq=False)
class _Follower:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    topics: set[Topic] = field(default_factory=set)


class Changes:
    """The signals of one daemon. Not thread-safe: used in the engine's event loop only."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(4)
        self._version = 0
        self._followers: set[_Follower] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._signalled_at = float("-inf")
        self._ended = False

    @property
    def number(self) -> int:
        """The number of changes since the daemon started."""
        return self._version

    @property
    def version(self) -> str:
        """A text that differs after each change and for each daemon run."""
        return self.version_of(self._version)

    def version_of(self, number: int) -> str:
        """Return the version after a number of changes."""
        return f"{self._origin}.{number}"

    def number_of(self, version: str) -> int:
        """Return the number of changes up to a version; -1 for a text that is no version of this run."""
        origin, _, digits = version.partition(".")
        is_own = origin == self._origin and digits.isdecimal() and len(digits) < 20
        number = int(digits) if is_own else -1
        return number if number <= self._version else -1

    @property
    def ended(self) -> bool:
        return self._ended

    def note_change(self, *topics: Topic) -> None:
        """Record a change of these topics; followers are signalled soon."""
        self._version += 1
        for follower in self._followers:
            follower.topics.update(topics)
        if self._followers and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._signalled_at + MIN_INTERVAL), self._signal_followers)

    def _signal_followers(self) -> None:
        """Wake the followers with changes."""
        self._timer = None
        self._signalled_at = asyncio.get_running_loop().time()
        for follower in self._followers:
            if follower.topics:
                follower.wake.set()

    def end_followers(self) -> None:
        """End all followers."""
        self._ended = True
        for follower in self._followers:
            follower.wake.set()

    async def follow_changes(self, since: str = "") -> AsyncIterator[frozenset[Topic]]:
        """Yield the topics of each change, until ``end_followers`` is called.

        If ``since`` is not the current version, first yield all topics at once, since one version counts the changes
        of all. After ``IDLE_INTERVAL`` seconds without a change, yield an empty set.
        """
        follower = _Follower()
        self._followers.add(follower)
        try:
            if since and since != self.version:
                follower.topics.update(TOPICS)
                follower.wake.set()
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_INTERVAL):
                        await follower.wake.wait()
                if self.ended:
                    return
                follower.wake.clear()
                topics, follower.topics = frozenset(follower.topics), set()
                yield topics
        finally:
            self._followers.discard(follower)
