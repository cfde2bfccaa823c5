"""Record the progress of jobs as log lines, and as spans for a trace collector."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from koalapy.config.settings import Settings
from koalapy.daemon.engine.engine import Engine
from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Component, Job, JobId, JobState

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a job's trace: its path in the job, and its times as Unix timestamps."""

    path: str
    name: str
    start: float
    end: float
    parent: str = ""
    """Path of the parent span; empty for the span of the job."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    fault: str = ""
    """Why it failed; empty if it did not."""


def trace_of(instance: str, job: JobId) -> int:
    """Return the trace id of a job; it is the same after a restart of the daemon, so that the trace continues."""
    return _hash_number(f"{instance}:{job}", 16)


def id_of(instance: str, job: JobId, path: str) -> int:
    """Return the span id of a path in a job."""
    return _hash_number(f"{instance}:{job}:{path}", 8)


def _hash_number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


def spans_of_attempt(attempt: Attempt, ended_at: float, waited_since: float | None) -> Iterator[Span]:
    """Yield the spans of a finished attempt, and of the wait before it if ``waited_since`` is not None."""
    path = f"attempt-{attempt.generation}"
    if waited_since is not None:
        yield Span(f"queued-{attempt.generation}", "queued", waited_since, attempt.placed_at, "job")
    end = attempt.ended_at if attempt.ended_at is not None else ended_at
    clusters = tuple(sorted({component.cluster for component in attempt.gang}))
    attributes: dict[str, Value] = {"koala.attempt": attempt.generation, "koala.clusters": clusters}
    yield Span(path, "attempt", attempt.placed_at, end, "job", attributes, attempt.end_reason)
    phases = (("claiming", attempt.placed_at), ("starting", attempt.barrier_at), ("running", attempt.launched_at))
    begun = [(name, began_at) for name, began_at in phases if began_at is not None]
    for (name, start), until in zip(begun, [*(began_at for _, began_at in begun[1:]), end], strict=True):
        yield Span(f"{path}/{name}", name, start, until, path)
    for component in attempt.components:
        yield from _spans_of(component, path, attempt.placed_at, end)


def _spans_of(component: Component, attempt: str, placed_at: float, end: float) -> Iterator[Span]:
    """Yield the spans of a component and of its file transfers. A component that has not ended gets ``end``."""
    path = f"{attempt}/component-{component.index}"
    attributes: dict[str, Value] = {
        "koala.cluster": component.cluster,
        "koala.nodes": component.size,
        "koala.component": component.index,
        "koala.lrm_job": component.lrm_job or "",
    }
    ended_at = component.ended_at if component.ended_at is not None else end
    yield Span(path, "component", component.submitted_at or placed_at, ended_at, attempt, attributes, component.error)
    if component.staging_since is not None:
        staged = component.staged_at if component.staged_at is not None else ended_at
        size: dict[str, Value] = {"koala.cluster": component.cluster, "koala.bytes": component.staged}
        yield Span(f"{path}/files", "files", component.staging_since, staged, path, size)


def spans_of_job(job: Job, waited_since: float | None) -> Iterator[Span]:
    """Yield the spans of a finished job and of its last attempt."""
    end = job.ended_at if job.ended_at is not None else job.submitted_at
    attributes: dict[str, Value] = {
        "koala.job": job.id,
        "koala.job_name": job.spec.name,
        "koala.user": job.spec.owner,
        "koala.state": str(job.state),
        "koala.reason": job.reason,
        "koala.restarts": job.restarts,
    }
    if job.exit_code is not None:
        attributes["koala.exit_code"] = job.exit_code
    fault = (job.reason or "failed") if job.state is JobState.FAILED else ""
    yield Span("job", "job", job.submitted_at, end, "", attributes, fault)
    if job.attempt is not None:
        yield from spans_of_attempt(job.attempt, end, waited_since)
    elif waited_since is not None:
        yield Span("queued-1", "queued", waited_since, end, "job")


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


@contextmanager
def traced_jobs(settings: Settings, engine: Engine, instance: str) -> Iterator[None]:
    """Send traces of jobs within the context if tracing is configured.

    Raise ``UsageError`` if the packages for tracing are not installed.
    """
    if settings.tracing.endpoint is None:
        yield
        return
    try:
        from koalapy.daemon.observability.tracing import (
            Tracing,  # needs many packages that most installations do not use
        )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tracing.endpoint: the package {error.name} is missing",
            field="tracing.endpoint",
            hint="pip install 'koalapy[tracing]'",
        ) from error
    tracing = Tracing(settings.tracing.endpoint, instance)
    engine.subscribe(tracing.job_changed, tracing.attempt_ended)
    try:
        yield
    finally:
        tracing.stop()
