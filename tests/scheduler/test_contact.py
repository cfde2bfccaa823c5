"""Disconnected clusters, repeated or late messages of agents, and restarts of the daemon."""

import pytest

from koalapy.model.cluster import ClusterState
from koalapy.model.job import ComponentState, JobState, parse_token
from koalapy.model.job_spec import Launcher
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.scheduler.effects import MAX_STRAYS, ForgetComponent, StopComponent
from koalapy.scheduler.events import InventoryReceived, JobHeld, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

BOTH_LAUNCHERS = pytest.mark.parametrize("launcher", list(Launcher))
CLOCK_TIMES = pytest.mark.parametrize("now", [0.0, 1e9 + 0.1, 1.7e9 + 0.7])


@CLOCK_TIMES
def test_disconnect_makes_job_unknown_until_reconnect(now: float) -> None:
    world = World({"north": 4, "south": 4}, Rules(unreachable_after=5), now=now)
    job = world.submit(flexible(6), run_time=60)
    world.advance(1)
    world.disconnect("south", "its agent has gone")
    assert world.queries.grid["south"].state is ClusterState.UNREACHABLE
    assert world.queries.grid["south"].state_reason == "its agent has gone"
    world.advance(4)
    assert world.state(job) is JobState.RUNNING
    world.advance(1)
    assert world.state(job) is JobState.UNKNOWN
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.unknown_since for c in attempt.components] == [None, now + 1]
    reason = world.job(job).reason
    assert reason.startswith("south is out of reach, where it may still run: tried again at ")
    assert [c.lost_at for c in attempt.components] == [None, now + 1 + world.loss_delay("south")]
    world.advance(30)
    world.connect("south")
    assert world.state(job) is JobState.RUNNING
    world.advance(60)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 0)
    assert world.timeline_events(job).count("unknown") == 1


@pytest.mark.parametrize("now", [0.0, 1.7e9 + 0.25])
def test_disconnect_deadline_without_exact_float_is_met(now: float) -> None:
    """A wakeup must not be an instant too early for its deadline."""
    world = World({"north": 4}, Rules(unreachable_after=5.3), now=now, lease=564.3)
    job = world.submit(fixed(north=4), run_time=2000)
    world.advance(1)
    world.disconnect("north")
    world.advance(6)
    assert world.state(job) is JobState.UNKNOWN
    world.advance(world.loss_delay("north") - 6)
    assert world.state(job) is JobState.QUEUED


def test_disconnect_watch_wakes_at_most_once_a_second() -> None:
    """A short ``unreachable_after`` does not increase the rate."""
    world = World({"north": 4}, Rules(unreachable_after=0.001))
    world.disconnect("north")
    wakeups = 0
    while wakeups < 100 and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= 20.0:
        world.now, wakeups = max(world.now, wakeup), wakeups + 1
        world.step()
    assert wakeups <= 21


def test_disconnect_shorter_than_limit_is_ignored() -> None:
    world = World({"north": 4}, Rules(unreachable_after=5))
    job = world.submit(fixed(north=4), run_time=60)
    world.advance(1)
    for _ in range(4):
        world.disconnect("north")
        world.advance(3)
        world.connect("north")
    world.advance(3)
    assert "unknown" not in world.timeline_events(job)
    world.disconnect("north")
    world.disconnect("north")
    world.advance(6)
    assert world.state(job) is JobState.UNKNOWN


@CLOCK_TIMES
@BOTH_LAUNCHERS
def test_disconnect_longer_than_lease_restarts_job_elsewhere(launcher: Launcher, now: float) -> None:
    world = World({"north": 4, "south": 4}, now=now, lease=560.0)
    job = world.submit(flexible(4), run_time=2000, launcher=launcher)
    world.advance(1)
    world.disconnect("north")
    world.advance(world.loss_delay("north") - 1)
    assert (world.job(job).generation, world.state(job)) == (1, JobState.UNKNOWN)
    world.advance(2)
    assert world.reasons(job, "error") == ["not heard of for 596 s, and its lease is over"]
    assert (world.job(job).generation, world.state(job)) == (2, JobState.RUNNING)
    lost_site = world.sites["north"]
    assert lost_site.in_phase("running") == []
    world.connect("north")
    assert not lost_site.runners
    assert world.sent[-1] == ForgetComponent("north", "1.1.0")
    world.advance(3000)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 1)
    check_nothing_remains(world)


