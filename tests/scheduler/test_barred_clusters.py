"""Clusters that a job avoids after failures and rejections, and errors of which several jobs or sites are the cause."""

from typing import Literal

import pytest

from koalapy.model.array import IndexRange, TaskIndices
from koalapy.model.cluster import ClusterState, Link, Relays
from koalapy.model.job import JobId, JobState, RefusalCause
from koalapy.model.job_spec import Launcher
from koalapy.scheduler.events import LinkMeasured, RelayChanged
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World

LONG = 1e5
RULES = Rules(max_restarts=None)
RELAYED = {("north", "south"): Link(relayed=True)}


def fail_repeatedly(world: World, job: JobId, times: int = 3) -> None:
    """Let a job fail each time that it runs."""
    for _ in range(times):
        advance_until_running(world, job)
        break_component(world, world.tokens(job)[0])
        world.advance(1)


def advance_until_running(world: World, job: JobId) -> None:
    for _ in range(1000):
        if world.state(job) is JobState.RUNNING:
            return
        world.advance(5)
    raise AssertionError(world.job(job))


def causes(world: World, job: JobId) -> dict[str, set[RefusalCause]]:
    refusals = world.job(job).refusals
    return {name: {entry.cause for entry in refusals if entry.cluster == name} for name in world.sites}


def test_job_does_not_fail_while_a_cluster_bars_it_for_its_failures_only() -> None:
    world = World({"north": 4, "south": 4}, RULES)
    user = world.sites["south"].add_local_user(4)
    world.advance(1)
    job = world.submit(flexible(2), run_time=LONG)
    fail_repeatedly(world, job, 6)
    world.sites["south"].rejection_fault = lambda size: "unknown"
    world.sites["south"].rejection_message = lambda size: "strange words"
    world.sites["south"].remove_local_user(user)
    world.advance(1000)
    assert RefusalCause.REJECTED in causes(world, job)["south"]
    assert world.state(job) is JobState.RUNNING
    assert [c.cluster for c in world.job(job).attempt.gang] == ["north"]  # type: ignore[union-attr]


@pytest.mark.parametrize("queue", ["scan", "fcfs", "head"])
def test_barred_array_does_not_block_other_jobs(queue: Literal["scan", "fcfs", "head"]) -> None:
    world = World({"north": 4}, Rules(queue=queue, plan_after=None))
    indices = TaskIndices((IndexRange(1, 50),), limit=1)
    array = world.submit(flexible(4), run_time=LONG, array=indices, max_restarts=0)
    for _ in range(6):
        for _ in range(2000):
            running = [job for job in world.jobs.values() if job.array_job == array and job.state is JobState.RUNNING]
            if running:
                break
            world.advance(5)
        break_component(world, running[0].token(0))
        world.advance(1)
    assert causes(world, array) == {"north": {RefusalCause.FAILURE}}
    small = world.submit(flexible(1), run_time=5)
    world.advance(20)
    assert world.state(small) is JobState.SUCCEEDED


@pytest.mark.parametrize("queue", ["scan", "head"])
def test_nodes_are_not_kept_on_a_cluster_that_the_job_avoids(queue: Literal["scan", "head"]) -> None:
    world = World({"north": 4}, Rules(queue=queue, max_restarts=None, plan_after=None))
    job = world.submit(flexible(4), run_time=LONG)
    for _ in range(6):
        advance_until_running(world, job)
        world.advance(3000)
        break_component(world, world.tokens(job)[0])
    world.advance(1)
    assert world.state(job) is JobState.QUEUED
    other = world.submit(flexible(4), run_time=5)
    world.advance(10)
    assert world.state(other) is JobState.SUCCEEDED


def test_change_of_a_job_releases_the_nodes_kept_for_its_restart() -> None:
    world = World({"north": 8, "south": 8}, Rules(max_restarts=None, plan_after=None))
    world.sites["south"].add_local_user(8)
    world.advance(1)
    job = world.submit(flexible(8), run_time=LONG)
    fail_repeatedly(world, job, 1)
    advance_until_running(world, job)
    break_component(world, world.tokens(job)[0])
    assert world.state(job) is JobState.QUEUED
    world.change(job, request=fixed(south=8))
    other = world.submit(flexible(4), run_time=5)
    world.advance(10)
    assert world.state(other) is JobState.SUCCEEDED


def test_change_of_a_job_forgets_rejections_of_its_former_form() -> None:
    world = World({"north": 8}, RULES)
    world.sites["north"].rejection_fault = lambda size: "unknown" if size > 2 else ""
    world.sites["north"].rejection_message = lambda size: "strange words"
    job = world.submit(fixed(north=4), run_time=10)
    world.advance(5)
    assert causes(world, job) == {"north": {RefusalCause.REJECTED}}
    world.change(job, request=fixed(north=2))
    world.advance(15)
    assert world.state(job) is JobState.SUCCEEDED


def test_errors_of_several_jobs_at_once_make_a_cluster_unusable() -> None:
    """A cluster that loses all its jobs at once, three times, is at fault, whichever job was found lost first."""
    world = World({"north": 8}, Rules(max_restarts=None, error_threshold=3), strict=False)
    jobs = [world.submit(flexible(2), run_time=LONG) for _ in range(3)]
    for _ in range(3):
        for job in jobs:
            advance_until_running(world, job)
        world.disconnect("north")
        for job in jobs:
            world.sites["north"].lose_component(world.tokens(job)[0])
        world.connect("north")
    world.advance(1)
    assert world.queries.grid["north"].health.errors == 3
    assert world.queries.grid["north"].state is not ClusterState.USABLE


def run_job_without_relay_of_south() -> tuple[World, JobId]:
    """Return a job that waits at its barrier for the relay of south; its head is on north."""
    relays = Relays(streams=1000, ready=frozenset({"north", "south"}))
    world = World({"north": 8, "south": 4}, RULES, relays=relays, links=RELAYED, strict=False)
    job = world.submit(fixed(north=8, south=2), run_time=1000.0, launcher=Launcher.OPENMPI)
    world.step([RelayChanged("south", is_ready=False, relayed_only=False)])
    world.advance(1)
    assert world.job(job).attempt.barrier_at is None  # type: ignore[union-attr]
    return world, job


def test_relay_that_is_not_ready_is_an_error_of_its_own_cluster() -> None:
    world, _ = run_job_without_relay_of_south()
    world.advance(200)
    errors = {name: world.queries.grid[name].health.errors for name in world.sites}
    assert errors["north"] == 0
    assert errors["south"] > 0


def test_measured_path_opens_the_barrier_of_a_job_that_waits_for_a_relay() -> None:
    world, job = run_job_without_relay_of_south()
    world.step([LinkMeasured("north", "south", Link(0.001, 1e8, direct=True))])
    world.advance(5)
    assert (world.state(job), world.job(job).restarts) == (JobState.RUNNING, 0)
    assert world.job(job).attempt.barrier_at is not None  # type: ignore[union-attr]
