"""Whose fault was it, and what follows."""

import pytest

from koalapy.model.cluster import ClusterState
from koalapy.model.job import ComponentState, JobState, Launcher, parse_token
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.events import ClusterCleared, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World


def break_component(world: World, token: str, error: str = "node lost") -> None:
    world.settle()
    site = world.site_of(token)
    site.fail_component(token, error)
    site.end_component(token)
    world.settle()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("launcher", list(Launcher))
def test_a_gang_dies_as_one_and_is_tried_again(launcher: Launcher, index: int) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    broken = world.job(job).token(index)
    cluster = world.site_of(broken).name
    break_component(world, broken)
    assert world.reasons(job, "error") == ["node lost"]
    assert world.reasons(job, "requeued") == [f"infrastructure-failure: {cluster}: node lost (restart 1 of 10)"]
    assert ("Stop", f"1.1.{1 - index}") in world.commands(job)
    assert world.queries.grid[cluster].health.errors == 1
    assert world.state(job) is JobState.CLAIMING, "tried again at once"
    world.advance(30)
    done = world.job(job)
    assert (done.state, done.restarts, done.generation, done.exit_code) == (JobState.SUCCEEDED, 1, 2, 0)
    assert world.queries.grid[cluster].health.errors == 0, "a success resets the count"
    check_nothing_remains(world)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("launcher", list(Launcher))
@pytest.mark.parametrize("other_fails_first", [False, True])
def test_memory_limit_of_a_component_fails_its_job_and_blames_no_cluster(
    launcher: Launcher, index: int, other_fails_first: bool
) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    token, other = world.job(job).token(index), world.job(job).token(1 - index)
    site, other_site = world.site_of(token), world.site_of(other)
    if other_fails_first:
        other_site.fail_component(other, "the MPI daemon was lost")
        world.deliver(other_site.name)
        assert world.job(job).ending is JobState.QUEUED
    site.exceed_memory_limit(token)
    world.settle()
    world.advance(60)
    done = world.job(job)
    assert (done.state, done.generation, done.exit_code) == (JobState.FAILED, 1, None)
    assert done.reason == f"{site.name}: memory limit exceeded"
    assert [world.queries.grid[name].health.errors for name in ("north", "south")] == [0, 0]
    check_nothing_remains(world)


def test_memory_limit_after_the_program_told_its_exit_code_is_the_reason() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), launcher=Launcher.PROCESSES)
    world.advance(5)
    token = world.job(job).token(0)
    site = world.site_of(token)
    site.exit_program(token, 1)
    world.deliver("north")
    site.exceed_memory_limit(token)
    world.settle()
    done = world.job(job)
    assert (done.state, done.restarts, done.exit_code) == (JobState.FAILED, 0, None)
    assert done.reason == "north: memory limit exceeded"
    check_nothing_remains(world)


def test_a_failure_during_the_claim() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6))
    break_component(world, "1.1.1", "the resource manager refused")
    assert "started" not in world.timeline_events(job)
    world.advance(30)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 1)


def test_a_component_that_ends_without_a_word_during_the_claim() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    world.settle()
    world.sites["north"].end_component("1.1.0")
    world.settle()
    assert world.reasons(job, "error") == ["its nodes were given back before the program had ended"]


@pytest.mark.parametrize(("launcher", "restarts"), [(Launcher.OPENMPI, 0), (Launcher.PROCESSES, 1)])
def test_a_component_that_ends_without_its_exit_code(launcher: Launcher, restarts: int) -> None:
    """Under Open MPI only the head has one to tell; of plain processes each."""
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    world.sites["south"].end_component("1.1.1")
    world.settle()
    assert world.job(job).restarts == restarts


def test_errors_in_a_row_make_a_cluster_unusable_until_it_is_cleared() -> None:
    world = World({"north": 4, "south": 2}, Rules(error_threshold=3, restart_pause=0))
    job = world.submit(fixed(north=4))
    for _ in range(3):
        break_component(world, world.tokens(job)[0], "no fork")
    cluster = world.queries.grid["north"]
    assert (cluster.state, cluster.health.errors) == (ClusterState.UNUSABLE, 3)
    assert cluster.state_reason == "3 errors in a row, the last: no fork"
    assert world.state(job) is JobState.QUEUED
    assert "unusable" in world.queries.waiting_reason(world.job(job)) or "north" in world.job(job).reason
    other = world.submit(flexible(2))
    world.advance(20)
    assert world.state(other) is JobState.SUCCEEDED, "the other cluster serves on"
    assert world.state(job) is JobState.QUEUED
    world.step([ClusterCleared("north")])
    assert (cluster.state, cluster.health.errors, cluster.state_reason) == (ClusterState.USABLE, 0, "")
    assert world.state(job) is JobState.CLAIMING
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


def test_running_jobs_go_on_where_a_cluster_became_unusable_and_do_not_mend_it() -> None:
    world = World({"north": 4}, Rules(error_threshold=1, probation=False))
    running = world.submit(fixed(north=2), run_time=50)
    broken = world.submit(fixed(north=2))
    world.advance(1)
    break_component(world, world.tokens(broken)[0])
    assert world.queries.grid["north"].state is ClusterState.UNUSABLE
    world.advance(100)
    assert world.state(running) is JobState.SUCCEEDED
    assert world.queries.grid["north"].state is ClusterState.UNUSABLE


