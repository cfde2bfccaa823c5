"""Claims: from a placement to the open barrier, and failed claims."""

import pytest

from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.events import ClusterConfirmed, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import START_DELAY, World

BOTH_LAUNCHERS = pytest.mark.parametrize("launcher", list(Launcher))


@BOTH_LAUNCHERS
def test_claim_gang_on_two_clusters_runs_to_success(launcher: Launcher) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    assert world.state(job) is JobState.CLAIMING
    world.advance(START_DELAY)
    assert world.state(job) is JobState.RUNNING
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.timeline_events(job) == [
        "submitted",
        "placed",
        "claiming",
        "claimed",
        "claimed",
        "started",
        "running",
        "ending",
        "succeeded",
    ]
    assert world.commands(job) == [
        ("Submit", "1.1.0"),
        ("Submit", "1.1.1"),
        ("Open", "1.1.0"),
        ("Open", "1.1.1"),
        ("Forget", "1.1.0"),
        ("Forget", "1.1.1"),
    ]
    finished = world.job(job)
    assert (finished.submitted_at, finished.placed_at, finished.started_at, finished.ended_at) == (
        0,
        0,
        START_DELAY,
        START_DELAY + 10,
    )
    assert (finished.exit_code, finished.restarts, finished.generation, finished.claiming_tries) == (0, 0, 1, 1)
    assert world.reasons(job, "claiming") == ["4 on north, 2 on south"]
    check_nothing_remains(world)


def test_claim_lost_to_local_users_is_requeued() -> None:
    """The cluster reports idle nodes for which a local user is already queued."""
    world = World({"north": 4, "south": 4}, Rules(claim_grace=10))
    world.sites["south"].add_local_user(2)  # not yet reported
    first = world.submit(fixed(north=2, south=4))
    second = world.submit(fixed(north=4))
    world.advance(9)
    assert world.state(first) is JobState.CLAIMING
    assert world.state(second) is JobState.QUEUED
    world.advance(2)
    assert world.state(first) is JobState.QUEUED
    assert world.reasons(first, "requeued") == ["claim-failed: local users of south were faster"]
    assert [kind for kind, _ in world.commands(first)] == ["Submit", "Submit", "Stop", "Stop", "Forget", "Forget"]
    assert world.state(second) is JobState.RUNNING, "its nodes are available at once"
    assert world.queries.grid["south"].health.errors == 0
    assert world.job(first).restarts == 0
    assert world.job(first).queue_seq < world.job(second).queue_seq, "it keeps its queue position"
    world.sites["south"].remove_local_user("user-1")
    world.advance(60)
    assert world.state(first) is JobState.SUCCEEDED
    assert (world.job(first).generation, world.job(first).claiming_tries) == (2, 2)
    check_nothing_remains(world)


def test_claim_during_resource_manager_problem_counts_no_try() -> None:
    world = World({"north": 4}, Rules(claim_grace=10))
    world.sites["north"].add_local_user(1)  # not yet reported
    job = world.submit(fixed(north=4), max_claiming_tries=1)
    world.sites["north"].set_problem("slurmctld does not answer")
    world.advance(60)
    queued_job = world.job(job)
    assert (queued_job.state, queued_job.generation, queued_job.claiming_tries) == (JobState.QUEUED, 1, 0)
    world.sites["north"].set_problem("")
    world.advance(60)
    assert world.state(job) is JobState.QUEUED, "the local user is still there"
    world.sites["north"].remove_local_user("user-1")
    world.advance(60)
    assert (world.state(job), world.job(job).claiming_tries) == (JobState.SUCCEEDED, 1)
    check_nothing_remains(world)


def test_barrier_timeout_names_silent_cluster() -> None:
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4, south=4))
    world.run_commands("north")
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.now = 59.0
    world.step()
    assert world.job(job).ending is None
    world.now = 60.0
    world.step()
    assert not world.reasons(job, "error"), "their report may be in transit"
    world.step([ClusterConfirmed("north", 60.0), ClusterConfirmed("south", 59.9)])
    assert not world.reasons(job, "error"), "the confirmation is older than the deadline"
    world.step([ClusterConfirmed("south", 60.0)])
    assert world.reasons(job, "error") == ["its nodes had not all reported after 60 s"]
    assert {n: world.queries.grid[n].health.errors for n in ("north", "south")} == {"north": 0, "south": 1}
    assert world.commands(job)[-2:] == [("Stop", "1.1.0"), ("Stop", "1.1.1")]
    world.start_automation()
    world.advance(60)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 1)
    check_nothing_remains(world)


