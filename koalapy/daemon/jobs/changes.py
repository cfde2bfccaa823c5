"""Who shows how things stand is told when that has changed, at most so often; what has changed he looks at himself."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

Topic = Literal["jobs", "clusters"]
TOPICS: tuple[Topic, ...] = get_args(Topic)

MIN_INTERVAL = 1.0
"""Seconds between two signals."""
MAX_INTERVAL = 10.0
"""Seconds between two signals while something changes all the time and what follows from a signal costs much; also
seconds after which a signal comes though nothing changed, for what only ages."""
SHARE = 0.08
"""Of the time, what may be spent on that which follows from signals."""


@dataclass(slots=True, eq=False)
class _Follower:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    topics: set[Topic] = field(default_factory=set)


class Changes:
    """Lives in the engine's loop."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(4)
        self._version = 0
        self._followers: set[_Follower] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._interval = MIN_INTERVAL
        self._spent = 0.0
        self._ended = False

    @property
    def version(self) -> str:
        """Another one after each change, and of each daemon."""
        return f"{self._origin}.{self._version}"

    @property
    def told_at(self) -> float:
        """When the last signal was given, by the loop's clock."""
        return self._told_at

    @property
    def ended(self) -> bool:
        return self._ended

    def note(self, *topics: Topic) -> None:
        """Something changed; those who follow are told soon."""
        self._version += 1
        for follower in self._followers:
            follower.topics.update(topics)
        if self._followers and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._told_at + self._interval), self._tell)

    def spent(self, seconds: float) -> None:
        """What somebody did for a signal took so long: signals come seldom enough that this stays a small share."""
        self._spent += seconds

    def _tell(self) -> None:
        self._timer = None
        self._told_at = asyncio.get_running_loop().time()
        self._interval = min(MAX_INTERVAL, max(MIN_INTERVAL, self._spent / SHARE))
        self._spent = 0.0
        for follower in self._followers:
            if follower.topics:
                follower.wake.set()

    def end(self) -> None:
        """Let go of everybody."""
        self._ended = True
        for follower in self._followers:
            follower.wake.set()

    async def follow(self, since: str = "") -> AsyncIterator[frozenset[Topic]]:
        """What kinds of things changed, at once where that was after the version ``since``; at least every
        ``MAX_INTERVAL`` seconds something, or nothing."""
        follower = _Follower()
        self._followers.add(follower)
        try:
            if since and since != self.version:
                follower.topics.update(TOPICS)
                follower.wake.set()
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(MAX_INTERVAL):
                        await follower.wake.wait()
                if self.ended:
                    return
                follower.wake.clear()
                topics, follower.topics = frozenset(follower.topics), set()
                yield topics
        finally:
            self._followers.discard(follower)
