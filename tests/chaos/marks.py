"""Marks that the ranks wrote."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koalapy.audit.facts import Run, RunKind, Source
from tests.chaos.rank import MARKS

MARKS_OF_RANKS = Source("marks of ranks")


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a rank: ``begin``, ``loud`` (it starts to write much) or ``end``.

    ``time_s`` is the machine's monotonic clock, which is the same for all processes.
    """

    event: str
    job: str
    """The daemon's id, or the name of a local user's job."""
    generation: int
    index: int
    size: int
    node: str
    host: str
    pid: int
    time_s: float
    clock: float
    trouble: tuple[str, ...] = ()
    code: int | None = None
    lines: int = 0

    @property
    def rank(self) -> tuple[str, int, int]:
        return self.job, self.generation, self.index

    @property
    def cluster(self) -> str:
        return self.node.rpartition("-")[0]

    def __str__(self) -> str:
        return f"{self.event} of rank {self.index} of {self.job}.{self.generation} on {self.node} (pid {self.pid})"


def parse_marks(text: str) -> list[Mark]:
    """Return the marks of all complete lines, in the order of writing."""
    return [_create_mark(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _create_mark(fields: dict[str, Any]) -> Mark:
    return Mark(**{**fields, "trouble": tuple(fields.get("trouble", ()))})


def read_facts(marks: Sequence[Mark]) -> Iterator[Run]:
    """Yield the programs of all ranks as facts for the auditor. The end of a killed rank is unknown."""
    offset = time.time() - time.monotonic()
    ends = {(*mark.rank, mark.pid): mark for mark in marks if mark.event == "end"}
    for mark in marks:
        if mark.event != "begin":
            continue
        end = ends.get((*mark.rank, mark.pid))
        is_local = mark.job.startswith("local-")
        yield Run(
            MARKS_OF_RANKS,
            RunKind.PROGRAM,
            -int(mark.job.removeprefix("local-")) if is_local else int(mark.job),
            mark.generation,
            f"rank {mark.index}",
            mark.cluster,
            mark.time_s + offset,
            None if end is None else end.time_s + offset,
            nodes=(mark.node,),
            size=mark.size,
            exit_code=None if end is None else end.code,
            run_id=str(mark.pid),
        )


class MarkReader:
    """A reader of new marks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MARKS
        self._read = 0

    def new(self) -> Iterator[Mark]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        yield from parse_marks(complete.decode())
