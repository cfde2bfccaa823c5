"""Nodes of failed attempts that are kept for the restarts of their jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.scheduler.events import ClusterDrained
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.queue.kept_nodes import KEPT_S
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

LONG = 5000.0


def make_world(rules: Rules | None = None, width: int = 8) -> tuple[World, JobId, list[JobId]]:
    """Return a grid with a wide job that has lost a component and still holds the others, and narrow jobs behind it."""
    world = World({"north": 4, "south": 4}, rules or Rules(plan_after=None))
    wide = world.submit(flexible(width), run_time=LONG)
    world.advance(100)
    narrow = [world.submit(flexible(2), run_time=100) for _ in range(4)]
    fail_north(world, wide)
    return world, wide, narrow


def fail_north(world: World, job: JobId) -> None:
    """Let the component on north fail, while that on south keeps its nodes."""
    north, south = (world.sites[name] for name in ("north", "south"))
    north_token, south_token = world.tokens(job)[-2:]
    south.stuck_components.add(south_token)
    north.fail_component(north_token, "node lost")
    north.end_component(north_token)
    world.settle()


def states(world: World, jobs: list[JobId]) -> set[JobState]:
    return {world.state(job) for job in jobs}


def end_south(world: World) -> None:
    world.sites["south"].release_stuck_nodes()
    world.advance(1)


def test_kept_nodes_are_not_offered_to_younger_jobs() -> None:
    world, wide, narrow = make_world()
    newcomer = world.submit(fixed(north=1), run_time=1)
    world.advance(60)
    assert states(world, [*narrow, newcomer]) == {JobState.QUEUED}
    end_south(world)
    assert (world.state(wide), world.job(wide).generation) == (JobState.RUNNING, 2)
    assert states(world, narrow) == {JobState.QUEUED}
    world.advance(2 * LONG)
    assert states(world, [wide, *narrow, newcomer]) == {JobState.SUCCEEDED}


def test_without_keeping_younger_jobs_take_the_nodes() -> None:
    world, wide, narrow = make_world(Rules(plan_after=None, keeps_for_restart=False))
    assert states(world, narrow[:2]) == {JobState.CLAIMING}
    end_south(world)
    assert world.state(wide) is JobState.QUEUED


@pytest.mark.parametrize("queue", ["scan", "head"])
def test_kept_nodes_serve_older_jobs(queue: str) -> None:
    world = World({"north": 4, "south": 4}, Rules(queue=queue, plan_after=None))  # type: ignore[arg-type]
    blocker = world.submit(fixed(south=1), run_time=100)
    older = world.submit(fixed(north=1, south=4), run_time=100)
    wide = world.submit(fixed(north=4, south=3), run_time=LONG)
    world.advance(1)
    assert states(world, [blocker, wide]) == {JobState.RUNNING}
    world.cancel(blocker)
    fail_north(world, wide)
    end_south(world)
    assert (world.state(older), world.state(wide)) == (JobState.RUNNING, JobState.QUEUED)


def test_kept_nodes_are_offered_to_high_priority() -> None:
    world, wide, narrow = make_world()
    urgent = world.submit(fixed(north=4), run_time=10, priority=Priority.HIGH)
    world.advance(1)
    assert world.state(urgent) is JobState.RUNNING
    assert states(world, narrow) == {JobState.QUEUED}
    world.advance(20)
    end_south(world)
    assert world.state(wide) is JobState.RUNNING


def test_kept_nodes_of_high_priority_are_not_offered_to_low() -> None:
    world = World({"north": 4, "south": 4})
    wide = world.submit(flexible(8), run_time=LONG, priority=Priority.HIGH)
    world.advance(1)
    narrow = world.submit(flexible(2), run_time=100)
    fail_north(world, wide)
    world.advance(1)
    assert world.state(narrow) is JobState.QUEUED
    end_south(world)
    assert world.state(wide) is JobState.RUNNING


@pytest.mark.parametrize("action", ["hold", "cancel", "drain", "disconnect"])
def test_kept_nodes_are_released_with_their_reason(action: str) -> None:
    """The wide job needs one more node, so that it waits with all other nodes kept for it."""
    world, wide, narrow = make_world()
    world.sites["north"].break_nodes(1)
    end_south(world)
    assert (world.state(wide), states(world, narrow)) == (JobState.QUEUED, {JobState.QUEUED})
    if action == "hold":
        world.hold(wide)
    elif action == "cancel":
        world.cancel(wide)
    elif action == "drain":
        world.step([ClusterDrained("south")])
    else:
        world.disconnect("south")
    world.advance(10)
    assert JobState.RUNNING in states(world, narrow)


def test_kept_nodes_are_released_after_a_time() -> None:
    world, wide, narrow = make_world()
    world.sites["north"].break_nodes(1)
    end_south(world)
    world.advance(KEPT_S - 60)
    assert states(world, narrow) == {JobState.QUEUED}
    world.advance(120)
    assert states(world, narrow) == {JobState.RUNNING, JobState.QUEUED}
    assert world.state(wide) is JobState.QUEUED


def test_kept_nodes_last_over_a_restart_of_the_daemon() -> None:
    world, wide, narrow = make_world()
    world.restart()
    for name in ("north", "south"):
        world.connect(name)
        world.advance(1)
        assert states(world, narrow) == {JobState.QUEUED}
    end_south(world)
    assert world.state(wide) is JobState.RUNNING


def test_kept_nodes_last_over_a_restart_in_the_queue() -> None:
    world, wide, narrow = make_world()
    world.sites["north"].break_nodes(1)
    end_south(world)
    world.restart()
    for name in ("south", "north"):
        world.connect(name)
        world.advance(1)
    assert states(world, [wide, *narrow]) == {JobState.QUEUED}
    world.sites["north"].repair_nodes()
    world.advance(1)
    assert world.state(wide) is JobState.RUNNING


def test_kept_nodes_in_a_pause_need_a_longer_run() -> None:
    """A program that fails soon after each start keeps no nodes in its pauses."""
    world = World({"north": 4, "south": 4}, Rules(plan_after=None, restart_pause=50, error_threshold=1000))
    wide = world.submit(flexible(8), run_time=LONG)
    for seconds, state in ((10, JobState.QUEUED), (10, JobState.RUNNING), (200, JobState.QUEUED)):
        while world.state(wide) is not JobState.RUNNING:
            world.advance(1)
        world.advance(seconds)
        fail_north(world, wide)
        end_south(world)
        if world.job(wide).restarts == 1:
            continue
        narrow = world.submit(flexible(2), run_time=10)
        world.advance(5)
        assert world.state(narrow) is state
        world.advance(200)


def test_kept_nodes_are_told_to_users() -> None:
    world, wide, narrow = make_world()
    world.sites["north"].break_nodes(1)
    end_south(world)
    reason = f"nodes are kept for job {wide}, which runs again after a failure"
    assert world.queries.waiting_reason(world.job(narrow[0])) == reason
    assert explain(world.queries, world.job(narrow[0]), world.timeline, world.now).headline == reason
    assert explain_submission(world.queries, JobSpec(flexible(2), ("program",)), world.now).headline == reason
    wide_reason = world.queries.waiting_reason(world.job(wide))
    assert wide_reason.endswith("8 nodes of its failed attempt are kept for it")
    assert explain(world.queries, world.job(wide), world.timeline, world.now).headline == wide_reason


def test_kept_nodes_remain_after_a_change_of_priority() -> None:
    world, wide, narrow = make_world()
    world.sites["north"].break_nodes(1)
    end_south(world)
    world.change(wide, priority=Priority.HIGH)
    world.advance(5)
    assert states(world, narrow) == {JobState.QUEUED}


@given(
    failures=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=4),
    narrow=st.lists(st.integers(1, 3), min_size=1, max_size=6),
)
def test_wide_job_runs_again_when_its_components_have_ended(failures: list[tuple[int, int]], narrow: list[int]) -> None:
    """On a grid without local users, younger jobs never delay the restart of a job that had run."""
    world = World(
        {"north": 4, "south": 4}, Rules(plan_after=None, restart_pause=0, max_restarts=None, error_threshold=100)
    )
    wide = world.submit(flexible(8), run_time=LONG)
    world.advance(1)
    for size in narrow:
        world.submit(flexible(size), run_time=1000)
    for running, ending in failures:
        world.advance(running)
        fail_north(world, wide)
        world.advance(ending)
        end_south(world)
        assert world.state(wide) is JobState.RUNNING
