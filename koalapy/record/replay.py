"""A recorded life of a scheduler once more: without change it does again what it did."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from koalapy.model.errors import KoalaError
from koalapy.model.job import Nonce
from koalapy.policies.registry import Registry
from koalapy.record.beginning import Beginning
from koalapy.record.recorder import TICKS
from koalapy.record.step import Done, Step
from koalapy.scheduler.effects import Effects


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a scheduler did something else than what was recorded."""

    step: int
    at: float
    recorded: str
    replayed: str


class Replay:
    """A scheduler that is told what another was told, and given what that was given."""

    def __init__(self, beginning: Beginning, policies: Registry) -> None:
        self._nonces: deque[Nonce] = deque()
        self._looks: deque[tuple[int, int]] = deque()
        self._tick = beginning.rules.step_budget / TICKS
        self._scheduler = beginning.scheduler(policies, self._nonce, self._clock)

    def _nonce(self) -> Nonce:
        # One more than was recorded is found out by what is done with it.
        return self._nonces.popleft() if self._nonces else ""

    def _clock(self) -> float:
        if not self._looks:
            return 0.0
        count, ticks = self._looks.popleft()
        if count > 1:
            self._looks.appendleft((count - 1, ticks))
        return ticks * self._tick

    def take(self, step: Step) -> tuple[Effects, Divergence | None]:
        """Do one step; and how it differs from what was recorded, if it does."""
        self._nonces, self._looks = deque(step.nonces), deque(step.looks)
        refused = []
        for index, event in enumerate(step.events):
            try:
                self._scheduler.apply(event, step.at)
            except KoalaError:
                refused.append(index)
        self._scheduler.decide(step.at)
        effects = self._scheduler.take()
        told = _difference(step, Done.of(effects), tuple(refused))
        return effects, told and Divergence(step.number, step.at, *told)

    def take_all(self, steps: Iterable[Step]) -> Iterator[tuple[Step, Effects, Divergence | None]]:
        """Step by step, up to the first that differs."""
        for step in steps:
            effects, divergence = self.take(step)
            yield step, effects, divergence
            if divergence is not None:
                return


def _difference(step: Step, done: Done, refused: tuple[int, ...]) -> tuple[str, str] | None:
    """What was recorded and what was done instead, of the first thing that is not the same."""
    if refused != step.refused:
        return f"refused {_events(step.refused)}", f"refused {_events(refused)}"
    if done == step.done:
        return None
    for name in ("timeline", "jobs", "commands"):
        recorded, replayed = getattr(step.done, name), getattr(done, name)
        for index in range(max(len(recorded), len(replayed))):
            one, other = (some[index] if index < len(some) else None for some in (recorded, replayed))
            if one != other:
                return str(one or "nothing"), str(other or "nothing")
    return None


def _events(indices: tuple[int, ...]) -> str:
    return f"events {', '.join(map(str, indices))}" if indices else "no event"
