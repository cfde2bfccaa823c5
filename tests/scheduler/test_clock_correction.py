"""Restored times of jobs when the daemon's clock is behind that of its predecessor."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler, corrected
from koalapy.scheduler.state import SchedulerState

RULES = Rules(restart_pause_max=60.0)
OLD_NOW, NOW = 7200.0, 3600.0
"""The clock was set back by an hour between two daemons."""
SPEC = JobSpec(FlexibleRequest(1), ("true",))
PLANNED = ("start_estimate", "claim_at", "retry_at")


def restore_job(job: Job) -> Scheduler:
    scheduler = Scheduler(
        SchedulerState(RULES, builtin_policies(), [ClusterStatus("north")]), nonces=iter("abc").__next__
    )
    scheduler.restore([job], NOW)
    return scheduler


def past_times(entity: Job | Attempt | Component) -> list[float]:
    """Return all times of an entity that are in the past."""
    times = [f.name for f in fields(entity) if f.name.endswith(("_at", "_since")) and f.name not in PLANNED]
    return [time for name in times if (time := getattr(entity, name)) is not None]


def test_retry_pause_is_at_most_maximum_after_clock_change() -> None:
    scheduler = restore_job(Job(1, SPEC, OLD_NOW, queue_seq=1, generation=2, restarts=2, retry_at=OLD_NOW + 8.0))
    job = scheduler.queries.job(1)
    assert job is not None
    assert job.retry_at is not None
    assert job.retry_at <= NOW + RULES.restart_pause_max
    scheduler.step([], job.retry_at)
    retried_job = scheduler.queries.job(1)
    assert retried_job is not None
    assert retried_job.retry_at is None, "it is back in its queue"


def test_claim_time_keeps_distance_after_clock_change() -> None:
    attempt = Attempt(1, (Component(0, "north", 1),), OLD_NOW, start_estimate=OLD_NOW + 40.0, claim_at=OLD_NOW + 30.0)
    scheduler = restore_job(Job(1, SPEC, OLD_NOW, JobState.CLAIMING, generation=1, attempt=attempt))
    job = scheduler.queries.job(1)
    assert job is not None
    assert job.attempt is not None
    assert (job.attempt.claim_at, job.attempt.start_estimate) == (NOW + 30.0, NOW + 40.0)


def test_walltime_starts_at_restore_after_clock_change() -> None:
    component = Component(0, "north", 1, ComponentState.RUNNING, hosts=("a",))
    attempt = Attempt(1, (component,), OLD_NOW, barrier_at=OLD_NOW, launched_at=OLD_NOW)
    scheduler = restore_job(
        Job(1, replace(SPEC, walltime=90.0), OLD_NOW, JobState.RUNNING, generation=1, attempt=attempt)
    )
    job = scheduler.queries.job(1)
    assert job is not None
    assert job.attempt is not None
    assert job.attempt.launched_at == NOW


times = st.none() | st.floats(0.0, 1e5)
past = dict.fromkeys(("claimed_at", "warned_at", "ended_at", "submitted_at", "staging_since", "staged_at"), times)
components = st.builds(
    lambda given, since: Component(0, "n", 1, unknown_since=since, **given), st.fixed_dictionaries(past), times
)
attempts = st.builds(
    lambda parts, placed, planned, at: Attempt(
        1, tuple(parts), placed, start_estimate=planned, claim_at=planned, barrier_at=at, launched_at=at, ended_at=at
    ),
    st.lists(components, min_size=1, max_size=3),
    st.floats(0.0, 1e5),
    times,
    times,
)


@given(attempts, times, times)
def test_corrected_times_are_in_past_and_unchanged_without_clock_change(
    attempt: Attempt, time: float | None, retry_at: float | None
) -> None:
    job = Job(
        1, SPEC, attempt.placed_at, attempt=attempt, placed_at=time, started_at=time, ended_at=time, retry_at=retry_at
    )
    corrected_job = corrected(job, NOW, RULES.restart_pause_max)
    assert corrected_job.attempt is not None
    for entity in (corrected_job, corrected_job.attempt, *corrected_job.attempt.components):
        assert all(time <= NOW for time in past_times(entity))
    assert corrected_job.retry_at is None or corrected_job.retry_at <= NOW + RULES.restart_pause_max
    if attempt.claim_at is not None and corrected_job.attempt.claim_at is not None:
        distance = attempt.claim_at - attempt.placed_at
        assert corrected_job.attempt.claim_at - corrected_job.attempt.placed_at == pytest.approx(distance)
    assert corrected(job, 1e6, RULES.restart_pause_max) == job
