"""Failures of programs and infrastructure, restarts, and errors of clusters."""

import pytest

from koalapy.model.array import TaskIndices
from koalapy.model.cluster import ClusterState
from koalapy.model.job import ComponentState, JobState, parse_token
from koalapy.model.job_spec import Launcher
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.events import ClusterCleared, Reported
from koalapy.scheduler.ledger import live
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
def test_failed_component_restarts_whole_job(launcher: Launcher, index: int) -> None:
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
    assert world.state(job) is JobState.CLAIMING, "restarted at once"
    world.advance(30)
    finished = world.job(job)
    assert (finished.state, finished.restarts, finished.generation, finished.exit_code) == (JobState.SUCCEEDED, 1, 2, 0)
    assert world.queries.grid[cluster].health.errors == 0, "a success resets the count"
    check_nothing_remains(world)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("launcher", list(Launcher))
@pytest.mark.parametrize("other_fails_first", [False, True])
def test_memory_limit_fails_job_without_cluster_error(launcher: Launcher, index: int, other_fails_first: bool) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    token, other_token = world.job(job).token(index), world.job(job).token(1 - index)
    site, other_site = world.site_of(token), world.site_of(other_token)
    if other_fails_first:
        other_site.fail_component(other_token, "the MPI daemon was lost")
        world.deliver(other_site.name)
        assert world.job(job).ending is JobState.QUEUED
    site.exceed_memory_limit(token)
    world.settle()
    world.advance(60)
    finished = world.job(job)
    assert (finished.state, finished.generation, finished.exit_code) == (JobState.FAILED, 1, None)
    assert finished.reason == f"{site.name}: memory limit exceeded"
    assert [world.queries.grid[name].health.errors for name in ("north", "south")] == [0, 0]
    check_nothing_remains(world)


def test_memory_limit_after_exit_code_is_reason() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), launcher=Launcher.PROCESSES)
    world.advance(5)
    token = world.job(job).token(0)
    site = world.site_of(token)
    site.exit_program(token, 1)
    world.deliver("north")
    site.exceed_memory_limit(token)
    world.settle()
    finished = world.job(job)
    assert (finished.state, finished.restarts, finished.exit_code) == (JobState.FAILED, 0, None)
    assert finished.reason == "north: memory limit exceeded"
    check_nothing_remains(world)


def test_component_end_during_claim_is_error() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    world.settle()
    world.sites["north"].end_component("1.1.0")
    world.settle()
    assert world.reasons(job, "error") == ["its nodes were given back before the program had ended"]


@pytest.mark.parametrize(("launcher", "restarts"), [(Launcher.OPENMPI, 0), (Launcher.PROCESSES, 1)])
def test_component_end_without_exit_code_restarts_processes_only(launcher: Launcher, restarts: int) -> None:
    """Under Open MPI only the head reports an exit code; with plain processes each component does."""
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    world.sites["south"].end_component("1.1.1")
    world.settle()
    assert world.job(job).restarts == restarts


def test_consecutive_errors_of_several_jobs_make_cluster_unusable_until_cleared() -> None:
    world = World({"north": 4, "south": 2}, Rules(error_threshold=3, restart_pause=0))
    jobs = [world.submit(fixed(north=1), run_time=1000) for _ in range(3)]
    for job in jobs:
        break_component(world, world.tokens(job)[0], "no fork")
    cluster = world.queries.grid["north"]
    assert (cluster.state, cluster.health.errors) == (ClusterState.UNUSABLE, 3)
    assert cluster.health.last_error == "no fork"
    assert cluster.state_reason == "3 errors in a row", "an error may name a job, which other users must not see"
    job = world.submit(fixed(north=1))
    assert world.state(job) is JobState.QUEUED
    assert "unusable" in world.queries.waiting_reason(world.job(job))
    other_job = world.submit(flexible(2))
    world.advance(20)
    assert world.state(other_job) is JobState.SUCCEEDED, "the other cluster still accepts jobs"
    assert world.state(job) is JobState.QUEUED
    world.step([ClusterCleared("north")])
    assert (cluster.state, cluster.health.errors, cluster.state_reason) == (ClusterState.USABLE, 0, "")
    assert world.state(job) is JobState.CLAIMING
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