def test_stray_component_is_stopped_once() -> None:
    """An agent answers a repeated stop with a status: a stop for each status would never end."""
    world = World({"north": 4})
    for _ in range(5):
        world.step([Reported("north", ComponentStatus("7.1.0", ComponentState.RUNNING))])
    assert [type(c) for c in world.sent] == [StopComponent]
    world.step([Reported("north", ComponentStatus("7.1.0", ComponentState.ENDED))])
    world.step([Reported("north", ComponentStatus("7.1.0", ComponentState.RUNNING))])
    assert [type(c) for c in world.sent] == [StopComponent, ForgetComponent, StopComponent]


def test_stray_components_are_limited_per_cluster() -> None:
    world = World({"north": 4, "south": 4})

    def report_and_count_stops(cluster: str, token: str, state: str = "running") -> int:
        old_count = len(world.sent)
        world.step([Reported(cluster, ComponentStatus(token, ComponentState(state)))])
        return sum(isinstance(command, StopComponent) for command in world.sent[old_count:])

    many = [
        Reported("north", ComponentStatus(f"{job}.1.0", ComponentState.RUNNING))
        for job in range(1000, 997 + MAX_STRAYS)
    ]
    world.step(many)
    assert [report_and_count_stops("north", f"{job}.1.0") for job in range(100, 106)] == [1, 1, 1, 0, 0, 0]
    assert report_and_count_stops("south", "105.1.0") == 1, "other clusters are not affected"
    assert report_and_count_stops("north", "101.1.0", "ended") == 0
    assert [report_and_count_stops("north", f"{job}.1.0") for job in (104, 105)] == [1, 0]


def test_stray_component_is_stopped_again_after_reconnect() -> None:
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    for _ in range(2):
        world.step([InventoryReceived("north", Inventory((ComponentStatus("7.1.0", ComponentState.RUNNING),)))])
    assert [type(c) for c in world.sent] == [StopComponent, StopComponent]


@pytest.mark.parametrize("token", ["nonsense", "1.1.9", "1.1.-1", "1.2.0", "9.1.0"])
def test_report_for_invalid_token_changes_no_job(token: str) -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    old_job = world.job(job)
    world.step([Reported("north", ComponentStatus(token, ComponentState.CLAIMED, hosts=("evil",) * 4))])
    assert world.job(job) is old_job
    assert world.sent[-1] == StopComponent("north", token, "not of a live attempt", stray=True)


def test_report_of_wrong_cluster_changes_no_job() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(fixed(north=4))
    old_job = world.job(job)
    world.step([Reported("south", ComponentStatus("1.1.0", ComponentState.ENDED, error="no", infrastructure=True))])
    assert world.job(job) is old_job
    assert world.queries.grid["north"].nodes.available == 0


def test_report_of_old_attempt_changes_no_job() -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=4))
    world.settle()
    world.sites["north"].fail_component("1.1.0", "node lost")
    world.sites["north"].end_component("1.1.0")
    world.settle()
    assert world.job(job).generation == 2
    current_job = world.job(job)
    for state in (ComponentState.WAITING, ComponentState.CLAIMED, ComponentState.RUNNING):
        world.step([Reported("north", ComponentStatus("1.1.0", state, error="late", infrastructure=True))])
    world.step([Reported("north", ComponentStatus("1.1.0", ComponentState.ENDED, program_exit=1))])
    assert world.job(job) is current_job
    assert [type(c) for c in world.sent[-2:]] == [StopComponent, ForgetComponent]


@BOTH_LAUNCHERS
def test_report_repeated_changes_nothing(launcher: Launcher) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    for _ in range(30):
        for site in world.sites.values():
            for token in [*site.runners]:
                site.report_component(token)
                site.report_component(token)
        world.advance(0.5)
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


def test_restart_after_disconnected_part_is_lost() -> None:
    world = World({"north": 4, "south": 4, "west": 4}, lease=560.0)
    job = world.submit(flexible(8), run_time=2000)
    world.advance(1)
    world.disconnect("north")
    world.advance(60)
    world.sites["south"].fail_component("1.1.1", "node lost")
    world.sites["south"].end_component("1.1.1")
    world.advance(600)
    assert (world.job(job).generation, world.state(job)) == (2, JobState.RUNNING)
    assert world.queries.grid["north"].health.errors == 0, "one failure counts one error"


