"""Tells the log what becomes of jobs, once it is stored."""

import structlog

from koalapy.model.job import Job, JobState

log = structlog.get_logger()


def log_change(job: Job, before: JobState | None) -> None:
    """Starts and ends, and that a job has to wait again; with the level ``debug`` all between, too."""
    if job.state is before:
        return
    waits_again = job.state is JobState.QUEUED and before is not None and before.is_active
    if (job.state.is_final or job.state is JobState.RUNNING or waits_again) and not job.spec.internal:
        log.info("a job has changed", action="job-changed", **_told(job, before))
    else:
        log.debug("a job has changed", action="job-changed", **_told(job, before))


def _told(job: Job, before: JobState | None) -> dict[str, object]:
    """The attempt is the last one, and the clusters are its."""
    attempt = job.attempt
    return {
        "job": job.id,
        "state": str(job.state),
        "before": None if before is None else str(before),
        "user": job.spec.owner,
        "attempt": job.generation,
        "clusters": sorted({component.cluster for component in attempt.gang}) if attempt else [],
        "reason": job.reason,
        "exit_code": job.exit_code,
    }
