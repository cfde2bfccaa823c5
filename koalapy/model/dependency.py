"""Dependencies between jobs, and result files that a job gets from another job.

A job waits until each of its clauses holds. A clause lists alternatives, of which one suffices.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple

from koalapy.model.field import Field, Length, TextForm
from koalapy.model.request import MAX_ENTRIES, MAX_NAME_LENGTH, MAX_PATH_LENGTH, FileName, Name
from koalapy.model.wording import format_list, shorten

MAX_DEPENDENCIES = 1000
"""Maximum number of dependencies of one job: the alternatives of all of its clauses."""
MAX_BATCH_DEPENDENCIES = 5000
"""Maximum number of different jobs that the jobs of one batch may wait for."""
MAX_NUMBER = 2**63 - 1
OR = "?"
"""The sign between alternatives, as in Slurm."""


class EndCondition(StrEnum):
    """How a job must end for a dependency on it to hold."""

    OK = "ok"
    """It succeeds."""
    FAILED = "failed"
    """It fails or is cancelled."""
    ANY = "any"
    """It ends."""

    def holds_after(self, *, succeeded: bool | None) -> bool:
        """Return whether the condition holds for a job that has ended; None: it is not known how."""
        return self is EndCondition.ANY or succeeded is (self is EndCondition.OK)


_VERBS = {EndCondition.OK: "succeed", EndCondition.FAILED: "fail", EndCondition.ANY: "end"}


@dataclass(frozen=True, slots=True)
class Dependency:
    """A job that another job waits for, and how it must end."""

    job: int
    """Its number. In a batch that is not stored yet also -1 for its first entry, -2 for its second, and so on."""
    condition: EndCondition = EndCondition.OK

    def __str__(self) -> str:
        return f"{format_entry(self.job) if self.job < 0 else self.job}:{self.condition}"

    @property
    def requirement(self) -> str:
        """Return what must happen, as text: ``job 7 to succeed``."""
        return f"job {self.job} to {_VERBS[self.condition]}"


def format_entry(job: int) -> str:
    """Return the name of an entry of a batch, ``#0`` for the first, by the number that represents it."""
    return f"#{-1 - job}"


Clause = tuple[Dependency, ...]
Dependencies = Annotated[tuple[Clause, ...], Length(MAX_DEPENDENCIES), TextForm("7, 7:any, 7?8:failed, #0 in a batch")]
"""All of these clauses must hold."""
NO_DEPENDENCIES: tuple[Clause, ...] = ()

_DEPENDENCY = re.compile(r"\s*(?:(\d{1,19})|#(\d{1,9}))(?::(ok|failed|any))?\s*", re.ASCII)


def parse_clause(text: str) -> Clause:
    """Parse a clause such as ``7``, ``7:any``, ``7?8:failed`` or ``#0``, the first entry of the same batch.

    Raise ``ValueError`` for another text.
    """
    clause: list[Dependency] = []
    for part in text.split(OR):
        match = _DEPENDENCY.fullmatch(part)
        if match is None or (match[1] and not 0 < int(match[1]) <= MAX_NUMBER):
            raise ValueError(f"{shorten(part.strip(), 60)!r} is not JOB or JOB:ok, JOB:failed, JOB:any")
        job = int(match[1]) if match[1] else -1 - int(match[2])
        clause.append(Dependency(job, EndCondition(match[3] or EndCondition.OK)))
    return tuple(dict.fromkeys(clause))


def format_clause(clause: Clause) -> str:
    """Return a clause as users write it: ``7:ok?8:any``."""
    return OR.join(map(str, clause))


def describe_clauses(clauses: Iterable[Clause]) -> str:
    """Return what must happen, as text: ``job 7 to succeed, and either job 8 to end or job 9 to fail``."""
    texts = [
        f"{'either ' if len(clause) > 1 else ''}{' or '.join(dependency.requirement for dependency in clause)}"
        for clause in clauses
    ]
    return format_list(texts, separator=", and ")


def with_numbers(clauses: tuple[Clause, ...], numbers: Sequence[int]) -> tuple[Clause, ...]:
    """Return clauses with the numbers of jobs in place of entries of their batch. ``numbers``: those of its entries."""
    return tuple(tuple(replace(d, job=numbers[-1 - d.job]) if d.job < 0 else d for d in clause) for clause in clauses)


class End(NamedTuple):
    """The end of a job: its final state, as text for reasons, and whether it succeeded; None: it is not known."""

    state: str
    succeeded: bool | None


class Resolution(NamedTuple):
    """The clauses that do not hold yet, and the reason why one can never hold; empty if each still can."""

    remaining: tuple[Clause, ...]
    failure: str = ""
    failed_job: int | None = None
    """The job that the reason names."""


def resolve_ends(clauses: tuple[Clause, ...], ends: Mapping[int, End]) -> Resolution:
    """Apply the ends of jobs to clauses, in one pass."""
    remaining: list[Clause] = []
    for clause in clauses:
        if any(d.job in ends and d.condition.holds_after(succeeded=ends[d.job].succeeded) for d in clause):
            continue
        if unmet := tuple(dependency for dependency in clause if dependency.job not in ends):
            remaining.append(unmet)
            continue
        job, condition = clause[0].job, clause[0].condition
        return Resolution(clauses, f"job {job} {ends[job].state}, and it had to {_VERBS[condition]}", job)
    return Resolution(tuple(remaining))


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
    jobs = dict.fromkeys(result_input.job for result_input in inputs if result_input.job not in awaited)
    return (*clauses, *((Dependency(job),) for job in jobs))
