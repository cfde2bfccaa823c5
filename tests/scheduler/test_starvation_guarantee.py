"""Starvation guarantee: after ``low_patience`` high-priority jobs no longer delay a job of low priority."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.scheduler.queue.reservation import is_promised
from koalapy.scheduler.rules import Preemption, PreemptionOrder, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

RULES = Rules(low_patience=100.0)
LOW = Job(1, JobSpec(FlexibleRequest(2), ("program",), priority=Priority.LOW), submitted_at=50.0)


def place_low_job(placed_at: float) -> Job:
    return replace(LOW, state=JobState.RUNNING, generation=1, attempt=Attempt(1, (), placed_at))


def test_guarantee_begins_after_low_patience() -> None:
    assert not is_promised(LOW, RULES, 149.9)
    assert is_promised(LOW, RULES, 150.0)


def test_guarantee_requires_placement_after_patience() -> None:
    assert not is_promised(place_low_job(149.9), RULES, 1e6)
    assert is_promised(place_low_job(150.0), RULES, 150.0)


def test_guarantee_of_requeued_job_counts_from_submission() -> None:
    preempted = replace(place_low_job(60.0), state=JobState.QUEUED)
    assert not is_promised(preempted, RULES, 149.0)
    assert is_promised(preempted, RULES, 150.0)


def test_guarantee_excludes_high_and_internal_jobs() -> None:
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, priority=Priority.HIGH)), RULES, 1e6)
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, internal=True)), RULES, 1e6)
    assert not is_promised(LOW, Rules(low_patience=None), 1e6)


@pytest.mark.parametrize("patience", [0.0, -1.0, float("inf"), float("nan")])
def test_low_patience_must_be_positive_or_none(patience: float) -> None:
    with pytest.raises(UsageError, match="low_patience"):
        Rules(low_patience=patience)


# What it is worth

GUARANTEE_RULES: dict[str, Any] = {"scan_interval": 10.0, "aging_tries": 3}
MAX_RUN_TIME_S = 30.0
"""Maximum run time of high-priority jobs in seconds."""


def submit_stream_of_high_jobs(world: World, seconds: float, sizes: Sequence[int] = (1,)) -> None:
    """Submit more high-priority jobs than there are nodes, one each second."""
    for number in range(int(seconds)):
        world.submit(flexible(sizes[number % len(sizes)]), priority=Priority.HIGH, run_time=MAX_RUN_TIME_S)
        world.advance(1)


def start_time(world: World, job: JobId) -> float:
    started_at = world.job(job).started_at
    assert started_at is not None, "the job has not started"
    return started_at


@pytest.mark.parametrize("preemption", ["placement", "claiming", "never"])
@pytest.mark.parametrize("patience", [60.0, None])
def test_guarantee_starts_low_job_under_stream_of_high_jobs(preemption: Preemption, patience: float | None) -> None:
    """It starts after its patience, the next scan, and the end of the running jobs."""
    world = World({"north": 4, "south": 2}, Rules(preemption=preemption, low_patience=patience, **GUARANTEE_RULES))
    submit_stream_of_high_jobs(world, 10)
    low_job = world.submit(fixed(north=4, south=2), run_time=20)
    submit_stream_of_high_jobs(world, 200)
    if patience is None:
        assert world.state(low_job) is JobState.QUEUED, "there is no guarantee without patience"
        return
    assert start_time(world, low_job) <= 10 + patience + 10 + MAX_RUN_TIME_S + 5
    assert (world.state(low_job), world.job(low_job).generation) == (JobState.SUCCEEDED, 1)


def test_guarantee_applies_without_aging() -> None:
    world = World({"north": 4}, Rules(aging=False, low_patience=60.0, scan_interval=10.0))
    low_job = world.submit(fixed(north=4), run_time=20)
    world.cancel(low_job)
    submit_stream_of_high_jobs(world, 10)
    low_job = world.submit(fixed(north=4), run_time=20)
    submit_stream_of_high_jobs(world, 150)
    assert world.state(low_job) is JobState.SUCCEEDED


def test_guarantee_reserved_nodes_are_not_preempted_for_others() -> None:
    """Low jobs on these nodes run to their end, then the guaranteed job starts."""
    world = World({"north": 4}, Rules(low_patience=60.0, **GUARANTEE_RULES))
    running = [world.submit(flexible(2), run_time=100) for _ in range(2)]
    promised = world.submit(fixed(north=4), run_time=20)
    world.advance(75)
    high = world.submit(flexible(2), priority=Priority.HIGH, run_time=1000)
    assert world.state(high) is JobState.QUEUED
    world.advance(60)
    assert [world.job(job).generation for job in running] == [1, 1]
    assert (world.state(promised), world.state(high)) == (JobState.SUCCEEDED, JobState.RUNNING)


def test_guarantee_permits_preemption_beside_reserved_nodes() -> None:
    world = World({"north": 6}, Rules(low_patience=60.0, **GUARANTEE_RULES))
    running = [world.submit(flexible(2), run_time=100) for _ in range(3)]
    promised = world.submit(fixed(north=4), run_time=20)
    world.advance(75)
    high_jobs = [world.submit(flexible(2), priority=Priority.HIGH, run_time=200) for _ in range(2)]
    world.advance(1)
    assert [world.state(job) for job in high_jobs] == [JobState.RUNNING, JobState.QUEUED]
    assert sorted(world.job(job).generation for job in running) == [1, 1, 1]
    assert sum("preempted" in world.timeline_events(job) for job in running) == 1
    world.advance(30)
    assert world.state(promised) in (JobState.RUNNING, JobState.SUCCEEDED)


def test_guarantee_permits_preemption_despite_idle_reserved_nodes() -> None:
    world = World({"north": 6}, Rules(low_patience=60.0, **GUARANTEE_RULES))
    user = world.sites["north"].add_local_user(2)
    running = [world.submit(flexible(2), run_time=100) for _ in range(2)]
    world.submit(fixed(north=4), run_time=20)
    world.advance(75)
    world.sites["north"].remove_local_user(user)
    world.advance(1)
    high = world.submit(flexible(2), priority=Priority.HIGH, run_time=200)
    world.advance(1)
    assert sum("preempted" in world.timeline_events(job) for job in running) == 1
    assert world.state(high) is JobState.RUNNING


def test_guarantee_reserved_nodes_are_not_claimed_by_earlier_placement() -> None:
    """The high job's transfer had started before the reservation."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World(
        {"north": 4, "south": 1}, Rules(low_patience=60.0, preemption="never", **GUARANTEE_RULES), links=links
    )
    world.submit(fixed(north=2), run_time=120)
    promised = world.submit(fixed(north=4), run_time=20)
    world.advance(50)
    file = InputFile("file", 4000, ("south",))
    request = FixedRequest((ComponentRequest(2, "north", inputs=(file,)),))
    high = world.submit(request, priority=Priority.HIGH, run_time=1000)
    assert world.state(high) is JobState.PLACED
    world.advance(65)
    assert world.job(high).started_at is None
    world.advance(40)
    assert world.state(promised) is JobState.SUCCEEDED


