"""Replay a record: a new scheduler gets the recorded events, and its effects are compared with the recorded ones."""

import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from koalapy.model.errors import KoalaError, UsageError
from koalapy.model.job import JobId, Nonce
from koalapy.policies.registry import Registry
from koalapy.scheduler.effects import Effects
from koalapy.simulation.record.format import FORMAT, Beginning, Done, Json, Step, beginning_from_json, step_from_json
from koalapy.simulation.record.recorder import TICKS

AGAIN = "export it again: koala export"
Lines = BinaryIO | gzip.GzipFile
GZIP = b"\x1f\x8b"
MAX_LINE = 1024**3
"""Maximum bytes of a line. The initial state is one line with all waiting jobs. A small packed file could expand to
more."""
NOT_READ = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions from converting a line that is not a part of a record."""


@dataclass(slots=True)
class Life:
    """The record of one daemon run. Its steps can be read once, and before the next run."""

    version: str
    beginning: Beginning
    steps: Iterator[Step] = field(repr=False)


class RecordFile:
    """A record file that ``koala export`` wrote."""

    def __init__(self, path: Path, lost: list[str] | None = None, *, max_line: int = MAX_LINE) -> None:
        """``lost`` receives the parts of the record that the daemon could not read or write.

        ``max_line``: maximum bytes of a line, so that a small packed file cannot fill the memory.
        """
        self._path, self._max_line = path, max_line
        self._lost: list[str] = [] if lost is None else lost
        self._number = 0
        self._ahead: Json | None = None

    def lives(self) -> Iterator[Life]:
        """Yield the daemon runs in order. Raise ``UsageError`` if the file is not a complete record."""
        try:
            with self._path.open("rb") as file:
                is_packed = file.read(len(GZIP)) == GZIP
            opened: Lines = gzip.open(self._path) if is_packed else self._path.open("rb")  # noqa: SIM115
        except OSError as error:
            raise self._unreadable_error(error) from error
        with opened:
            yield from self._read_runs(opened)

    def _read_runs(self, file: Lines) -> Iterator[Life]:
        """Yield the daemon runs of an open file, after a check of its first line. Raise ``UsageError``."""
        export = self._next_line(file)
        if export is None or "koala_export" not in export:
            raise self._make_error("is not a record of koala's", "koala export writes one")
        self._check_format(export["koala_export"])
        while (head := self._next_line(file)) is not None:
            if "end" in head:
                if self._next_line(file) is not None:
                    raise self._make_error(f"has data after its end marker, in line {self._number}")
                return
            if "lost" in head:
                self._lost.append(str(head["lost"]))
                continue
            if head.get("part") != 1:
                raise self._make_error(f"lacks the first part of the daemon run in line {self._number}")
            life = self._read_run(head, file)
            yield life
            for _ in life.steps:  # skip the steps that the caller did not read
                pass
        raise self._truncated_error()

    def _read_run(self, head: Json, file: Lines) -> Life:
        """Return the daemon run after a header line, with its steps still unread. Raise ``UsageError``."""
        self._check_format(head.get("koala_record"))
        content = self._next_line(file)
        if content is None:
            raise self._truncated_error()
        try:
            beginning = beginning_from_json(content["begin"])
        except NOT_READ as error:
            raise self._make_error(
                f"is damaged in line {self._number}: the initial state of the daemon run cannot be read"
            ) from error
        life, version = head.get("life"), head.get("version")
        if not isinstance(life, str) or not isinstance(version, str):
            raise self._make_error(f"is damaged before line {self._number}: it does not say whose life begins there")
        return Life(version, beginning, self._read_steps(life, file))

    def _read_steps(self, life: str, file: Lines) -> Iterator[Step]:
        """Yield the steps of the daemon run with the id ``life``. Raise ``UsageError`` if one is missing or damaged."""
        expected, part = 1, 1
        while (content := self._next_line(file)) is not None:
            if "koala_record" in content and content.get("life") == life:
                part += 1
                if content.get("part") != part:
                    raise self._make_error(f"has a gap before line {self._number}: part {part} of {life} is missing")
                continue
            if "n" not in content:
                self._ahead = content
                return
            try:
                step = step_from_json(content)
            except NOT_READ as error:
                raise self._make_error(f"is damaged in line {self._number}: that is not a step") from error
            if step.number != expected:
                raise self._make_error(
                    f"has a gap before line {self._number}: after step {expected - 1} comes {step.number}"
                )
            expected += 1
            yield step
        raise self._truncated_error()

    def _next_line(self, file: Lines) -> Json | None:
        """Return the next line; None at the end of the file."""
        if self._ahead is not None:
            content, self._ahead = self._ahead, None
            return content
        try:
            line = file.readline(self._max_line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._make_error(f"is damaged after line {self._number}: {error}") from error
        except OSError as error:
            raise self._unreadable_error(error) from error
        if not line:
            return None
        self._number += 1
        if len(line) == self._max_line:
            raise self._make_error(f"is damaged in line {self._number}: it has more than {self._max_line} bytes")
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if self._number == 1:
                raise self._make_error("is not a record of koala's", "koala export writes one") from error
            if not line.endswith(b"\n"):
                raise self._truncated_error() from error
            raise self._make_error(f"is damaged in line {self._number}") from error
        if not isinstance(content, dict):
            raise self._make_error(f"is damaged in line {self._number}")
        return content

    def _check_format(self, number: object) -> None:
        if number not in range(1, FORMAT + 1):
            raise self._make_error(
                f"is of format {number}, and this version of koala reads formats up to {FORMAT}",
                "replay it by the version that wrote it",
            )

    def _unreadable_error(self, error: OSError) -> UsageError:
        return self._make_error(f"cannot be read: {error.strerror or error}", "")

    def _truncated_error(self) -> UsageError:
        return self._make_error(f"is cut off after line {self._number}")

    def _make_error(self, problem: str, hint: str = AGAIN) -> UsageError:
        return UsageError(f"{self._path} {problem}", field="file", value=str(self._path), hint=hint)


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
