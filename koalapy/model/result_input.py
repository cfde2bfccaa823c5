"""Result files of one job that another job gets as inputs."""

import re
from dataclasses import dataclass
from typing import Annotated

from koalapy.model.dependency import MAX_NUMBER, Clause, Dependency
from koalapy.model.field import Field, Length, TextForm
from koalapy.model.request import MAX_ENTRIES, MAX_NAME_LENGTH, MAX_PATH_LENGTH, FileName, Name

FORM = "JOB:FILE, JOB[INDEX]:FILE for a task of an array, JOB.RANK:FILE for one component"
_TEXT = re.compile(r"(\d{1,19})(?:\[(\d{1,9})\])?(?:\.(\d{1,5}))?:(.+?)(?::as=(.*))?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ResultInput:
    """A result file or folder of another job, which each component gets in its folder."""

    job: int
    """Number of the job, or of the array with the task ``index``."""
    path: FileName
    """Path below the folder of the component that produced it."""
    index: int | None = None
    rank: int | None = None
    """Position of the component that produced it; None: the only one with this path."""
    target: Annotated[Name, Field(json="as")] = ""
    """Name in the folder; by default the last part of the path."""
    source: Annotated[int, Field(is_settable=False)] = 0
    """Number of the job or task with the results, set at submission."""

    @property
    def file_name(self) -> str:
        return self.target or self.path.rstrip("/").rpartition("/")[2]

    @property
    def job_name(self) -> str:
        """Return the job as users name it: ``7`` or ``7[3]``."""
        return str(self.job) if self.index is None else f"{self.job}[{self.index}]"

    def __str__(self) -> str:
        rank, target = "" if self.rank is None else f".{self.rank}", f":as={self.target}" if self.target else ""
        return f"{self.job_name}{rank}:{self.path}{target}"


ResultInputs = Annotated[
    tuple[ResultInput, ...], Length(MAX_ENTRIES), TextForm("7:out.csv, 7[3]:out.csv, 7.1:out.csv:as=in.csv")
]


def parse_result_input(text: str) -> ResultInput:
    """Parse a text such as ``7:out.csv`` or ``7[3].0:out.csv:as=in.csv``. Raise ``ValueError`` for another text."""
    match = _TEXT.fullmatch(text) if text.isprintable() else None
    if match is None or not 0 < (job := int(match[1])) <= MAX_NUMBER:
        raise ValueError(f"is not {FORM}")
    if len(match[4]) > MAX_PATH_LENGTH or len(match[5] or "") > MAX_NAME_LENGTH:
        raise ValueError("has a path or name that is too long")
    index, rank = (None if number is None else int(number) for number in match.group(2, 3))
    return ResultInput(job, match[4], index, rank, match[5] or "")


def with_dependencies(clauses: tuple[Clause, ...], inputs: tuple[ResultInput, ...]) -> tuple[Clause, ...]:
    """Return clauses that wait for the jobs of inputs, too: for their success, unless a clause names such a job
    alone."""
    awaited = {clause[0].job for clause in clauses if len({dependency.job for dependency in clause}) == 1}
    jobs = dict.fromkeys(each.job for each in inputs if each.job not in awaited)
    return (*clauses, *((Dependency(job),) for job in jobs))
