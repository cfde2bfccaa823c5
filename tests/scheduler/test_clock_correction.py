"""A daemon whose clock is behind that of the one before waits for nothing longer than that one would have."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler, corrected
from koalapy.scheduler.state import SchedulerState

RULES = Rules(restart_pause_max=60.0)
BEFORE, NOW = 7200.0, 3600.0
"""The clock was set back by an hour between two daemons."""
SPEC = JobSpec(FlexibleRequest(1), ("true",))
PLANNED = ("start_estimate", "claim_at", "retry_at")


def restored(job: Job) -> Scheduler:
    scheduler = Scheduler(
        SchedulerState(RULES, builtin_policies(), [ClusterStatus("north")]), nonces=iter("abc").__next__
    )
    scheduler.restore([job], NOW)
    return scheduler


def moments(thing: Job | Attempt | Component) -> list[float]:
    """Everything that has happened."""
    times = [f.name for f in fields(thing) if f.name.endswith(("_at", "_since")) and f.name not in PLANNED]
    return [at for name in times if (at := getattr(thing, name)) is not None]


def test_a_paused_job_waits_for_no_longer_than_any_pause() -> None:
    scheduler = restored(Job(1, SPEC, BEFORE, queue_seq=1, generation=2, restarts=2, retry_at=BEFORE + 8.0))
    found = scheduler.queries.job(1)
    assert found is not None
    assert found.retry_at is not None
    assert found.retry_at <= NOW + RULES.restart_pause_max
    scheduler.step([], found.retry_at)
    again = scheduler.queries.job(1)
    assert again is not None
    assert again.retry_at is None, "it is back in its queue"


def test_a_claim_is_tried_when_it_would_have_been() -> None:
    attempt = Attempt(1, (Component(0, "north", 1),), BEFORE, start_estimate=BEFORE + 40.0, claim_at=BEFORE + 30.0)
    scheduler = restored(Job(1, SPEC, BEFORE, JobState.CLAIMING, generation=1, attempt=attempt))
    found = scheduler.queries.job(1)
    assert found is not None
    assert found.attempt is not None
    assert (found.attempt.claim_at, found.attempt.start_estimate) == (NOW + 30.0, NOW + 40.0)


def test_a_walltime_counts_from_now_at_the_latest() -> None:
    component = Component(0, "north", 1, ComponentState.RUNNING, hosts=("a",))
    attempt = Attempt(1, (component,), BEFORE, barrier_at=BEFORE, launched_at=BEFORE)
    scheduler = restored(Job(1, replace(SPEC, walltime=90.0), BEFORE, JobState.RUNNING, generation=1, attempt=attempt))
    found = scheduler.queries.job(1)
    assert found is not None
    assert found.attempt is not None
    assert found.attempt.launched_at == NOW


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
def test_nothing_has_happened_later_than_now_and_nothing_changes_where_no_clock_was_set(
    attempt: Attempt, at: float | None, retry: float | None
) -> None:
    job = Job(1, SPEC, attempt.placed_at, attempt=attempt, placed_at=at, started_at=at, ended_at=at, retry_at=retry)
    found = corrected(job, NOW, RULES.restart_pause_max)
    assert found.attempt is not None
    for thing in (found, found.attempt, *found.attempt.components):
        assert all(moment <= NOW for moment in moments(thing))
    assert found.retry_at is None or found.retry_at <= NOW + RULES.restart_pause_max
    if attempt.claim_at is not None and found.attempt.claim_at is not None:
        ahead = attempt.claim_at - attempt.placed_at
        assert found.attempt.claim_at - found.attempt.placed_at == pytest.approx(ahead)
    assert corrected(job, 1e6, RULES.restart_pause_max) == job


def test_every_moment_of_a_job_is_looked_at() -> None:
    """A field that is added is to be thought of."""
    known = {name for thing in (Job, Attempt, Component) for name in (f.name for f in fields(thing))}
    assert {name for name in known if name.endswith(("_at", "_since"))} == {
        "submitted_at",
        "placed_at",
        "started_at",
        "ended_at",
        "retry_at",
        "claim_at",
        "barrier_at",
        "launched_at",
        "unknown_since",
        "lost_at",
        "claimed_at",
        "warned_at",
        "staging_since",
        "staged_at",
    }
