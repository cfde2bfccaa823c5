"""Jobs of an earlier life, whose clock may have been ahead of ours."""

from dataclasses import replace

from koalapy.model.job import Attempt, Component, Job
from koalapy.scheduler.attempts.refusals import MAX_REFUSAL_PAUSE


def corrected(job: Job, now: float, longest_pause: float) -> Job:
    """A job without anything that has happened later than now, and with what is planned no farther ahead than it was.

    Else what is counted from there would come as much too late as the clock was set back.
    """
    attempt = job.attempt and _attempt(job.attempt, now)
    return replace(
        job,
        attempt=attempt,
        submitted_at=min(job.submitted_at, now),
        placed_at=_past(job.placed_at, now),
        started_at=_past(job.started_at, now),
        ended_at=_past(job.ended_at, now),
        retry_at=_past(job.retry_at, now + longest_pause),
        refusals=tuple(replace(each, until=_past(each.until, now + MAX_REFUSAL_PAUSE)) for each in job.refusals),
    )


def _attempt(attempt: Attempt, now: float) -> Attempt:
    ahead = max(0.0, attempt.placed_at - now)
    return replace(
        attempt,
        components=tuple(_component(c, now) for c in attempt.components),
        placed_at=min(attempt.placed_at, now),
        barrier_at=_past(attempt.barrier_at, now),
        launched_at=_past(attempt.launched_at, now),
        ended_at=_past(attempt.ended_at, now),
        start_estimate=_earlier(attempt.start_estimate, ahead),
        claim_at=_earlier(attempt.claim_at, ahead),
    )


def _component(component: Component, now: float) -> Component:
    return replace(
        component,
        unknown_since=_past(component.unknown_since, now),
        lost_at=None,  # counted anew: nothing was heard before this daemon began
        submitted_at=_past(component.submitted_at, now),
        claimed_at=_past(component.claimed_at, now),
        warned_at=_past(component.warned_at, now),
        ended_at=_past(component.ended_at, now),
        staging_since=_past(component.staging_since, now),
        staged_at=_past(component.staged_at, now),
    )


def _past(at: float | None, latest: float) -> float | None:
    return None if at is None else min(at, latest)


def _earlier(at: float | None, seconds: float) -> float | None:
    return None if at is None else at - seconds
