"""Who is promised that jobs of high priority delay it no more, and what that is worth."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Job, JobId, JobSpec, JobState, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.scheduler.queue.reservation import is_promised
from koalapy.scheduler.rules import Preemption, PreemptionOrder, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

RULES = Rules(low_patience=100.0)
LOW = Job(1, JobSpec(FlexibleRequest(2), ("program",), priority=Priority.LOW), submitted_at=50.0)


def placed(at: float) -> Job:
    return replace(LOW, state=JobState.RUNNING, generation=1, attempt=Attempt(1, (), at))


def test_a_job_of_low_priority_is_promised_its_turn_once_it_has_waited() -> None:
    assert not is_promised(LOW, RULES, 149.9)
    assert is_promised(LOW, RULES, 150.0)


def test_one_that_was_placed_before_that_may_still_be_preempted_however_long_it_runs() -> None:
    assert not is_promised(placed(149.9), RULES, 1e6)
    assert is_promised(placed(150.0), RULES, 150.0)


def test_one_that_queues_again_has_waited_since_it_was_submitted() -> None:
    preempted = replace(placed(60.0), state=JobState.QUEUED)
    assert not is_promised(preempted, RULES, 149.0)
    assert is_promised(preempted, RULES, 150.0)


def test_nobody_else_is_promised_anything() -> None:
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, priority=Priority.HIGH)), RULES, 1e6)
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, internal=True)), RULES, 1e6)
    assert not is_promised(LOW, Rules(low_patience=None), 1e6)


@pytest.mark.parametrize("patience", [0.0, -1.0, float("inf"), float("nan")])
def test_patience_is_a_time_or_left_out(patience: float) -> None:
    with pytest.raises(UsageError, match="low_patience"):
        Rules(low_patience=patience)


# What it is worth

PROMISE = {"scan_interval": 10.0, "aging_tries": 3}
LONGEST = 30.0
"""Seconds that jobs of high priority run at most."""


def stream_of_high_jobs(world: World, seconds: float, sizes: Sequence[int] = (1,)) -> None:
    """More than there are nodes for, and always some that wait."""
    for number in range(int(seconds)):
        world.submit(flexible(sizes[number % len(sizes)]), priority=Priority.HIGH, run_time=LONGEST)
        world.advance(1)


def begun(world: World, job: JobId) -> float:
    at = world.job(job).started_at
    assert at is not None, "it has not started"
    return at


@pytest.mark.parametrize("preemption", ["placement", "claiming", "never"])
@pytest.mark.parametrize("patience", [60.0, None])
def test_under_an_endless_stream_of_high_jobs_a_low_one_starts_if_it_was_promised_to(
    preemption: Preemption, patience: float | None
) -> None:
    """Once it has waited that long: after the next periodic scan, and when those have ended who run on its nodes."""
    world = World({"north": 4, "south": 2}, Rules(preemption=preemption, low_patience=patience, **PROMISE))
    stream_of_high_jobs(world, 10)
    low = world.submit(fixed(north=4, south=2), run_time=20)
    stream_of_high_jobs(world, 200)
    if patience is None:
        assert world.state(low) is JobState.QUEUED, "nobody is protected else"
        return
    assert begun(world, low) <= 10 + patience + 10 + LONGEST + 5
    assert (world.state(low), world.job(low).generation) == (JobState.SUCCEEDED, 1)


def test_also_those_that_are_not_aged_jobs_are_promised_their_turn() -> None:
    world = World({"north": 4}, Rules(aging=False, low_patience=60.0, scan_interval=10.0))
    low = world.submit(fixed(north=4), run_time=20)
    world.cancel(low)
    stream_of_high_jobs(world, 10)
    low = world.submit(fixed(north=4), run_time=20)
    stream_of_high_jobs(world, 150)
    assert world.state(low) is JobState.SUCCEEDED


def test_nobody_makes_room_on_nodes_that_are_kept_for_another() -> None:
    """Those of low priority that run there come to their end, and the one that was promised them follows."""
    world = World({"north": 4}, Rules(low_patience=60.0, **PROMISE))
    running = [world.submit(flexible(2), run_time=100) for _ in range(2)]
    promised = world.submit(fixed(north=4), run_time=20)
    world.advance(75)
    high = world.submit(flexible(2), priority=Priority.HIGH, run_time=1000)
    assert world.state(high) is JobState.QUEUED
    world.advance(60)
    assert [world.job(job).generation for job in running] == [1, 1]
    assert (world.state(promised), world.state(high)) == (JobState.SUCCEEDED, JobState.RUNNING)


def test_only_as_much_room_is_made_as_is_left_beside_them() -> None:
    world = World({"north": 6}, Rules(low_patience=60.0, **PROMISE))
    running = [world.submit(flexible(2), run_time=100) for _ in range(3)]
    promised = world.submit(fixed(north=4), run_time=20)
    world.advance(75)
    highs = [world.submit(flexible(2), priority=Priority.HIGH, run_time=200) for _ in range(2)]
    world.advance(1)
    assert [world.state(job) for job in highs] == [JobState.RUNNING, JobState.QUEUED]
    assert sorted(world.job(job).generation for job in running) == [1, 1, 1]
    assert sum("preempted" in world.timeline_events(job) for job in running) == 1
    world.advance(30)
    assert world.state(promised) in (JobState.RUNNING, JobState.SUCCEEDED)


def test_room_is_made_though_nodes_are_idle_that_are_kept() -> None:
    world = World({"north": 6}, Rules(low_patience=60.0, **PROMISE))
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


def test_who_was_placed_before_claims_none_of_them() -> None:
    """Its files were on their way when nodes began to be kept for another."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World({"north": 4, "south": 1}, Rules(low_patience=60.0, preemption="never", **PROMISE), links=links)
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


