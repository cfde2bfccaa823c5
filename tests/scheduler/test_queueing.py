"""Queue modes and orders, priorities, scans, tries and waiting reasons."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from koalapy.model.errors import BusyError
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import Environment, Request
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.policy import Policy
from koalapy.policies.registry import Registry, builtin_policies
from koalapy.scheduler.events import JobSubmitted, PeriodicScan, Reported
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

BY_SCANS_ONLY = Rules(preemption="never", event_driven=False, scan_interval=30)


def create_blocked_queue(rules: Rules, *, occupied: int = 3) -> tuple[World, int]:
    """Run a job on most nodes for ten seconds and queue one that needs all four."""
    world = World({"north": 4}, rules)
    world.submit(fixed(north=occupied), run_time=10)
    head = world.submit(fixed(north=4), run_time=10)
    assert world.state(head) is JobState.QUEUED
    return world, head


@pytest.mark.parametrize(
    ("mode", "states"),
    [("scan", ["claiming", "queued"]), ("head", ["claiming", "queued"]), ("fcfs", ["queued", "queued"])],
)
def test_queue_newcomer_behind_blocked_head_is_tried_once(mode: QueueMode, states: list[str]) -> None:
    """In the mode fcfs no job is tried before its turn."""
    world, _ = create_blocked_queue(Rules(queue=mode))
    late_jobs = [world.submit(fixed(north=1)), world.submit(fixed(north=1))]
    assert [world.state(job) for job in late_jobs] == states


@pytest.mark.parametrize(("mode", "state"), [("scan", JobState.CLAIMING), ("head", JobState.QUEUED)])
def test_queue_scan_continues_past_blocked_head_only_in_scan_mode(mode: QueueMode, state: JobState) -> None:
    world, head = create_blocked_queue(Rules(queue=mode), occupied=4)
    late_job = world.submit(fixed(north=1))
    assert world.state(late_job) is JobState.QUEUED
    world.settle()
    world.sites["north"].add_nodes(1)
    world.settle()
    assert (world.state(head), world.state(late_job)) == (JobState.QUEUED, state)


def test_queue_newcomer_is_tried_in_step_with_released_nodes() -> None:
    world, head = create_blocked_queue(Rules(queue="head"), occupied=4)
    world.settle()
    north = world.sites["north"]
    north.add_nodes(1)
    newcomer = Job(3, JobSpec(fixed(north=1), ("program",)), world.now)
    world.step([Reported("north", north.current_report()), JobSubmitted(newcomer)])
    assert (world.state(head), world.state(3)) == (JobState.QUEUED, JobState.CLAIMING)


def test_queue_fcfs_starts_jobs_in_order() -> None:
    world, head = create_blocked_queue(Rules(queue="fcfs"))
    later_jobs = [world.submit(fixed(north=n), run_time=5) for n in (1, 4, 1, 2)]
    world.advance(200)
    starts = [world.job(job).started_at or 0 for job in (head, *later_jobs)]
    assert starts == sorted(starts)
    assert starts[0] >= 10


def test_queue_narrowest_first_starts_small_jobs() -> None:
    world = World({"north": 4}, Rules(queue="head", queue_order="narrowest-first"))
    world.submit(fixed(north=4), run_time=10)
    jobs = {size: world.submit(fixed(north=size), run_time=100) for size in (4, 3, 1, 2)}
    world.advance(11)
    assert {size for size, job in jobs.items() if world.state(job) is JobState.RUNNING} == {1, 2}


def test_queue_high_jobs_start_before_low_jobs() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=4), run_time=10)
    low_jobs = [world.submit(fixed(north=4), run_time=10) for _ in range(2)]
    high_jobs = [world.submit(fixed(north=4), run_time=10, priority=Priority.HIGH) for _ in range(2)]
    world.advance(100)
    starts = [world.job(job).started_at or 0 for job in (*high_jobs, *low_jobs)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_scan_of_low_queue_follows_given_number_of_high_scans(times: int) -> None:
    world = World({"north": 4}, replace(BY_SCANS_ONLY, high_scans_per_low=times))
    world.submit(fixed(north=4), run_time=1)
    low_job = world.submit(fixed(north=1), run_time=1)
    high_job = world.submit(fixed(north=4), run_time=1, priority=Priority.HIGH)
    world.advance(29)
    assert (world.state(high_job), world.state(low_job)) == (JobState.QUEUED, JobState.QUEUED), (
        "jobs are placed by scans only"
    )
    world.advance(30 * max(2, times) + 10)
    assert world.state(high_job) is JobState.SUCCEEDED
    assert world.job(high_job).placed_at == 30
    # With S = 1 the first scan of the low queue finds all nodes given to the high job, and the next comes 30 s later.
    assert world.job(low_job).placed_at == max(60, 30 * times)


def test_scan_of_high_queue_leaves_released_nodes_for_low_queue() -> None:
    world = World({"north": 4}, Rules(scan_interval=1000))
    world.settle()
    world.submit(fixed(north=4), run_time=10)
    low_job = world.submit(fixed(north=4))
    world.settle()
    north = world.sites["north"]
    north.add_nodes(4)
    world.step([Reported("north", north.current_report()), PeriodicScan()])
    assert world.state(low_job) is JobState.CLAIMING


@pytest.mark.parametrize("mode", ["head", "fcfs"])
@pytest.mark.parametrize("remove_job", [World.cancel, World.hold])
@pytest.mark.parametrize("event_driven", [True, False])
def test_queue_job_behind_leaving_head_is_tried(
    mode: QueueMode, remove_job: Callable[[World, int], None], event_driven: bool
) -> None:
    """This happens at once, or without ``event_driven`` in the next scan."""
    world, head = create_blocked_queue(Rules(queue=mode, event_driven=event_driven), occupied=4)
    late_job = world.submit(fixed(north=1))
    world.settle()
    world.sites["north"].add_nodes(1)
    world.settle()
    assert world.state(late_job) is JobState.QUEUED
    remove_job(world, head)
    assert world.state(late_job) is (JobState.CLAIMING if event_driven else JobState.QUEUED)
    world.advance(75)
    assert world.state(late_job) is JobState.SUCCEEDED


def test_queue_job_behind_failed_head_is_tried() -> None:
    world = World({"north": 4}, Rules(queue="fcfs", high_scans_per_low=1, scan_interval=30))
    world.submit(fixed(north=2), run_time=1000)
    head = world.submit(fixed(north=4), max_placement_tries=3)
    late_job = world.submit(fixed(north=2), run_time=1000)
    world.advance(59)
    assert (world.state(head), world.state(late_job)) == (JobState.QUEUED, JobState.QUEUED)
    world.advance(2)
    assert (world.state(head), world.state(late_job)) == (JobState.FAILED, JobState.RUNNING)


def test_queue_limit_exceeded_submission_is_rejected() -> None:
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


def test_tries_of_one_fail_job_at_submission() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=5), max_placement_tries=1)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.startswith("not placed in 1 tries: ")
    assert "north" in world.job(job).reason
    assert world.job(job).ended_at == 0


@pytest.mark.parametrize("job_limit", [None, 2, 4])
def test_tries_are_counted_at_submission_and_periodic_scans(job_limit: int | None) -> None:
    world = World({"north": 4}, Rules(max_placement_tries=3, high_scans_per_low=1, scan_interval=30))
    job = world.submit(fixed(north=5), max_placement_tries=job_limit)
    limit = job_limit or 3
    world.advance(30 * (limit - 1) - 1)
    assert world.state(job) is JobState.QUEUED
    world.advance(2)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).placement_tries == limit


def test_tries_are_not_counted_for_untried_job() -> None:
    """In the mode head a scan ends at the first rejected job."""
    world = World({"north": 4}, Rules(queue="head", high_scans_per_low=1))
    head = world.submit(fixed(north=5))
    next_job = world.submit(fixed(north=5), max_placement_tries=3)
    world.advance(200)
    assert world.job(next_job).placement_tries == 1
    world.cancel(head)
    world.advance(61)
    assert world.state(next_job) is JobState.FAILED


def test_tries_without_limit_never_fail_job() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=5))
    world.advance(10_000)
    assert world.state(job) is JobState.QUEUED


# Why is my job not running?


def test_waiting_reason_names_missing_nodes() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(fixed(north=4), run_time=10)
    job = world.submit(nonfixed(4, 4))
    reason = world.queries.waiting_reason(world.job(job))
    assert "(most: north with 0)" in reason or "no cluster has 4 idle nodes" in reason
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    next_job = world.submit(nonfixed(4, 4))
    assert world.state(next_job) is JobState.CLAIMING
    assert world.queries.waiting_reason(world.job(next_job)) != reason


def test_waiting_reason_of_untried_job_names_job_ahead() -> None:
    world, _ = create_blocked_queue(Rules(queue="fcfs"))
    job = world.submit(fixed(north=1))
    assert world.queries.waiting_reason(world.job(job)) == "waits behind job 2"


def test_waiting_reason_of_removed_policy_names_it() -> None:
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


def test_rejection_applies_to_all_jobs_of_equal_shape() -> None:
    """The cost of a scan grows with distinct shapes, not with jobs."""
    requests: list[Request] = []

    class Counting(Registry):
        def resolve(self, name: str, request: Request, options: Environment = ()) -> Policy:
            requests.append(request)
            return super().resolve(name, request, options)

    policies = Counting()
    for name in builtin_policies().names():
        policies.register(builtin_policies().get(name))
    world = World({"north": 4}, Rules(scan_interval=1000), policies=policies, strict=False)
    world.submit(fixed(north=4), run_time=10)
    for number in range(300):
        world.submit(flexible(2 + number % 3), run_time=1000)
    requests.clear()
    world.advance(11)
    assert len(requests) < 20
    assert world.queries.queued == 298
