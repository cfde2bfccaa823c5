"""A job's place in its queue, as the table in docs/scheduling.md has it: who comes, returns, or stood in the way."""

from collections.abc import Callable

import pytest

from koalapy.model.application import NO_APPLICATION
from koalapy.model.job import JobId, JobSpec, JobState, Priority
from koalapy.model.request import Request
from koalapy.scheduler.events import ClusterDrained, JobHeld, JobReleased, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

LATE = 1e6
"""Seconds between periodic scans that are not to help."""
AGING = Rules(aging_tries=3, scan_interval=10, high_scans_per_low=1, claim_grace=8)


def spec_of(request: Request, priority: Priority = Priority.LOW) -> JobSpec:
    return JobSpec(request, ("program",), priority=priority)


def behind(world: World, request: Request, count: int = 3) -> list[JobId]:
    return [world.submit(request, run_time=1000) for _ in range(count)]


def positions(world: World, jobs: list[JobId]) -> list[int | None]:
    return [world.queries.position(job) for job in jobs]


# Who returns


def is_overtaken(world: World, job: JobId) -> None:
    """The job is placed on nodes that are idle as far as is known, and a local user has one of them before it."""
    north = world.sites["north"]
    world.deliver("north")
    seen = north.current_report()
    north.add_local_user(1)
    world.step([Reported("north", seen)])
    assert world.state(job) is JobState.CLAIMING
    world.advance(11)


def claim_fails(world: World, job: JobId) -> None:
    world.sites["north"].add_local_user(2)  # before it, and not yet told
    world.advance(9)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]


def is_preempted(world: World, job: JobId) -> None:
    world.advance(1)
    world.submit(fixed(north=4), priority=Priority.HIGH, run_time=1000)
    world.advance(1)
    assert "preempted" in world.timeline_events(job)


def loses_a_node(world: World, job: JobId) -> None:
    world.sites["north"].fail_component(world.tokens(job)[0], "node lost")
    world.settle()


def breaks(world: World, job: JobId) -> None:
    world.advance(1)
    world.sites["north"].add_local_user(2)
    loses_a_node(world, job)
    assert world.job(job).restarts == 1


def is_held_and_released(world: World, job: JobId) -> None:
    world.hold(job)
    world.release(job)


@pytest.mark.parametrize("returns", [claim_fails, is_preempted, breaks])
@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_who_returns_stands_where_it_stood(returns: Callable[[World, JobId], None], queue: str) -> None:
    """And what it was tried is not forgotten: what befell it was no fault of its own."""
    world = World({"north": 4}, Rules(scan_interval=LATE, claim_grace=8, queue=queue))  # type: ignore[arg-type]
    job = world.submit(fixed(north=3), run_time=1000)
    others = behind(world, fixed(north=4))
    returns(world, job)
    assert world.state(job) is JobState.QUEUED
    assert positions(world, [job, *others]) == [1, 2, 3, 4]
    assert world.queries.tries(job) == 1


def test_who_is_released_stands_behind_those_who_waited() -> None:
    world = World({"north": 4}, Rules(scan_interval=LATE))
    world.submit(fixed(north=4), run_time=1000)
    job, *others = behind(world, fixed(north=4))
    is_held_and_released(world, job)
    assert positions(world, [*others, job]) == [1, 2, 3]
    assert world.queries.tries(job) == 2, "on arrival, and now"


def test_who_comes_back_after_a_pause_stands_where_it_stood() -> None:
    world = World({"north": 4}, Rules(scan_interval=LATE, restart_pause=50))
    job = world.submit(fixed(north=3), run_time=1000)
    others = behind(world, fixed(north=4))
    for _ in range(2):
        world.advance(1)
        loses_a_node(world, job)
    assert positions(world, [job, *others]) == [None, None, 1, 2], "the first of the others was placed meanwhile"
    world.advance(51)
    assert positions(world, [job, *others]) == [1, None, 2, 3]


@pytest.mark.parametrize("event_driven", [True, False])
def test_who_returns_does_not_overtake_the_queue_as_if_it_had_just_arrived(event_driven: bool) -> None:
    """What is free when it returns is offered from the head on: with ``event_driven`` off in the next scan."""
    rules = Rules(scan_interval=60, event_driven=event_driven, high_scans_per_low=1)
    world = World({"north": 4, "south": 2}, rules)
    blocker = world.submit(fixed(south=2), run_time=1000)
    wide = world.submit(fixed(north=2, south=2), run_time=1000)
    job = world.submit(fixed(north=4), run_time=1000)
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    world.cancel(blocker)
    world.settle()
    loses_a_node(world, job)
    assert world.state(job) is JobState.QUEUED
    assert world.state(wide) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(61)
    assert (world.state(wide), world.state(job)) == (JobState.RUNNING, JobState.QUEUED)