def test_claim_silent_running_component_fails_at_barrier_timeout() -> None:
    """The cluster reports that the component has its nodes, so local users are not the reason."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60), manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4))
    reach_all_agents(world)
    for world.now in (10.0, 20.0, 59.0):
        world.step()
        world.sites["north"].send_report(world.sites["north"].current_report())
        world.step([ClusterConfirmed("north", world.now)])
        reach_all_agents(world)
        assert "claim-failed" not in world.timeline_events(job)
        assert world.state(job) is JobState.CLAIMING
    world.now = 60.0
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.reasons(job, "error") == ["its nodes had not all reported after 60 s"]
    assert world.queries.grid["north"].health.errors == 1


@pytest.mark.parametrize("is_restarted", [False, True])
def test_claim_waits_for_promised_nodes_without_cluster_error(is_restarted: bool) -> None:
    """A resource manager may never end a job that is stopping, such as when its node is lost."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60))
    site = world.sites["north"]
    preempted_job = world.submit(fixed(north=2), run_time=1e6)
    world.advance(1)
    site.stuck_components.update(world.tokens(preempted_job))
    site.add_local_user(1)  # not yet reported
    job = world.submit(fixed(north=3), priority=Priority.HIGH)
    world.advance(5)
    if is_restarted:
        world.restart()
        world.connect("north")
    world.advance(40)
    assert world.job(preempted_job).ending is JobState.QUEUED, "preempted"
    assert world.state(job) is JobState.CLAIMING, "the nodes may be released at any time"
    assert world.job(job).generation == 1
    world.advance(20)
    assert world.reasons(job, "requeued") == ["claim-failed: north does not let go of 2 nodes"]
    assert (world.queries.grid["north"].health.errors, world.job(job).restarts) == (0, 0)
    site.stuck_components.clear()
    site.end_component(world.tokens(preempted_job)[0])
    site.remove_local_user("user-1")
    world.advance(60)
    assert (world.state(preempted_job), world.state(job)) == (JobState.RUNNING, JobState.SUCCEEDED)


def test_claim_of_idle_nodes_is_not_prolonged_by_leaving_jobs() -> None:
    """On a busy cluster jobs leave at any time; a component promised idle nodes does not depend on them."""
    world = World({"north": 8}, Rules(claim_grace=10, barrier_timeout=60))
    site = world.sites["north"]
    running_jobs = [world.submit(fixed(north=2), run_time=1e6) for _ in range(2)]
    world.advance(1)
    site.stuck_components.update(token for running_job in running_jobs for token in world.tokens(running_job))
    world.cancel(running_jobs[0])
    site.add_local_user(2)  # not yet reported
    job = world.submit(fixed(north=3))
    world.advance(5)
    assert world.queries.grid["north"].nodes.leaving == 2
    world.cancel(running_jobs[1])
    world.advance(6)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]
    assert (world.queries.grid["north"].health.errors, world.job(job).restarts) == (0, 0)


def test_barrier_timeout_with_queued_component_blames_no_cluster() -> None:
    """The claim grace is longer than the barrier timeout."""
    world = World({"north": 4, "south": 4}, Rules(claim_grace=200, barrier_timeout=60))
    user = world.sites["south"].add_local_user(2)  # not yet reported
    job = world.submit(fixed(north=4, south=4))
    world.advance(59)
    assert world.state(job) is JobState.CLAIMING
    world.advance(2)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of south were faster"]
    assert ([world.queries.grid[n].health.errors for n in world.sites], world.job(job).restarts) == ([0, 0], 0)
    world.sites["south"].remove_local_user(user)
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


