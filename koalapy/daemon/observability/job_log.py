"""Record the progress of jobs as log lines."""

import structlog

from koalapy.model.job import Job, JobState

log = structlog.get_logger()


def log_change(job: Job, previous_state: JobState | None) -> None:
    """Log a job's start, end or return to the queue at level ``info``, and any other change at ``debug``."""
    if job.state is previous_state:
        return
    waits_again = job.state is JobState.QUEUED and previous_state is not None and previous_state.is_active
    if (job.state.is_final or job.state is JobState.RUNNING or waits_again) and not job.spec.internal:
        log.info("a job has changed", action="job-changed", **_log_fields(job, previous_state))
    else:
        log.debug("a job has changed", action="job-changed", **_log_fields(job, previous_state))


def _log_fields(job: Job, previous_state: JobState | None) -> dict[str, object]:
    """Return the log fields of a job's change; attempt and clusters are those of the last attempt."""
    attempt = job.attempt
    return {
        "job": job.id,
        "state": str(job.state),
        "before": None if previous_state is None else str(previous_state),
        "user": job.spec.owner,
        "attempt": job.generation,
        "clusters": sorted({component.cluster for component in attempt.gang}) if attempt else [],
        "reason": job.reason,
        "exit_code": job.exit_code,
    }
