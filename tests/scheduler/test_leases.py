"""The next attempt of a job begins only when the earlier one is certainly over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import ConflictError
from koalapy.model.job import NO_LEASE, WALLTIME_ALLOWANCE, JobId, JobState, Launcher, lease_of, with_margin
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.events import ClusterDisconnected
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

LONG = 20_000.0


def running(lease: float = 100.0, **spec: object) -> tuple[World, JobId]:
    """A job that runs on north, which has just gone out of reach."""
    world = World({"north": 2, "south": 2}, lease=lease)
    job = world.submit(flexible(2), run_time=LONG, **spec)  # type: ignore[arg-type]
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    world.disconnect("north")
    return world, job


def lost_at(world: World, job: JobId) -> float | None:
    attempt = world.job(job).attempt
    assert attempt is not None
    return attempt.components[0].lost_at


def test_lease_of_job_comes_before_that_of_cluster() -> None:
    assert lease_of(None, None) == 2400
    assert lease_of(None, 60.0) == 60
    assert lease_of(30.0, 60.0) == 30
    assert lease_of(NO_LEASE, 60.0) is None
    assert lease_of(None, NO_LEASE) is None


def test_component_of_silent_cluster_is_lost_after_lease_and_margin() -> None:
    world, job = running()
    world.advance(with_margin(100) - 1)
    assert world.state(job) is JobState.UNKNOWN
    assert lost_at(world, job) == 1 + with_margin(100)
    world.advance(2)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)


def test_component_with_warning_is_lost_after_lease_and_grace_and_margin() -> None:
    world, job = running(warning=StopWarning(WarningSignal.TERM, 50.0))
    world.advance(with_margin(150) - 1)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2


def test_lease_of_job_overrides_lease_of_cluster() -> None:
    world = World({"north": 2, "south": 2}, lease=100.0)
    job = world.submit(flexible(2), run_time=LONG, lease=500.0)
    world.advance(1)
    world.disconnect("north")
    world.advance(with_margin(500) - 1)
    assert world.job(job).generation == 1


def test_job_without_lease_waits_until_its_cluster_is_back() -> None:
    world, job = running(lease=NO_LEASE)
    world.advance(4000)
    assert (world.state(job), world.job(job).generation, lost_at(world, job)) == (JobState.UNKNOWN, 1, None)
    assert world.job(job).reason == (
        "north is out of reach, where it may still run: tried again once that is over (koala clusters lost north)"
    )
    world.connect("north")
    assert world.state(job) is JobState.RUNNING


def test_job_without_lease_is_tried_again_once_its_walltime_is_certainly_over() -> None:
    world, job = running(lease=NO_LEASE, walltime=3600)
    world.advance(1)
    world.sites["north"].end_component("1.1.0")  # as its runner does, whoever knows it
    world.advance(with_margin(3600 + WALLTIME_ALLOWANCE) - 2)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2
    (error,) = world.reasons(job, "error")
    assert error.endswith("and its walltime is over")


def test_walltime_that_an_earlier_daemon_counted_begins_anew() -> None:
    """Its clock may have been another."""
    world, job = running(lease=NO_LEASE, walltime=3600)
    world.advance(3000)
    world.restart()
    world.connect("south")
    world.advance(3000)
    assert world.job(job).generation == 1


def test_lease_counts_anew_from_the_beginning_of_a_daemon() -> None:
    """What the daemon before it has heard, and when, is not known."""
    world, job = running()
    world.advance(with_margin(100) - 10)
    world.restart()
    world.connect("south")
    assert world.job(job).generation == 1
    world.advance(with_margin(100) - 1)
    assert world.job(job).generation == 1
    world.advance(2)
    assert world.job(job).generation == 2


def test_cluster_declared_lost_has_its_jobs_tried_again_at_once() -> None:
    world, job = running(lease=NO_LEASE)
    world.advance(10)
    world.declare_lost("north", "its hall has burned down")
    world.advance(1)
    assert (world.state(job), world.job(job).generation) == (JobState.RUNNING, 2)
    assert world.reasons(job, "error") == ["north was declared lost: its hall has burned down"]
    world.connect("north")
    assert not world.sites["north"].runners, "what had lived on is ended"


def test_cluster_declared_lost_lets_go_of_jobs_that_are_ending() -> None:
    """A part on south has failed already, and the job waits for its part on north."""
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


def test_cluster_in_reach_cannot_be_declared_lost() -> None:
    world = World({"north": 2})
    with pytest.raises(ConflictError, match="the agent of north is connected") as caught:
        world.declare_lost("north")
    assert "koala clusters drain north --requeue" in caught.value.hint


def test_superseded_claim_on_silent_cluster_holds_up_no_next_attempt() -> None:
    """Its barrier never opened, so that it cannot run the program."""
    world = World({"north": 2, "south": 2}, Rules(claim_grace=5), lease=NO_LEASE)
    user = world.sites["north"].add_local_user(2)
    world.queries.grid["north"]._idle = 2  # as was reported before
    job = world.submit(flexible(2), run_time=LONG)
    world.advance(30)
    world.sites["north"].remove_local_user(user)
    assert world.state(job) is JobState.RUNNING


def test_agent_that_says_no_lease_is_waited_for() -> None:
    """One of an earlier version: its runners count no silence of the daemon's."""
    world = World({"north": 2, "south": 2}, lease=100.0)
    world.sites["north"].lease_of = lambda token: None
    job = world.submit(flexible(2), run_time=LONG)
    world.advance(1)
    world.disconnect("north")
    world.advance(4000)
    assert (world.state(job), world.job(job).generation) == (JobState.UNKNOWN, 1)