@pytest.mark.parametrize("launcher", list(Launcher))
def test_a_programs_own_failure_is_the_jobs_result(launcher: Launcher) -> None:
    world = World({"north": 4, "south": 4})
    world.queries.grid["north"].health.errors = 2
    job = world.submit(flexible(6), code=3, launcher=launcher)
    world.advance(30)
    done = world.job(job)
    assert (done.state, done.exit_code, done.reason) == (JobState.FAILED, 3, "the program exited with 3")
    assert (done.restarts, done.generation) == (0, 1)
    assert all(world.queries.grid[name].health.errors == 0 for name in world.sites), (
        "its clusters carried it to its end"
    )
    check_nothing_remains(world)


def test_the_cluster_may_say_why_a_program_failed() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    world.advance(1)
    error = "walltime of 30 s exceeded"
    world.step([Reported("north", ComponentStatus("1.1.0", ComponentState.ENDED, program_exit=143, error=error))])
    assert world.job(job).reason == "the program was killed by signal 15 (SIGTERM): walltime of 30 s exceeded"


@pytest.mark.parametrize("launcher", list(Launcher))
def test_a_program_killed_by_a_lost_node_is_restarted(launcher: Launcher) -> None:
    """The head tells 137 before the other cluster tells why."""
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_by_hand(world, launcher)
    world.sites["north"].exit_program("1.1.0", 137)
    world.deliver("north")
    assert world.job(job).ending is JobState.FAILED
    world.sites["south"].fail_component("1.1.1", "node lost")
    world.deliver("south")
    assert world.job(job).ending is JobState.QUEUED
    world.start_automation()
    world.advance(60)
    assert (world.state(job), world.job(job).restarts, world.job(job).exit_code) == (JobState.SUCCEEDED, 1, 0)


def test_once_a_failure_is_settled_it_stands() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), code=137)
    world.advance(30)
    world.step(
        [Reported("south", ComponentStatus("1.1.1", ComponentState.ENDED, error="node lost", infrastructure=True))]
    )
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 137)


def test_an_error_told_twice_counts_once() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_by_hand(world, Launcher.PROCESSES)
    world.sites["south"].fail_component("1.1.1", "node lost")
    for _ in range(3):
        world.sites["south"].report_component("1.1.1")
    world.deliver("south")
    assert world.queries.grid["south"].health.errors == 1
    assert world.job(job).restarts == 1


def test_a_success_that_was_told_stands_against_what_its_end_looks_like() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_by_hand(world, Launcher.OPENMPI)
    world.sites["north"].exit_program("1.1.0", 0)
    world.sites["south"].fail_component("1.1.1", "its runner ended without a word")
    for name in world.sites:
        world.deliver(name)
    world.start_automation()
    world.advance(10)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 0)


def test_the_deadlines_of_an_attempt_end_with_it() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=25, walltime=30)
    world.advance(20)
    break_component(world, world.tokens(job)[0])
    world.advance(20)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED


def test_a_job_that_is_tried_again_has_not_started() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=25)
    world.advance(5)
    first = world.job(job)
    break_component(world, world.tokens(job)[0])
    again = world.job(job)
    assert (again.state, again.generation, again.started_at) == (JobState.CLAIMING, 2, None)
    world.advance(1)
    started = world.job(job).started_at
    assert started is not None
    assert started > first.started_at  # type: ignore[operator]


@pytest.mark.parametrize(("own", "restarts"), [(None, 2), (0, 0), (1, 1)])
def test_a_job_is_given_up_after_max_restarts(own: int | None, restarts: int) -> None:
    world = World({"north": 4}, Rules(max_restarts=2, restart_pause=0, error_threshold=99))
    job = world.submit(fixed(north=4), max_restarts=own)
    while not world.state(job).is_final:
        break_component(world, world.tokens(job)[0])
        assert world.job(job).generation <= restarts + 1
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == f"infrastructure-failure: north: node lost (gave up after {restarts} restarts)"
    assert world.job(job).restarts == restarts
    assert world.job(job).exit_code is None
    check_nothing_remains(world)


def start_by_hand(world: World, launcher: Launcher) -> int:
    """A job of 4 nodes on north (its head) and 2 on south, running, in a world where nothing happens by itself."""
    for name in world.sites:
        world.deliver(name)
    job = world.submit(fixed(north=4, south=2), launcher=launcher)
    tokens = world.tokens(job)
    for name in world.sites:
        world.run_commands(name)
    for token in tokens:
        world.site_of(token).report_claimed(token)
    for _ in range(2):
        for name in world.sites:
            world.deliver(name)
            world.run_commands(name)
    for name in world.sites:
        world.deliver(name)
    assert world.state(job) is JobState.RUNNING
    assert [parse_token(token)[2] for token in tokens] == [0, 1]
    return job
