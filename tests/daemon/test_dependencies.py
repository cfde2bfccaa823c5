"""The numbers of dependencies that submissions may have, and the reads of the jobs that they name."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from koalapy.daemon.jobs.submissions import Submissions
from koalapy.model.dependency import MAX_BATCH_DEPENDENCIES, MAX_DEPENDENCIES, Clause, Dependency, EndCondition
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobId, JobState, new_job
from koalapy.model.job_spec import JobSpec
from tests.validation.submissions import GRID, check_spec, make_spec, one_component

CALLER = Identity("alice", Role.OPERATOR, "a test")
PAIR = (Dependency(7), Dependency(8))


class StoredJobs:
    """Succeeded jobs of all numbers but 9, and the reads of them."""

    def __init__(self) -> None:
        self.reads: list[Sequence[JobId]] = []
        self.submissions = Submissions(ENGINE, NO_UNFINISHED, STORE, 1, self.get_many)

    async def get_many(self, jobs: Sequence[JobId]) -> dict[JobId, Job]:
        self.reads.append(jobs)
        ended = replace(new_job(1, depend_on([]), 0.0), state=JobState.SUCCEEDED)
        return {ident: replace(ended, id=ident) for ident in jobs if ident != 9}


NO_UNFINISHED: Any = SimpleNamespace(job=lambda ident: None)
ENGINE: Any = None
STORE: Any = None


def depend_on(clauses: Iterable[Clause]) -> JobSpec:
    return make_spec(one_component(), after=tuple(clauses))


def batch_of(first: JobId, count: int) -> list[JobSpec]:
    """Return jobs that name ``count`` jobs from ``first`` on, 1,000 each, and all of them job ``first``."""
    numbers = range(first, first + count)
    return [
        depend_on([(Dependency(first), Dependency(number, EndCondition.ANY)) for number in numbers[start:][:1000]])
        for start in range(0, count, 1000)
    ]


def test_check_submission_with_dependencies_at_limit_passes() -> None:
    check_spec(depend_on([PAIR] * (MAX_DEPENDENCIES // 2)), GRID)


async def test_read_final_states_of_batch_at_limit_reads_each_job_once() -> None:
    stored = StoredJobs()
    specs = batch_of(10, MAX_BATCH_DEPENDENCIES)
    states = await stored.submissions.read_final_states([*specs, *specs], CALLER, is_batch=True)
    assert states == dict.fromkeys(range(10, 10 + MAX_BATCH_DEPENDENCIES), JobState.SUCCEEDED)
    assert stored.reads == [list(states)]


async def test_find_unmet_of_ended_jobs_returns_no_clauses() -> None:
    stored, spec = StoredJobs(), depend_on([PAIR])
    states = await stored.submissions.read_final_states([spec], CALLER)
    assert stored.submissions.find_unmet(spec, states) == ()
