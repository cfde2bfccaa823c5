"""Whether a resource manager answers and accepts jobs, how long its answers take, and the reports of that."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
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


@dataclass(slots=True)
class _Tally:
    """The calls of one operation; the longest of this span and of the one before."""

    count: int = 0
    failures: int = 0
    seconds: float = 0.0
    largest: float = 0.0
    largest_before: float = 0.0
    span: int = 0
    last_error: str = ""
    failed_at: float = 0.0

    def move_on(self, now: float) -> None:
        """Start a new time span if the last one is over, so that ``largest`` counts recent calls only."""
        span = int(now // LARGEST_SPAN)
        if span != self.span:
            self.largest_before = self.largest if span == self.span + 1 else 0.0
            self.largest, self.span = 0.0, span


class CallRecord:
    """Counts and durations of finished calls."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._tallies: dict[LrmOperation, _Tally] = {}

    async def measure_call(self, operation: LrmOperation, call: Awaitable[T]) -> T:
        """Await and record a call; return its answer or raise its ``SiteError``."""
        began = self._clock.monotonic()
        try:
            answer = await call
        except SiteError as error:
            self.record_call(operation, began, error)
            raise
        self.record_call(operation, began)
        return answer

    def record_call(self, operation: LrmOperation, began: float, error: SiteError | None = None) -> None:
        """Record a call that began at that monotonic time and is finished."""
        now = self._clock.monotonic()
        tally = self._tallies.setdefault(operation, _Tally())
        tally.move_on(now)
        tally.count += 1
        tally.seconds += now - began
        tally.largest = max(tally.largest, now - began)
        # A rejection of the job itself, or because of a limit, is an answer.
        is_job_rejected = isinstance(error, SiteRejected) and error.fault is not SiteFault.SITE
        if error is not None and not (operation is LrmOperation.SUBMIT and is_job_rejected):
            tally.failures += 1
            tally.last_error, tally.failed_at = error.message, now

    def summarize_calls(self) -> tuple[LrmCalls, ...]:
        now = self._clock.monotonic()
        return tuple(_count_calls(operation, tally, now) for operation, tally in sorted(self._tallies.items()))


def _count_calls(operation: LrmOperation, tally: _Tally, now: float) -> LrmCalls:
    """Return the counts of an operation's calls to report, with durations in seconds."""
    tally.move_on(now)
    return LrmCalls(
        operation,
        count=tally.count,
        failures=tally.failures,
        seconds=round(tally.seconds, 6),
        largest=round(max(tally.largest, tally.largest_before), 6),
        last_error=tally.last_error,
        failed_ago=round(now - tally.failed_at, 3) if tally.failures else None,
    )


class LrmHealth:
    """The state of a resource manager. Calls ``tell`` whenever the problem changes."""

    def __init__(
        self, tell: Callable[[], None], timeouts: AgentTimeouts = DEFAULT_TIMEOUTS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._report_problem, self._timeouts, self._clock = tell, timeouts, clock
        self.calls = CallRecord(clock)
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

    @property
    def problem(self) -> str:
        """Why nothing can be started, in one line; empty if it can."""
        refusal = self._refusal if self._clock.monotonic() < self._refused_until else ""
        return self._fault or self._submit_problem or refusal

    @property
    def silent_for(self) -> float:
        """Seconds since the resource manager last answered; 0 unless it is reported as not answering."""
        return self._clock.monotonic() - self._answered_monotonic if self._is_silent else 0.0

    async def poll_lrm(self, operation: LrmOperation, call: Awaitable[T]) -> T:
        """Return the answer to a regular poll; report silence while it lasts. Raise ``SiteError``."""
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
            self.calls.record_call(operation, began, error)
            text = format_error(error)
            self._set_unreachable(text, silent=self._clock.monotonic() - began >= timeout)
            raise
        finally:
            polling.cancel()
        self.calls.record_call(operation, began)
        self._answered_at, self._answered_monotonic = self._clock.now(), self._clock.monotonic()
        self._last_poll_s, self._is_silent = self._answered_monotonic - began, False
        if self._fault:
            log.info("the resource manager answers again", action="lrm-back")
            self._fault = ""
            self._report_problem()
        return answer

    async def call_lrm(self, operation: LrmOperation, call: Awaitable[T]) -> T:
        """Return the answer to any other call. Raise ``SiteUnavailable`` without one: it may have been executed."""
        return await self.calls.measure_call(operation, self._call_with_timeout(call))

    async def _call_with_timeout(self, call: Awaitable[T]) -> T:
        """Return the answer to a call. Raise ``SiteUnavailable`` after ``CALL_TIMEOUT`` or an unexpected error."""
        with only_site_errors():
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    return await call
            except TimeoutError as error:
                raise SiteUnavailable(f"the resource manager did not answer within {CALL_TIMEOUT:g} s") from error

    def set_submit_problem(self, reason: str) -> None:
        """Set why the resource manager accepts no jobs; empty if no reason is known."""
        if reason == self._submit_problem:
            return
        if reason:
            log.warning("the resource manager accepts no jobs", action="lrm-takes-no-jobs", reason=reason)
        self._submit_problem = reason
        self._report_problem()

    def suspend_submission(self, reason: str) -> None:
        """Report that the cluster cannot start jobs, for a pause that doubles until it accepts one."""
        pause = min(MAX_REFUSAL_PAUSE, REFUSAL_PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._refusal, self._refused_until = reason, self._clock.monotonic() + pause
        log.warning("the resource manager rejects jobs", action="lrm-refuses", reason=self._refusal, pause=pause)
        self._report_problem()

    def on_job_accepted(self) -> None:
        self._refusal, self._refusals = "", 0

    def _set_unreachable(self, text: str, *, silent: bool = True) -> None:
        """Record and report that the resource manager does not answer. ``text`` is its error, or empty."""
        now = self._clock.now()
        since = f"not answering since {clock_text(self._answered_at, now, exact=True)}" if silent else ""
        if not self._fault:
            log.warning("the resource manager does not answer", action="lrm-lost", reason=text or since)
        self._fault, self._is_silent = ": ".join(filter(None, (since, text))), silent
        self._report_problem()


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
