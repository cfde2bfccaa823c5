"""Notes what a scheduler is told, and the few things that it finds out by itself: nonces, and how late it is."""

from collections.abc import Callable

from koalapy.model.job import Nonce
from koalapy.record.step import Done, Step
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event

TICKS = 16
"""In which the budget of a step is counted: a power of 2, so that a number of them is what it is."""


class StepClock:
    """What a step is measured by: seconds since it began, in ticks, so that few numbers say what was seen."""

    def __init__(self, clock: Callable[[], float], budget: float) -> None:
        """``budget`` of a step in seconds."""
        self._clock, self._tick = clock, budget / TICKS
        self._began: float | None = None
        self._runs: list[list[int]] = []

    def __call__(self) -> float:
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
        """What was seen since this was last called, as a step has it; nothing if no time was seen to pass."""
        runs, self._runs, self._began = self._runs, [], None
        return tuple((count, ticks) for count, ticks in runs) if any(ticks for _, ticks in runs) else ()


class Recorder:
    """Gathers one step after the other; what it is told does not change any more."""

    def __init__(
        self, keep: Callable[[Step], None], nonces: Callable[[], Nonce], clock: Callable[[], float], budget: float
    ) -> None:
        """``keep`` is given each step that is over."""
        self._keep, self._nonces = keep, nonces
        self.clock = StepClock(clock, budget)
        self._number = 0
        self._events: list[Event] = []
        self._refused: list[int] = []
        self._given: list[Nonce] = []

    def nonce(self) -> Nonce:
        """Another one, as the scheduler is given it."""
        nonce = self._nonces()
        self._given.append(nonce)
        return nonce

    def told(self, event: Event) -> None:
        """The scheduler is about to be told of an event."""
        self._events.append(event)

    def refused(self) -> None:
        """The last one was not possible."""
        self._refused.append(len(self._events) - 1)

    def stepped(self, at: float, effects: Effects) -> None:
        """It has decided, and that is what it did."""
        self._number += 1
        events, refused, given = tuple(self._events), tuple(self._refused), tuple(self._given)
        self._events, self._refused, self._given = [], [], []
        self._keep(Step(self._number, at, events, refused, given, self.clock.take(), Done.of(effects)))