# Inventories


def test_inventory_without_component_means_lost() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), run_time=60)
    world.advance(1)
    world.disconnect("south")
    world.sites["south"].lose_component("1.1.1")
    world.connect("south")
    assert world.reasons(job, "error") == ["the cluster knows nothing of it"]
    assert world.queries.grid["south"].health.errors == 1
    world.advance(100)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 1)


def test_inventory_incomplete_keeps_missing_component() -> None:
    """The agent has no record of it and the resource manager does not answer yet."""
    world = World({"north": 4, "south": 4}, Rules(unreachable_after=5))
    job = world.submit(flexible(6), run_time=60)
    world.advance(1)
    world.disconnect("south")
    world.advance(6)
    assert world.state(job) is JobState.UNKNOWN
    world.step([InventoryReceived("south", Inventory((), whole=False))])
    assert (world.state(job), world.job(job).restarts) == (JobState.UNKNOWN, 0)
    world.connect("south")
    assert world.state(job) is JobState.RUNNING
    world.advance(60)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 0)


def test_inventory_before_submission_is_no_loss() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    for name in world.sites:
        world.deliver(name)
    job = world.submit(flexible(6))
    world.disconnect("south")
    world.now = 6.0
    world.step()
    assert world.state(job) is JobState.UNKNOWN
    world.connect("south")
    world.start_automation()
    world.settle()
    assert "error" not in world.timeline_events(job)
    world.advance(30)
    assert (world.state(job), world.job(job).restarts) == (JobState.SUCCEEDED, 0)


def test_stop_lost_in_transit_is_sent_again() -> None:
    world = World({"north": 4, "south": 4}, Rules(unreachable_after=5))
    job = world.submit(flexible(6), run_time=1000)
    world.advance(1)
    world.disconnect("south")
    world.cancel(job)
    world.settle()
    assert not world.state(job).is_final, "south may reconnect soon"
    world.advance(5)
    assert world.state(job) is JobState.CANCELLED
    assert world.sites["south"].in_phase("running") == ["1.1.1"]
    world.connect("south")
    assert not world.sites["south"].runners
    check_nothing_remains(world)


# Restarts of the daemon

RESTART_TIMES = {"placed": 0.0, "running": 5.0, "ending": 10.0, "ended": 11.0}


@pytest.mark.parametrize("disconnected_s", [0.0, 3.0, 30.0])
@pytest.mark.parametrize("restart_time", RESTART_TIMES.values(), ids=RESTART_TIMES.keys())
@BOTH_LAUNCHERS
def test_restart_of_daemon_keeps_jobs(launcher: Launcher, restart_time: float, disconnected_s: float) -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    if restart_time:
        world.advance(restart_time)
    world.restart()
    world.advance(disconnected_s)
    for name in world.sites:
        world.connect(name)
    world.advance(30)
    finished = world.job(job)
    assert (finished.state, finished.restarts, finished.generation) == (JobState.SUCCEEDED, 0, 1)
    assert world.timeline_events(job).count("claimed") == 2
    check_nothing_remains(world)


def test_restart_of_daemon_keeps_queue_order() -> None:
    world = World({"north": 4})
    first = world.submit(fixed(north=4), run_time=20)
    waiting = [world.submit(fixed(north=n)) for n in (3, 4, 2)]
    world.step([JobHeld(waiting[1])])
    world.restart()
    world.settle()
    assert world.queries.queued == 2
    world.connect("north")
    world.advance(200)
    assert [world.state(job) for job in (first, *waiting)] == [
        JobState.SUCCEEDED,
        JobState.SUCCEEDED,
        JobState.HELD,
        JobState.SUCCEEDED,
    ]
    starts = [world.job(job).started_at or 0 for job in (waiting[0], waiting[2])]
    assert starts == sorted(starts)
    new_job = world.submit(fixed(north=1))
    assert world.job(new_job).queue_seq > max(world.job(job).queue_seq for job in waiting)