def test_errors_of_one_job_never_make_cluster_unusable() -> None:
    world = World({"north": 4}, Rules(error_threshold=3, restart_pause=0, probation_pause=60, probation_pause_max=200))
    job = world.submit(fixed(north=1))
    cluster, pauses = world.queries.grid["north"], []
    for failures in range(1, 8):
        break_component(world, world.tokens(job)[0])
        assert (cluster.state, cluster.health.errors) == (ClusterState.USABLE, failures)
        if failures == 4:
            reason = world.queries.waiting_reason(world.job(job))
            assert "it has failed 4 times in a row on north, and may run there at" in reason
        began = world.now
        while world.state(job) is JobState.QUEUED:
            world.advance(1)
        pauses.append(round(world.now - began))
    assert pauses == [pytest.approx(pause, abs=2) for pause in (0, 0, 60, 120, 200, 200, 200)]
    other_jobs = [world.submit(fixed(north=1)) for _ in range(3)]
    world.advance(20)
    assert {world.state(other) for other in (job, *other_jobs)} == {JobState.SUCCEEDED}
    check_nothing_remains(world)


def test_errors_of_one_job_do_not_add_up_over_daemon_restarts() -> None:
    world = World({"north": 4}, Rules(error_threshold=3, restart_pause=0))
    job = world.submit(fixed(north=1))
    for _ in range(3):
        break_component(world, world.tokens(job)[0])
        world.restart()
        world.connect("north")
        world.settle()
    assert world.queries.grid["north"].state is ClusterState.USABLE
    assert "it has failed 3 times in a row on north" in world.queries.waiting_reason(world.job(job))


def test_job_that_fails_on_one_cluster_runs_on_another() -> None:
    world = World({"north": 8, "south": 4}, Rules(error_threshold=3, restart_pause=0))
    job = world.submit(flexible(2, max_components=1), run_time=100)
    for _ in range(3):
        assert live(world.job(job)).gang[0].cluster == "north"
        break_component(world, world.tokens(job)[0])
    assert live(world.job(job)).gang[0].cluster == "south"
    other_job = world.submit(flexible(2, max_components=1))
    assert live(world.job(other_job)).gang[0].cluster == "north"
    world.advance(200)
    assert world.state(job) is world.state(other_job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_failed_tasks_of_array_count_as_one_job_and_move_the_others() -> None:
    world = World({"north": 8, "south": 4}, Rules(error_threshold=3, restart_pause=0, max_restarts=0))
    array = world.submit(flexible(1, max_components=1), array=TaskIndices.parse("0-9%3"), run_time=10)
    for _ in range(3):
        world.settle()
        task = min(job.id for job in world.jobs.values() if job.array_job == array and job.state.is_active)
        break_component(world, world.tokens(task)[0])
    cluster = world.queries.grid["north"]
    assert (cluster.state, cluster.health.errors) == (ClusterState.USABLE, 3)
    world.advance(5)
    tasks = [job for job in world.jobs.values() if job.array_job == array and job.state.is_active]
    assert tasks[-1].attempt is not None
    assert tasks[-1].attempt.gang[0].cluster == "south"
    world.advance(100)
    assert cluster.health.errors == 0


def test_unusable_cluster_keeps_running_jobs_and_stays_unusable() -> None:
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
def test_program_failure_is_result_of_job(launcher: Launcher) -> None:
    world = World({"north": 4, "south": 4})
    world.queries.grid["north"].health.errors = 2
    job = world.submit(flexible(6), code=3, launcher=launcher)
    world.advance(30)
    finished = world.job(job)
    assert (finished.state, finished.exit_code, finished.reason) == (JobState.FAILED, 3, "the program exited with 3")
    assert (finished.restarts, finished.generation) == (0, 1)
    assert all(world.queries.grid[name].health.errors == 0 for name in world.sites), (
        "the job ran to its end on these clusters"
    )
    check_nothing_remains(world)


def test_failure_reason_includes_cluster_error() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    world.advance(1)
    error = "walltime of 30 s exceeded"
    world.step([Reported("north", ComponentStatus("1.1.0", ComponentState.ENDED, program_exit=143, error=error))])
    assert world.job(job).reason == "the program was killed by signal 15 (SIGTERM): walltime of 30 s exceeded"


@pytest.mark.parametrize("launcher", list(Launcher))
def test_program_killed_by_lost_node_is_restarted(launcher: Launcher) -> None:
    """The head reports 137 before the other cluster reports the lost node."""
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_manually(world, launcher)
    world.sites["north"].exit_program("1.1.0", 137)
    world.deliver("north")
    assert world.job(job).ending is JobState.FAILED
    world.sites["south"].fail_component("1.1.1", "node lost")
    world.deliver("south")
    assert world.job(job).ending is JobState.QUEUED
    world.start_automation()
    world.advance(60)
    assert (world.state(job), world.job(job).restarts, world.job(job).exit_code) == (JobState.SUCCEEDED, 1, 0)


def test_failure_of_finished_job_is_final() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), code=137)
    world.advance(30)
    world.step(
        [Reported("south", ComponentStatus("1.1.1", ComponentState.ENDED, error="node lost", infrastructure=True))]
    )
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 137)


