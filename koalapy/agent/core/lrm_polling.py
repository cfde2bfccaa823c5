"""When a resource manager is polled.

As a rule it says itself when something has changed, and to poll without that is a safety net. But where only its word
is missing for the end of a component, nodes of ours are idle until then: it is polled soon, and ever later. And nobody
says when nodes that others have come free.
"""

import asyncio
from collections.abc import Callable, Iterable

from koalapy.agent.components.component import Component
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.lrm.port import LrmSnapshot
from koalapy.system.clock import SYSTEM_CLOCK, Clock

FIRST_POLL_DELAY = 0.1
"""Seconds until we poll for the end of a component whose runners are gone; each further poll waits twice as long."""
MIN_PAUSE_RATIO = 4
"""How many times as long as a poll took, we wait at least until the next such one."""
AWAITED_POLL_INTERVAL = 1.0
"""Seconds between two polls while jobs wait for nodes that others have: nobody tells us when they give them back."""


class PollSchedule:
    """Who wants a poll, and what the last one said and cost."""

    def __init__(
        self,
        interval: float,
        live: Callable[[], Iterable[Component]],
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``interval``: seconds between two polls that the resource manager makes of itself; ``live`` components."""
        self._timeouts, self._clock = timeouts, clock
        self._interval, self._live = interval, live
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._last: LrmSnapshot | None = None
        self._seconds = self._ended_at = 0.0
        """Of the last poll: how long it took, and when it was over."""
        self._under_way = False
        self._count = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Who waits for the end of a poll of that number or a later one."""
        self._awaited = False
        self._ending: set[str] = set()
        self._pause = self._pause_until = 0.0

    # Who wants one

    def request_poll(self) -> None:
        self._wake.set()

    async def wait_for_new_poll(self) -> None:
        """Wait for a poll that began after this was called, whatever came of it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self._count + 1, done))
        self.request_poll()
        await done

    def set_nodes_awaited(self, *, awaited: bool) -> None:
        """Jobs wait for nodes here, or do not any more: what others give back shows soon, at a bounded price."""
        self._awaited = awaited
        if self._awaits_others and not self._under_way:
            rest = MIN_PAUSE_RATIO * self._seconds - (self._clock.monotonic() - self._ended_at)
            asyncio.get_running_loop().call_later(max(0.0, rest), self._soon_after, self._count)

    def _soon_after(self, number: int) -> None:
        """Ask for a poll unless there was one since the poll of that number."""
        if self._count == number:
            self.request_poll()

    @property
    def _awaits_others(self) -> bool:
        """Whether jobs wait for nodes that others have: of our own jobs' ends we hear without that."""
        last = self._last
        return self._awaited and last is not None and last.background + last.down > 0

    async def wait_until_due(self, timeout: float | None = None) -> None:
        """Until somebody wants one, or it is time; by default as much of that as ``time_to_next`` says."""
        try:
            async with asyncio.timeout(self.seconds_to_next() if timeout is None else timeout):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def seconds_to_next(self) -> float:
        """Seconds until the next poll at the latest."""
        now = self._clock.monotonic()
        ending = {component.name for component in self._live() if component.awaits_job_end}
        if ending - self._ending:
            self._pause = max(FIRST_POLL_DELAY, MIN_PAUSE_RATIO * self._seconds)
            self._pause_until = now + self._pause
        elif now >= self._pause_until:
            self._pause = min(self._interval, self._pause * 2)
            self._pause_until = now + self._pause
        self._ending = ending
        timeout = max(self._timeouts.report_interval_s, 2 * self._interval)
        if self._awaits_others:
            timeout = min(timeout, max(AWAITED_POLL_INTERVAL, MIN_PAUSE_RATIO * self._seconds))
        return min(timeout, self._pause_until - now) if ending else timeout

    # One poll

    def begin_poll(self) -> int:
        self._count += 1
        self._under_way = True
        return self._count

    def end_poll(self, began: float, snapshot: LrmSnapshot | None) -> None:
        """What was said, if anything was; it may not have been taken in yet."""
        self._under_way = False
        self._ended_at = self._clock.monotonic()
        self._seconds = self._ended_at - began
        self._last = snapshot or self._last

    def notify_processed(self, number: int) -> None:
        """All that follows from it is done: who waits for it goes on."""
        if self._last is not None:
            self._answered.set()
        waiting, self._waiting = self._waiting, []
        for wanted, done in waiting:
            if wanted > number:
                self._waiting.append((wanted, done))
            elif not done.done():
                done.set_result(None)

    async def latest_snapshot(self) -> LrmSnapshot:
        """What the last poll said that was answered; waits for the first."""
        await self._answered.wait()
        assert self._last is not None
        return self._last