@pytest.mark.parametrize("leaves", [World.cancel, World.hold])
def test_what_was_kept_for_one_that_leaves_is_offered_at_once(leaves: Callable[[World, JobId], None]) -> None:
    world = World({"north": 4}, Rules(low_patience=60.0, preemption="never", **PROMISE))
    world.submit(flexible(2), run_time=1000)
    promised = world.submit(fixed(north=4))
    world.advance(75)
    high = world.submit(flexible(2), priority=Priority.HIGH, run_time=1000)
    assert world.state(high) is JobState.QUEUED
    why = world.queries.waiting_reason(world.job(high))
    assert why == f"nodes are kept for job {promised}, which has waited longer"
    leaves(world, promised)
    assert world.state(high) is JobState.CLAIMING


def test_they_are_kept_until_they_are_claimed() -> None:
    """A job whose files take long to come is placed long before that."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World({"north": 4, "south": 1}, Rules(low_patience=60.0, **PROMISE), links=links)
    stream_of_high_jobs(world, 10)
    file = InputFile("file", 4000, ("south",))
    low = world.submit(FixedRequest((ComponentRequest(4, "north", inputs=(file,)),)), run_time=20)
    stream_of_high_jobs(world, 200)
    assert world.job(low).generation == 1, "nobody had its nodes meanwhile"
    assert (world.state(low), world.job(low).claiming_tries) == (JobState.SUCCEEDED, 1)


def test_two_who_were_promised_their_turn_do_not_keep_each_other_waiting() -> None:
    """The one has been placed, and its files are on their way, when nodes begin to be kept for the other, too."""
    links = {("north", "south"): Link(bandwidth=100.0)}
    world = World({"north": 4, "south": 2}, Rules(low_patience=60.0, preemption="never", **PROMISE), links=links)
    world.submit(fixed(north=4), run_time=100)
    file = InputFile("file", 2000, ("south",))
    first = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=(file,)),)), run_time=20)
    second = world.submit(fixed(north=4, south=2), run_time=20)
    while world.state(first) is JobState.QUEUED:
        world.advance(1)
    assert world.queries.reservation == second
    world.advance(150)
    assert (world.state(first), world.state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert (world.job(first).generation, world.job(first).claiming_tries) == (1, 1)


def test_one_whose_claim_fails_has_its_turn_again() -> None:
    world = World({"north": 4}, Rules(low_patience=60.0, claim_grace=8, **PROMISE))
    stream_of_high_jobs(world, 5)
    low = world.submit(fixed(north=4), run_time=20)
    while world.state(low) is JobState.QUEUED:
        stream_of_high_jobs(world, 1)
    world.sites["north"].add_local_user(1)
    assert world.now < 120
    stream_of_high_jobs(world, 20)
    world.sites["north"].remove_local_user("user-1")
    stream_of_high_jobs(world, 60)
    assert world.state(low) is JobState.SUCCEEDED


@given(
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=9),
    preemption=st.sampled_from(["placement", "claiming", "never"]),
    order=st.sampled_from(["least-harm", "jst"]),
)
def test_every_low_job_starts_in_bounded_time(
    widths: list[int], sizes: list[int], preemption: Preemption, order: PreemptionOrder
) -> None:
    """Each within the time that the ones before it and the high ones on its nodes take."""
    rules = Rules(preemption=preemption, preemption_order=order, low_patience=40.0, **PROMISE)
    world = World({"north": 4, "south": 3}, rules)
    stream_of_high_jobs(world, 10, sizes)
    lows = [world.submit(flexible(width) if width > 4 else nonfixed(width), run_time=10) for width in widths]
    stream_of_high_jobs(world, 60 + len(lows) * (10 + LONGEST + 15), sizes)
    assert [world.state(job) for job in lows] == [JobState.SUCCEEDED] * len(lows)


@pytest.mark.parametrize("restarts", [False, True])
def test_nodes_are_kept_until_they_are_claimed_also_by_the_next_daemon(restarts: bool) -> None:
    """Whose turn came waits for its file, which is on its way for a while."""
    rules = Rules(low_patience=40.0, scan_interval=10)
    world = World({"north": 10, "south": 1}, rules, links={("south", "north"): Link(0.001, 10.0)})
    world.submit(fixed(north=8), run_time=1000, priority=Priority.HIGH)
    world.submit(fixed(north=2), run_time=80, priority=Priority.HIGH)
    file = InputFile("file", 1000, ("south",))
    promised = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=(file,)),)))
    world.advance(120)
    assert world.state(promised) is JobState.PLACED
    if restarts:
        world.restart()
        world.connect("north")
        world.connect("south")
    assert world.queries.kept("north", Priority.HIGH) == 2
    world.advance(1)
    high = world.submit(fixed(north=2), priority=Priority.HIGH, run_time=1000)
    world.advance(1)
    assert world.state(high) is JobState.QUEUED
    world.advance(100)
    assert world.state(promised) is JobState.SUCCEEDED
    assert world.state(high) is JobState.RUNNING, "and no longer"


def test_who_stands_behind_a_younger_one_of_its_shape_has_its_turn() -> None:
    """It was held for long, and released to the tail."""
    world = World({"north": 4}, Rules(low_patience=1000.0, aging=False))
    world.submit(fixed(north=4), priority=Priority.HIGH, run_time=100000)
    old = world.submit(fixed(north=4))
    world.hold(old)
    world.advance(900)
    young = world.submit(fixed(north=4))
    world.release(old)
    world.advance(500)
    assert world.queries.position(young) == 1
    assert world.queries.reservation == old