def test_error_reported_twice_counts_once() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_manually(world, Launcher.PROCESSES)
    world.sites["south"].fail_component("1.1.1", "node lost")
    for _ in range(3):
        world.sites["south"].report_component("1.1.1")
    world.deliver("south")
    assert world.queries.grid["south"].health.errors == 1
    assert world.job(job).restarts == 1


def test_success_reported_outweighs_later_errors() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    job = start_manually(world, Launcher.OPENMPI)
    world.sites["north"].exit_program("1.1.0", 0)
    world.sites["south"].fail_component("1.1.1", "its runner ended without a word")
    for name in world.sites:
        world.deliver(name)
    world.start_automation()
    world.advance(10)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 0)


def test_attempt_end_removes_its_deadlines() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=25, walltime=30)
    world.advance(20)
    break_component(world, world.tokens(job)[0])
    world.advance(20)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED


def test_restarted_job_has_no_start_time() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=25)
    world.advance(5)
    first = world.job(job)
    break_component(world, world.tokens(job)[0])
    restarted = world.job(job)
    assert (restarted.state, restarted.generation, restarted.started_at) == (JobState.CLAIMING, 2, None)
    world.advance(1)
    started = world.job(job).started_at
    assert started is not None
    assert started > first.started_at  # type: ignore[operator]


@pytest.mark.parametrize(("job_limit", "restarts"), [(None, 2), (0, 0), (1, 1)])
def test_restarts_exhausted_job_fails(job_limit: int | None, restarts: int) -> None:
    world = World({"north": 4}, Rules(max_restarts=2, restart_pause=0, error_threshold=99))
    job = world.submit(fixed(north=4), max_restarts=job_limit)
    while not world.state(job).is_final:
        break_component(world, world.tokens(job)[0])
        assert world.job(job).generation <= restarts + 1
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == f"infrastructure-failure: north: node lost (gave up after {restarts} restarts)"
    assert world.job(job).restarts == restarts
    assert world.job(job).exit_code is None
    check_nothing_remains(world)


def start_manually(world: World, launcher: Launcher) -> int:
    """Run a job of 4 nodes on north (its head) and 2 on south in a manual world."""
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


def test_cleared_cluster_ends_the_pause_after_failures_there() -> None:
    rules = Rules(error_threshold=3, restart_pause=0, probation_pause=600, probation_pause_max=600)
    world = World({"north": 4}, rules)
    job = world.submit(fixed(north=1), run_time=10)
    for _ in range(3):
        break_component(world, world.tokens(job)[0])
    world.advance(60)
    assert (world.state(job), world.job(job).retry_at is not None) == (JobState.QUEUED, True)
    world.step([ClusterCleared("north")])
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
