"""Who is tried when: queue modes and orders, priorities, scans, limits, and what is told to those who wait."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from koalapy.model.errors import BusyError
from koalapy.model.job import Job, JobSpec, JobState, Priority
from koalapy.model.request import Environment, Request
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.policy import Policy
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.events import JobSubmitted, PeriodicScan, Reported
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

BY_SCANS_ONLY = Rules(preemption="never", event_driven=False, scan_interval=30)


def blocked(rules: Rules, *, first: int = 3) -> tuple[World, int]:
    """Four nodes, all but one taken for ten seconds, and a job at the head of the queue that needs them all."""
    world = World({"north": 4}, rules)
    world.submit(fixed(north=first), run_time=10)
    head = world.submit(fixed(north=4), run_time=10)
    assert world.state(head) is JobState.QUEUED
    return world, head


@pytest.mark.parametrize(
    ("mode", "states"),
    [("scan", ["claiming", "queued"]), ("head", ["claiming", "queued"]), ("fcfs", ["queued", "queued"])],
)
def test_a_newcomer_that_fits_behind_a_job_that_does_not(mode: QueueMode, states: list[str]) -> None:
    """In the mode fcfs nobody is tried out of turn; in the others each newcomer once."""
    world, _ = blocked(Rules(queue=mode))
    late = [world.submit(fixed(north=1)), world.submit(fixed(north=1))]
    assert [world.state(job) for job in late] == states


@pytest.mark.parametrize(("mode", "state"), [("scan", JobState.CLAIMING), ("head", JobState.QUEUED)])
def test_a_later_scan_goes_on_past_a_job_that_does_not_fit_or_stops_there(mode: QueueMode, state: JobState) -> None:
    world, head = blocked(Rules(queue=mode), first=4)
    late = world.submit(fixed(north=1))
    assert world.state(late) is JobState.QUEUED
    world.settle()
    world.sites["north"].add_nodes(1)
    world.settle()
    assert (world.state(head), world.state(late)) == (JobState.QUEUED, state)


def test_a_newcomer_is_tried_also_when_nodes_come_free_at_the_same_moment() -> None:
    world, head = blocked(Rules(queue="head"), first=4)
    world.settle()
    north = world.sites["north"]
    north.add_nodes(1)
    newcomer = Job(3, JobSpec(fixed(north=1), ("program",)), world.now)
    world.step([Reported("north", north.current_report()), JobSubmitted(newcomer)])
    assert (world.state(head), world.state(3)) == (JobState.QUEUED, JobState.CLAIMING)


def test_fcfs_starts_jobs_strictly_in_order() -> None:
    world, head = blocked(Rules(queue="fcfs"))
    rest = [world.submit(fixed(north=n), run_time=5) for n in (1, 4, 1, 2)]
    world.advance(200)
    starts = [world.job(job).started_at or 0 for job in (head, *rest)]
    assert starts == sorted(starts)
    assert starts[0] >= 10


def test_narrowest_first() -> None:
    world = World({"north": 4}, Rules(queue="head", queue_order="narrowest-first"))
    world.submit(fixed(north=4), run_time=10)
    jobs = {size: world.submit(fixed(north=size), run_time=100) for size in (4, 3, 1, 2)}
    world.advance(11)
    assert {size for size, job in jobs.items() if world.state(job) is JobState.RUNNING} == {1, 2}


def test_high_before_low() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10)
    low = [world.submit(fixed(north=4), run_time=10) for _ in range(2)]
    high = [world.submit(fixed(north=4), run_time=10, priority=Priority.HIGH) for _ in range(2)]
    world.advance(100)
    starts = [world.job(job).started_at or 0 for job in (*high, *low)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_high_queue_is_scanned_s_times_for_each_scan_of_the_low_one(times: int) -> None:
    world = World({"north": 4}, replace(BY_SCANS_ONLY, high_scans_per_low=times))
    world.submit(fixed(north=4), run_time=1)
    low = world.submit(fixed(north=1), run_time=1)
    high = world.submit(fixed(north=4), run_time=1, priority=Priority.HIGH)
    world.advance(29)
    assert (world.state(high), world.state(low)) == (JobState.QUEUED, JobState.QUEUED), "only scans place"
    world.advance(30 * max(2, times) + 10)
    assert world.state(high) is JobState.SUCCEEDED
    assert world.job(high).placed_at == 30
    # With S = 1 the first scan of the low queue finds all nodes given to the high job, and the next comes 30 s later.
    assert world.job(low).placed_at == max(60, 30 * times)


def test_a_periodic_scan_of_the_high_queue_does_not_use_up_what_the_low_one_waits_for() -> None:
    world = World({"north": 4}, Rules(scan_interval=1000))
    world.settle()
    world.submit(fixed(north=4), run_time=10)
    low = world.submit(fixed(north=4))
    world.settle()
    north = world.sites["north"]
    north.add_nodes(4)
    world.step([Reported("north", north.current_report()), PeriodicScan()])
    assert world.state(low) is JobState.CLAIMING


@pytest.mark.parametrize("mode", ["head", "fcfs"])
@pytest.mark.parametrize("leaves", [World.cancel, World.hold])
@pytest.mark.parametrize("event_driven", [True, False])
def test_who_stood_behind_a_head_that_leaves_is_tried(
    mode: QueueMode, leaves: Callable[[World, int], None], event_driven: bool
) -> None:
    """At once, though no node came free; with ``event_driven`` off in the next scan."""
    world, head = blocked(Rules(queue=mode, event_driven=event_driven), first=4)
    late = world.submit(fixed(north=1))
    world.settle()
    world.sites["north"].add_nodes(1)
    world.settle()
    assert world.state(late) is JobState.QUEUED
    leaves(world, head)
    assert world.state(late) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(75)
    assert world.state(late) is JobState.SUCCEEDED


def test_who_stood_behind_a_head_that_is_given_up_is_tried() -> None:
    world = World({"north": 4}, Rules(queue="fcfs", high_scans_per_low=1, scan_interval=30))
    world.submit(fixed(north=2), run_time=1000)
    head = world.submit(fixed(north=4), max_placement_tries=3)
    late = world.submit(fixed(north=2), run_time=1000)
    world.advance(59)
    assert (world.state(head), world.state(late)) == (JobState.QUEUED, JobState.QUEUED)
    world.advance(2)
    assert (world.state(head), world.state(late)) == (JobState.FAILED, JobState.RUNNING)


def test_the_placement_queues_have_an_end() -> None:
    world = World({"north": 4}, Rules(placement_queue_limit=3, scan_interval=30))
    world.submit(fixed(north=4), priority=Priority.HIGH)
    for priority in (Priority.HIGH, Priority.LOW, Priority.LOW):
        world.submit(fixed(north=4), priority=priority)
    with pytest.raises(BusyError, match="3 jobs wait already, and placement_queue_limit is 3") as error:
        world.submit(fixed(north=1))
    assert error.value.retry_after == 30
    assert len(world.jobs) == 4
    world.cancel(4)
    assert world.submit(fixed(north=1)) == 5


# Tries


def test_a_job_that_may_be_tried_once_fails_on_arrival() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=5), max_placement_tries=1)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.startswith("not placed in 1 tries: ")
    assert "north" in world.job(job).reason
    assert world.job(job).ended_at == 0


@pytest.mark.parametrize("own", [None, 2, 4])
def test_tries_are_counted_on_arrival_and_in_each_periodic_scan(own: int | None) -> None:
    world = World({"north": 4}, Rules(max_placement_tries=3, high_scans_per_low=1, scan_interval=30))
    job = world.submit(fixed(north=5), max_placement_tries=own)
    limit = own or 3
    world.advance(30 * (limit - 1) - 1)
    assert world.state(job) is JobState.QUEUED
    world.advance(2)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).placement_tries == limit


def test_who_is_not_tried_is_not_counted() -> None:
    """In the mode head a scan that stops at the first job says nothing of those behind it."""
    world = World({"north": 4}, Rules(queue="head", high_scans_per_low=1))
    head = world.submit(fixed(north=5))
    behind = world.submit(fixed(north=5), max_placement_tries=3)
    world.advance(200)
    assert world.job(behind).placement_tries == 1
    world.cancel(head)
    world.advance(61)
    assert world.state(behind) is JobState.FAILED


def test_without_a_limit_a_job_waits_for_ever() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=5))
    world.advance(10_000)
    assert world.state(job) is JobState.QUEUED


# Why is my job not running?


def test_the_reason_names_what_is_missing_and_goes_with_it() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(fixed(north=4), run_time=10)
    job = world.submit(nonfixed(4, 4))
    reason = world.queries.waiting_reason(world.job(job))
    assert "(most: north with 0)" in reason or "no cluster has 4 idle nodes" in reason
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    again = world.submit(nonfixed(4, 4))
    assert world.state(again) is JobState.CLAIMING
    assert world.queries.waiting_reason(world.job(again)) != reason


def test_who_was_never_tried_waits_for_its_turn() -> None:
    world, _ = blocked(Rules(queue="fcfs"))
    job = world.submit(fixed(north=1))
    assert world.queries.waiting_reason(world.job(job)) == "waits behind job 2"


def test_a_job_of_an_earlier_daemon_whose_policy_is_gone_waits_and_says_so() -> None:
    class Mine(ClusterMinimization):
        name = "mine"

    policies = builtin_policies()
    policies.register(Mine())
    world = World({"north": 4}, policies=policies)
    world.submit(flexible(4), run_time=1000)
    job = world.submit(flexible(1), policy="mine")
    assert world.state(job) is JobState.QUEUED
    world.cancel(1)
    world.policies = builtin_policies()
    world.restart()
    world.connect("north")
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)) == "there is no policy mine"


def test_one_refusal_stands_for_all_jobs_of_its_shape() -> None:
    """A scan's cost grows with distinct shapes, not with jobs."""
    asked: list[Request] = []

    class Counting(Registry):
        def resolve(self, name: str, request: Request, options: Environment = ()) -> Policy:
            asked.append(request)
            return super().resolve(name, request, options)

    policies = Counting()
    for name in builtin_policies().names():
        policies.register(builtin_policies().get(name))
    world = World({"north": 4}, Rules(scan_interval=1000), policies=policies, strict=False)
    world.submit(fixed(north=4), run_time=10)
    for number in range(300):
        world.submit(flexible(2 + number % 3), run_time=1000)
    asked.clear()
    world.advance(11)
    assert len(asked) < 20
    assert world.queries.queued == 298
