"""A step places jobs for as long as its budget lasts, and the next one goes on: nobody is passed over or forgotten."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobSpec, JobState, Priority
from koalapy.model.request import Request
from koalapy.scheduler.events import ClusterCleared, JobPriorityChanged, PeriodicScan
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

LATE = 1e6
"""Seconds between periodic scans that are not to help."""


def stingy(sizes: dict[str, int], tries: int, **rules: Any) -> World:
    """A world in which so many jobs are tried in a step: its clock goes on by a second each time it is looked at."""
    ticks = count()
    wanted = {"step_budget": float(tries), "scan_interval": LATE, **rules}
    return World(sizes, Rules(**wanted), manual=True, clock=lambda: float(next(ticks)))


def connected(world: World) -> World:
    for name, site in world.sites.items():
        site.send_report()
        world.deliver(name)
    world.finish()
    return world


def spec_of(request: Request, priority: Priority = Priority.LOW) -> JobSpec:
    return JobSpec(request, ("program",), priority=priority)


def placed(world: World, jobs: list[JobId]) -> list[JobId]:
    return [job for job in jobs if world.state(job) is not JobState.QUEUED]


def local_users_leave(world: World, name: str, *users: str) -> None:
    for user in users:
        world.sites[name].remove_local_user(user)
    world.sites[name].send_report()
    world.deliver(name)


def test_what_is_left_goes_into_the_next_step_which_is_wanted_at_once() -> None:
    world = connected(stingy({"north": 10}, 3))
    jobs = world.submit_together([spec_of(flexible(1))] * 10)
    for step in (1, 2, 3):
        assert placed(world, jobs) == jobs[: 3 * step], "in order"
        assert world.scheduler.next_wakeup() == world.now
        world.step()
    assert placed(world, jobs) == jobs
    assert not world.scheduler.is_unfinished
    assert world.scheduler.next_wakeup() != world.now


def test_without_a_clock_a_step_places_all() -> None:
    world = World({"north": 10}, Rules(step_budget=0.001))
    jobs = world.submit_together([spec_of(flexible(1))] * 10)
    assert placed(world, jobs) == jobs


def waiting(world: World, *requests: Request) -> tuple[list[JobId], list[str]]:
    """Jobs that wait while local users have each a node of north, and these."""
    users = [world.sites["north"].add_local_user(1) for _ in range(world.sites["north"].total)]
    connected(world)
    jobs = world.submit_together([spec_of(request) for request in requests])
    world.finish()
    assert not placed(world, jobs)
    return jobs, users


def test_who_stands_before_others_is_not_passed_over_when_nodes_come_free_meanwhile() -> None:
    """The scan begins anew: else those behind it would have the nodes for which it waits."""
    world = stingy({"north": 6}, 1)
    (wide, first, second, *others), users = waiting(world, fixed(north=4), *[flexible(1)] * 6)
    local_users_leave(world, "north", *users[:2])
    assert placed(world, [wide, first, second]) == [first]
    assert world.scheduler.is_unfinished
    local_users_leave(world, "north", *users[2:])
    world.finish()
    assert placed(world, [wide, first, second, *others]) == [wide, first, second]


def test_a_scan_that_begins_anew_for_one_forgets_nobody_it_was_made_for() -> None:
    world = stingy({"north": 6}, 1, preemption="never")
    jobs, users = waiting(world, flexible(1), fixed(north=1), nonfixed(1))
    wide = world.submit(fixed(north=6), priority=Priority.HIGH)
    world.finish()
    local_users_leave(world, "north", *users[:3])
    assert placed(world, jobs) == jobs[:1]
    world.step([JobPriorityChanged(wide, Priority.LOW)])
    world.finish()
    assert placed(world, [*jobs, wide]) == jobs


def test_who_comes_meanwhile_is_tried_after_those_who_wait() -> None:
    world = stingy({"north": 3}, 1)
    jobs, users = waiting(world, *[flexible(1)] * 3)
    local_users_leave(world, "north", *users)
    late = world.submit(flexible(1))
    world.finish()
    assert placed(world, [*jobs, late]) == jobs
    assert world.queries.tries(late) == 1


def test_a_new_job_of_high_priority_goes_before_the_rest_of_the_low_ones() -> None:
    world = stingy({"north": 3}, 1, preemption="never")
    jobs, users = waiting(world, *[flexible(1)] * 3)
    local_users_leave(world, "north", *users)
    high = world.submit(flexible(1), priority=Priority.HIGH)
    world.finish()
    assert placed(world, [*jobs, high]) == [*jobs[:2], high]


@pytest.mark.parametrize("leaves", [World.cancel, World.hold])
def test_who_leaves_meanwhile_is_not_tried(leaves: Any) -> None:
    world = stingy({"north": 3}, 1)
    jobs, users = waiting(world, *[flexible(1)] * 4)
    local_users_leave(world, "north", *users)
    leaves(world, jobs[1])
    world.finish()
    assert world.state(jobs[1]) in (JobState.CANCELLED, JobState.HELD)
    assert [world.state(job) for job in (jobs[0], *jobs[2:])] == [JobState.CLAIMING] * 3


def test_a_scan_that_begins_anew_each_time_comes_to_its_end() -> None:
    """Each shape passes the idle_test at idle nodes and is refused by its policy, and each step finds nodes gained."""
    world = connected(stingy({"north": 40, "south": 1}, 1))
    requests = [nonfixed(large, 41 - large) for large in range(21, 40)]
    jobs = world.submit_together([spec_of(request) for request in requests])
    for _ in range(8):
        world.step([ClusterCleared("north")])
        if not world.scheduler.is_unfinished:
            break
    assert not world.scheduler.is_unfinished
    assert not placed(world, jobs)


def test_a_periodic_scan_is_one_try_however_many_steps_it_takes() -> None:
    """And one that comes before its end is the same one."""
    world = connected(stingy({"north": 40, "south": 1}, 2, high_scans_per_low=1))
    jobs = world.submit_together([spec_of(nonfixed(large, 41 - large)) for large in range(21, 30)])
    world.finish()
    world.step([PeriodicScan()])
    assert world.scheduler.is_unfinished
    world.step([PeriodicScan()])
    world.finish()
    assert [world.queries.tries(job) for job in jobs] == [2] * len(jobs), "on arrival, and now"
    world.step([PeriodicScan(), PeriodicScan()])
    world.finish()
    assert [world.queries.tries(job) for job in jobs] == [4] * len(jobs)


def test_who_has_used_up_its_tries_is_given_up_in_the_end() -> None:
    world = connected(stingy({"north": 4}, 1, high_scans_per_low=1))
    jobs = [world.submit(fixed(north=5), max_placement_tries=2) for _ in range(5)]
    world.step([PeriodicScan()])
    assert world.scheduler.is_unfinished
    world.cancel(jobs[-1])
    world.finish()
    assert [world.state(job) for job in jobs] == [JobState.FAILED] * 4 + [JobState.CANCELLED]


def test_with_event_driven_off_a_step_goes_on_with_the_periodic_scan_only() -> None:
    world = stingy({"north": 4}, 2, event_driven=False, high_scans_per_low=1)
    jobs, users = waiting(world, *[flexible(1)] * 4)
    local_users_leave(world, "north", *users)
    assert not world.scheduler.is_unfinished
    assert not placed(world, jobs)
    world.step([PeriodicScan()])
    assert placed(world, jobs) == jobs[:1]
    world.finish()
    assert placed(world, jobs) == jobs


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
def test_whatever_happens_between_its_steps_a_scan_leaves_nobody_out(
    tries: int, queue: QueueMode, event_driven: bool, actions: list[tuple[str, Any]]
) -> None:
    """The laws hold at each step; those of who waits whenever all were tried."""
    rules = {"queue": queue, "event_driven": event_driven, "aging_tries": 2, "high_scans_per_low": 1}
    world = connected(stingy({"north": 4, "south": 3}, tries, **rules))
    users: list[tuple[str, str]] = []
    for action, value in actions:
        queued = [job.id for job in world.queries.jobs() if job.state is JobState.QUEUED]
        if action == "submit":
            world.submit_together([spec_of(*each) for each in value])
        elif action == "come":
            users.append((value, world.sites[value].add_local_user(1)))
        elif action == "leave" and users:
            local_users_leave(world, *users.pop(value % len(users)))
        elif action == "report":
            connected(world)
        elif action == "scan":
            world.step([PeriodicScan()])
        elif action == "clear":
            world.step([ClusterCleared("north")])
        elif action == "step":
            world.step()
        elif action in ("cancel", "hold") and queued:
            getattr(world, action)(queued[value % len(queued)])
        elif action == "priority" and queued:
            world.step([JobPriorityChanged(queued[value % len(queued)], Priority.HIGH)])
    world.finish()
