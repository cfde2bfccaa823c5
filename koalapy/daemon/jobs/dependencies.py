"""Check the dependencies of submissions, and find the jobs that a job depends on or that depend on it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.dependency import MAX_BATCH_DEPENDENCIES, Clause, End, EndCondition, resolve_ends
from koalapy.model.errors import KoalaError, reject
from koalapy.model.identity import Identity
from koalapy.model.job import END_TEXTS, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of

NO_JOB_HINT = "name a job that koala queue or koala history shows; jobs are removed some time after their end"
FinalStates = dict[JobId, JobState]
"""The final states of ended jobs, as stored."""


class EndedMeanwhile(KoalaError):
    """A job that a submission names has ended since its state was read; read the states again."""


@dataclass(frozen=True, slots=True)
class RelatedJob:
    """A job that another one depends on, or that depends on it."""

    job: JobId
    condition: EndCondition
    """How the job that is waited for must end."""
    clause: int
    """Number of the entry in ``after``; jobs of one entry are alternatives."""
    state: JobState | None
    """None if the job was removed."""


RelatedJobs = tuple[Sequence[RelatedJob], Sequence[RelatedJob]]
"""The jobs that a job depends on, and the unfinished ones that depend on it."""


class Dependencies:
    """The dependencies of submissions on stored and unfinished jobs."""

    def __init__(self, queries: Queries, get_many: Callable[[Sequence[JobId]], Awaitable[Mapping[JobId, Job]]]) -> None:
        """``get_many`` returns those of the jobs that exist."""
        self._queries, self._get_many = queries, get_many

    async def read_final_states(
        self, specs: Sequence[JobSpec], caller: Identity, *, is_batch: bool = False
    ) -> FinalStates:
        """Return the final states of the ended jobs that submissions name.

        Raise ``UsageError`` for jobs that do not exist or that the caller may not see, and for too many jobs.
        """
        fields = find_fields(specs, is_batch=is_batch)
        jobs = await self._get_many(list(fields)) if fields else {}
        states: FinalStates = {}
        for ident, field in fields.items():
            job = jobs.get(ident)
            if job is None:
                reject(field, ident, f"names job {ident}, which does not exist", NO_JOB_HINT)
            if not may_see_all_of(caller, job):
                reject(field, ident, f"names job {ident}, which is not yours", "name your own jobs only")
            if job.array_job is not None:
                hint = f"name the array, {job.array_job}"
                reject(field, ident, f"names task {job.display_name} of an array", hint)
            if job.state.is_final:
                states[ident] = job.state
        return states

    async def commit(
        self,
        engine: Engine,
        make_item: Callable[[FinalStates], WorkItem],
        read_states: Callable[[], Awaitable[FinalStates]],
        final_states: FinalStates,
    ) -> None:
        """Commit submissions. Read the final states again if a job that they name has ended in between."""
        while True:
            try:
                await engine.commit(make_item(final_states))
                return
            except EndedMeanwhile:
                await engine.commit(WorkItem())  # wait until the end of that job is written
            final_states = await read_states()

    def find_unmet(self, spec: JobSpec, final_states: FinalStates) -> tuple[Clause, ...]:
        """Return the clauses of a submission that do not hold yet. To be called in the engine's loop.

        Raise ``UsageError`` if one can never hold, and ``EndedMeanwhile`` if a job is neither unfinished nor among the
        final states.
        """
        ends: dict[JobId, End] = {}
        for ident in _jobs_of(spec.after):
            if self._queries.job(ident) is not None:
                continue
            if ident not in final_states:
                raise EndedMeanwhile(f"job {ident} has just ended")
            state = final_states[ident]
            ends[ident] = End(END_TEXTS[state], state is JobState.SUCCEEDED)
        resolution = resolve_ends(spec.after, ends)
        if resolution.failure:
            problem = f"can never hold: {resolution.failure}"
            reject("after", resolution.failed_job, problem, "name another job, or JOB:any")
        return resolution.remaining

    def list_related(self, job: Job, known: Mapping[JobId, Job]) -> RelatedJobs:
        """Return the jobs that a job depends on, and those that depend on it. ``known``: those of them that exist."""
        dependencies = [
            RelatedJob(dependency.job, dependency.condition, index, other.state if other is not None else None)
            for index, clause in enumerate(job.spec.after)
            for dependency in clause
            for other in (known.get(dependency.job),)
        ]
        dependents = [
            RelatedJob(dependent.id, dependency.condition, index, dependent.state)
            for ident in self._queries.dependents_of(job.id)
            if (dependent := known.get(ident)) is not None
            for index, clause in enumerate(dependent.spec.after)
            for dependency in clause
            if dependency.job == job.id
        ]
        return dependencies, dependents


def find_fields(specs: Sequence[JobSpec], *, is_batch: bool) -> dict[JobId, str]:
    """Return the jobs that submissions name, with the first field that names each, such as ``jobs[3].after``.

    Raise ``UsageError`` if a batch names too many jobs.
    """
    fields: dict[JobId, str] = {}
    for index, spec in enumerate(specs):
        field = f"jobs[{index}].after" if is_batch else "after"
        for ident in _jobs_of(spec.after):
            fields.setdefault(ident, field)
        if is_batch and (count := len(fields)) > MAX_BATCH_DEPENDENCIES:
            problem = f"is the first with which the batch names more than {MAX_BATCH_DEPENDENCIES} different jobs"
            reject(field, count, problem, "submit it as several batches, or name an array instead of many jobs")
    return fields


def _jobs_of(clauses: Iterable[Clause]) -> list[JobId]:
    return list(dict.fromkeys(dependency.job for clause in clauses for dependency in clause))