def test_barrier_opens_when_disconnected_component_returns() -> None:
    """All components are claimed, but one cluster is disconnected."""
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4, south=4))
    reach_all_agents(world)
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.disconnect("north")
    world.now = 6.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    world.sites["south"].report_claimed("1.1.1")
    world.deliver("south")
    assert "started" not in world.timeline_events(job)
    world.connect("north")
    world.deliver("north")
    assert world.state(job) is JobState.STARTING
    world.start_automation()
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_barrier_timeout_blames_disconnected_cluster() -> None:
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4, south=4))
    reach_all_agents(world)
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.disconnect("north")
    world.now = 6.0
    world.step()
    world.sites["south"].report_claimed("1.1.1")
    world.deliver("south")
    world.now = 60.0
    world.step([ClusterConfirmed("south", 60.0)])
    assert world.reasons(job, "error") == ["its nodes had not all reported after 60 s"]
    assert {n: world.queries.grid[n].health.errors for n in ("north", "south")} == {"north": 1, "south": 0}
    world.run_commands("south")
    world.deliver("south")
    assert world.state(job) is JobState.QUEUED, "the barrier never opened, so no program can run in north"


def test_barrier_component_broken_when_claimed_keeps_it_closed() -> None:
    world = World({"north": 4}, manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4))
    world.step(
        [
            Reported(
                "north", ComponentStatus("1.1.0", ComponentState.CLAIMED, error="a runner is gone", infrastructure=True)
            )
        ]
    )
    assert [kind for kind, _ in world.commands(job)] == ["Submit", "Stop"]
    assert world.job(job).ending is JobState.QUEUED


def test_launch_timeout_is_infrastructure_error() -> None:
    world = World({"north": 4}, Rules(barrier_timeout=60), manual=True)
    reach_all_agents(world)
    job = world.submit(fixed(north=4))
    reach_all_agents(world)
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    assert world.state(job) is JobState.STARTING
    world.now = 60.0
    world.step()
    assert not world.reasons(job, "error"), "the agent has not confirmed"
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.reasons(job, "error") == ["the program was not launched within 60 s"]
    assert world.queries.grid["north"].health.errors == 1
    world.run_commands("north", 1)
    world.start_automation()
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).restarts == 1


@BOTH_LAUNCHERS
def test_success_components_end_or_are_stopped(launcher: Launcher) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), run_time=5, launcher=launcher, lingers=launcher is Launcher.OPENMPI)
    world.advance(5.5)
    if launcher is Launcher.OPENMPI:
        assert world.state(job) is JobState.RUNNING
        assert world.job(job).ending is JobState.SUCCEEDED
        world.advance(2)
        assert ("Stop", "1.1.1") in world.commands(job)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).ended_at == START_DELAY + 5
    check_nothing_remains(world)


def test_success_requires_all_processes_to_end() -> None:
    """The head component may end long before the others."""
    world = World({"north": 4, "south": 4})
    job = world.submit(nonfixed(4, 2), run_time=(1.0, 30.0))
    world.advance(10)
    assert world.state(job) is JobState.RUNNING
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.state for c in attempt.components] == [ComponentState.ENDED, ComponentState.RUNNING]
    assert world.queries.grid["north"].nodes.available == 4, "its nodes are free already"
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).restarts == 0


def test_walltime_exceeded_since_launch_fails_job() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), run_time=100, walltime=30)
    world.advance(30)
    assert world.state(job) is JobState.RUNNING
    world.advance(1)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == "walltime of 30 s exceeded"
    assert world.job(job).exit_code is None
    assert all(world.queries.grid[name].health.errors == 0 for name in world.sites)
    check_nothing_remains(world)


def test_walltime_of_disconnected_job_waits_for_report() -> None:
    """Its program may have ended in time."""
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=20, walltime=30)
    world.advance(10)
    world.disconnect("north")
    world.advance(60)
    assert world.state(job) is JobState.UNKNOWN
    world.connect("north")
    assert world.state(job) is JobState.SUCCEEDED


def test_timers_of_finished_jobs_are_removed() -> None:
    world = World({"north": 4})
    for _ in range(200):
        world.submit(fixed(north=4), run_time=1, walltime=1e6)
    world.advance(400)
    assert not world.queries.jobs()
    wakeup = world.scheduler.next_wakeup()
    assert wakeup is None or wakeup < world.now + 1e5


def reach_all_agents(world: World) -> None:
    """Deliver all messages and commands in manual mode."""
    for name, site in world.sites.items():
        world.deliver(name)
        world.run_commands(name)
        world.deliver(name)
        site.send_report()
        world.deliver(name)
