"""Replay a record: a new scheduler gets the recorded events, and its effects are compared with the recorded ones."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from koalapy.model.errors import KoalaError, UsageError
from koalapy.model.job import JobId, Nonce
from koalapy.policies.registry import Registry
from koalapy.record.beginning import Beginning
from koalapy.record.reading import AGAIN, NOT_READ, Life, RecordFile
from koalapy.record.recorder import TICKS
from koalapy.record.step import Done, Step
from koalapy.scheduler.effects import Effects


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between the effects of a replay and the recorded ones."""

    step: int
    at: float
    recorded: str
    replayed: str


@dataclass(slots=True)
class History:
    """The history of one daemon run."""

    version: str
    began: float
    ended: float
    """Time of its last step."""
    jobs: set[JobId]
    steps: int = 0
    placements: int = 0
    divergence: Divergence | None = None
    """The first difference between the replay and the record; the replay ends there."""

    def take(self, step: Step, effects: Effects) -> None:
        self.steps, self.ended = step.number, step.at
        self.jobs.update(effects.jobs)
        self.placements += sum(entry.event == "placed" for entry in effects.timeline)


def replay(path: Path, policies: Registry, lost: list[str] | None = None) -> Iterator[History]:
    """Replay each daemon run in a record, and yield its history.

    ``lost`` receives the parts of the record that the daemon could not read or write before the export. Raise
    ``UsageError`` if the file cannot be read or names an unknown policy.
    """
    for life in RecordFile(path, lost).lives():
        yield _replay_life(life, policies, path)


def _replay_life(life: Life, policies: Registry, path: Path) -> History:
    """Replay one daemon run up to its first difference, and return its history. Raise ``UsageError``."""
    missing = sorted(set(life.beginning.policies) - set(policies.names()))
    if missing:
        raise UsageError(
            f"{path} was written with policies that there are not here: {', '.join(missing)}",
            field="file",
            value=str(path),
            hint="install them, as koala policies of the daemon",
        )
    began = life.beginning.now
    history = History(life.version, began, began, {job.id for job in life.beginning.jobs})
    try:
        replay = Replay(life.beginning, policies)
        for step in life.steps:
            effects, history.divergence = replay.take(step)
            history.take(step, effects)
            if history.divergence is not None:
                break
    except KoalaError:
        raise
    except NOT_READ as error:
        # A daemon never records unknown clusters or jobs.
        raise UsageError(
            f"{path} tells after step {history.steps} of what there is not: {error!r:.100}",
            field="file",
            value=str(path),
            hint=AGAIN,
        ) from error
    return history


class Replay:
    """A scheduler that gets recorded events, nonces and clock readings."""

    def __init__(self, beginning: Beginning, policies: Registry) -> None:
        self._nonces: deque[Nonce] = deque()
        self._looks: deque[tuple[int, int]] = deque()
        self._tick = beginning.rules.step_budget / TICKS
        self._scheduler = beginning.make_scheduler(policies, self._next_nonce, self._read_clock)

    def _next_nonce(self) -> Nonce:
        # An extra nonce shows as a difference in the effects.
        return self._nonces.popleft() if self._nonces else ""

    def _read_clock(self) -> float:
        """Return the next recorded clock reading of the step in seconds; 0 if there is none."""
        if not self._looks:
            return 0.0
        count, ticks = self._looks.popleft()
        if count > 1:
            self._looks.appendleft((count - 1, ticks))
        return ticks * self._tick

    def take(self, step: Step) -> tuple[Effects, Divergence | None]:
        """Replay one step. Return its effects, and the difference from the record if there is one."""
        self._nonces, self._looks = deque(step.nonces), deque(step.looks)
        refused = []
        for index, event in enumerate(step.events):
            try:
                self._scheduler.apply(event, step.at)
            except KoalaError:
                refused.append(index)
        effects = self._scheduler.step((), step.at)
        difference = _first_difference(step, Done.from_effects(effects), tuple(refused))
        return effects, difference and Divergence(step.number, step.at, *difference)


def _first_difference(step: Step, replayed_effects: Done, refused: tuple[int, ...]) -> tuple[str, str] | None:
    """Return the first recorded effect that differs and the replayed one as texts; None if all are equal."""
    if refused != step.refused:
        return f"refused {_format_events(step.refused)}", f"refused {_format_events(refused)}"
    if replayed_effects == step.done:
        return None
    for name in ("timeline", "jobs", "commands"):
        recorded, replayed = getattr(step.done, name), getattr(replayed_effects, name)
        for index in range(max(len(recorded), len(replayed))):
            recorded_item, replayed_item = (
                items[index] if index < len(items) else None for items in (recorded, replayed)
            )
            if recorded_item != replayed_item:
                return str(recorded_item or "nothing"), str(replayed_item or "nothing")
    return None


def _format_events(indices: tuple[int, ...]) -> str:
    return f"events {', '.join(map(str, indices))}" if indices else "no event"
