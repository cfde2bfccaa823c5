"""Check the dependencies of submissions, and find the jobs that a job depends on or that depend on it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.dependency import MAX_DEPENDENCIES, Clause, EndCondition, resolve_end
from koalapy.model.errors import KoalaError, NotFoundError, reject
from koalapy.model.identity import Identity
from koalapy.model.job import END_TEXTS, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of

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

    def __init__(self, queries: Queries, read_job: Callable[[JobId], Awaitable[Job]]) -> None:
        """``read_job`` returns any job, or raises ``NotFoundError``."""
        self._queries, self._read_job = queries, read_job

    async def read_final_states(self, spec: JobSpec, caller: Identity) -> FinalStates:
        """Return the final states of the ended jobs that a submission names.

        Raise ``UsageError`` for jobs that do not exist or that the caller may not see.
        """
        states: FinalStates = {}
        idents = _jobs_of(spec.after)
        if len(idents) > MAX_DEPENDENCIES:
            reject("after", len(idents), f"names {len(idents)} jobs", f"name at most {MAX_DEPENDENCIES}")
        for ident in idents:
            try:
                job = await self._read_job(ident)
            except NotFoundError:
                hint = "name a job that koala queue --all shows; jobs are removed some time after their end"
                reject("after", ident, f"names job {ident}, which does not exist", hint)
            if not may_see_all_of(caller, job):
                reject("after", ident, f"names job {ident}, which is not yours", "name your own jobs only")
            if job.array_job is not None:
                hint = f"name the array, {job.array_job}"
                reject("after", ident, f"names task {job.display_name} of an array", hint)
            if job.state.is_final:
                states[ident] = job.state
        return states

    async def commit(
        self,
        engine: Engine,
        make_item: Callable[[FinalStates], WorkItem],
        specs: Sequence[JobSpec],
        caller: Identity,
        final_states: FinalStates,
    ) -> None:
        """Commit submissions. Read the final states again if a job that they name has ended in between."""
        while True:
            try:
                await engine.commit(make_item(final_states))
                return
            except EndedMeanwhile:
                await engine.commit(WorkItem())  # wait until the end of that job is written
            final_states = {}
            for spec in specs:
                final_states |= await self.read_final_states(spec, caller)

    def find_unmet(self, spec: JobSpec, final_states: FinalStates) -> tuple[Clause, ...]:
        """Return the clauses of a submission that do not hold yet. To be called in the engine's loop.

        Raise ``UsageError`` if one can never hold, and ``EndedMeanwhile`` if a job is neither unfinished nor among the
        final states.
        """
        clauses = spec.after
        for ident in _jobs_of(spec.after):
            if self._queries.job(ident) is not None:
                continue
            if ident not in final_states:
                raise EndedMeanwhile(f"job {ident} has just ended")
            state = final_states[ident]
            resolution = resolve_end(clauses, ident, END_TEXTS[state], succeeded=state is JobState.SUCCEEDED)
            if resolution.failure:
                reject("after", ident, f"can never hold: {resolution.failure}", "name another job, or JOB:any")
            clauses = resolution.remaining
        return clauses

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


def _jobs_of(clauses: Iterable[Clause]) -> list[JobId]:
    return list(dict.fromkeys(dependency.job for clause in clauses for dependency in clause))