def test_restart_of_daemon_keeps_failed_claim_reason() -> None:
    world = World({"north": 4}, Rules(claim_grace=10))
    world.sites["north"].add_local_user(1)
    job = world.submit(fixed(north=4))
    world.advance(1)
    world.restart()
    world.connect("north")
    world.advance(15)
    assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]
    assert world.queries.grid["north"].health.errors == 0


def test_claim_is_kept_while_cluster_is_disconnected() -> None:
    world = World({"north": 4}, Rules(claim_grace=10))
    user = world.sites["north"].add_local_user(1)
    job = world.submit(fixed(north=4))
    world.advance(1)
    world.disconnect("north")
    world.sites["north"].remove_local_user(user)
    world.advance(30)
    world.connect("north")
    world.advance(30)
    assert (world.state(job), world.job(job).generation) == (JobState.SUCCEEDED, 1)


@pytest.mark.parametrize("ending", [JobState.CANCELLED, JobState.FAILED, JobState.SUCCEEDED, JobState.QUEUED])
def test_restart_of_daemon_finishes_ending_attempt(ending: JobState) -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    for name in world.sites:
        world.deliver(name)
    job = world.submit(fixed(north=4, south=2), launcher=Launcher.OPENMPI)
    world.start_automation()
    world.advance(1)
    world.manual = True
    match ending:
        case JobState.CANCELLED:
            world.cancel(job)
        case JobState.FAILED | JobState.SUCCEEDED:
            world.sites["north"].exit_program("1.1.0", 3 if ending is JobState.FAILED else 0)
        case _:
            world.sites["north"].fail_component("1.1.0", "node lost")
    world.deliver("north")
    assert world.job(job).ending is ending
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.start_automation()
    world.advance(300)
    final = JobState.SUCCEEDED if ending is JobState.QUEUED else ending
    assert world.state(job) is final
    check_nothing_remains(world)


def test_lost_component_of_ending_job_is_not_awaited() -> None:
    world = World({"north": 4, "south": 4}, manual=True)
    for name in world.sites:
        world.deliver(name)
    job = world.submit(fixed(north=4, south=2))
    world.start_automation()
    world.advance(1)
    world.manual = True
    world.cancel(job)
    world.sites["south"].lose_component("1.1.1")
    world.disconnect("south")
    world.connect("south")
    world.deliver("south")
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.components[1].state is ComponentState.ENDED
    world.start_automation()
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    assert [parse_token(t)[0] for t in world.tokens(job)] == [1, 1]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_report_of_agent_without_data_keeps_nodes(is_restarted: bool) -> None:
    """The agent restarted while its resource manager hangs."""
    world = World({"north": 4})
    job = world.submit(fixed(north=3), run_time=1e6)
    world.advance(1)
    world.disconnect("north")
    if is_restarted:
        world.restart()
        world.queries.grid["north"].nodes.last_report = ClusterReport(4, 0)  # as it is stored
    world.step([Reported("north", ClusterReport(0, 0, 0, 0, frozenset(), "not answering"))])
    cluster = world.queries.grid["north"]
    assert (cluster.last_report.total, cluster.nodes.used, cluster.state_reason) == (4, 3, "not answering")
    world.connect("north")
    world.advance(1)
    assert (cluster.last_report.total, cluster.nodes.used, cluster.state_reason, world.state(job)) == (
        4,
        3,
        "",
        JobState.RUNNING,
    )


@pytest.mark.parametrize("source", ["inventory", "silence"])
def test_losses_at_one_time_count_one_error(source: str) -> None:
    world = World({"north": 6}, Rules(error_threshold=3, unreachable_after=5), lease=29.0)
    jobs = [world.submit(fixed(north=2), run_time=1000) for _ in range(3)]
    world.advance(1)
    world.disconnect("north")
    for job in jobs:
        world.sites["north"].lose_component(f"{job}.1.0")
    if source == "silence":
        world.advance(61)
    world.connect("north")
    cluster = world.queries.grid["north"]
    assert [world.job(job).restarts for job in jobs] == [1, 1, 1]
    assert (cluster.health.errors, cluster.state) == (1, ClusterState.USABLE)
    world.disconnect("north")
    world.sites["north"].lose_component("2.2.0")
    world.connect("north")
    assert cluster.health.errors == 2, "a later loss of another job counts separately"
