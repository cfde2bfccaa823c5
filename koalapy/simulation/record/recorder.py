"""A scheduler that records its events, its nonces and clock readings, and its effects."""

from collections.abc import Callable, Sequence

from koalapy.model.errors import KoalaError
from koalapy.model.job import Nonce
from koalapy.policies.registry import Registry
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event
from koalapy.scheduler.queries import Queries
from koalapy.simulation.record.format import Beginning, Done, Step

TICKS = 16
"""Ticks of the step clock per step budget; a power of 2, so that multiples are exact."""


class StepClock:
    """A clock that returns seconds since the step began, in whole ticks, so that its readings are short to record."""

    def __init__(self, clock: Callable[[], float], budget: float) -> None:
        """``budget``: seconds of a step's budget."""
        self._clock, self._tick = clock, budget / TICKS
        self._began: float | None = None
        self._runs: list[list[int]] = []

    def __call__(self) -> float:
        """Return the seconds since the first reading of this step, in whole ticks, and remember the reading."""
        now = self._clock()
        if self._began is None:
            self._began = now
        ticks = int((now - self._began) / self._tick)
        if self._runs and self._runs[-1][1] == ticks:
            self._runs[-1][0] += 1
        else:
            self._runs.append([1, ticks])
        return ticks * self._tick

    def take(self) -> tuple[tuple[int, int], ...]:
        """Return the readings of the current step as (count, ticks), and begin a new step.

        Empty if all readings are 0.
        """
        runs, self._runs, self._began = self._runs, [], None
        return tuple((count, ticks) for count, ticks in runs) if any(ticks for _, ticks in runs) else ()


class RecordedScheduler:
    """A scheduler with the interface of ``Scheduler`` that hands each finished step to ``keep``."""

    def __init__(
        self,
        beginning: Beginning,
        policies: Registry,
        nonces: Callable[[], Nonce],
        clock: Callable[[], float],
        keep: Callable[[Step], None],
    ) -> None:
        self._keep, self._nonces = keep, nonces
        self._clock = StepClock(clock, beginning.rules.step_budget)
        self._number = 0
        self._events: list[Event] = []
        self._refused: list[int] = []
        self._given: list[Nonce] = []
        self._scheduler = beginning.make_scheduler(policies, self._record_nonce, self._clock)

    def _record_nonce(self) -> Nonce:
        self._given.append(nonce := self._nonces())
        return nonce

    @property
    def queries(self) -> Queries:
        return self._scheduler.queries

    @property
    def is_unfinished(self) -> bool:
        return self._scheduler.is_unfinished

    def next_wakeup(self) -> float | None:
        return self._scheduler.next_wakeup()

    def apply(self, event: Event, now: float) -> None:
        """Apply an event and record it. Raise ``KoalaError`` if the scheduler rejects it."""
        self._events.append(event)
        try:
            self._scheduler.apply(event, now)
        except KoalaError:
            self._refused.append(len(self._events) - 1)
            raise

    def step(self, events: Sequence[Event], now: float) -> Effects:
        """Apply events, end the step, hand its record to ``keep``, and return its effects."""
        for event in events:
            self.apply(event, now)
        effects = self._scheduler.step((), now)
        self._number += 1
        recorded_events, refused, nonces = tuple(self._events), tuple(self._refused), tuple(self._given)
        self._events, self._refused, self._given = [], [], []
        self._keep(
            Step(self._number, now, recorded_events, refused, nonces, self._clock.take(), Done.from_effects(effects))
        )
        return effects