@pytest.mark.parametrize("remove_job", [World.cancel, World.hold])
def test_guarantee_reservation_of_leaving_job_is_offered(remove_job: Callable[[World, JobId], None]) -> None:
    world = World({"north": 4}, Rules(low_patience=60.0, preemption="never", **GUARANTEE_RULES))
    world.submit(flexible(2), run_time=1000)
    promised = world.submit(fixed(north=4))
    world.advance(75)
    high = world.submit(flexible(2), priority=Priority.HIGH, run_time=1000)
    assert world.state(high) is JobState.QUEUED
    reason = world.queries.waiting_reason(world.job(high))
    assert reason == f"nodes are kept for job {promised}, which has waited longer"
    remove_job(world, promised)
    assert world.state(high) is JobState.CLAIMING


def test_guarantee_keeps_nodes_during_transfer() -> None:
    """With a long transfer the job is placed long before its claim."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World({"north": 4, "south": 1}, Rules(low_patience=60.0, **GUARANTEE_RULES), links=links)
    submit_stream_of_high_jobs(world, 10)
    file = InputFile("file", 4000, ("south",))
    low_job = world.submit(FixedRequest((ComponentRequest(4, "north", inputs=(file,)),)), run_time=20)
    submit_stream_of_high_jobs(world, 200)
    assert world.job(low_job).generation == 1, "no other job had its nodes"
    assert (world.state(low_job), world.job(low_job).claiming_tries) == (JobState.SUCCEEDED, 1)


def test_guarantee_of_two_jobs_causes_no_deadlock() -> None:
    """The first job is placed and its transfer runs when the second receives the reservation."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World(
        {"north": 4, "south": 2}, Rules(low_patience=60.0, preemption="never", **GUARANTEE_RULES), links=links
    )
    world.submit(fixed(north=4), run_time=100)
    file = InputFile("file", 2000, ("south",))
    first_job = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=(file,)),)), run_time=20)
    second_job = world.submit(fixed(north=4, south=2), run_time=20)
    while world.state(first_job) is JobState.QUEUED:
        world.advance(1)
    assert world.queries.reservation == second_job
    world.advance(150)
    assert (world.state(first_job), world.state(second_job)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert (world.job(first_job).generation, world.job(first_job).claiming_tries) == (1, 1)


def test_guarantee_survives_failed_claim() -> None:
    world = World({"north": 4}, Rules(low_patience=60.0, claim_grace=8, **GUARANTEE_RULES))
    submit_stream_of_high_jobs(world, 5)
    low_job = world.submit(fixed(north=4), run_time=20)
    while world.state(low_job) is JobState.QUEUED:
        submit_stream_of_high_jobs(world, 1)
    world.sites["north"].add_local_user(1)
    assert world.now < 120
    submit_stream_of_high_jobs(world, 20)
    world.sites["north"].remove_local_user("user-1")
    submit_stream_of_high_jobs(world, 60)
    assert world.state(low_job) is JobState.SUCCEEDED


@given(
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=9),
    preemption=st.sampled_from(["placement", "claiming", "never"]),
    order=st.sampled_from(["least-harm", "jst"]),
)
def test_guarantee_starts_each_low_job_in_bounded_time(
    widths: list[int], sizes: list[int], preemption: Preemption, order: PreemptionOrder
) -> None:
    """The bound is the run time of earlier jobs and of the high jobs on the nodes."""
    rules = Rules(preemption=preemption, preemption_order=order, low_patience=40.0, **GUARANTEE_RULES)
    world = World({"north": 4, "south": 3}, rules)
    submit_stream_of_high_jobs(world, 10, sizes)
    low_jobs = [world.submit(flexible(width) if width > 4 else nonfixed(width), run_time=10) for width in widths]
    submit_stream_of_high_jobs(world, 60 + len(low_jobs) * (10 + MAX_RUN_TIME_S + 15), sizes)
    assert [world.state(job) for job in low_jobs] == [JobState.SUCCEEDED] * len(low_jobs)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_guarantee_keeps_nodes_across_daemon_restart(is_restarted: bool) -> None:
    """The guaranteed job waits for its transfer."""
    rules = Rules(low_patience=40.0, scan_interval=10)
    world = World({"north": 10, "south": 1}, rules, links={("south", "north"): Link(0.001, 10.0)})
    world.submit(fixed(north=8), run_time=1000, priority=Priority.HIGH)
    world.submit(fixed(north=2), run_time=80, priority=Priority.HIGH)
    file = InputFile("file", 1000, ("south",))
    promised = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=(file,)),)))
    world.advance(120)
    assert world.state(promised) is JobState.PLACED
    if is_restarted:
        world.restart()
        world.connect("north")
        world.connect("south")
    assert world.queries.reserved_nodes("north", Priority.HIGH) == 2
    world.advance(1)
    high = world.submit(fixed(north=2), priority=Priority.HIGH, run_time=1000)
    world.advance(1)
    assert world.state(high) is JobState.QUEUED
    world.advance(100)
    assert world.state(promised) is JobState.SUCCEEDED
    assert world.state(high) is JobState.RUNNING, "the reservation ends with the claim"


def test_guarantee_applies_behind_younger_job_of_equal_shape() -> None:
    """The older job was held and then released to the tail."""
    world = World({"north": 4}, Rules(low_patience=1000.0, aging=False))
    world.submit(fixed(north=4), priority=Priority.HIGH, run_time=100000)
    old_job = world.submit(fixed(north=4))
    world.hold(old_job)
    world.advance(900)
    young_job = world.submit(fixed(north=4))
    world.release(old_job)
    world.advance(500)
    assert world.queries.position(young_job) == 1
    assert world.queries.reservation == old_job
