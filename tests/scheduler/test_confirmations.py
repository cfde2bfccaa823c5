"""No deadline says anything of what it has not been told, and nobody's silence is the daemon's own sleep."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import DEFAULT_LEASE, ComponentState, JobId, JobState, Launcher
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.attempts.contact import CONFIRMATION_TIMEOUT
from koalapy.scheduler.events import ClusterConfirmed, ClusterDisconnected, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

RULES = Rules(claim_grace=10, barrier_timeout=30, unreachable_after=5, scan_interval=1000)
LAUNCHERS = pytest.mark.parametrize("launcher", list(Launcher))


def play(world: World, rounds: int = 4) -> None:
    """Everybody does what there is to do, in no time."""
    for _ in range(rounds):
        for name, site in world.sites.items():
            world.run_commands(name)
            for token in site.startable():
                site.report_claimed(token)
            world.deliver(name)


def running(launcher: Launcher, lease: float = DEFAULT_LEASE, **more: Any) -> tuple[World, JobId]:
    world = World({"north": 4, "south": 4}, RULES, manual=True, lease=lease)
    play(world)
    job = world.submit(fixed(north=2, south=2), launcher=launcher, **{"walltime": 60, **more})
    play(world)
    assert world.state(job) is JobState.RUNNING
    return world, job


def exits(world: World) -> None:
    for site in world.sites.values():
        for token in site.in_phase("running"):
            site.exit_program(token, 0)


@LAUNCHERS
def test_a_program_that_ended_in_time_is_not_ended_for_its_walltime(launcher: Launcher) -> None:
    """Its agents were stopped, connected as they were, and nothing of what they say arrives before the deadline."""
    world, job = running(launcher)
    world.now = 59.0
    exits(world)
    for world.now in (60.0, 61.0, 75.0):
        world.step()
    assert world.job(job).ending is None
    play(world)
    world.start_automation()
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


@LAUNCHERS
def test_a_program_that_did_not_is_ended_as_soon_as_that_is_certain(launcher: Launcher) -> None:
    world, job = running(launcher)
    world.now = 60.0
    world.step()
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.job(job).ending is None, "south has not said"
    world.step([ClusterConfirmed("south", 59.99)])
    assert world.job(job).ending is None, "that was before the deadline"
    play(world)
    assert world.job(job).reason == "walltime of 60 s exceeded"


@LAUNCHERS
def test_a_program_that_ended_in_time_may_have_much_output_on_its_way(launcher: Launcher) -> None:
    """Its exit code comes after that, long after the deadline."""
    world, job = running(launcher)
    world.now = 59.0
    for token in world.tokens(job):
        world.step([Reported(world.site_of(token).name, ComponentStatus(token, ComponentState.RUNNING, over=True))])
    for world.now in (60.0, 65.0, 70.0, 75.0):
        world.step()
        play(world)
        assert world.job(job).ending is None
    exits(world)
    play(world)
    assert world.job(job).ending is JobState.SUCCEEDED


def test_a_part_of_a_program_may_not_outlive_the_walltime_because_another_has_ended() -> None:
    world, job = running(Launcher.PROCESSES)
    world.step([Reported("north", ComponentStatus(world.tokens(job)[0], ComponentState.RUNNING, over=True))])
    world.now = 60.0
    world.step()
    play(world)
    assert world.job(job).reason == "walltime of 60 s exceeded"


def test_a_cluster_is_asked_once_for_all_deadlines_that_wait_for_it() -> None:
    world = World({"north": 4}, RULES, manual=True)
    play(world)
    for _ in range(4):
        world.submit(fixed(north=1), walltime=60)
    play(world)
    asked = 0
    for world.now in (60.0, 60.5, 65.0):
        effects = world.scheduler.step([], world.now)
        asked += len(effects.confirm)
        world.apply_effects(effects)
    assert asked == 1
    play(world)
    assert all(job.ending for job in world.queries.jobs())


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_answer_that_never_comes_is_awaited_as_long_as_the_cluster_is(comes_back: bool) -> None:
    """The connection breaks while it is asked: it is asked again when it is back, or counts as lost."""
    world, job = running(Launcher.PROCESSES)
    world.now = 60.0
    world.step()
    world.disconnect("south")
    world.now = 65.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    play(world)
    assert world.job(job).ending is None
    if comes_back:
        world.connect("south")
        play(world)
        assert world.job(job).reason == "walltime of 60 s exceeded"
        return
    while world.now < 160:
        world.now += 5
        world.step()
    assert world.reasons(job, "error") == ["not heard of for 100 s, and its walltime is over"]


@pytest.mark.parametrize("flaps", [False, True])
def test_who_speaks_and_never_confirms_holds_up_no_other_cluster_for_good(flaps: bool) -> None:
    world, job = running(Launcher.PROCESSES)
    play(world)
    while world.job(job).ending is None and world.now < 1000:
        world.now += 5
        world.step([ClusterConfirmed("north", world.now)])
        if flaps:
            world.disconnect("south")
            world.connect("south")
            world.deliver("south")
    assert world.now == 60 + CONFIRMATION_TIMEOUT + RULES.unreachable_after
    assert world.job(job).reason == "walltime of 60 s exceeded"


def test_who_came_back_after_a_question_is_waited_for_by_the_next_deadline() -> None:
    world, job = running(Launcher.PROCESSES)
    world.now = 60.0
    world.step()
    world.disconnect("south")
    world.submit(fixed(north=1), walltime=5000)
    world.step([ClusterConfirmed("north", 60.0)])
    world.cancel(job)
    world.now = 70.0
    world.connect("south")
    play(world)
    world.start_automation()
    later = world.submit(fixed(south=2), walltime=60)
    play(world)
    while world.now < 140:
        world.now += 1
        world.step()
    assert world.state(later) is JobState.RUNNING
    assert world.job(later).ending is None, "south has not said"


def test_a_claim_is_not_given_up_for_a_runner_that_has_come_through_unheard() -> None:
    world = World({"north": 4}, RULES, manual=True)
    play(world)
    user = world.sites["north"].add_local_user(4)
    job = world.submit(fixed(north=4))
    play(world)
    world.sites["north"].remove_local_user(user)
    world.sites["north"].report_claimed(world.tokens(job)[0])
    world.now = 11.0
    world.step()
    assert world.state(job) is JobState.CLAIMING
    play(world)
    assert world.state(job) is JobState.RUNNING
    assert "claim-failed" not in world.timeline_events(job)


def test_components_that_have_ended_by_themselves_are_not_told_to() -> None:
    world, job = running(Launcher.PROCESSES)
    exits(world)
    for name, site in world.sites.items():
        world.deliver(name)
        for token in site.in_phase("running"):
            site.end_component(token)
    assert world.job(job).ending is JobState.SUCCEEDED
    world.now = 3.0
    world.step()
    play(world)
    assert world.state(job) is JobState.SUCCEEDED
    assert "Stop" not in [kind for kind, _ in world.commands(job)]


# Our own sleep


@pytest.mark.parametrize("nap", [130.0, DEFAULT_LEASE - 10])
def test_a_daemon_that_slept_does_not_take_that_for_its_clusters_silence(nap: float) -> None:
    world, job = running(Launcher.PROCESSES)
    world.disconnect("south")
    world.now = 2.0
    world.step()
    world.now += nap
    world.step()
    assert world.state(job) is JobState.RUNNING, "what south has said is not read yet"
    world.now += 4.9
    world.step()
    world.connect("south")
    play(world)
    assert "unknown" not in world.timeline_events(job)
    assert world.job(job).restarts == 0


def test_silence_counts_while_the_daemon_is_awake_however_often_it_sleeps() -> None:
    world, job = running(Launcher.PROCESSES, lease=29.0, walltime=None)
    world.disconnect("south")
    awake = 0.0
    while not world.reasons(job, "error"):
        for _ in range(4):
            world.now += 5
            awake += 5
            world.step()
        world.now += 300
        world.step()
        assert awake < 200
    assert awake >= world.loss_delay("south")
    (error,) = world.reasons(job, "error")
    assert error.endswith("and its lease is over")


def test_a_silence_that_was_noticed_late_began_when_it_began() -> None:
    world, job = running(Launcher.PROCESSES)
    world.now = 20.0
    world.disconnect("south")
    world.connect("south")
    play(world)
    world.now = 40.0
    world.step([ClusterDisconnected("south", "no answer", heard=36.0)])
    world.now = 41.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.unknown_since for c in attempt.components if c.state is ComponentState.RUNNING] == [None, 36.0]


# Whatever the order and the delays

moments = st.floats(0, 90, allow_nan=False)


@given(
    launcher=st.sampled_from(Launcher),
    ends=st.tuples(moments, moments),
    heard=st.lists(st.tuples(st.sampled_from(["north", "south"]), moments, st.booleans()), max_size=8),
    naps=st.lists(moments, max_size=4),
)
def test_the_walltime_is_judged_by_what_happened(
    launcher: Launcher, ends: tuple[float, float], heard: list[tuple[str, float, bool]], naps: list[float]
) -> None:
    """Agents and daemon run for moments only, in any order."""
    world, job = running(launcher)
    agenda = [(at, lambda name=name: exit_on(world, name)) for name, at in zip(world.sites, ends, strict=True)]
    agenda += [(at, lambda name=name, full=full: hear(world, name, full)) for name, at, full in heard]
    agenda += [(at, world.step) for at in naps]
    for world.now, happen in sorted(agenda, key=lambda entry: entry[0]):
        happen()
    world.now = 100.0
    world.step()
    play(world)
    in_time = [end < 60 for end in ends]
    state = world.job(job).ending or world.state(job)
    if in_time[0] if launcher is Launcher.OPENMPI else all(in_time):
        assert state is JobState.SUCCEEDED


def exit_on(world: World, name: str) -> None:
    site = world.sites[name]
    for token in site.in_phase("running"):
        site.exit_program(token, 0)


def hear(world: World, name: str, full: bool) -> None:
    world.deliver(name, None if full else 1)
    world.run_commands(name, None if full else 1)
