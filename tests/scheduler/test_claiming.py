"""From a placement to an open barrier, and the way back."""

import pytest

from koalapy.model.job import ComponentState, JobState, Launcher, Priority
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.events import ClusterConfirmed, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import START_DELAY, World

BOTH = pytest.mark.parametrize("launcher", list(Launcher))


@BOTH
def test_a_gang_over_two_clusters_from_its_submission_to_its_end(launcher: Launcher) -> None:
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
    done = world.job(job)
    assert (done.submitted_at, done.placed_at, done.started_at, done.ended_at) == (0, 0, START_DELAY, START_DELAY + 10)
    assert (done.exit_code, done.restarts, done.generation, done.claiming_tries) == (0, 0, 1, 1)
    assert world.reasons(job, "claiming") == ["4 on north, 2 on south"]
    check_nothing_remains(world)


def test_the_barrier_stays_shut_until_the_last_component_is_claimed() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    _reach_all(world)
    job = world.submit(nonfixed(4, 4))
    _reach_all(world)
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    assert world.state(job) is JobState.CLAIMING
    assert ("Open", "1.1.0") not in world.commands(job)
    world.sites["south"].report_claimed("1.1.1")
    world.deliver("south")
    assert world.state(job) is JobState.STARTING
    hosts = [c.hosts for c in world.job(job).attempt.components]  # type: ignore[union-attr]
    assert hosts == [tuple(f"{name}-{n}" for n in range(4)) for name in ("north", "south")]


def test_local_users_are_faster() -> None:
    """The grid said idle, but somebody else was at the cluster's own queue before us."""
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
    assert world.state(second) is JobState.RUNNING, "its nodes are free for others at once"
    assert world.queries.grid["south"].health.errors == 0
    assert world.job(first).restarts == 0
    assert world.job(first).queue_seq < world.job(second).queue_seq, "back where it stood"
    world.sites["south"].remove_local_user("user-1")
    world.advance(60)
    assert world.state(first) is JobState.SUCCEEDED
    assert (world.job(first).generation, world.job(first).claiming_tries) == (2, 2)
    check_nothing_remains(world)


def test_a_claim_that_a_resource_manager_in_trouble_does_not_start_is_no_try() -> None:
    world = World({"north": 4}, Rules(claim_grace=10))
    world.sites["north"].add_local_user(1)  # not yet reported
    job = world.submit(fixed(north=4), max_claiming_tries=1)
    world.sites["north"].set_problem("slurmctld does not answer")
    world.advance(60)
    waits = world.job(job)
    assert (waits.state, waits.generation, waits.claiming_tries) == (JobState.QUEUED, 1, 0)
    world.sites["north"].set_problem("")
    world.advance(60)
    assert world.state(job) is JobState.QUEUED, "the local user is still there"
    world.sites["north"].remove_local_user("user-1")
    world.advance(60)
    assert (world.state(job), world.job(job).claiming_tries) == (JobState.SUCCEEDED, 1)
    check_nothing_remains(world)


def test_a_failed_claim_makes_room_that_is_used_at_once() -> None:
    """A runner that never had nodes gives back a promise, which no report of its cluster would show as growth."""
    world = World({"north": 4}, Rules(claim_grace=10, scan_interval=1000))
    world.sites["north"].add_local_user(1)
    first = world.submit(fixed(north=4))
    second = world.submit(fixed(north=2))
    world.advance(5)
    assert (world.state(first), world.state(second)) == (JobState.CLAIMING, JobState.QUEUED)
    world.advance(6)
    assert (world.state(first), world.state(second)) == (JobState.QUEUED, JobState.RUNNING)


def test_a_runner_that_waits_only_for_a_moment_is_no_failed_claim() -> None:
    world = World({"north": 4})
    world.sites["north"].add_local_user(2)
    job = world.submit(fixed(north=4))
    world.advance(5)
    world.sites["north"].remove_local_user("user-1")
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).generation == 1


def test_nodes_that_never_report_are_given_up_after_the_barrier_timeout() -> None:
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    _reach_all(world)
    job = world.submit(fixed(north=4, south=4))
    world.run_commands("north")
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.now = 59.0
    world.step()
    assert world.job(job).ending is None
    world.now = 60.0
    world.step()
    assert not world.reasons(job, "error"), "they may have reported, and the word of it be on its way"
    world.step([ClusterConfirmed("north", 60.0), ClusterConfirmed("south", 59.9)])
    assert not world.reasons(job, "error"), "that was before"
    world.step([ClusterConfirmed("south", 60.0)])
    assert world.reasons(job, "error") == ["its nodes had not all reported after 60 s"]
    assert {n: world.queries.grid[n].health.errors for n in ("north", "south")} == {"north": 0, "south": 1}
    assert world.commands(job)[-2:] == [("Stop", "1.1.0"), ("Stop", "1.1.1")]
    world.start_automation()
    world.advance(60)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 1)
    check_nothing_remains(world)


