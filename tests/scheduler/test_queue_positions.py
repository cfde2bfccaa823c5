"""Queue positions of new, returning and leaving jobs, as in the table of docs/scheduling.md."""

from collections.abc import Callable

import pytest

from koalapy.model.application import NO_APPLICATION
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import Request
from koalapy.scheduler.events import ClusterDrained, JobHeld, JobReleased, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

LONG_INTERVAL_S = 1e6
"""Scan interval in seconds that excludes periodic scans."""
PLANNED = Rules(plan_after=0, scan_interval=10, high_scans_per_low=1, claim_grace=8)


def make_spec(request: Request, priority: Priority = Priority.LOW) -> JobSpec:
    return JobSpec(request, ("program",), priority=priority)


def submit_jobs(world: World, request: Request, count: int = 3) -> list[JobId]:
    return [world.submit(request, run_time=1000) for _ in range(count)]


def queue_positions(world: World, jobs: list[JobId]) -> list[int | None]:
    return [world.queries.position(job) for job in jobs]


# Jobs that return


def let_local_user_overtake(world: World, job: JobId) -> None:
    """Place the job on nodes that a local user takes before it."""
    north = world.sites["north"]
    world.deliver("north")
    old_report = north.current_report()
    north.add_local_user(1)
    world.step([Reported("north", old_report)])
    assert world.state(job) is JobState.CLAIMING
    world.advance(11)


def fail_claim(world: World, job: JobId) -> None:
    world.sites["north"].add_local_user(2)  # queued before the job, not yet reported
    world.advance(9)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]


def preempt_job(world: World, job: JobId) -> None:
    world.advance(1)
    world.submit(fixed(north=4), priority=Priority.HIGH, run_time=1000)
    world.advance(1)
    assert "preempted" in world.timeline_events(job)


def fail_node(world: World, job: JobId) -> None:
    world.sites["north"].fail_component(world.tokens(job)[0], "node lost")
    world.settle()


def restart_after_failure(world: World, job: JobId) -> None:
    world.advance(1)
    world.sites["north"].add_local_user(2)
    fail_node(world, job)
    assert world.job(job).restarts == 1


def hold_and_release(world: World, job: JobId) -> None:
    world.hold(job)
    world.release(job)


@pytest.mark.parametrize("requeue_job", [fail_claim, preempt_job, restart_after_failure])
@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_queue_returning_job_keeps_position_and_tries(requeue_job: Callable[[World, JobId], None], queue: str) -> None:
    """Tries are kept as well: these causes are no fault of the job."""
    world = World({"north": 4}, Rules(scan_interval=LONG_INTERVAL_S, claim_grace=8, queue=queue))  # type: ignore[arg-type]
    job = world.submit(fixed(north=3), run_time=1000)
    waiting_jobs = submit_jobs(world, fixed(north=4))
    requeue_job(world, job)
    assert world.state(job) is JobState.QUEUED
    assert queue_positions(world, [job, *waiting_jobs]) == [1, 2, 3, 4]
    assert world.queries.tries(job) == 1


def test_queue_released_job_moves_to_tail() -> None:
    world = World({"north": 4}, Rules(scan_interval=LONG_INTERVAL_S))
    world.submit(fixed(north=4), run_time=1000)
    job, *waiting_jobs = submit_jobs(world, fixed(north=4))
    hold_and_release(world, job)
    assert queue_positions(world, [*waiting_jobs, job]) == [1, 2, 3]
    assert world.queries.tries(job) == 2, "once at submission and once now"


def test_queue_paused_job_returns_to_its_position() -> None:
    world = World({"north": 4}, Rules(scan_interval=LONG_INTERVAL_S, restart_pause=50))
    job = world.submit(fixed(north=3), run_time=1000)
    waiting_jobs = submit_jobs(world, fixed(north=4))
    for _ in range(2):
        world.advance(1)
        fail_node(world, job)
    assert queue_positions(world, [job, *waiting_jobs]) == [None, None, 1, 2], (
        "the next job was placed during the pause"
    )
    world.advance(51)
    assert queue_positions(world, [job, *waiting_jobs]) == [1, None, 2, 3]


@pytest.mark.parametrize("event_driven", [True, False])
def test_queue_returning_job_does_not_overtake(event_driven: bool) -> None:
    """Free nodes are offered from the head; without ``event_driven`` in the next scan."""
    rules = Rules(scan_interval=60, event_driven=event_driven, high_scans_per_low=1)
    world = World({"north": 4, "south": 2}, rules)
    blocker = world.submit(fixed(south=2), run_time=1000)
    wide_job = world.submit(fixed(north=2, south=2), run_time=1000)
    job = world.submit(fixed(north=4), run_time=1000)
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    world.cancel(blocker)
    world.settle()
    fail_node(world, job)
    assert world.state(job) is JobState.QUEUED
    assert world.state(wide_job) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(61)
    assert (world.state(wide_job), world.state(job)) == (JobState.RUNNING, JobState.QUEUED)


