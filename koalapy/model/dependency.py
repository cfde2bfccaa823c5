"""Dependencies between jobs: the jobs that must end, and how, before another job may start.

A job waits until each of its clauses holds. A clause lists alternatives, of which one suffices.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

from koalapy.model.field import Length, TextForm
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
    condition: EndCondition = EndCondition.OK

    def __str__(self) -> str:
        return f"{self.job}:{self.condition}"

    @property
    def requirement(self) -> str:
        """Return what must happen, as text: ``job 7 to succeed``."""
        return f"job {self.job} to {_VERBS[self.condition]}"


Clause = tuple[Dependency, ...]
Dependencies = Annotated[tuple[Clause, ...], Length(MAX_DEPENDENCIES), TextForm("7, 7:any, 7?8:failed")]
"""All of these clauses must hold."""
NO_DEPENDENCIES: tuple[Clause, ...] = ()

_DEPENDENCY = re.compile(r"\s*(\d{1,19})(?::(ok|failed|any))?\s*", re.ASCII)


def parse_clause(text: str) -> Clause:
    """Parse a clause such as ``7``, ``7:any`` or ``7?8:failed``. Raise ``ValueError`` for another text."""
    clause: list[Dependency] = []
    for part in text.split(OR):
        match = _DEPENDENCY.fullmatch(part)
        if match is None or not 0 < (job := int(match[1])) <= MAX_NUMBER:
            raise ValueError(f"{shorten(part.strip(), 60)!r} is not JOB or JOB:ok, JOB:failed, JOB:any")
        clause.append(Dependency(job, EndCondition(match[2] or EndCondition.OK)))
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
        if others := tuple(dependency for dependency in clause if dependency.job not in ends):
            remaining.append(others)
            continue
        job, condition = clause[0].job, clause[0].condition
        return Resolution(clauses, f"job {job} {ends[job].state}, and it had to {_VERBS[condition]}", job)
    return Resolution(tuple(remaining))