seconds = st.one_of(st.sampled_from([0.0, 0.5, 5.0, 5.1]), st.floats(0.0, 400.0))
lags = st.sampled_from([0.0, 0.0, 1.0, 5.0])
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("disconnect"), st.sampled_from(["north", "south", "west"]), lags),
        st.tuples(st.just("connect"), st.sampled_from(["north", "south", "west"]), st.just(0.0)),
        st.tuples(st.just("restart"), st.just(""), st.just(0.0)),
        st.tuples(st.just("sleep"), st.just(""), seconds),
        st.tuples(st.just("wait"), st.just(""), seconds),
    ),
    max_size=15,
)


@given(
    happenings,
    st.sampled_from([0.001, 3.0, 20.0, 100.0]),
    st.sampled_from([None, 0.5, 30.0]),
    st.sampled_from([None, 50.0, 1000.0]),
    st.sampled_from(list(Launcher)),
)
def test_attempts_never_overlap_whatever_becomes_of_links_agents_and_daemon(
    happenings: list[tuple[str, str, float]],
    lease: float,
    grace: float | None,
    walltime: float | None,
    launcher: Launcher,
) -> None:
    """The world's laws look at each step; its runners end what has no lease as late as they may."""
    warning = None if grace is None or (walltime or LONG) <= grace else StopWarning(WarningSignal.TERM, grace)
    world = World({"north": 2, "south": 2, "west": 2}, Rules(max_restarts=None, probation_pause=5.0), lease=lease)
    wide = world.submit(flexible(4), run_time=600.0, launcher=launcher, warning=warning, walltime=walltime)
    narrow = world.submit(flexible(1), run_time=600.0, launcher=launcher, warning=warning, walltime=walltime)
    world.advance(1)
    for what, name, length in happenings:
        match what:
            case "disconnect" if world.sites[name].connected:
                _fall_silent(world, name, length)
            case "connect" if not world.sites[name].connected:
                world.connect(name)
            case "restart":
                world.restart()
            case "sleep":  # the daemon's own: its steps come late
                world.now += length
                world.step()
            case "wait":
                world.advance(length)
    for name, site in world.sites.items():
        if not site.connected:
            world.connect(name)
    world.advance(LONG)
    assert {world.state(wide), world.state(narrow)} <= {JobState.SUCCEEDED, JobState.FAILED}
    check_nothing_remains(world)


def _fall_silent(world: World, name: str, lag: float) -> None:
    """A cluster hears no more of the daemon, which notices that ``lag`` seconds later."""
    heard = world.now
    world._disconnect_site(world.sites[name])
    world._ready.discard(name)
    world.now += lag
    world.step([ClusterDisconnected(name, "no answer", heard)])
