"""Whether a resource manager answers and takes jobs, how long its answers take, and what is to be told of that."""

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
"""Seconds of which, and of as many before, the longest call is told."""
SLOWNESS_FACTOR = 3.0
"""So many times as long as the last look took, the next one may."""
CALL_TIMEOUT = 120.0
"""Seconds that anything asked of a resource manager may take; each of the commands it is made of has less."""
REFUSAL_PAUSE = 60.0
"""Seconds for which a resource manager that refused a job by its own fault is given no further one, the first time;
each further refusal in a row doubles it."""
MAX_REFUSAL_PAUSE = 300.0
MAX_ERROR_LENGTH = 2000
"""Signs of an error's words."""


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
        """What was long ago is no news."""
        span = int(now // LARGEST_SPAN)
        if span != self.span:
            self.largest_before = self.largest if span == self.span + 1 else 0.0
            self.largest, self.span = 0.0, span


class CallRecord:
    """Counts and times calls; what is still under way is in none of the figures."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._tallies: dict[LrmOperation, _Tally] = {}

    async def measure_call(self, operation: LrmOperation, asked: Awaitable[T]) -> T:
        """The answer, or the ``SiteError``, of a call that is counted when it is over."""
        began = self._clock.monotonic()
        try:
            answer = await asked
        except SiteError as error:
            self.record_call(operation, began, error)
            raise
        self.record_call(operation, began)
        return answer

    def record_call(self, operation: LrmOperation, began: float, error: SiteError | None = None) -> None:
        """A call is over that began at that monotonic time."""
        now = self._clock.monotonic()
        tally = self._tallies.setdefault(operation, _Tally())
        tally.move_on(now)
        tally.count += 1
        tally.seconds += now - began
        tally.largest = max(tally.largest, now - began)
        if error is not None and not _is_an_answer(operation, error):
            tally.failures += 1
            tally.last_error, tally.failed_at = error.message, now

    def summarize_calls(self) -> tuple[LrmCalls, ...]:
        now = self._clock.monotonic()
        return tuple(_calls(operation, tally, now) for operation, tally in sorted(self._tallies.items()))


def _calls(operation: LrmOperation, tally: _Tally, now: float) -> LrmCalls:
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


def _is_an_answer(operation: LrmOperation, error: SiteError) -> bool:
    """Whether it has said no for a reason that lies with the job or with a limit."""
    return operation is LrmOperation.SUBMIT and isinstance(error, SiteRejected) and error.fault is not SiteFault.SITE


class LrmHealth:
    """What is known of a resource manager's own health; ``tell`` is called with the problem whenever that changes."""

    def __init__(
        self, tell: Callable[[], None], timeouts: AgentTimeouts = DEFAULT_TIMEOUTS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._tell, self._timeouts, self._clock = tell, timeouts, clock
        self.calls = CallRecord(clock)
        self._fault = ""
        """Why it cannot be asked."""
        self._obstacle = ""
        """Why it takes no jobs, as far as it was asked."""
        self._refusal = ""
        """Why it took none when one was submitted."""
        self._refused_until = 0.0
        self._refusals = 0
        self._answered_at = self._clock.now()
        self._took = 0.0
        """Seconds of the last look that was answered."""

    @property
    def problem(self) -> str:
        """Why nothing can be started there, in one line; empty when it can."""
        refusal = self._refusal if self._clock.monotonic() < self._refused_until else ""
        return self._fault or self._obstacle or refusal

    async def poll_lrm(self, operation: LrmOperation, asked: Awaitable[T]) -> T:
        """The answer to a question that is asked all the time; silence is told of while it lasts. ``SiteError``."""
        began = self._clock.monotonic()
        # One that always takes its time is slow, and not silent.
        timeout = max(self._timeouts.lrm_silence_s, min(SLOWNESS_FACTOR * self._took, CALL_TIMEOUT / 2))
        polling = asyncio.ensure_future(asked)
        try:
            done, _ = await asyncio.wait((polling,), timeout=timeout)
            if not done:
                self._out_of_reach("")
                done, _ = await asyncio.wait((polling,), timeout=CALL_TIMEOUT - timeout)
            if not done:
                raise SiteUnavailable(f"no answer within {CALL_TIMEOUT:g} s")
            with only_site_errors():
                answer = polling.result()
        except SiteError as error:
            self.calls.record_call(operation, began, error)
            text = format_error(error)
            self._out_of_reach(text, silent=self._clock.monotonic() - began >= timeout)
            raise
        finally:
            polling.cancel()
        self.calls.record_call(operation, began)
        self._answered_at, self._took = self._clock.now(), self._clock.monotonic() - began
        if self._fault:
            log.info("resource manager in reach again", action="lrm-back")
            self._fault = ""
            self._tell()
        return answer

    async def call_lrm(self, operation: LrmOperation, asked: Awaitable[T]) -> T:
        """The answer to anything else; ``SiteUnavailable`` when there is none: it may have been done all the same."""
        return await self.calls.measure_call(operation, self._call(asked))

    async def _call(self, asked: Awaitable[T]) -> T:
        with only_site_errors():
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    return await asked
            except TimeoutError as error:
                raise SiteUnavailable(f"the resource manager did not answer within {CALL_TIMEOUT:g} s") from error

    def set_submit_problem(self, why: str) -> None:
        """It was asked whether it would take a job; ``why`` is empty when nothing is known to be in the way."""
        if why == self._obstacle:
            return
        if why:
            log.warning("resource manager takes no jobs", action="lrm-takes-no-jobs", reason=why)
        self._obstacle = why
        self._tell()

    def suspend_submission(self, why: str) -> None:
        """Tell that the cluster can start no job, for a pause that doubles each time until it takes one."""
        pause = min(MAX_REFUSAL_PAUSE, REFUSAL_PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._refusal, self._refused_until = why, self._clock.monotonic() + pause
        log.warning("resource manager refuses jobs", action="lrm-refuses", reason=self._refusal, pause=pause)
        self._tell()

    def on_job_accepted(self) -> None:
        self._refusal, self._refusals = "", 0

    def _out_of_reach(self, text: str, *, silent: bool = True) -> None:
        now = self._clock.now()
        since = f"not answering since {clock_text(self._answered_at, now, exact=True)}" if silent else ""
        if not self._fault:
            log.warning("resource manager out of reach", action="lrm-lost", reason=text or since)
        self._fault = ": ".join(filter(None, (since, text)))
        self._tell()


def unexpected_error(error: Exception) -> SiteUnavailable:
    """What is to be told of an error that nobody thought of: what had been asked for may have been done."""
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
    """An error's words and the way out; of very many words, the first and the last."""
    text = " ".join(error.message.split())
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[: MAX_ERROR_LENGTH // 2]} … {text[-MAX_ERROR_LENGTH // 2 :]}"
    return f"{text}; {' '.join(error.hint.split())}" if error.hint else text
