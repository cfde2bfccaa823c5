"""Deadlines act only on confirmed information, and a sleeping daemon does not count as silence of clusters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import DEFAULT_LEASE, ComponentState, JobId, JobState
from koalapy.model.job_spec import Launcher
from koalapy.model.reports import ComponentStatus
from koalapy.scheduler.attempts.contact import CONFIRMATION_TIMEOUT
from koalapy.scheduler.events import ClusterConfirmed, ClusterDisconnected, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

RULES = Rules(claim_grace=10, barrier_timeout=30, unreachable_after=5, scan_interval=1000)
BOTH_LAUNCHERS = pytest.mark.parametrize("launcher", list(Launcher))


def run_cycles(world: World, rounds: int = 4) -> None:
    """Carry out all commands and deliver all messages at the current time."""
    for _ in range(rounds):
        for name, site in world.sites.items():
            world.run_commands(name)
            for token in site.startable():
                site.report_claimed(token)
            world.deliver(name)


def submit_running_job(launcher: Launcher, lease: float = DEFAULT_LEASE, **options: Any) -> tuple[World, JobId]:
    world = World({"north": 4, "south": 4}, RULES, manual=True, lease=lease)
    run_cycles(world)
    job = world.submit(fixed(north=2, south=2), launcher=launcher, **{"walltime": 60, **options})
    run_cycles(world)
    assert world.state(job) is JobState.RUNNING
    return world, job


def exit_programs(world: World) -> None:
    for site in world.sites.values():
        for token in site.in_phase("running"):
            site.exit_program(token, 0)


@BOTH_LAUNCHERS
def test_walltime_exceeded_job_ends_after_all_confirm(launcher: Launcher) -> None:
    world, job = submit_running_job(launcher)
    world.now = 60.0
    world.step()
    world.step([ClusterConfirmed("north", 60.0)])
    assert world.job(job).ending is None, "south has not confirmed"
    world.step([ClusterConfirmed("south", 59.99)])
    assert world.job(job).ending is None, "the confirmation is older than the deadline"
    run_cycles(world)
    assert world.job(job).reason == "walltime of 60 s exceeded"


@BOTH_LAUNCHERS
def test_walltime_exited_program_may_deliver_output_later(launcher: Launcher) -> None:
    """The exit code follows the output, long after the deadline."""
    world, job = submit_running_job(launcher)
    world.now = 59.0
    for token in world.tokens(job):
        world.step([Reported(world.site_of(token).name, ComponentStatus(token, ComponentState.RUNNING, over=True))])
    for world.now in (60.0, 65.0, 70.0, 75.0):
        world.step()
        run_cycles(world)
        assert world.job(job).ending is None
    exit_programs(world)
    run_cycles(world)
    assert world.job(job).ending is JobState.SUCCEEDED


def test_walltime_partially_exited_program_is_ended() -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    world.step([Reported("north", ComponentStatus(world.tokens(job)[0], ComponentState.RUNNING, over=True))])
    world.now = 60.0
    world.step()
    run_cycles(world)
    assert world.job(job).reason == "walltime of 60 s exceeded"


def test_confirmation_is_requested_once_for_all_deadlines() -> None:
    world = World({"north": 4}, RULES, manual=True)
    run_cycles(world)
    for _ in range(4):
        world.submit(fixed(north=1), walltime=60)
    run_cycles(world)
    request_count = 0
    for world.now in (60.0, 60.5, 65.0):
        effects = world.scheduler.step([], world.now)
        request_count += len(effects.confirm)
        world.apply_effects(effects)
    assert request_count == 1
    run_cycles(world)
    assert all(job.ending for job in world.queries.jobs())


@pytest.mark.parametrize("reconnects", [True, False])
def test_confirmation_missing_waits_until_cluster_is_lost(reconnects: bool) -> None:
    """After a reconnect the confirmation is requested again; without one the cluster counts as lost."""
    world, job = submit_running_job(Launcher.PROCESSES)
    world.now = 60.0
    world.step()
    world.disconnect("south")
    world.now = 65.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    run_cycles(world)
    assert world.job(job).ending is None
    if reconnects:
        world.connect("south")
        run_cycles(world)
        assert world.job(job).reason == "walltime of 60 s exceeded"
        return
    while world.now < 160:
        world.now += 5
        world.step()
    assert world.reasons(job, "error") == ["not heard of for 100 s, and its walltime is over"]


@pytest.mark.parametrize("flaps", [False, True])
def test_confirmation_never_sent_times_out(flaps: bool) -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    world.sites["south"].enforces_walltime = False
    run_cycles(world)
    while world.job(job).ending is None and world.now < 1000:
        world.now += 5
        world.step([ClusterConfirmed("north", world.now)])
        if flaps:
            world.disconnect("south")
            world.connect("south")
            world.deliver("south")
    assert world.now == 60 + CONFIRMATION_TIMEOUT + RULES.unreachable_after
    assert world.job(job).reason == "walltime of 60 s exceeded"


def test_confirmation_of_reconnected_cluster_is_awaited_by_next_deadline() -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    world.now = 60.0
    world.step()
    world.disconnect("south")
    world.submit(fixed(north=1), walltime=5000)
    world.step([ClusterConfirmed("north", 60.0)])
    world.cancel(job)
    world.now = 70.0
    world.connect("south")
    run_cycles(world)
    world.start_automation()
    late_job = world.submit(fixed(south=2), walltime=60)
    run_cycles(world)
    while world.now < 140:
        world.now += 1
        world.step()
    assert world.state(late_job) is JobState.RUNNING
    assert world.job(late_job).ending is None, "south has not confirmed"


def test_claim_with_unreported_success_is_kept() -> None:
    world = World({"north": 4}, RULES, manual=True)
    run_cycles(world)
    user = world.sites["north"].add_local_user(4)
    job = world.submit(fixed(north=4))
    run_cycles(world)
    world.sites["north"].remove_local_user(user)
    world.sites["north"].report_claimed(world.tokens(job)[0])
    world.now = 11.0
    world.step()
    assert world.state(job) is JobState.CLAIMING
    run_cycles(world)
    assert world.state(job) is JobState.RUNNING
    assert "claim-failed" not in world.timeline_events(job)


def test_stop_is_not_sent_to_ended_components() -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    exit_programs(world)
    for name, site in world.sites.items():
        world.deliver(name)
        for token in site.in_phase("running"):
            site.end_component(token)
    assert world.job(job).ending is JobState.SUCCEEDED
    world.now = 3.0
    world.step()
    run_cycles(world)
    assert world.state(job) is JobState.SUCCEEDED
    assert "Stop" not in [kind for kind, _ in world.commands(job)]


# Our own sleep


@pytest.mark.parametrize("sleep_s", [130.0, DEFAULT_LEASE - 10])
def test_daemon_sleep_is_not_cluster_silence(sleep_s: float) -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    world.disconnect("south")
    world.now = 2.0
    world.step()
    world.now += sleep_s
    world.step()
    assert world.state(job) is JobState.RUNNING, "messages of south are not processed yet"
    world.now += 4.9
    world.step()
    world.connect("south")
    run_cycles(world)
    assert "unknown" not in world.timeline_events(job)
    assert world.job(job).restarts == 0


def test_silence_counts_only_while_daemon_is_awake() -> None:
    world, job = submit_running_job(Launcher.PROCESSES, lease=29.0, walltime=None)
    world.disconnect("south")
    awake_s = 0.0
    while not world.reasons(job, "error"):
        for _ in range(4):
            world.now += 5
            awake_s += 5
            world.step()
        world.now += 300
        world.step()
        assert awake_s < 200
    assert awake_s >= world.loss_delay("south")
    (error,) = world.reasons(job, "error")
    assert error.endswith("and its lease is over")


def test_silence_noticed_late_starts_at_last_message() -> None:
    world, job = submit_running_job(Launcher.PROCESSES)
    world.now = 20.0
    world.disconnect("south")
    world.connect("south")
    run_cycles(world)
    world.now = 40.0
    world.step([ClusterDisconnected("south", "no answer", heard=36.0)])
    world.now = 41.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.unknown_since for c in attempt.components if c.state is ComponentState.RUNNING] == [None, 36.0]


# Whatever the order and the delays

drawn_times = st.floats(0, 90, allow_nan=False)


@given(
    launcher=st.sampled_from(Launcher),
    exit_times=st.tuples(drawn_times, drawn_times),
    deliveries=st.lists(st.tuples(st.sampled_from(["north", "south"]), drawn_times, st.booleans()), max_size=8),
    steps=st.lists(drawn_times, max_size=4),
)
def test_walltime_is_decided_by_actual_exit_times(
    launcher: Launcher, exit_times: tuple[float, float], deliveries: list[tuple[str, float, bool]], steps: list[float]
) -> None:
    """Agents and daemon act at random times; ``invariants.check_effects`` compares with actual exit times."""
    world, job = submit_running_job(launcher)
    agenda = [
        (time, lambda name=name: exit_programs_on(world, name))
        for name, time in zip(world.sites, exit_times, strict=True)
    ]
    agenda += [
        (time, lambda name=name, full=full: receive_messages(world, name, full)) for name, time, full in deliveries
    ]
    agenda += [(time, world.step) for time in steps]
    for world.now, act in sorted(agenda, key=lambda entry: entry[0]):
        act()
    world.now = 100.0
    world.step()
    run_cycles(world)
    in_time = [end < 60 for end in exit_times]
    state = world.job(job).ending or world.state(job)
    if in_time[0] if launcher is Launcher.OPENMPI else all(in_time):
        assert state is JobState.SUCCEEDED


def exit_programs_on(world: World, name: str) -> None:
    site = world.sites[name]
    for token in site.in_phase("running"):
        site.exit_program(token, 0)


def receive_messages(world: World, name: str, is_complete: bool) -> None:
    world.deliver(name, None if is_complete else 1)
    world.run_commands(name, None if is_complete else 1)
