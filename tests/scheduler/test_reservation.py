"""Wide jobs do not starve: nodes are kept for who has failed many scans (semantics 4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.job import ClaimingMode, JobState, Priority
from koalapy.model.request import ComponentRequest, InputFile, NonFixedRequest
from koalapy.scheduler.events import PeriodicScan
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

AGING = Rules(aging_tries=3, scan_interval=10, high_scans_per_low=1)


def stream_of_narrow_jobs(world: World, count: int) -> None:
    """One-node jobs that always find a node before a wide one finds all of them."""
    for number in range(count):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number}")
        world.advance(5)


def test_without_aging_a_wide_job_starves() -> None:
    world = World({"north": 4}, Rules(aging=False, scan_interval=10, high_scans_per_low=1))
    stream_of_narrow_jobs(world, 6)
    wide = world.submit(fixed(north=4))
    stream_of_narrow_jobs(world, 60)
    assert world.state(wide) is JobState.QUEUED


def test_with_aging_it_is_placed_as_soon_as_those_that_ran_before_have_ended() -> None:
    world = World({"north": 4}, AGING)
    stream_of_narrow_jobs(world, 6)
    wide = world.submit(fixed(north=4), run_time=20)
    stream_of_narrow_jobs(world, 6)
    assert world.queries.reservation == wide
    assert world.state(wide) is JobState.QUEUED
    narrow = world.submit(flexible(1))
    assert world.queries.waiting_reason(world.job(narrow)) in (
        f"nodes are kept for job {wide}, which has waited longer",
        "needs 1 node; 0 are idle (north 0)",
    )
    world.advance(25)
    assert world.state(wide) is JobState.RUNNING
    assert world.queries.reservation != wide
    world.advance(60)
    assert world.state(narrow) is JobState.SUCCEEDED


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
@pytest.mark.parametrize("restarts", [False, True])
@given(width=st.integers(2, 4), run_time=st.integers(11, 40), order=st.sampled_from(["narrowest-first", "fcfs"]))
def test_a_wide_job_does_not_starve_whatever_the_order(
    queue: str, restarts: bool, width: int, run_time: int, order: str
) -> None:
    """Narrower ones come all the time, one for each node, and run until the next ones wait."""
    rules = Rules(queue=queue, queue_order=order, aging_tries=3, scan_interval=10, high_scans_per_low=1)  # type: ignore[arg-type]
    world = World({"north": 4}, rules, strict=False)
    for _ in range(5):
        world.submit(flexible(1), run_time=run_time)
    wide = world.submit(fixed(north=width), run_time=20)
    for _ in range(12):
        for _ in range(5):
            world.submit(flexible(1), run_time=run_time)
        world.advance(10)
        if restarts and world.state(wide) is JobState.QUEUED:
            before = world.queries.tries(wide), world.queries.reservation
            world.restart()
            world.connect("north")
            assert (world.queries.tries(wide), world.queries.reservation) == before
    assert world.state(wide) in (JobState.RUNNING, JobState.SUCCEEDED)


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_who_is_behind_narrower_ones_is_given_up_after_as_many_tries_as_they(queue: str) -> None:
    rules = Rules(queue=queue, queue_order="narrowest-first", scan_interval=10, high_scans_per_low=1)  # type: ignore[arg-type]
    world = World({"north": 4}, rules)
    world.submit(fixed(north=4), run_time=1000)
    jobs = [world.submit(fixed(north=size), max_placement_tries=5) for size in (1, 2)]
    world.advance(39)
    assert [world.state(job) for job in jobs] == [JobState.QUEUED] * 2
    world.advance(12)
    assert [world.job(job).placement_tries for job in jobs] == [5, 5]
    assert [world.state(job) for job in jobs] == [JobState.FAILED] * 2


def test_nodes_beyond_those_that_are_kept_are_given_to_others() -> None:
    world = World({"north": 4, "south": 4}, AGING)
    world.submit(fixed(north=4), run_time=100)
    wide = world.submit(fixed(north=3))
    world.advance(40)
    assert world.queries.reservation == wide
    beside = world.submit(flexible(4))
    assert world.state(beside) is JobState.CLAIMING
    assert world.job(beside).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]


def test_high_jobs_are_not_held_up_by_a_low_one() -> None:
    world = World({"north": 4}, Rules(aging_tries=3, scan_interval=10, high_scans_per_low=1, preemption="never"))
    world.submit(fixed(north=2), run_time=200)
    wide = world.submit(fixed(north=4))
    world.advance(40)
    assert world.queries.reservation == wide
    low = world.submit(flexible(1))
    high = world.submit(flexible(1), priority=Priority.HIGH)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)


def test_a_reservation_ends_with_its_job() -> None:
    world = World({"north": 4}, AGING)
    world.submit(fixed(north=2), run_time=1000)
    wide = world.submit(fixed(north=4))
    world.advance(40)
    low = world.submit(flexible(1))
    assert world.state(low) is JobState.QUEUED
    world.cancel(wide)
    assert world.queries.reservation is None
    world.advance(11)
    assert world.state(low) in (JobState.RUNNING, JobState.SUCCEEDED)


def test_nothing_is_kept_for_what_local_users_make_impossible() -> None:
    world = World({"north": 4}, AGING)
    world.sites["north"].add_local_user(2)
    world.settle()
    wide = world.submit(fixed(north=4))
    world.advance(100)
    assert world.state(wide) is JobState.QUEUED
    assert world.queries.reservation is None
    low = world.submit(flexible(2))
    assert world.state(low) is JobState.CLAIMING


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    narrow=st.lists(st.tuples(st.integers(1, 2), st.integers(5, 40)), min_size=30, max_size=40),
)
def test_every_job_starts_in_bounded_time(widths: list[int], narrow: list[tuple[int, int]]) -> None:
    """Under a stream of narrow jobs that never ends, each wide one starts within a few job lengths."""
    world = World({"north": 4, "south": 3}, AGING)
    for size, run_time in narrow[:6]:
        world.submit(flexible(size), run_time=run_time)
    wide = [world.submit(flexible(width) if width > 4 else nonfixed(width), run_time=10) for width in widths]
    for size, run_time in narrow * 4:
        world.submit(flexible(size), run_time=run_time)
        world.advance(4)
    assert all(world.state(job) is JobState.SUCCEEDED for job in wide)


def test_nothing_is_kept_for_a_job_on_a_cluster_that_takes_nothing_as_large() -> None:
    """The next one that has waited long is kept nodes meanwhile: the limit may be there for ever."""
    world = World({"north": 4, "south": 4}, AGING)
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    refused = world.submit(fixed(north=4))
    for number in range(6):
        world.submit(fixed(south=1), run_time=30, name=f"narrow-{number}")
        world.advance(5)
    wide = world.submit(fixed(south=4), run_time=20)
    for number in range(40):
        world.submit(fixed(south=1), run_time=30, name=f"later-{number}")
        world.advance(5)
    assert world.state(wide) is JobState.SUCCEEDED
    assert world.state(refused) is JobState.QUEUED
    for number in range(20):
        world.submit(fixed(north=1), run_time=30, name=f"beside-{number}")
        world.advance(5)
    world.sites["north"].rejection_fault = lambda size: ""
    for number in range(60):
        world.submit(fixed(north=1), run_time=30, name=f"behind-{number}")
        world.advance(5)
    assert world.state(refused) is not JobState.QUEUED, "it has waited longest, and is taken again"


def test_a_limit_that_is_never_lifted_takes_nobody_elses_turn() -> None:
    """Whom nodes are kept for keeps them until it is placed, though an older one may be tried again meanwhile."""
    world = World({"north": 4, "south": 4}, AGING)
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    for _ in range(4):
        world.submit(fixed(north=1), run_time=300)
        world.submit(fixed(south=1), run_time=300)
        world.advance(75)
    refused = world.submit(fixed(north=4))
    wide = world.submit(fixed(south=4), run_time=20)
    for _ in range(160):
        world.submit(fixed(north=1), run_time=300)
        world.submit(fixed(south=1), run_time=300)
        world.advance(20)
    assert (world.state(refused), world.state(wide)) == (JobState.QUEUED, JobState.SUCCEEDED)
    began = world.job(wide).started_at
    assert began is not None
    assert began < 1200


def test_one_of_its_shape_that_has_not_waited_and_stands_before_it_takes_nothing_from_who_has() -> None:
    """It was preempted, and is back at the place that it had before the other one came."""
    world = World({"north": 6}, Rules(aging_tries=20, low_patience=None))
    first = world.submit(fixed(north=4), run_time=100000)
    waits = world.submit(fixed(north=4), run_time=100)
    world.advance(30 * 42)
    narrow = [world.submit(fixed(north=1), run_time=200) for _ in range(3)]
    assert world.queries.reservation == waits
    world.submit(fixed(north=3), run_time=100, priority=Priority.HIGH)
    world.settle()
    assert world.state(first) is JobState.QUEUED
    assert world.queries.position(first) == 1
    assert world.queries.reservation == waits
    world.advance(150)
    assert world.state(waits) is JobState.RUNNING
    assert world.queries.kept("north", Priority.LOW) == 0
    assert {world.state(job) for job in narrow} <= {JobState.QUEUED, JobState.RUNNING}


@pytest.mark.parametrize("priority", Priority)
def test_a_component_of_low_priority_is_not_re_placed_on_nodes_that_are_kept(priority: Priority) -> None:
    rules = Rules(aging_tries=3, low_patience=None, preemption="never")
    world = World({"north": 4, "south": 4}, rules, links={("north", "south"): Link(0.001, 100.0)})
    world.submit(fixed(north=2), run_time=300)
    waits = world.submit(fixed(north=4))
    world.step([PeriodicScan()] * 8)
    assert world.queries.reservation == waits
    sites = ("north",) if priority is Priority.LOW else ("north", "east")
    inputs = (InputFile("file", 1000, sites),)
    request = NonFixedRequest((ComponentRequest(2, inputs=inputs),))
    world.sites["north"].add_local_user(2)
    world.settle()
    moves = world.submit(request, run_time=400, claiming=ClaimingMode.INCREMENTAL, priority=priority)
    assert world.job(moves).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]
    world.sites["south"].add_local_user(4)
    for user in list(world.sites["north"].local_users):
        world.sites["north"].remove_local_user(user)
    world.settle()
    world.advance(15)
    assert ("re-placed" in world.timeline_events(moves)) == (priority is Priority.HIGH)
