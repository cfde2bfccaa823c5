"""Poll a resource manager, and record whether it answers and accepts jobs, and how long its answers take.

A resource manager usually reports changes itself, and polls are a safety net. Two cases need polls: when only the job's
end is missing to end a component, its nodes are idle until then, so polls start soon and slow down. And no resource
manager reports when nodes of other users become free.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.lrm.port import Lrm, LrmSnapshot
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.wording import format_time as clock_text
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

T = TypeVar("T")
LARGEST_SPAN = 300.0
"""Seconds of a span; the longest call of this span and the one before is reported."""
SLOWNESS_FACTOR = 3.0
"""The next poll may take this multiple of the last one before it counts as unanswered."""
CALL_TIMEOUT = 120.0
"""Seconds for any call of a resource manager; each command within has less."""
REFUSAL_PAUSE = 60.0
"""Seconds without submissions after the resource manager rejected a job by its own fault; doubles each time."""
MAX_REFUSAL_PAUSE = 300.0
MAX_ERROR_LENGTH = 2000
"""Maximum characters of an error text."""
POLL_INTERVAL = 5.0
"""Seconds between two polls that a resource manager makes itself if it is not notified of changes."""
FIRST_POLL_DELAY = 0.1
"""Seconds until the first poll for the end of a component without runners; each further pause doubles."""
MIN_PAUSE_RATIO = 4
"""Minimum pause before such a poll, as a multiple of the last poll's duration."""
AWAITED_POLL_INTERVAL = 1.0
"""Seconds between two polls while jobs wait for nodes that other users occupy."""