def test_queue_returning_job_waits_for_scan_without_event_driven() -> None:
    world = World({"north": 4}, Rules(scan_interval=60, event_driven=False, high_scans_per_low=1))
    job = world.submit(fixed(north=4), run_time=10)
    world.advance(1)
    fail_node(world, job)
    world.advance(58)
    assert world.state(job) is JobState.QUEUED
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


# Jobs of one transaction


def test_queue_high_job_of_one_transaction_is_tried_first() -> None:
    world = World({"north": 4})
    low, high = world.submit_together([make_spec(fixed(north=4)), make_spec(fixed(north=4), Priority.HIGH)])
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)


def test_queue_low_rejection_does_not_apply_to_high_job() -> None:
    world = World({"north": 4}, Rules(scan_interval=LONG_INTERVAL_S))
    running = world.submit(fixed(north=4), run_time=1000)
    world.advance(1)
    low, high = world.submit_together([make_spec(fixed(north=4)), make_spec(fixed(north=4), Priority.HIGH)])
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)
    world.advance(1)
    assert (world.state(running), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)


def test_queue_narrowest_first_keeps_order_of_one_transaction() -> None:
    world = World({"north": 4}, Rules(queue="fcfs", queue_order="narrowest-first", scan_interval=LONG_INTERVAL_S))
    wide_job, narrow_job = world.submit_together([make_spec(fixed(north=3)), make_spec(fixed(north=1))])
    assert (world.state(wide_job), world.state(narrow_job)) == (JobState.CLAIMING, JobState.CLAIMING)


def test_queue_job_held_and_released_in_one_step_is_tried_once() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=1000)
    job = world.submit(fixed(north=4))
    world.hold(job)
    world.step([JobReleased(job), JobHeld(job), JobReleased(job)])
    assert world.queries.tries(job) == 2


# Jobs with kept nodes


def submit_aged_job(world: World, request: Request) -> JobId:
    """Submit a job and let it wait for a planned start."""
    job = world.submit(request, run_time=20)
    world.advance(40)
    return job


def test_reservation_skips_job_that_cannot_be_placed() -> None:
    """The oldest job requests a drained cluster."""
    world = World({"north": 4, "south": 4}, PLANNED)
    world.step([ClusterDrained("south", "ops", "new switch")])
    world.submit(fixed(south=4))
    for number in range(4):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number}")
        world.advance(5)
    wide_job = world.submit(fixed(north=4), run_time=20)
    for number in range(40):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number + 4}")
        world.advance(5)
    assert world.state(wide_job) is JobState.SUCCEEDED


def test_reservation_moves_when_its_cluster_is_drained() -> None:
    world = World({"north": 4, "south": 4}, Rules(plan_after=0, scan_interval=10, high_scans_per_low=1))
    world.submit(fixed(north=2, south=2), run_time=1000)
    aged = submit_aged_job(world, fixed(south=4))
    narrow_job = world.submit(fixed(south=1), run_time=1000)
    assert (world.queries.planned_job, world.state(narrow_job)) == (aged, JobState.QUEUED)
    younger = world.submit(fixed(north=4))
    world.advance(35)
    assert world.queries.planned_job == aged
    world.step([ClusterDrained("south", "ops", "new switch")])
    assert world.queries.planned_job == younger


@pytest.mark.parametrize("remove_job", [World.cancel, World.hold])
@pytest.mark.parametrize("event_driven", [True, False])
def test_reservation_of_leaving_job_is_offered_to_others(
    remove_job: Callable[[World, JobId], None], event_driven: bool
) -> None:
    """The plan moves at once, and the offer follows, or without ``event_driven`` in the next scan."""
    rules = Rules(plan_after=0, scan_interval=10, high_scans_per_low=1, event_driven=event_driven)
    world = World({"north": 4}, rules)
    world.submit(fixed(north=2), run_time=1000)
    wide_job = submit_aged_job(world, fixed(north=4))
    low_job = world.submit(flexible(1), run_time=1000)
    assert (world.queries.planned_job, world.state(low_job)) == (wide_job, JobState.QUEUED)
    remove_job(world, wide_job)
    assert world.queries.planned_job == (None if event_driven else low_job)
    assert world.state(low_job) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(11)
    assert world.state(low_job) is JobState.RUNNING


