"""Jobs as users name them: a number, or tasks of an array such as ``7[3]`` and ``7[3-9]``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from koalapy.client.errors import Exit, GridError

if TYPE_CHECKING:
    from koalapy.client.client import Client
    from koalapy.model.array import TaskIndices

_REFERENCE = re.compile(r"([0-9]{1,100})(?:\[([^\[\]]*)\])?")
_SLURM_TASK = re.compile(r"([0-9]+)_\[?([0-9][0-9,-]*)\]?")
MAX_TASKS = 1000
"""Tasks that one argument of a command that needs their numbers may name."""


@dataclass(frozen=True, slots=True)
class JobReference:
    """A job, or some tasks of an array."""

    job: int
    tasks: TaskIndices | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the job or tasks that a text names. Raise ``ValueError`` with the problem."""
        if task := _SLURM_TASK.fullmatch(text):
            raise ValueError(f"{text!r} is not a job; name a task as {task[1]}[{task[2]}].")
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a job; give 7, or 7[3-9] for tasks of an array.")
        job = int(match[1])
        if match[2] is None:
            return cls(job)
        from koalapy.model.array import TaskIndices

        try:
            tasks = TaskIndices.parse(match[2])
        except ValueError as error:
            raise ValueError(f"{text!r}: the part in brackets {error}.") from error
        if tasks.limit is not None or not tasks.ranges:
            raise ValueError(f"{text!r}: give indices in the brackets, as in {job}[3-9].")
        return cls(job, tasks)

    def __str__(self) -> str:
        return str(self.job) if self.tasks is None else f"{self.job}[{self.tasks}]"

    def find_numbers(self, client: Client) -> list[int]:
        """Return the number of the job, or those of the tasks. Raise ``GridError`` for tasks that do not exist."""
        if self.tasks is None:
            return [self.job]
        text = client.job(self.job)["array"]
        if text is None:
            raise GridError(f"job {self.job} is not an array, so {self} does not exist", Exit.NOT_FOUND)
        from koalapy.model.array import TaskIndices  # slow to import, and most commands name no task

        indices = TaskIndices.parse(text)
        ranges = list(indices.positions_of(self.tasks))
        count = sum(last - first + 1 for first, last in ranges)
        if not count:
            hint = f"its indices are {TaskIndices(indices.ranges)}"
            raise GridError(f"array {self.job} has no task {self.tasks}", Exit.NOT_FOUND, hint)
        if count > MAX_TASKS:
            raise GridError(f"{self} names {count} tasks", Exit.USAGE, f"name at most {MAX_TASKS}, or the array")
        return [self.job + 1 + position for first, last in ranges for position in range(first, last + 1)]

    def find_number(self, client: Client) -> int:
        """Return the number of the job or task. Raise ``GridError`` for several tasks."""
        numbers = self.find_numbers(client)
        if len(numbers) > 1:
            raise GridError(f"{self} names {len(numbers)} tasks", Exit.USAGE, f"name one, as in {self.job}[3]")
        return numbers[0]
