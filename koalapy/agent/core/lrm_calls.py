"""How a resource manager answers: how often it was asked for what, how long that took, and what went wrong."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from koalapy.model.errors import SiteError, SiteRejected
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.system.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")

LARGEST_SPAN = 300.0
"""Seconds of which, and of as many before, the longest call is told."""


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

    async def measured(self, operation: LrmOperation, asked: Awaitable[T]) -> T:
        """The answer, or the ``SiteError``, of a call that is counted when it is over."""
        began = self._clock.monotonic()
        try:
            answer = await asked
        except SiteError as error:
            self.note(operation, began, error)
            raise
        self.note(operation, began)
        return answer

    def note(self, operation: LrmOperation, began: float, error: SiteError | None = None) -> None:
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

    def told(self) -> tuple[LrmCalls, ...]:
        """All of it, as of now."""
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
    return operation is LrmOperation.SUBMIT and isinstance(error, SiteRejected) and error.fault != "site"