def test_with_event_driven_off_who_returns_waits_for_the_scan_though_nobody_else_does() -> None:
    world = World({"north": 4}, Rules(scan_interval=60, event_driven=False, high_scans_per_low=1))
    job = world.submit(fixed(north=4), run_time=10)
    world.advance(1)
    loses_a_node(world, job)
    world.advance(58)
    assert world.state(job) is JobState.QUEUED
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


# Who came at the same moment


def test_of_one_transaction_high_jobs_are_tried_first() -> None:
    world = World({"north": 4})
    low, high = world.submit_together([spec_of(fixed(north=4)), spec_of(fixed(north=4), Priority.HIGH)])
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)


def test_a_low_jobs_refusal_is_none_of_a_high_one_of_its_shape() -> None:
    world = World({"north": 4}, Rules(scan_interval=LATE))
    running = world.submit(fixed(north=4), run_time=1000)
    world.advance(1)
    low, high = world.submit_together([spec_of(fixed(north=4)), spec_of(fixed(north=4), Priority.HIGH)])
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)
    world.advance(1)
    assert (world.state(running), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)


def test_narrowest_first_holds_for_who_comes_at_the_same_moment() -> None:
    world = World({"north": 4}, Rules(queue="fcfs", queue_order="narrowest-first", scan_interval=LATE))
    wide, narrow = world.submit_together([spec_of(fixed(north=3)), spec_of(fixed(north=1))])
    assert (world.state(wide), world.state(narrow)) == (JobState.CLAIMING, JobState.CLAIMING)


def test_a_job_that_is_held_and_released_as_it_comes_is_tried_once() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=1000)
    job = world.submit(fixed(north=4))
    world.hold(job)
    world.step([JobReleased(job), JobHeld(job), JobReleased(job)])
    assert world.queries.tries(job) == 2


# Whose nodes are kept


def starved(world: World, request: Request) -> JobId:
    """A job that has failed enough scans for nodes to be kept for it."""
    job = world.submit(request, run_time=20)
    world.advance(40)
    return job


def test_a_job_that_cannot_be_placed_keeps_nothing_from_the_next_one() -> None:
    """It asks for a cluster that is drained, and is the oldest."""
    world = World({"north": 4, "south": 4}, AGING)
    world.step([ClusterDrained("south", "ops", "new switch")])
    world.submit(fixed(south=4))
    for number in range(4):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number}")
        world.advance(5)
    wide = world.submit(fixed(north=4), run_time=20)
    for number in range(40):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number + 4}")
        world.advance(5)
    assert world.state(wide) is JobState.SUCCEEDED


def test_what_is_kept_follows_the_cluster_that_is_drained_at_once() -> None:
    world = World({"north": 4, "south": 4}, Rules(aging_tries=3, scan_interval=10, high_scans_per_low=1))
    world.submit(fixed(north=2, south=2), run_time=1000)
    aged = starved(world, fixed(south=4))
    narrow = world.submit(fixed(south=1), run_time=1000)
    assert (world.queries.reservation, world.state(narrow)) == (aged, JobState.QUEUED)
    younger = world.submit(fixed(north=4))
    world.advance(35)
    assert world.queries.reservation == aged
    world.step([ClusterDrained("south", "ops", "new switch")])
    assert world.queries.reservation == younger


@pytest.mark.parametrize("leaves", [World.cancel, World.hold])
@pytest.mark.parametrize("event_driven", [True, False])
def test_what_was_kept_for_a_job_that_leaves_is_offered(
    leaves: Callable[[World, JobId], None], event_driven: bool
) -> None:
    """At once, though no node came free; with ``event_driven`` off in the next scan."""
    rules = Rules(aging_tries=3, scan_interval=10, high_scans_per_low=1, event_driven=event_driven)
    world = World({"north": 4}, rules)
    world.submit(fixed(north=2), run_time=1000)
    wide = starved(world, fixed(north=4))
    low = world.submit(flexible(1), run_time=1000)
    assert (world.queries.reservation, world.state(low)) == (wide, JobState.QUEUED)
    leaves(world, wide)
    assert world.queries.reservation is None
    assert world.state(low) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(11)
    assert world.state(low) is JobState.RUNNING


def test_what_was_kept_for_a_job_that_is_given_up_is_offered() -> None:
    world = World({"north": 4}, AGING)
    world.submit(fixed(north=2), run_time=1000)
    wide = world.submit(fixed(north=4), max_placement_tries=5)
    world.advance(35)
    low = world.submit(flexible(1), run_time=1000)
    assert (world.queries.reservation, world.state(low)) == (wide, JobState.QUEUED)
    world.advance(6)
    assert (world.state(wide), world.state(low)) == (JobState.FAILED, JobState.RUNNING)


