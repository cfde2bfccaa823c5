"""Warnings before a preemption, drain or cancellation, and the grace that follows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import ComponentState, JobId, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.effects import StopComponent
from koalapy.scheduler.events import ClusterDrained, ClusterResumed, JobCancelled
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, nonfixed
from tests.scheduler.world import World

GRACE = 30.0
WARNING = StopWarning(WarningSignal.TERM, GRACE)
WARNED_REASON = "SIGTERM, 30 s before it is stopped"


def start_warned_job(world: World, *, run_time: float = 500.0, **spec: Any) -> JobId:
    """Run a low-priority job with a warning on all of north."""
    job = world.submit(fixed(north=4), run_time=run_time, **{"warning": WARNING, **spec})
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    return job


def stop_warnings(world: World, job: JobId) -> list[StopWarning | None]:
    return [c.warning for c in world._sent_for(job) if isinstance(c, StopComponent)]


def drain_cluster(world: World, name: str = "north", reason: str = "") -> None:
    world.step([ClusterDrained(name, "op", reason, requeue=True)])


def test_warned_job_preempted_ends_after_grace() -> None:
    world = World({"north": 4})
    low_job = start_warned_job(world)
    high_job = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(GRACE - 2)
    assert (stop_warnings(world, low_job), world.reasons(low_job, "warned")) == ([WARNING], [WARNED_REASON])
    assert (world.job(low_job).ending, world.state(high_job)) == (JobState.QUEUED, JobState.CLAIMING)
    assert world.job(low_job).attempt.components[0].warned_at == 1.0  # type: ignore[union-attr]
    assert world.queries.grid["north"].nodes.expected == 0, "its nodes are promised to the high job"
    world.advance(3)
    assert (world.state(low_job), world.state(high_job)) == (JobState.QUEUED, JobState.RUNNING)
    assert (world.job(low_job).restarts, world.job(high_job).generation) == (0, 1)
    world.advance(2000)
    assert world.state(low_job) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("code", [0, 3])
def test_warned_job_ending_within_grace_is_requeued(code: int) -> None:
    world = World({"north": 4})
    low_job = start_warned_job(world, run_time=10, code=code)
    high_job = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(11)
    assert (world.state(low_job), world.state(high_job)) == (JobState.QUEUED, JobState.RUNNING)
    assert "not-warned" not in world.timeline_events(low_job)


@pytest.mark.parametrize("grace", [100.0, 130.0, 600.0])
def test_claim_waits_for_grace_longer_than_barrier_timeout(grace: float) -> None:
    world = World({"north": 4, "south": 2}, Rules(claim_grace=5, barrier_timeout=60))
    low_job = start_warned_job(world, run_time=1e6, warning=StopWarning(WarningSignal.USR1, grace))
    high_job = world.submit(fixed(north=4, south=2), priority=Priority.HIGH)
    world.advance(grace - 1)
    assert world.state(high_job) is JobState.CLAIMING
    world.advance(2)
    assert (world.state(high_job), world.job(high_job).generation) == (JobState.RUNNING, 1)
    assert (world.state(low_job), world.reasons(high_job, "requeued")) == (JobState.QUEUED, [])


def test_claim_fails_if_nodes_are_kept_after_grace() -> None:
    world = World({"north": 4}, Rules(claim_grace=5, barrier_timeout=60))
    low_job = start_warned_job(world, run_time=1e6)
    world.sites["north"].stuck_components.update(world.tokens(low_job))
    high_job = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(GRACE + 50)
    assert world.state(high_job) is JobState.CLAIMING
    world.advance(20)
    assert world.reasons(high_job, "requeued") == ["claim-failed: north does not let go of 4 nodes"]


def test_grace_is_limited_by_current_rules() -> None:
    """The rules may have permitted more at submission."""
    world = World({"north": 4}, Rules(warning_max=10))
    low_job = world.submit_together([make_spec()])[0]
    world.advance(1)
    world.submit(fixed(north=4), priority=Priority.HIGH)
    assert stop_warnings(world, low_job) == [StopWarning(WarningSignal.TERM, 10.0)]


def make_spec() -> JobSpec:
    return JobSpec(fixed(north=4), ("program",), launcher=Launcher.PROCESSES, policy="fixed", warning=WARNING)


@pytest.mark.parametrize("phase", ["claimed", "opened"])
def test_stop_of_unstarted_job_has_no_warning(phase: str) -> None:
    world = World({"north": 4}, manual=True)
    world.connect("north")
    site = world.sites["north"]
    low_job = world.submit(fixed(north=4), warning=WARNING)
    world.settle()
    (token,) = world.tokens(low_job)
    if phase == "opened":
        site.report_claimed(token)
        world.deliver("north")
    world.submit(fixed(north=4), priority=Priority.HIGH)
    assert stop_warnings(world, low_job) == [None]


def test_stop_on_cluster_without_warnings_is_in_timeline() -> None:
    world = World({"north": 4, "south": 2})
    world.sites["south"].supports_warnings = False
    low_job = world.submit(fixed(north=4, south=2), run_time=500, warning=WARNING)
    world.advance(1)
    world.submit(fixed(south=2), priority=Priority.HIGH)
    world.advance(1)
    assert world.reasons(low_job, "warned") == [WARNED_REASON]
    assert world.reasons(low_job, "not-warned") == [
        "south stopped it at once: its agent or runner is of an earlier version, or was away"
    ]
    world.advance(GRACE)
    assert len(world.reasons(low_job, "requeued")) == 1
    assert world.timeline_events(low_job).count("not-warned") == 1


def test_drain_with_requeue_warns_jobs() -> None:
    world = World({"north": 4, "south": 4})
    warned_job = world.submit(nonfixed(4), run_time=100, warning=WARNING)
    other_job = world.submit(nonfixed(4), run_time=100)
    world.advance(1)
    clusters = {job: world.job(job).attempt.components[0].cluster for job in (warned_job, other_job)}  # type: ignore[union-attr]
    drain_cluster(world, clusters[warned_job], "new disks")
    assert (stop_warnings(world, warned_job), stop_warnings(world, other_job)) == ([WARNING], [])
    world.advance(GRACE + 1)
    assert world.reasons(warned_job, "requeued") == [f"drained: {clusters[warned_job]}: new disks"]
    assert (world.state(warned_job), world.job(warned_job).restarts) == (JobState.QUEUED, 0)
    drain_cluster(world, clusters[warned_job])
    world.advance(200)
    assert [world.state(job) for job in (warned_job, other_job)] == [JobState.SUCCEEDED] * 2
    assert next(entry.actor for entry in world.timeline if entry.event == "ending" and entry.job == warned_job) == "op"


def test_drain_stops_unclaimed_component_without_warning() -> None:
    world = World({"north": 4}, manual=True)
    world.connect("north")
    waiting = world.submit(fixed(north=2), warning=WARNING)
    world.settle()
    drain_cluster(world)
    drain_cluster(world)
    assert stop_warnings(world, waiting) == [None]
    world.settle()
    assert world.reasons(waiting, "requeued") == ["drained: north is to be empty"]


def test_drain_spares_job_with_ended_program() -> None:
    """Its exit code follows its output; a requeued job would run twice."""
    world = World({"north": 4}, manual=True)
    world.connect("north")
    world.start_automation()
    job = start_warned_job(world)
    (token,) = world.tokens(job)
    world.queries.grid["north"].nodes.exited.add(token)
    drain_cluster(world)
    assert (stop_warnings(world, job), world.job(job).ending) == ([], None)


def test_walltime_warning_by_runners_keeps_exit_code() -> None:
    world = World({"north": 4})
    job = start_warned_job(world, run_time=80, code=7, walltime=100.0)
    world.advance(70)
    site, (token,) = world.sites["north"], world.tokens(job)
    site.warn(token)
    site.report_component(token)
    world.settle()
    assert (world.reasons(job, "warned"), stop_warnings(world, job)) == ([WARNED_REASON], [])
    cluster = world.queries.grid["north"]
    assert (cluster.nodes.leaving, cluster.nodes.preemptible) == (4, 0), "the nodes will be released soon"
    high_job = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(5)
    assert (world.state(job), world.state(high_job)) == (JobState.RUNNING, JobState.CLAIMING)
    world.advance(10)
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 7)
    assert world.state(high_job) is JobState.RUNNING


@pytest.mark.parametrize("is_warned", [False, True])
def test_walltime_stops_program_without_grace(is_warned: bool) -> None:
    world = World({"north": 4})
    job = start_warned_job(world, walltime=100.0)
    world.advance(75)
    if is_warned:
        world.sites["north"].warn(world.tokens(job)[0])
    world.advance(26)
    assert (world.state(job), stop_warnings(world, job)) == (JobState.FAILED, [None])
    assert ("warned" in world.timeline_events(job), "not-warned" in world.timeline_events(job)) == (
        is_warned,
        not is_warned,
    )
    assert world.job(job).reason == "walltime of 100 s exceeded"


def test_cancel_warns_only_on_request() -> None:
    world = World({"north": 4})
    job = start_warned_job(world)
    world.cancel(job)
    world.advance(1)
    assert (world.state(job), stop_warnings(world, job)) == (JobState.CANCELLED, [None])
    job = start_warned_job(world)
    world.cancel(job, warn=True)
    world.advance(GRACE - 1)
    assert (world.state(job), world.job(job).ending) == (JobState.RUNNING, JobState.CANCELLED)
    world.advance(2)
    assert (world.state(job), stop_warnings(world, job)) == (JobState.CANCELLED, [WARNING])


@pytest.mark.parametrize("cause", ["preempted", "warned"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_cancel_ends_grace(cause: str, is_restarted: bool) -> None:
    world = World({"north": 4})
    job = start_warned_job(world)
    if cause == "preempted":
        world.submit(fixed(north=4), priority=Priority.HIGH)
    else:
        world.cancel(job, warn=True)
    world.advance(5)
    if is_restarted:
        world.restart()
        world.connect("north")
    world.cancel(job)
    world.advance(0)
    assert (world.state(job), stop_warnings(world, job)) == (JobState.CANCELLED, [WARNING, None])
    assert "not-warned" not in world.timeline_events(job)


def test_cancel_with_warning_within_grace_keeps_its_end() -> None:
    world = World({"north": 4})
    job = start_warned_job(world)
    world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(5)
    world.cancel(job, warn=True)
    world.step([JobCancelled(job, warn=True)])
    world.advance(GRACE - 6)
    assert world.state(job) is JobState.RUNNING
    world.advance(2)
    assert (world.state(job), stop_warnings(world, job)) == (JobState.CANCELLED, [WARNING])


def test_grace_continues_after_daemon_restart() -> None:
    world = World({"north": 4}, Rules(claim_grace=5, barrier_timeout=20))
    low_job = start_warned_job(world, run_time=1e6, warning=StopWarning(WarningSignal.TERM, 100.0))
    high_job = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(10)
    world.restart()
    world.connect("north")
    component = world.job(low_job).attempt.components[0]  # type: ignore[union-attr]
    assert (component.state, component.warned_at) == (ComponentState.STOPPING, 1.0)
    world.advance(85)
    assert (world.job(low_job).ending, len(stop_warnings(world, low_job))) == (JobState.QUEUED, 1)
    assert world.state(high_job) is JobState.CLAIMING, "it waits for promised nodes"
    world.advance(10)
    assert (world.state(low_job), world.state(high_job)) == (JobState.QUEUED, JobState.RUNNING)
    assert world.timeline_events(low_job).count("warned") == 1


def test_warning_reported_for_job_without_warning_is_ignored() -> None:
    world = World({"north": 4})
    job = start_warned_job(world, warning=None)
    world.sites["north"].warn(world.tokens(job)[0])
    world.settle()
    assert ("warned" in world.timeline_events(job), world.queries.grid["north"].nodes.leaving) == (False, 0)


@given(st.data())
def test_warned_jobs_finish_under_random_actions(data: st.DataObject) -> None:
    """Invariants are checked at each step."""
    world = World({"north": 4, "south": 2}, Rules(claim_grace=5, barrier_timeout=20))
    world.sites["south"].supports_warnings = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(3, 10))):
        live = [job_id for job_id, job in world.jobs.items() if not job.state.is_final]
        match data.draw(st.sampled_from(["low", "low", "high", "cancel", "warn", "drain", "resume", "restart"])):
            case "low":
                grace = data.draw(st.sampled_from([1.0, 30.0]))
                sizes = data.draw(st.sampled_from([{"north": 4}, {"north": 2, "south": 2}, {"south": 1}]))
                warning = StopWarning(WarningSignal.TERM, grace)
                world.submit(fixed(**sizes), run_time=data.draw(st.sampled_from([5.0, 60.0])), warning=warning)
            case "high":
                world.submit(fixed(north=3), priority=Priority.HIGH)
            case "cancel" if live:
                world.cancel(data.draw(st.sampled_from(live)))
            case "warn" if live:
                world.cancel(data.draw(st.sampled_from(live)), warn=True)
            case "drain":
                drain_cluster(world)
            case "resume":
                resume_cluster(world)
            case "restart":
                world.restart()
                for name in world.sites:
                    world.connect(name)
        world.advance(data.draw(st.sampled_from([0.0, 1.0, 7.0])))
    resume_cluster(world)
    world.advance(3000)
    assert all(job.state.is_final for job in world.jobs.values())
    check_nothing_remains(world)


def resume_cluster(world: World) -> None:
    world.step([ClusterResumed("north")])
