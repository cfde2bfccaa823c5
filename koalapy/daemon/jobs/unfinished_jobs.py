"""List the unfinished jobs, which the scheduler has in memory."""

from collections.abc import Callable

from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_search import JobSort
from koalapy.model.job_spec import Priority
from koalapy.ports import JobFilter
from koalapy.scheduler.queries import Queries
from koalapy.system.event_loop import iterate_in_slices


async def list_unfinished(queries: Queries, job_filter: JobFilter, sort: JobSort) -> list[Job]:
    """Return all unfinished jobs that match a filter, in an order. The filter's limit and position are not used."""
    # Positions and jobs are read in one step, so that they belong together.
    waiting = [job.id for priority in (Priority.HIGH, Priority.LOW) for job in queries.waiting(priority)]
    all_jobs = queries.jobs()
    matching: list[Job] = []
    async for chunk in iterate_in_slices(all_jobs):
        matching += [job for job in chunk if _matches(job, job_filter)]
    positions = {job: position for position, job in enumerate(waiting)}
    matching.sort(key=_sort_key(sort, positions))
    return matching


def _matches(job: Job, job_filter: JobFilter) -> bool:
    gang = job.attempt.gang if job.attempt is not None else ()
    spec = job.spec
    return (
        job.array_job == job_filter.array
        and (not job_filter.states or job.state in job_filter.states)
        and job_filter.owner in ("", spec.owner)
        and job_filter.name in ("", spec.name)
        and job_filter.home_site in ("", spec.home_site)
        and (not job_filter.cluster or any(component.cluster == job_filter.cluster for component in gang))
        and (job_filter.since is None or job.submitted_at >= job_filter.since)
        and (job_filter.until is None or job.submitted_at < job_filter.until)
    )


def _sort_key(sort: JobSort, positions: dict[JobId, int]) -> Callable[[Job], tuple[int, int, int]]:
    """Return the sort key of a job. ``positions``: the waiting jobs in the order of the placement queues."""

    def queue_key(job: Job) -> tuple[int, int, int]:
        if job.state.is_active:
            return 0 if job.state is JobState.RUNNING else 1, 0, -job.id
        position = positions.get(job.id)
        return (3, 0, job.id) if position is None else (2, position, job.id)

    match sort:
        case JobSort.QUEUE:
            return queue_key
        case JobSort.OLDEST:
            return lambda job: (0, 0, job.id)
        case JobSort.NODES:
            return lambda job: (-job.spec.request.total_size, 0, -job.id)
        case JobSort.NEWEST:
            return lambda job: (0, 0, -job.id)
