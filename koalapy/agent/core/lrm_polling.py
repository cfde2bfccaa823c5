"""The schedule of polls of a resource manager.

A resource manager usually reports changes itself, and polls are a safety net. Two cases need polls: when only the job's
end is missing to end a component, its nodes are idle until then, so polls start soon and slow down. And no resource
manager reports when nodes of other users become free.
"""

import asyncio
from collections.abc import Callable, Iterable

from koalapy.agent.components.component import Component
from koalapy.agent.lrm.port import LrmSnapshot
from koalapy.model.errors import SiteUnavailable
from koalapy.system.clock import SYSTEM_CLOCK, Clock

FIRST_POLL_DELAY = 0.1
"""Seconds until the first poll for the end of a component without runners; each further pause doubles."""
MIN_PAUSE_RATIO = 4
"""Minimum pause before such a poll, as a multiple of the last poll's duration."""
AWAITED_POLL_INTERVAL = 1.0
"""Seconds between two polls while jobs wait for nodes that other users occupy."""


class PollSchedule:
    """When to poll, and the last snapshot with its cost."""

    def __init__(self, interval: float, live: Callable[[], Iterable[Component]], clock: Clock = SYSTEM_CLOCK) -> None:
        """Set up. ``interval``: seconds between two polls that the resource manager makes; ``live`` components."""
        self._clock = clock
        self._interval, self._live = interval, live
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._last: LrmSnapshot | None = None
        self._last_at = 0.0
        """When the last snapshot was taken."""
        self._seconds = self._ended_at = 0.0
        """Duration and end of the last poll."""
        self._under_way = False
        self._count = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Waiters, each for the end of a poll of that number or a later one."""
        self._awaited = False
        self._ending: set[str] = set()
        self._pause = self._pause_until = 0.0

    # Who wants one

    def request_poll(self) -> None:
        self._wake.set()

    async def wait_for_new_poll(self) -> None:
        """Wait for the end of a poll that begins after this call, successful or not."""
        finished = asyncio.get_running_loop().create_future()
        self._waiting.append((self._count + 1, finished))
        self.request_poll()
        await finished

    def set_nodes_awaited(self, *, awaited: bool) -> None:
        """Set whether jobs wait for nodes here, so that nodes freed by other users are noticed soon."""
        self._awaited = awaited
        if self._awaits_others and not self._under_way:
            pause = MIN_PAUSE_RATIO * self._seconds - (self._clock.monotonic() - self._ended_at)
            asyncio.get_running_loop().call_later(max(0.0, pause), self._soon_after, self._count)

    def _soon_after(self, number: int) -> None:
        """Request a poll unless one has begun since the poll of that number."""
        if self._count == number:
            self.request_poll()

    @property
    def _awaits_others(self) -> bool:
        """Whether jobs wait for nodes that local users occupy. Ends of the daemon's own jobs are reported anyway."""
        last = self._last
        return self._awaited and last is not None and last.background + last.down > 0

    async def wait_until_due(self, timeout: float | None = None) -> None:
        """Wait until a poll is requested or due, by default as ``seconds_to_next`` says."""
        try:
            async with asyncio.timeout(self.seconds_to_next() if timeout is None else timeout):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def seconds_to_next(self) -> float:
        """Return the maximum seconds until the next poll."""
        now = self._clock.monotonic()
        ending = {component.name for component in self._live() if component.awaits_job_end}
        if ending - self._ending:
            self._pause = max(FIRST_POLL_DELAY, MIN_PAUSE_RATIO * self._seconds)
            self._pause_until = now + self._pause
        elif now >= self._pause_until:
            self._pause = min(self._interval, self._pause * 2)
            self._pause_until = now + self._pause
        self._ending = ending
        timeout = self._interval
        if self._awaits_others:
            timeout = min(timeout, max(AWAITED_POLL_INTERVAL, MIN_PAUSE_RATIO * self._seconds))
        return min(timeout, self._pause_until - now) if ending else timeout

    # One poll

    def begin_poll(self) -> int:
        """Count a poll that begins now, and return its number."""
        self._count += 1
        self._under_way = True
        return self._count

    def end_poll(self, began: float, snapshot: LrmSnapshot | None) -> None:
        """Record the end of a poll and its snapshot, None if it failed. The snapshot is not processed yet."""
        self._under_way = False
        self._ended_at = self._clock.monotonic()
        self._seconds = self._ended_at - began
        if snapshot is not None:
            self._last, self._last_at = snapshot, began

    def notify_processed(self, number: int) -> None:
        """Wake the tasks that wait for this poll or an earlier one, after its snapshot was processed."""
        if self._last is not None:
            self._answered.set()
        waiting, self._waiting = self._waiting, []
        for required, finished in waiting:
            if required > number:
                self._waiting.append((required, finished))
            elif not finished.done():
                finished.set_result(None)

    def known_snapshot(self) -> tuple[LrmSnapshot, float]:
        """Return the last snapshot and its age in seconds; raise ``SiteUnavailable`` before the first."""
        if self._last is None:
            raise SiteUnavailable("the resource manager has not answered yet")
        return self._last, self._clock.monotonic() - self._last_at

    async def latest_snapshot(self) -> LrmSnapshot:
        """Return the last snapshot; wait for the first."""
        await self._answered.wait()
        assert self._last is not None
        return self._last