def test_runners_that_run_and_are_silent_were_not_overtaken_by_local_users() -> None:
    """They have their nodes, as the cluster says: something is wrong with it."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60), manual=True)
    _reach_all(world)
    job = world.submit(fixed(north=4))
    _reach_all(world)
    for world.now in (10.0, 20.0, 59.0):
        world.step()
        world.sites["north"].send_report(world.sites["north"].current_report())
        world.step([ClusterConfirmed("north", world.now)])
        _reach_all(world)
        assert "claim-failed" not in world.timeline_events(job)
        assert world.state(job) is JobState.CLAIMING
    world.now = 60.0
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.reasons(job, "error") == ["its nodes had not all reported after 60 s"]
    assert world.queries.grid["north"].health.errors == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_nodes_that_were_promised_are_waited_for_and_are_no_error_of_the_cluster(restarted: bool) -> None:
    """A resource manager may keep a job that is stopping for ever, as where its node is gone."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60))
    site = world.sites["north"]
    held = world.submit(fixed(north=2), run_time=1e6)
    world.advance(1)
    site.stuck_components.update(world.tokens(held))
    site.add_local_user(1)  # not yet reported
    job = world.submit(fixed(north=3), priority=Priority.HIGH)
    world.advance(5)
    if restarted:
        world.restart()
        world.connect("north")
    world.advance(40)
    assert world.job(held).ending is JobState.QUEUED, "preempted"
    assert world.state(job) is JobState.CLAIMING, "they may be free any moment"
    assert world.job(job).generation == 1
    world.advance(20)
    assert world.reasons(job, "requeued") == ["claim-failed: north does not let go of 2 nodes"]
    assert (world.queries.grid["north"].health.errors, world.job(job).restarts) == (0, 0)
    site.stuck_components.clear()
    site.end_component(world.tokens(held)[0])
    site.remove_local_user("user-1")
    world.advance(60)
    assert (world.state(held), world.state(job)) == (JobState.RUNNING, JobState.SUCCEEDED)


def test_nodes_that_leave_for_others_do_not_prolong_a_claim() -> None:
    """On a busy cluster some are leaving at any moment, or for ever: a runner that was promised idle ones has nothing
    to do with them."""
    world = World({"north": 8}, Rules(claim_grace=10, barrier_timeout=60))
    site = world.sites["north"]
    others = [world.submit(fixed(north=2), run_time=1e6) for _ in range(2)]
    world.advance(1)
    site.stuck_components.update(token for other in others for token in world.tokens(other))
    world.cancel(others[0])
    site.add_local_user(2)  # not yet reported
    job = world.submit(fixed(north=3))
    world.advance(5)
    assert world.queries.grid["north"].leaving == 2
    world.cancel(others[1])
    world.advance(6)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]
    assert (world.queries.grid["north"].health.errors, world.job(job).restarts) == (0, 0)


def test_a_runner_that_is_still_queued_at_the_barrier_is_nobodys_error() -> None:
    """Whoever has longer patience with local users than with the barrier."""
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


def test_the_last_component_comes_in_while_another_is_out_of_sight() -> None:
    """All are claimed, but one of them cannot be reached: the barrier opens when it can."""
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    _reach_all(world)
    job = world.submit(fixed(north=4, south=4))
    _reach_all(world)
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


def test_a_cluster_that_stays_away_during_the_claim_gets_the_blame() -> None:
    world = World({"north": 4, "south": 4}, Rules(barrier_timeout=60), manual=True)
    _reach_all(world)
    job = world.submit(fixed(north=4, south=4))
    _reach_all(world)
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
    assert world.state(job) is JobState.QUEUED, "the barrier never opened: nothing of it can run in north"


def test_a_component_that_breaks_as_it_comes_in_keeps_the_barrier_shut() -> None:
    world = World({"north": 4}, manual=True)
    _reach_all(world)
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


def test_a_program_that_is_not_launched_in_time_is_the_infrastructures_fault() -> None:
    world = World({"north": 4}, Rules(barrier_timeout=60), manual=True)
    _reach_all(world)
    job = world.submit(fixed(north=4))
    _reach_all(world)
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    assert world.state(job) is JobState.STARTING
    world.now = 60.0
    world.step()
    assert not world.reasons(job, "error"), "nobody has said so"
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.reasons(job, "error") == ["the program was not launched within 60 s"]
    assert world.queries.grid["north"].health.errors == 1
    world.run_commands("north", 1)
    world.start_automation()
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).restarts == 1


@BOTH
def test_after_a_success_components_end_by_themselves_or_are_told_to(launcher: Launcher) -> None:
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


def test_components_of_one_job_may_share_a_cluster() -> None:
    world = World({"north": 8})
    job = world.submit(nonfixed(3, 3, 2))
    assert world.queries.grid["north"].available == 0
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.queries.grid["north"].available == 8


def test_plain_processes_of_different_length_all_have_to_end_well() -> None:
    """The head component may be done long before the others."""
    world = World({"north": 4, "south": 4})
    job = world.submit(nonfixed(4, 2), run_time=(1.0, 30.0))
    world.advance(10)
    assert world.state(job) is JobState.RUNNING
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.state for c in attempt.components] == [ComponentState.ENDED, ComponentState.RUNNING]
    assert world.queries.grid["north"].available == 4, "its nodes are free already"
    world.advance(30)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).restarts == 0


def test_walltime_counts_from_the_launch_and_ends_the_job() -> None:
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


def test_walltime_of_a_job_out_of_sight_waits_for_word_of_it() -> None:
    """Its program may have ended well in time."""
    world = World({"north": 4})
    job = world.submit(fixed(north=4), run_time=20, walltime=30)
    world.advance(10)
    world.disconnect("north")
    world.advance(60)
    assert world.state(job) is JobState.UNKNOWN
    world.connect("north")
    assert world.state(job) is JobState.SUCCEEDED


def test_deadlines_of_jobs_that_are_over_are_not_kept_until_they_come() -> None:
    world = World({"north": 4})
    for _ in range(200):
        world.submit(fixed(north=4), run_time=1, walltime=1e6)
    world.advance(400)
    assert not world.queries.jobs()
    wakeup = world.scheduler.next_wakeup()
    assert wakeup is None or wakeup < world.now + 1e5


def _reach_all(world: World) -> None:
    """Bring everybody up to date in a world where nothing happens by itself."""
    for name, site in world.sites.items():
        world.deliver(name)
        world.run_commands(name)
        world.deliver(name)
        site.send_report()
        world.deliver(name)
