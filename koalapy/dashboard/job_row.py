"""A job as a line of a table, as far as who looks at it may see it."""

from dataclasses import dataclass

from koalapy.api.job_views import as_others_see
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.wording import shorten
from koalapy.validation.permissions import may_see_all_of


@dataclass(frozen=True, slots=True)
class JobRow:
    """Times are seconds since the epoch."""

    id: JobId
    redacted: bool
    """Whether it is somebody else's, so that most of it is left out."""
    state: str
    name: str
    user: str
    priority: str
    nodes: int
    where: str
    """``north:4,south:2``; empty of a job that waits."""
    position: int | None
    """In its placement queue; 1 is the head."""
    submitted_at: float
    waits: bool
    waited: float | None
    """Seconds from its submission until it was placed; None while it waits."""
    started_at: float | None
    ran: float | None
    """Seconds; None while it runs, or when it has not."""
    reason: str


MAX_REASON_LENGTH = 500
"""Characters of a reason in a table; the job's page shows all."""


def row_of(record: JobRecord, by: Identity, position: int | None = None, *, whole_reason: bool = False) -> JobRow:
    """Return the line of a job; ``position`` is left out of others' jobs, as by the REST API."""
    is_theirs = may_see_all_of(by, record.job)
    seen = record if is_theirs else as_others_see(record)
    job, spec = seen.job, seen.job.spec
    reason = "" if job.state in (JobState.RUNNING, JobState.SUCCEEDED) else seen.reason
    began = None if job.state.waits or job.state in (JobState.PLACED, JobState.CLAIMING) else job.started_at
    return JobRow(
        id=job.id,
        redacted=not is_theirs,
        state=str(job.state),
        name=spec.name,
        user=spec.owner,
        priority=str(spec.priority),
        nodes=spec.request.total_size,
        where="" if job.state.waits else _where(job),
        position=position if is_theirs else None,
        submitted_at=job.submitted_at,
        waits=job.state.waits,
        waited=None if job.state.waits or job.placed_at is None else max(0.0, job.placed_at - job.submitted_at),
        started_at=began,
        ran=None if began is None or job.ended_at is None else max(0.0, job.ended_at - began),
        reason=reason if whole_reason else shorten(reason, MAX_REASON_LENGTH),
    )


def _where(job: Job) -> str:
    return ",".join(f"{component.cluster}:{component.size}" for component in job.attempt.gang) if job.attempt else ""
