"""Leases: the next attempt of a job starts only when the earlier one has certainly ended."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.errors import ConflictError
from koalapy.model.job import NO_LEASE, WALLTIME_ALLOWANCE, JobId, JobState, lease_of, with_margin
from koalapy.model.job_spec import Launcher
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.events import ClusterDisconnected
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

LONG = 20_000.0


def disconnect_running_job(lease: float = 100.0, **spec: object) -> tuple[World, JobId]:
    """Run a job on north, then disconnect north."""
    world = World({"north": 2, "south": 2}, lease=lease)
    job = world.submit(flexible(2), run_time=LONG, **spec)  # type: ignore[arg-type]
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    world.disconnect("north")
    return world, job


def loss_time(world: World, job: JobId) -> float | None:
    attempt = world.job(job).attempt
    assert attempt is not None
    return attempt.components[0].lost_at


def test_lease_of_job_overrides_cluster_and_default() -> None:
    assert lease_of(None, None) == 2400
    assert lease_of(None, 60.0) == 60
    assert lease_of(30.0, 60.0) == 30
    assert lease_of(NO_LEASE, 60.0) is None
    assert lease_of(None, NO_LEASE) is None


def test_lease_expired_component_is_lost_after_margin() -> None:
    world, job = disconnect_running_job()
    world.advance(with_margin(100) - 1)
    assert world.state(job) is JobState.UNKNOWN
    assert loss_time(world, job) == 1 + with_margin(100)
    world.advance(2)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)


@pytest.mark.parametrize("is_declared", [False, True])
def test_lost_component_keeps_that_its_end_was_never_reported(is_declared: bool) -> None:
    world, job = disconnect_running_job(max_restarts=0)
    certain_end = 1 + with_margin(100)
    if is_declared:
        world.declare_lost("north")
    world.advance(certain_end)
    world.connect("north")
    world.advance(1)
    assert world.state(job) is JobState.FAILED
    (component,) = world.job(job).attempt.components  # type: ignore[union-attr]
    assert (component.unknown_since, component.lost_at) == (1.0, None if is_declared else certain_end)


def test_unknown_component_that_reports_its_end_is_not_lost() -> None:
    world, job = disconnect_running_job(max_restarts=0)
    world.advance(50)
    world.sites["north"].fail_component("1.1.0", "node lost")
    world.sites["north"].end_component("1.1.0")
    world.connect("north")
    world.advance(1)
    assert world.state(job) is JobState.FAILED
    (component,) = world.job(job).attempt.components  # type: ignore[union-attr]
    assert (component.unknown_since, component.lost_at) == (None, None)


def test_lease_with_warning_includes_grace() -> None:
    world, job = disconnect_running_job(warning=StopWarning(WarningSignal.TERM, 50.0))
    world.advance(with_margin(150) - 1)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2


def test_lease_of_job_delays_loss_beyond_cluster_lease() -> None:
    world = World({"north": 2, "south": 2}, lease=100.0)
    job = world.submit(flexible(2), run_time=LONG, lease=500.0)
    world.advance(1)
    world.disconnect("north")
    world.advance(with_margin(500) - 1)
    assert world.job(job).generation == 1


def test_lease_disabled_job_waits_for_cluster() -> None:
    world, job = disconnect_running_job(lease=NO_LEASE)
    world.advance(4000)
    assert (world.state(job), world.job(job).generation, loss_time(world, job)) == (JobState.UNKNOWN, 1, None)
    assert world.job(job).reason == (
        "north is out of reach, where it may still run: tried again once that is over (koala clusters lost north)"
    )
    world.connect("north")
    assert world.state(job) is JobState.RUNNING


def test_lease_disabled_job_restarts_after_walltime() -> None:
    world, job = disconnect_running_job(lease=NO_LEASE, walltime=3600)
    world.advance(1)
    world.sites["north"].end_component("1.1.0")  # ended by its runner while disconnected
    world.advance(with_margin(3600 + WALLTIME_ALLOWANCE) - 2)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2
    (error,) = world.reasons(job, "error")
    assert error.endswith("and its walltime is over")


def test_walltime_starts_again_with_new_daemon() -> None:
    """The clock of the new daemon may differ."""
    world, job = disconnect_running_job(lease=NO_LEASE, walltime=3600)
    world.advance(3000)
    world.restart()
    world.connect("south")
    world.advance(3000)
    assert world.job(job).generation == 1


def test_lease_starts_again_with_new_daemon() -> None:
    """The new daemon does not know when the cluster was last heard."""
    world, job = disconnect_running_job()
    world.advance(with_margin(100) - 10)
    world.restart()
    world.connect("south")
    assert world.job(job).generation == 1
    world.advance(with_margin(100) - 1)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2


def test_cluster_declared_lost_restarts_jobs_at_once() -> None:
    world, job = disconnect_running_job(lease=NO_LEASE)
    world.advance(10)
    world.declare_lost("north", "its hall has burned down")
    world.advance(1)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)
    assert world.reasons(job, "error") == ["north was declared lost: its hall has burned down"]
    world.connect("north")
    assert not world.sites["north"].runners, "remaining components are ended"


def test_cluster_declared_lost_releases_ending_jobs() -> None:
    """A component on south has failed, and the job waits for its component on north."""
    world = World({"north": 2, "south": 4}, lease=NO_LEASE)
    job = world.submit(fixed(north=2, south=2), run_time=LONG)
    world.advance(1)
    world.disconnect("north")
    world.advance(10)
    world.sites["south"].fail_component("1.1.1", "node lost")
    world.sites["south"].end_component("1.1.1")
    world.advance(10)
    assert world.job(job).ending is JobState.QUEUED
    world.declare_lost("north")
    assert world.state(job) is JobState.QUEUED


def test_cluster_connected_cannot_be_declared_lost() -> None:
    world = World({"north": 2})
    with pytest.raises(ConflictError, match="north cannot be declared lost while its agent is connected") as error:
        world.declare_lost("north")
    assert "koala clusters drain north --requeue" in error.value.hint


def test_superseded_claim_on_disconnected_cluster_blocks_no_attempt() -> None:
    """Its barrier never opened, so it cannot run the program."""
    world = World({"north": 2, "south": 2}, Rules(claim_grace=5), lease=NO_LEASE)
    user = world.sites["north"].add_local_user(2)
    north = world.queries.grid["north"]
    north.nodes.last_report = replace(north.last_report, idle=2)  # as reported earlier
    job = world.submit(flexible(2), run_time=LONG)
    world.advance(30)
    world.sites["north"].remove_local_user(user)
    assert world.state(job) is JobState.RUNNING


def test_lease_not_reported_by_agent_waits_for_cluster() -> None:
    """Runners of an earlier version do not end without contact."""
    world = World({"north": 2, "south": 2}, lease=100.0)
    world.sites["north"].lease_of = lambda token: None
    job = world.submit(flexible(2), run_time=LONG)
    world.advance(1)
    world.disconnect("north")
    world.advance(4000)
    assert (world.state(job), world.job(job).generation) == (JobState.UNKNOWN, 1)


drawn_seconds = st.one_of(st.sampled_from([0.0, 0.5, 5.0, 5.1]), st.floats(0.0, 400.0))
drawn_lags = st.sampled_from([0.0, 0.0, 1.0, 5.0])
drawn_events = st.lists(
    st.one_of(
        st.tuples(st.just("disconnect"), st.sampled_from(["north", "south", "west"]), drawn_lags),
        st.tuples(st.just("connect"), st.sampled_from(["north", "south", "west"]), st.just(0.0)),
        st.tuples(st.just("restart"), st.just(""), st.just(0.0)),
        st.tuples(st.just("sleep"), st.just(""), drawn_seconds),
        st.tuples(st.just("wait"), st.just(""), drawn_seconds),
    ),
    max_size=15,
)


@given(
    drawn_events,
    st.sampled_from([0.001, 3.0, 20.0, 100.0]),
    st.sampled_from([None, 0.5, 30.0]),
    st.sampled_from([None, 50.0, 1000.0]),
    st.sampled_from(list(Launcher)),
)
@example([("disconnect", "north", 0.0), ("wait", "", 141.0)], 100.0, 30.0, 50.0, Launcher.OPENMPI)  # walltime first
def test_attempts_never_overlap_under_random_disconnects(
    events: list[tuple[str, str, float]], lease: float, grace: float | None, walltime: float | None, launcher: Launcher
) -> None:
    """Invariants are checked at each step; runners end expired components as late as they may."""
    warning = None if grace is None or (walltime or LONG) <= grace else StopWarning(WarningSignal.TERM, grace)
    world = World({"north": 2, "south": 2, "west": 2}, Rules(max_restarts=None, probation_pause=5.0), lease=lease)
    wide_job = world.submit(flexible(4), run_time=600.0, launcher=launcher, warning=warning, walltime=walltime)
    narrow_job = world.submit(flexible(1), run_time=600.0, launcher=launcher, warning=warning, walltime=walltime)
    world.advance(1)
    for event, name, duration_s in events:
        match event:
            case "disconnect" if world.sites[name].connected:
                disconnect_silently(world, name, duration_s)
            case "connect" if not world.sites[name].connected:
                world.connect(name)
            case "restart":
                world.restart()
            case "sleep":  # the daemon sleeps, so its steps are late
                world.now += duration_s
                world.step()
            case "wait":
                world.advance(duration_s)
    for name, site in world.sites.items():
        if not site.connected:
            world.connect(name)
    world.advance(LONG)
    assert {world.state(wide_job), world.state(narrow_job)} <= {JobState.SUCCEEDED, JobState.FAILED}
    check_nothing_remains(world)


def disconnect_silently(world: World, name: str, lag: float) -> None:
    """Disconnect a cluster and report that to the scheduler ``lag`` seconds later."""
    last_contact_at = world.now
    world._disconnect_site(world.sites[name])
    world._ready.discard(name)
    world.now += lag
    world.step([ClusterDisconnected(name, "no answer", last_contact_at)])