def test_the_next_one_is_kept_nodes_for_as_soon_as_the_first_is_placed() -> None:
    """Before narrow jobs are offered what it waits for."""
    world = World({"north": 5}, AGING)
    world.submit(fixed(north=5), run_time=55)
    first = world.submit(fixed(north=3), run_time=60)
    second = world.submit(fixed(north=4), run_time=10)
    narrow = world.submit(flexible(2), run_time=1000)
    world.advance(45)
    assert (world.queries.reservation, world.state(narrow)) == (first, JobState.QUEUED)
    world.advance(11)
    assert world.state(first) is JobState.RUNNING
    assert (world.queries.reservation, world.state(narrow)) == (second, JobState.QUEUED)


def test_an_aged_job_that_is_overtaken_keeps_place_and_reservation() -> None:
    world = World({"north": 6}, AGING)
    running, _ = world.submit(fixed(north=2), run_time=1000), world.submit(fixed(north=2), run_time=1000)
    wide = starved(world, fixed(north=4))
    others = behind(world, fixed(north=3), 20)
    assert (world.queries.reservation, world.queries.position(wide)) == (wide, 1)
    world.cancel(running)
    world.run_commands("north")
    is_overtaken(world, wide)
    assert world.reasons(wide, "requeued") == ["claim-failed: local users of north were faster"]
    assert positions(world, [wide, *others]) == list(range(1, 22))
    assert world.queries.reservation == wide
    world.sites["north"].remove_local_user("user-1")
    world.settle()
    assert (world.state(wide), positions(world, others)) == (JobState.CLAIMING, list(range(1, 21)))


def test_a_measurement_of_the_network_is_kept_nothing() -> None:
    """However long it waits: nobody's work waits for it, and who asks for the same nodes is not passed over for it."""
    world = World({"north": 4, "south": 4}, AGING)
    world.submit(fixed(north=4), run_time=1000)
    world.submit(fixed(north=1, south=1), owner="koala", application=NO_APPLICATION, internal=True)
    world.advance(100)
    assert world.queries.reservation is None
    others = behind(world, flexible(1), 4)
    assert [world.state(job) for job in others] == [JobState.CLAIMING] * 4
    alike = starved(world, fixed(north=1, south=1))
    assert world.queries.reservation == alike


# Nodes that others are about to give back


def test_a_high_job_is_placed_on_what_a_high_one_is_giving_back() -> None:
    """It may have nodes that are about to be free, as when it preempts."""
    world = World({"north": 4}, Rules(scan_interval=LATE))
    first = world.submit(fixed(north=4), priority=Priority.HIGH, run_time=1000)
    second = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(1)
    assert world.state(second) is JobState.QUEUED
    world.cancel(first)
    assert world.state(second) is JobState.CLAIMING
    world.advance(20)
    assert world.state(second) is JobState.SUCCEEDED
    check_nothing_remains(world)


# How often


@pytest.mark.parametrize(("limit", "says"), [("placement", "not placed in 2 tries"), ("claiming", "not claimed in 2")])
def test_claims_that_are_overtaken_are_tries(limit: str, says: str) -> None:
    world = World({"north": 4}, Rules(claim_grace=10, scan_interval=LATE))
    job = world.submit(fixed(north=4), **{f"max_{limit}_tries": 2})  # type: ignore[arg-type]
    is_overtaken(world, job)
    assert world.state(job) is JobState.QUEUED
    world.sites["north"].remove_local_user("user-1")
    is_overtaken(world, job)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.startswith(says)
    assert world.job(job).reason.endswith("local users of north were faster")


def test_a_restart_forgets_no_tries() -> None:
    """Neither those of a limit nor those after which nodes are kept for a job."""
    world = World({"north": 4}, AGING)
    world.submit(fixed(north=2), run_time=1000)
    limited = world.submit(nonfixed(4), max_placement_tries=8)
    wide = world.submit(fixed(north=4))
    for _ in range(5):
        world.advance(10)
        before = [(world.queries.tries(job), world.queries.position(job)) for job in (limited, wide)]
        world.restart()
        world.connect("north")
        after = [(world.queries.tries(job), world.queries.position(job)) for job in (limited, wide)]
        assert after == before
    assert world.queries.tries(limited) == 6
    assert world.queries.reservation == limited, "it is the older one"
    world.advance(30)
    assert (world.state(limited), world.job(limited).placement_tries) == (JobState.FAILED, 8)
    assert world.queries.reservation == wide
