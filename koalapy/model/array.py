"""Arrays: jobs with many tasks from one submission, and the record of their tasks."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from koalapy.model.wording import shorten

MAX_INDEX = 2**31 - 1
"""The highest index, so that programs may store an index in 32 bits."""
MAX_ARRAY_SIZE = 1_000_000
"""Tasks of an array, by default."""
MAX_ARRAY_TEXT_LENGTH = 10_000
MAX_LINE_LENGTH = 100_000
"""Characters of a line; Linux passes no longer variable to a program."""
MAX_LINES = 1_000_000
MAX_PENDING_RANGES = 1000
"""Ranges into which cancellations may split the waiting tasks of an array."""
MAX_STEPPED_INDICES = 10_000
"""Indices that one cancellation may select by ranges with a step."""

_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::(\d{1,18}))?)?", re.ASCII)
_LIMIT = re.compile(r"[1-9]\d{0,8}", re.ASCII)
MAX_SHOWN_LENGTH = 40
"""Characters of a wrong part that a message repeats."""


class ArrayFail(StrEnum):
    """What follows from the first failed task of an array."""

    CONTINUE = "continue"
    STOP = "stop"
    """The waiting tasks are not started, and the running ones are cancelled."""


class IndexRange(NamedTuple):
    """The indices from ``first`` to ``last``, both included, ``step`` apart."""

    first: int
    last: int
    step: int = 1

    @property
    def size(self) -> int:
        return (self.last - self.first) // self.step + 1

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f":{self.step}" if self.step != 1 else "")


@dataclass(frozen=True, slots=True)
class TaskIndices:
    """The indices of an array's tasks in ascending order, and how many tasks may run at once.

    Without ranges, one task for each line. A task's position counts from 0.
    """

    ranges: tuple[IndexRange, ...] = ()
    limit: int | None = None
    """Maximum tasks that are started and unfinished; None: no limit."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as ``1-200%16``, ``0-100:5`` or ``3,7,9``. Raise ``ValueError`` with the problem."""
        parts, percent, limit = text.strip().partition("%")
        if percent and not _LIMIT.fullmatch(limit):
            raise ValueError(f"has {shorten(limit, MAX_SHOWN_LENGTH)!r} after the %, which is not a number of tasks")
        ranges = sorted(map(_parse_range, parts.split(","))) if parts else []
        for previous, following in pairwise(ranges):
            if following.first <= previous.last:
                raise ValueError(f"has {previous} and {following}, which overlap")
        if not ranges and not percent:
            raise ValueError("is empty")
        return cls(tuple(ranges), int(limit) if percent else None)

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges)) + ("" if self.limit is None else f"%{self.limit}")

    @property
    def size(self) -> int:
        """Return the number of tasks."""
        return sum(indices.size for indices in self.ranges)

    def index_at(self, position: int) -> int:
        """Return the index of the task at a position. Raise ``IndexError`` if there is none."""
        for indices in self.ranges:
            if position < indices.size:
                return indices.first + position * indices.step
            position -= indices.size
        raise IndexError(position)

    def position_of(self, index: int) -> int | None:
        """Return the position of the task with an index; None if there is none."""
        return next((first for first, _ in self.positions_of(TaskIndices((IndexRange(index, index),)))), None)

    def positions_of(self, selected: "TaskIndices") -> "Iterator[Positions]":
        """Yield the positions of the selected tasks as ranges, in order. Skip indices that the array does not have."""
        starts = [indices.first for indices in self.ranges]
        offsets = list(accumulate((indices.size for indices in self.ranges), initial=0))
        for low, high in _consecutive(selected.ranges):
            for place in range(max(0, bisect_right(starts, low) - 1), len(starts)):
                indices = self.ranges[place]
                if indices.first > high:
                    break
                first = max(0, -((indices.first - low) // indices.step))
                last = min(indices.size - 1, (high - indices.first) // indices.step)
                if first <= last:
                    yield offsets[place] + first, offsets[place] + last


def _consecutive(ranges: Iterable[IndexRange]) -> "Iterator[Positions]":
    """Yield the first and last of consecutive indices; each index of a range with a step by itself."""
    for indices in ranges:
        if indices.step == 1:
            yield indices.first, indices.last
        else:
            yield from ((index, index) for index in range(indices.first, indices.last + 1, indices.step))


def join_indices(indices: Iterable[int]) -> tuple[IndexRange, ...]:
    """Return ascending indices as ranges."""
    ranges: list[IndexRange] = []
    for index in indices:
        first = ranges.pop().first if ranges and ranges[-1].last == index - 1 else index
        ranges.append(IndexRange(first, index))
    return tuple(ranges)


def _parse_range(text: str) -> IndexRange:
    """Parse an index, or a range of indices with or without a step. Raise ``ValueError`` with the problem."""
    match, part = _PART.fullmatch(text.strip()), shorten(text.strip(), MAX_SHOWN_LENGTH)
    if match is None:
        raise ValueError(f"has the part {part!r}, which is not an index or a range of indices")
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if last > MAX_INDEX or first > MAX_INDEX:
        raise ValueError(f"has the index {max(first, last)}, and the highest possible index is {MAX_INDEX}")
    if last < first:
        raise ValueError(f"has the range {part}, which ends before it begins")
    if step == 0:
        raise ValueError(f"has the range {part} with the step 0")
    last -= (last - first) % step
    return IndexRange(first, last, step if last > first else 1)


Positions = tuple[int, int]
"""The first and last of consecutive positions or indices."""


def is_selected(position: int, positions: Sequence[Positions]) -> bool:
    """Return whether a position is in one of the ranges, which are in order."""
    place = bisect_right(positions, (position, MAX_INDEX)) - 1
    return place >= 0 and position <= positions[place][1]


def without_first(pending: tuple[Positions, ...]) -> tuple[Positions, ...]:
    """Return pending positions without the first one."""
    first, last = pending[0]
    return ((first + 1, last), *pending[1:]) if first < last else pending[1:]


def without_positions(pending: Sequence[Positions], removed: Sequence[Positions]) -> tuple[Positions, ...]:
    """Return pending positions without those in any of the ranges ``removed``."""
    remaining = list(pending)
    cuts = iter(sorted(removed))
    cut = next(cuts, None)
    result: list[Positions] = []
    while remaining:
        first, last = remaining.pop(0)
        while cut is not None and cut[1] < first:
            cut = next(cuts, None)
        if cut is None or cut[0] > last:
            result.append((first, last))
            continue
        if first < cut[0]:
            result.append((first, cut[0] - 1))
        if cut[1] < last:
            remaining.insert(0, (cut[1] + 1, last))
    return tuple(result)


def format_task(array: int, index: int) -> str:
    """Return the name of a task: ``7[3]``."""
    return f"{array}[{index}]"
