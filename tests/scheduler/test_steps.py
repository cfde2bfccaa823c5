"""Unfinished steps: the next step continues, and no job is passed over or forgotten."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import Request
from koalapy.scheduler.events import ClusterCleared, PeriodicScan
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

LONG_INTERVAL_S = 1e6
"""Scan interval in seconds that excludes periodic scans."""


def create_limited_world(sizes: dict[str, int], tries: int, **rules: Any) -> World:
    """Create a world that tries so many jobs in a step: its clock advances by a second with each read."""
    ticks = count()
    settings = {"step_budget": float(tries), "scan_interval": LONG_INTERVAL_S, **rules}
    return World(sizes, Rules(**settings), manual=True, clock=lambda: float(next(ticks)))


def report_all(world: World) -> World:
    for name, site in world.sites.items():
        site.send_report()
        world.deliver(name)
    world.finish()
    return world


def make_spec(request: Request, priority: Priority = Priority.LOW) -> JobSpec:
    return JobSpec(request, ("program",), priority=priority)


def placed_jobs(world: World, jobs: list[JobId]) -> list[JobId]:
    return [job for job in jobs if world.state(job) is not JobState.QUEUED]


def remove_local_users(world: World, name: str, *users: str) -> None:
    for user in users:
        world.sites[name].remove_local_user(user)
    world.sites[name].send_report()
    world.deliver(name)


def test_step_continues_with_remaining_jobs_at_once() -> None:
    world = report_all(create_limited_world({"north": 10}, 3))
    jobs = world.submit_together([make_spec(flexible(1))] * 10)
    for step in (1, 2, 3):
        assert placed_jobs(world, jobs) == jobs[: 3 * step], "jobs are placed in order"
        assert world.scheduler.next_wakeup() == world.now
        world.step()
    assert placed_jobs(world, jobs) == jobs
    assert not world.scheduler.is_unfinished
    assert world.scheduler.next_wakeup() != world.now


def test_step_without_clock_places_all_jobs() -> None:
    world = World({"north": 10}, Rules(step_budget=0.001))
    jobs = world.submit_together([make_spec(flexible(1))] * 10)
    assert placed_jobs(world, jobs) == jobs


def queue_behind_local_users(world: World, *requests: Request) -> tuple[list[JobId], list[str]]:
    """Queue jobs while local users have all nodes of north; return the jobs and the users."""
    users = [world.sites["north"].add_local_user(1) for _ in range(world.sites["north"].total)]
    report_all(world)
    jobs = world.submit_together([make_spec(request) for request in requests])
    world.finish()
    assert not placed_jobs(world, jobs)
    return jobs, users


def test_step_restarts_scan_when_nodes_are_released() -> None:
    """Otherwise jobs behind the wide one would receive the nodes that it waits for."""
    world = create_limited_world({"north": 6}, 1)
    (wide_job, first, second, *later_jobs), users = queue_behind_local_users(world, fixed(north=4), *[flexible(1)] * 6)
    remove_local_users(world, "north", *users[:2])
    assert placed_jobs(world, [wide_job, first, second]) == [first]
    assert world.scheduler.is_unfinished
    remove_local_users(world, "north", *users[2:])
    world.finish()
    assert placed_jobs(world, [wide_job, first, second, *later_jobs]) == [wide_job, first, second]


def test_step_restarted_scan_keeps_earlier_reasons() -> None:
    world = create_limited_world({"north": 6}, 1, preemption="never")
    jobs, users = queue_behind_local_users(world, flexible(1), fixed(north=1), nonfixed(1))
    wide_job = world.submit(fixed(north=6), priority=Priority.HIGH)
    world.finish()
    remove_local_users(world, "north", *users[:3])
    assert placed_jobs(world, jobs) == jobs[:1]
    world.step([world.change_event(wide_job, priority=Priority.LOW)])
    world.finish()
    assert placed_jobs(world, [*jobs, wide_job]) == jobs


def test_step_tries_new_job_after_waiting_jobs() -> None:
    world = create_limited_world({"north": 3}, 1)
    jobs, users = queue_behind_local_users(world, *[flexible(1)] * 3)
    remove_local_users(world, "north", *users)
    late_job = world.submit(flexible(1))
    world.finish()
    assert placed_jobs(world, [*jobs, late_job]) == jobs
    assert world.queries.tries(late_job) == 1


def test_step_tries_high_job_before_remaining_low_jobs() -> None:
    world = create_limited_world({"north": 3}, 1, preemption="never")
    jobs, users = queue_behind_local_users(world, *[flexible(1)] * 3)
    remove_local_users(world, "north", *users)
    high_job = world.submit(flexible(1), priority=Priority.HIGH)
    world.finish()
    assert placed_jobs(world, [*jobs, high_job]) == [*jobs[:2], high_job]


@pytest.mark.parametrize("remove_job", [World.cancel, World.hold])
def test_step_skips_job_that_left(remove_job: Any) -> None:
    world = create_limited_world({"north": 3}, 1)
    jobs, users = queue_behind_local_users(world, *[flexible(1)] * 4)
    remove_local_users(world, "north", *users)
    remove_job(world, jobs[1])
    world.finish()
    assert world.state(jobs[1]) in (JobState.CANCELLED, JobState.HELD)
    assert [world.state(job) for job in (jobs[0], *jobs[2:])] == [JobState.CLAIMING] * 3


def test_step_restarted_scan_ends_with_frequent_gains() -> None:
    """Each shape passes the idle test and is rejected by its policy, and each step gains nodes."""
    world = report_all(create_limited_world({"north": 40, "south": 1}, 1))
    requests = [nonfixed(large, 41 - large) for large in range(21, 40)]
    jobs = world.submit_together([make_spec(request) for request in requests])
    for _ in range(8):
        world.step([ClusterCleared("north")])
        if not world.scheduler.is_unfinished:
            break
    assert not world.scheduler.is_unfinished
    assert not placed_jobs(world, jobs)


def test_step_periodic_scan_counts_one_try() -> None:
    """A periodic scan that arrives before the end of another counts with it."""
    world = report_all(create_limited_world({"north": 40, "south": 1}, 2, high_scans_per_low=1))
    jobs = world.submit_together([make_spec(nonfixed(large, 41 - large)) for large in range(21, 30)])
    world.finish()
    world.step([PeriodicScan()])
    assert world.scheduler.is_unfinished
    world.step([PeriodicScan()])
    world.finish()
    assert [world.queries.tries(job) for job in jobs] == [2] * len(jobs), "once at submission and once now"
    world.step([PeriodicScan(), PeriodicScan()])
    world.finish()
    assert [world.queries.tries(job) for job in jobs] == [4] * len(jobs)


def test_step_tries_exhausted_jobs_fail_at_scan_end() -> None:
    world = report_all(create_limited_world({"north": 4}, 1, high_scans_per_low=1))
    jobs = [world.submit(fixed(north=5), max_placement_tries=2) for _ in range(5)]
    world.step([PeriodicScan()])
    assert world.scheduler.is_unfinished
    world.cancel(jobs[-1])
    world.finish()
    assert [world.state(job) for job in jobs] == [JobState.FAILED] * 4 + [JobState.CANCELLED]


def test_step_without_event_driven_places_in_periodic_scan_only() -> None:
    world = create_limited_world({"north": 4}, 2, event_driven=False, high_scans_per_low=1)
    jobs, users = queue_behind_local_users(world, *[flexible(1)] * 4)
    remove_local_users(world, "north", *users)
    assert not world.scheduler.is_unfinished
    assert not placed_jobs(world, jobs)
    world.step([PeriodicScan()])
    assert placed_jobs(world, jobs) == jobs[:1]
    world.finish()
    assert placed_jobs(world, jobs) == jobs


REQUESTS = st.one_of(
    st.integers(1, 7).map(flexible),
    st.integers(1, 4).map(lambda size: fixed(north=size)),
    st.lists(st.integers(1, 3), min_size=2, max_size=3).map(lambda sizes: nonfixed(*sizes)),
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.lists(st.tuples(REQUESTS, st.sampled_from(Priority)), min_size=1, max_size=5)),
    st.tuples(st.sampled_from(["cancel", "hold", "priority", "leave", "leave"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["come", "report"]), st.sampled_from(["north", "south"])),
    st.tuples(st.sampled_from(["scan", "clear", "step", "step"]), st.just(None)),
)


@given(
    tries=st.integers(1, 3),
    queue=st.sampled_from(["scan", "scan", "head", "fcfs"]),
    event_driven=st.booleans(),
    actions=st.lists(ACTIONS, max_size=30),
)
def test_steps_with_random_events_leave_no_job_untried(
    tries: int, queue: QueueMode, event_driven: bool, actions: list[tuple[str, Any]]
) -> None:
    """Invariants are checked at each step, those of waiting jobs whenever all were tried."""
    rules = {"queue": queue, "event_driven": event_driven, "plan_after": 0, "high_scans_per_low": 1}
    world = report_all(create_limited_world({"north": 4, "south": 3}, tries, **rules))
    users: list[tuple[str, str]] = []
    for action, value in actions:
        queued = [job.id for job in world.queries.jobs() if job.state is JobState.QUEUED]
        if action == "submit":
            world.submit_together([make_spec(*request_and_priority) for request_and_priority in value])
        elif action == "come":
            users.append((value, world.sites[value].add_local_user(1)))
        elif action == "leave" and users:
            remove_local_users(world, *users.pop(value % len(users)))
        elif action == "report":
            report_all(world)
        elif action == "scan":
            world.step([PeriodicScan()])
        elif action == "clear":
            world.step([ClusterCleared("north")])
        elif action == "step":
            world.step()
        elif action in ("cancel", "hold") and queued:
            getattr(world, action)(queued[value % len(queued)])
        elif action == "priority" and queued:
            world.step([world.change_event(queued[value % len(queued)], priority=Priority.HIGH)])
    world.finish()