def test_reservation_of_failed_job_is_offered_to_others() -> None:
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=2), run_time=1000)
    wide_job = world.submit(fixed(north=4), max_placement_tries=5)
    world.advance(35)
    low_job = world.submit(flexible(1), run_time=1000)
    assert (world.queries.planned_job, world.state(low_job)) == (wide_job, JobState.QUEUED)
    world.advance(6)
    assert (world.state(wide_job), world.state(low_job)) == (JobState.FAILED, JobState.RUNNING)


def test_reservation_passes_to_next_job_at_placement() -> None:
    """Narrow jobs are offered these nodes only afterwards."""
    world = World({"north": 5}, PLANNED)
    world.submit(fixed(north=5), run_time=55)
    first = world.submit(fixed(north=3), run_time=60)
    second = world.submit(fixed(north=4), run_time=10)
    narrow_job = world.submit(flexible(2), run_time=1000)
    world.advance(45)
    assert (world.queries.planned_job, world.state(narrow_job)) == (first, JobState.QUEUED)
    world.advance(11)
    assert world.state(first) is JobState.RUNNING
    assert (world.queries.planned_job, world.state(narrow_job)) == (second, JobState.QUEUED)


def test_reservation_stays_after_failed_claim() -> None:
    world = World({"north": 6}, PLANNED)
    running, _ = world.submit(fixed(north=2), run_time=1000), world.submit(fixed(north=2), run_time=1000)
    wide_job = submit_aged_job(world, fixed(north=4))
    narrow_jobs = submit_jobs(world, fixed(north=3), 20)
    assert (world.queries.planned_job, world.queries.position(wide_job)) == (wide_job, 1)
    world.cancel(running)
    world.run_commands("north")
    let_local_user_overtake(world, wide_job)
    assert world.reasons(wide_job, "requeued") == ["claim-failed: local users of north were faster"]
    assert queue_positions(world, [wide_job, *narrow_jobs]) == list(range(1, 22))
    assert world.queries.planned_job == wide_job
    world.sites["north"].remove_local_user("user-1")
    world.settle()
    assert (world.state(wide_job), queue_positions(world, narrow_jobs)) == (JobState.CLAIMING, list(range(1, 21)))


def test_reservation_is_not_given_to_network_measurement() -> None:
    """Measurements neither reserve nodes nor delay jobs with an equal request."""
    world = World({"north": 4, "south": 4}, PLANNED)
    world.submit(fixed(north=4), run_time=1000)
    world.submit(fixed(north=1, south=1), owner="koala", application=NO_APPLICATION, internal=True)
    world.advance(100)
    assert world.queries.planned_job is None
    other_jobs = submit_jobs(world, flexible(1), 4)
    assert [world.state(job) for job in other_jobs] == [JobState.CLAIMING] * 4
    equal_job = submit_aged_job(world, fixed(north=1, south=1))
    assert world.queries.planned_job == equal_job


# Nodes that others are about to give back


def test_queue_high_job_is_placed_on_nodes_of_ending_high_job() -> None:
    """It may use nodes that are about to be released, as in a preemption."""
    world = World({"north": 4}, Rules(scan_interval=LONG_INTERVAL_S))
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


@pytest.mark.parametrize(
    ("limit", "expected"), [("placement", "not placed in 2 tries"), ("claiming", "not claimed in 2")]
)
def test_claim_lost_to_local_users_counts_as_try(limit: str, expected: str) -> None:
    world = World({"north": 4}, Rules(claim_grace=10, scan_interval=LONG_INTERVAL_S))
    job = world.submit(fixed(north=4), **{f"max_{limit}_tries": 2})  # type: ignore[arg-type]
    let_local_user_overtake(world, job)
    assert world.state(job) is JobState.QUEUED
    world.sites["north"].remove_local_user("user-1")
    let_local_user_overtake(world, job)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.startswith(expected)
    assert world.job(job).reason.endswith("local users of north were faster")


def test_queue_restart_of_daemon_keeps_tries() -> None:
    """The planned start is kept with them."""
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=2), run_time=1000)
    limited = world.submit(nonfixed(4), max_placement_tries=8)
    wide_job = world.submit(fixed(north=4))
    for _ in range(5):
        world.advance(10)
        old_values = [(world.queries.tries(job), world.queries.position(job)) for job in (limited, wide_job)]
        world.restart()
        world.connect("north")
        restored_values = [(world.queries.tries(job), world.queries.position(job)) for job in (limited, wide_job)]
        assert restored_values == old_values
    assert world.queries.tries(limited) == 6
    assert world.queries.planned_job == limited, "the older job comes first"
    world.advance(30)
    assert (world.state(limited), world.job(limited).placement_tries) == (JobState.FAILED, 8)
    assert world.queries.planned_job == wide_job