@dataclass(slots=True)
class CallTally:
    """The calls of one operation, with the longest of this span; the longest of the span before is kept apart."""

    calls: LrmCalls
    largest_before: float = 0.0
    span: int = 0
    failed_at: float = 0.0

    def move_on(self, now: float) -> None:
        """Start a new time span if the last one is over, so that ``largest`` counts recent calls only."""
        span = int(now // LARGEST_SPAN)
        if span != self.span:
            self.largest_before = self.calls.largest if span == self.span + 1 else 0.0
            self.calls, self.span = replace(self.calls, largest=0.0), span


class LrmMonitor:
    """The polls, the calls and the state of a resource manager."""

    def __init__(
        self,
        lrm: Lrm,
        live: dict[str, Component],
        poll_interval: float = POLL_INTERVAL,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Set up. ``live``: the components that have not ended, by name."""
        self._lrm, self._live, self._interval, self._timeouts, self._clock = lrm, live, poll_interval, timeouts, clock
        self.report_problem: Callable[[], object] = bool
        """Is called whenever the problem changes."""
        self._tallies: dict[LrmOperation, CallTally] = {}
        self._fault = ""
        """Why it cannot be reached."""
        self._submit_problem = ""
        """Why it accepts no jobs, as far as it reports that."""
        self._refusal = ""
        """Why it rejected the last submission."""
        self._refused_until = 0.0
        self._refusals = 0
        self._answered_at, self._answered_monotonic = self._clock.now(), self._clock.monotonic()
        self._is_silent = False
        self._last_poll_s = 0.0
        """Duration of the last successful poll."""
        self._wake = asyncio.Event()
        self._processed = asyncio.Condition()
        """Notified after the snapshot of a poll was processed."""
        self._begun_count = self._processed_count = 0
        """Polls that have begun, and the number of the last one that was processed."""
        self._last: LrmSnapshot | None = None
        self._last_at = self._ended_at = 0.0
        """When the last snapshot was taken, and when the last poll ended."""
        self._under_way = self._awaited = False
        self._ending: set[str] = set()
        self._pause = self._pause_until = 0.0

    # State

    @property
    def problem(self) -> str:
        """Why nothing can be started, in one line; empty if it can."""
        refusal = self._refusal if self._clock.monotonic() < self._refused_until else ""
        return self._fault or self._submit_problem or refusal

    @property
    def silent_for(self) -> float:
        """Seconds since the resource manager last answered; 0 unless it is reported as not answering."""
        return self._clock.monotonic() - self._answered_monotonic if self._is_silent else 0.0

    def suspend_submission(self, reason: str) -> None:
        """Report that the cluster cannot start jobs, for a pause that doubles until it accepts one."""
        pause = min(MAX_REFUSAL_PAUSE, REFUSAL_PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._refusal, self._refused_until = reason, self._clock.monotonic() + pause
        log.warning("the resource manager rejects jobs", action="lrm-refuses", reason=self._refusal, pause=pause)
        self.report_problem()

    def on_job_accepted(self) -> None:
        self._refusal, self._refusals = "", 0

    def _set_submit_problem(self, reason: str) -> None:
        """Set why the resource manager accepts no jobs; empty if no reason is known."""
        if reason == self._submit_problem:
            return
        if reason:
            log.warning("the resource manager accepts no jobs", action="lrm-takes-no-jobs", reason=reason)
        self._submit_problem = reason
        self.report_problem()

    def _set_unreachable(self, text: str, *, silent: bool = True) -> None:
        """Record and report that the resource manager does not answer. ``text`` is its error, or empty."""
        now = self._clock.now()
        since = f"not answering since {clock_text(self._answered_at, now, exact=True)}" if silent else ""
        if not self._fault:
            log.warning("the resource manager does not answer", action="lrm-lost", reason=text or since)
        self._fault, self._is_silent = ": ".join(filter(None, (since, text))), silent
        self.report_problem()

    # Calls

    async def call_lrm(self, operation: LrmOperation, call: Awaitable[T]) -> T:
        """Return the answer to a call. Raise ``SiteUnavailable`` without one: it may have been executed."""
        began = self._clock.monotonic()
        try:
            with only_site_errors():
                try:
                    async with asyncio.timeout(CALL_TIMEOUT):
                        answer = await call
                except TimeoutError as error:
                    raise SiteUnavailable(f"the resource manager did not answer within {CALL_TIMEOUT:g} s") from error
        except SiteError as error:
            self._record_call(operation, began, error)
            raise
        self._record_call(operation, began)
        return answer

    async def poll_lrm(self, operation: LrmOperation, call: Awaitable[T]) -> T:
        """Return the answer to a regular call; report silence while it lasts. Raise ``SiteError``."""
        began = self._clock.monotonic()
        # A resource manager that is always slow is not silent.
        timeout = max(self._timeouts.lrm_silence_s, min(SLOWNESS_FACTOR * self._last_poll_s, CALL_TIMEOUT / 2))
        polling = asyncio.ensure_future(call)
        try:
            finished, _ = await asyncio.wait((polling,), timeout=timeout)
            if not finished:
                self._set_unreachable("")
                finished, _ = await asyncio.wait((polling,), timeout=CALL_TIMEOUT - timeout)
            if not finished:
                raise SiteUnavailable(f"the resource manager did not answer {operation} within {CALL_TIMEOUT:g} s")
            with only_site_errors():
                answer = polling.result()
        except SiteError as error:
            self._record_call(operation, began, error)
            self._set_unreachable(format_error(error), silent=self._clock.monotonic() - began >= timeout)
            raise
        finally:
            polling.cancel()
        self._record_call(operation, began)
        self._answered_at, self._answered_monotonic = self._clock.now(), self._clock.monotonic()
        self._last_poll_s, self._is_silent = self._answered_monotonic - began, False
        if self._fault:
            log.info("the resource manager answers again", action="lrm-back")
            self._fault = ""
            self.report_problem()
        return answer

    def _record_call(self, operation: LrmOperation, began: float, error: SiteError | None = None) -> None:
        """Record a call that began at that monotonic time and is finished."""
        now = self._clock.monotonic()
        tally = self._tallies.setdefault(operation, CallTally(LrmCalls(operation)))
        tally.move_on(now)
        calls, seconds = tally.calls, now - began
        calls = replace(
            calls, count=calls.count + 1, seconds=calls.seconds + seconds, largest=max(calls.largest, seconds)
        )
        # A rejection of the job or reservation itself, or because of a limit, is an answer.
        is_rejected = isinstance(error, SiteRejected) and error.fault is not SiteFault.SITE
        if error is not None and not (operation in (LrmOperation.SUBMIT, LrmOperation.RESERVE) and is_rejected):
            calls = replace(calls, failures=calls.failures + 1, last_error=error.message)
            tally.failed_at = now
        tally.calls = calls

    def summarize_calls(self) -> tuple[LrmCalls, ...]:
        """Return the counts of all operations to report, with durations in seconds."""
        now, summary = self._clock.monotonic(), []
        for _, tally in sorted(self._tallies.items()):
            tally.move_on(now)
            calls = tally.calls
            largest = round(max(calls.largest, tally.largest_before), 6)
            failed_ago = round(now - tally.failed_at, 3) if calls.failures else None
            summary.append(replace(calls, seconds=round(calls.seconds, 6), largest=largest, failed_ago=failed_ago))
        return tuple(summary)

    # Polls

    def request_poll(self) -> None:
        self._wake.set()

    async def wait_for_new_poll(self) -> None:
        """Wait until a poll that begins after this call is processed, successful or not."""
        required = self._begun_count + 1
        self.request_poll()
        async with self._processed:
            await self._processed.wait_for(lambda: self._processed_count >= required)

    def set_nodes_awaited(self, *, awaited: bool) -> None:
        """Set whether jobs wait for nodes here, so that nodes freed by other users are noticed soon."""
        self._awaited = awaited
        if self._awaits_others and not self._under_way:
            pause, number = MIN_PAUSE_RATIO * self._last_poll_s, self._begun_count
            pause -= self._clock.monotonic() - self._ended_at
            asyncio.get_running_loop().call_later(max(0.0, pause), self._request_poll_after, number)

    def _request_poll_after(self, number: int) -> None:
        """Request a poll unless one has begun since the poll of that number."""
        if self._begun_count == number:
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
        ending = {component.name for component in self._live.values() if component.awaits_job_end}
        if ending - self._ending:
            self._pause = max(FIRST_POLL_DELAY, MIN_PAUSE_RATIO * self._last_poll_s)
            self._pause_until = now + self._pause
        elif now >= self._pause_until:
            self._pause = min(self._interval, self._pause * 2)
            self._pause_until = now + self._pause
        self._ending = ending
        timeout = self._interval
        if self._awaits_others:
            timeout = min(timeout, max(AWAITED_POLL_INTERVAL, MIN_PAUSE_RATIO * self._last_poll_s))
        return min(timeout, self._pause_until - now) if ending else timeout

    async def take_snapshot(self) -> tuple[LrmSnapshot | None, float]:
        """Poll the resource manager. Return its snapshot, None if it fails, and when that began (monotonic).

        The caller processes it and calls ``notify_processed``.
        """
        self._begun_count += 1
        self._under_way, began, snapshot = True, self._clock.monotonic(), None
        try:
            snapshot = self._last = await self.poll_lrm(LrmOperation.SNAPSHOT, self._lrm.take_snapshot())
            self._last_at = began
        except SiteError:
            pass
        finally:
            self._under_way, self._ended_at = False, self._clock.monotonic()
        if snapshot is not None:
            self._set_submit_problem(snapshot.submit_error)
        return snapshot, began

    async def notify_processed(self) -> None:
        """Wake the tasks that wait for this poll or an earlier one, after its snapshot was processed."""
        async with self._processed:
            self._processed_count = self._begun_count
            self._processed.notify_all()

    def known_snapshot(self) -> tuple[LrmSnapshot, float]:
        """Return the last snapshot and its age in seconds; raise ``SiteUnavailable`` before the first."""
        if self._last is None:
            raise SiteUnavailable("the resource manager has not answered yet")
        return self._last, self._clock.monotonic() - self._last_at

    async def latest_snapshot(self) -> LrmSnapshot:
        """Return the last snapshot; wait until the first was processed."""
        async with self._processed:
            await self._processed.wait_for(lambda: self._processed_count and self._last is not None)
        return self.known_snapshot()[0]


def unexpected_error(error: Exception) -> SiteUnavailable:
    """Return an error for an exception in the agent, which may have executed the request, and log it."""
    log.error("an error in the agent", action="agent-error", exc_info=error)
    return SiteUnavailable(f"an error in the agent: {error!r}", hint="see the agent's log")


@contextmanager
def only_site_errors() -> Iterator[None]:
    """Raise ``SiteUnavailable`` in place of any other exception."""
    try:
        yield
    except SiteError:
        raise
    except Exception as error:
        raise unexpected_error(error) from error


def format_error(error: SiteError) -> str:
    """Return message and hint of an error in one line; shorten long ones in the middle."""
    text = " ".join(error.message.split())
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[: MAX_ERROR_LENGTH // 2]} … {text[-MAX_ERROR_LENGTH // 2 :]}"
    return f"{text}; {' '.join(error.hint.split())}" if error.hint else text
