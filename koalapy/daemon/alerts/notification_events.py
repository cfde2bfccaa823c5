"""Build the notifications of jobs that change or wait for long, and of alerts."""

import secrets
from collections.abc import Iterator
from typing import Any

from koalapy.model.alert import Alert
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import MailType
from koalapy.model.notification import Channel
from koalapy.model.wording import to_line

Recipients = Iterator[tuple[Channel, str]]
MAX_REASON_LENGTH = 500
_RAN = (JobState.RUNNING, JobState.UNKNOWN)


def requested_events(job: Job, previous_state: JobState | None) -> Iterator[MailType]:
    """Yield the events since ``previous_state`` of which the owner of a job wants to be notified."""
    if not (job.spec.mail_user or job.spec.webhook):
        return
    requested_types = frozenset(job.spec.mail_type) or {MailType.END}
    begun = job.state is JobState.RUNNING or (job.state.is_final and job.started_at is not None)
    if begun and previous_state not in _RAN and MailType.BEGIN in requested_types:
        yield MailType.BEGIN
    if job.state.is_final and job.state is not previous_state:
        if MailType.END in requested_types:
            yield MailType.END
        elif MailType.FAIL in requested_types and job.state is JobState.FAILED:
            yield MailType.FAIL


def waits_since(job: Job) -> float | None:
    """Return the time since which a job has been queued.

    Return None if it is not queued, or its owner wants no notification of long waits.
    """
    if job.state is not JobState.QUEUED or job.is_deferred or MailType.WAITING not in job.spec.mail_type:
        return None
    ended = job.attempt.ended_at if job.attempt else None
    return max(job.waits_since, ended or 0.0)


def list_recipients(job: Job) -> Recipients:
    """Yield the channel and the address of each recipient of a job's notifications."""
    if job.spec.mail_user:
        yield "mail", job.spec.mail_user
    if job.spec.webhook:
        yield "webhook", job.spec.webhook


def build_job_body(event: MailType, job: Job, now: float) -> dict[str, Any]:
    """Return the body of a notification of a job; its ``id`` lets the recipient detect duplicates.

    The begin of a job that has already ended is reported without its final state, reason and exit code.
    """
    begins = event is MailType.BEGIN
    clusters: dict[str, int] = {}
    for component in job.attempt.gang if job.attempt and job.state is not JobState.QUEUED else ():
        clusters[component.cluster] = clusters.get(component.cluster, 0) + component.size
    return {
        "id": secrets.token_hex(8),
        "event": f"job-{event}",
        "at": now,
        "job": job.id,
        "name": job.spec.name,
        "owner": job.spec.owner,
        "state": str(JobState.RUNNING if begins else job.state),
        "reason": "" if begins else job.reason[:MAX_REASON_LENGTH],
        "exit_code": None if begins else job.exit_code,
        "restarts": job.restarts,
        "clusters": clusters,
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "ended_at": None if begins else job.ended_at,
    }


def build_alert_body(alert: Alert, now: float, *, begins: bool) -> dict[str, Any]:
    """Return the body of a notification to operators of an alert that begins or ends."""
    details = {
        name: getattr(alert, name) for name in ("target", "summary", "cause", "remedy", "since", "cluster", "job")
    }
    kind = {"kind": str(alert.kind), "severity": str(alert.severity)}
    event = "alert" if begins else "alert-over"
    return {"id": secrets.token_hex(8), "event": event, "at": now, **kind, **details}


def build_test_body(user: str, now: float) -> dict[str, Any]:
    """Return the body of a test notification that an operator sends."""
    return {"id": secrets.token_hex(8), "event": "test", "at": now, "by": user}


def format_mail(body: dict[str, Any]) -> tuple[str, str]:
    """Return the subject and the text of a mail for a notification body."""
    if body["event"] == "test":
        return "[koala] test", f"{body['by']} tests whether alerts reach you. Nothing has happened."
    if body["event"].startswith("alert"):
        prefix = "over: " if body["event"] == "alert-over" else f"{body['severity']}: "
        lines = [body["summary"], "", f"cause:  {body['cause']}", f"remedy: {body['remedy']}"]
        return _format_mail(f"{prefix}{body['target']}, {body['kind']}", lines)
    name = f" {body['name']}" if body["name"] else ""
    status = {"job-begin": "runs", "job-waiting": "still waits"}.get(body["event"], f"has {body['state']}")
    status = "is cancelled" if status == "has cancelled" else status
    lines = [f"Job {body['job']}{name} of {body['owner']} {status}."]
    if body["reason"] and body["reason"] != body["state"]:
        lines.append(f"reason: {body['reason']}")
    if body["exit_code"] is not None:
        lines.append(f"exit code: {body['exit_code']}")
    if body["clusters"]:
        lines.append("nodes: " + ", ".join(f"{count} on {name}" for name, count in body["clusters"].items()))
    if body["restarts"]:
        lines.append(f"restarts: {body['restarts']}")
    lines += ["", f"koala show {body['job']}", f"koala explain {body['job']}"]
    return _format_mail(f"job {body['job']}{name} {status}", lines)


def _format_mail(subject: str, lines: list[str]) -> tuple[str, str]:
    """Return a subject and a text of lines. No name or reason adds a header or a line to them."""
    return f"[koala] {to_line(subject)}"[:200], "\n".join(map(to_line, lines))
