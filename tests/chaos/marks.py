"""What the ranks said of themselves, as it is read back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.rank import MARKS


@dataclass(frozen=True, slots=True)
class Mark:
    """One word of one rank: ``begin``, ``loud`` (it starts to write much) or ``end``. ``at`` is the machine's monotonic
    clock, the same for all processes."""

    what: str
    job: str
    """The daemon's id; for local users' jobs the name by which the harness knows them."""
    generation: int
    index: int
    size: int
    node: str
    host: str
    pid: int
    at: float
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
        return f"{self.what} of rank {self.index} of {self.job}.{self.generation} on {self.node} (pid {self.pid})"


def parse(text: str) -> list[Mark]:
    """All whole lines, in the order in which they were written."""
    return [_mark(json.loads(one)) for one in text.splitlines(keepends=True) if one.endswith("\n")]


def _mark(fields: dict[str, Any]) -> Mark:
    return Mark(**{**fields, "trouble": tuple(fields.get("trouble", ()))})


class MarkReader:
    """Reads what has been marked since it was asked last."""

    def __init__(self, ground: Path) -> None:
        self._path = ground / MARKS
        self._read = 0

    def new(self) -> Iterator[Mark]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from parse(whole.decode())
