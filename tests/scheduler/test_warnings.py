"""Programs are warned before their jobs make room, are drained away or cancelled with that: who waits for whom then."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import ComponentState, JobId, JobSpec, JobState, Launcher, Priority
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.effects import StopComponent
from koalapy.scheduler.events import ClusterDrained, ClusterResumed, JobCancelled
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, nonfixed
from tests.scheduler.world import World

GRACE = 30.0
WARNING = StopWarning(WarningSignal.TERM, GRACE)
TOLD = "SIGTERM, 30 s before it is stopped"


def running(world: World, *, run_time: float = 500.0, **spec: Any) -> JobId:
    """A job of low priority that runs on all of north."""
    job = world.submit(fixed(north=4), run_time=run_time, **{"warning": WARNING, **spec})
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    return job


def stops(world: World, job: JobId) -> list[StopWarning | None]:
    return [c.warning for c in world._sent_for(job) if isinstance(c, StopComponent)]


def drain(world: World, name: str = "north", reason: str = "") -> None:
    world.step([ClusterDrained(name, "op", reason, requeue=True)])


def test_a_preempted_job_has_its_grace_and_its_nodes_are_waited_for() -> None:
    world = World({"north": 4})
    low = running(world)
    high = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(GRACE - 2)
    assert (stops(world, low), world.reasons(low, "warned")) == ([WARNING], [TOLD])
    assert (world.job(low).ending, world.state(high)) == (JobState.QUEUED, JobState.CLAIMING)
    assert world.job(low).attempt.components[0].warned_at == 1.0  # type: ignore[union-attr]
    assert world.queries.grid["north"].expected == 0, "what it has is promised to the other"
    world.advance(3)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)
    assert (world.job(low).restarts, world.job(high).generation) == (0, 1)
    world.advance(2000)
    assert world.state(low) is JobState.SUCCEEDED
    check_nothing_remains(world)


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_ends_by_itself_within_the_grace_queues_again(code: int) -> None:
    world = World({"north": 4})
    low = running(world, run_time=10, code=code)
    high = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(11)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)
    assert "not-warned" not in world.timeline_events(low)


@pytest.mark.parametrize("grace", [100.0, 130.0, 600.0])
def test_a_grace_longer_than_the_patience_at_the_barrier_fails_no_claim(grace: float) -> None:
    world = World({"north": 4, "south": 2}, Rules(claim_grace=5, barrier_timeout=60))
    low = running(world, run_time=1e6, warning=StopWarning(WarningSignal.USR1, grace))
    high = world.submit(fixed(north=4, south=2), priority=Priority.HIGH)
    world.advance(grace - 1)
    assert world.state(high) is JobState.CLAIMING
    world.advance(2)
    assert (world.state(high), world.job(high).generation) == (JobState.RUNNING, 1)
    assert (world.state(low), world.reasons(high, "requeued")) == (JobState.QUEUED, [])


def test_who_never_leaves_after_the_grace_is_given_up() -> None:
    world = World({"north": 4}, Rules(claim_grace=5, barrier_timeout=60))
    low = running(world, run_time=1e6)
    world.sites["north"].stuck_components.update(world.tokens(low))
    high = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(GRACE + 50)
    assert world.state(high) is JobState.CLAIMING
    world.advance(20)
    assert world.reasons(high, "requeued") == ["claim-failed: north does not let go of 4 nodes"]


def test_a_grace_is_no_longer_than_the_rules_allow_now() -> None:
    """They may have allowed more when the job was submitted."""
    world = World({"north": 4}, Rules(warning_max=10))
    low = world.submit_together([_spec()])[0]
    world.advance(1)
    world.submit(fixed(north=4), priority=Priority.HIGH)
    assert stops(world, low) == [StopWarning(WarningSignal.TERM, 10.0)]


def _spec() -> JobSpec:
    return JobSpec(fixed(north=4), ("program",), launcher=Launcher.PROCESSES, policy="fixed", warning=WARNING)


@pytest.mark.parametrize("before", ["claimed", "opened"])
def test_who_has_not_begun_is_stopped_at_once(before: str) -> None:
    world = World({"north": 4}, manual=True)
    world.connect("north")
    site = world.sites["north"]
    low = world.submit(fixed(north=4), warning=WARNING)
    world.settle()
    (token,) = world.tokens(low)
    if before == "opened":
        site.report_claimed(token)
        world.deliver("north")
    world.submit(fixed(north=4), priority=Priority.HIGH)
    assert stops(world, low) == [None]


def test_a_cluster_that_knows_no_warnings_stops_at_once_and_the_timeline_says_so() -> None:
    world = World({"north": 4, "south": 2})
    world.sites["south"].supports_warnings = False
    low = world.submit(fixed(north=4, south=2), run_time=500, warning=WARNING)
    world.advance(1)
    world.submit(fixed(south=2), priority=Priority.HIGH)
    world.advance(1)
    assert world.reasons(low, "warned") == [TOLD]
    assert world.reasons(low, "not-warned") == [
        "south stopped it at once: its agent or runner is of an earlier version, or was away"
    ]
    world.advance(GRACE)
    assert len(world.reasons(low, "requeued")) == 1
    assert world.timeline_events(low).count("not-warned") == 1


def test_a_drain_may_have_its_jobs_queue_again_elsewhere() -> None:
    world = World({"north": 4, "south": 4})
    low = world.submit(nonfixed(4), run_time=100, warning=WARNING)
    other = world.submit(nonfixed(4), run_time=100)
    world.advance(1)
    clusters = {job: world.job(job).attempt.components[0].cluster for job in (low, other)}  # type: ignore[union-attr]
    drain(world, clusters[low], "new disks")
    assert (stops(world, low), stops(world, other)) == ([WARNING], [])
    world.advance(GRACE + 1)
    assert world.reasons(low, "requeued") == [f"drained: {clusters[low]}: new disks"]
    assert (world.state(low), world.job(low).restarts) == (JobState.QUEUED, 0)
    drain(world, clusters[low])
    world.advance(200)
    assert [world.state(job) for job in (low, other)] == [JobState.SUCCEEDED] * 2
    assert next(entry.actor for entry in world.timeline if entry.event == "ending" and entry.job == low) == "op"


def test_a_drain_takes_what_has_no_warning_at_once_and_what_is_not_yet_claimed() -> None:
    world = World({"north": 4}, manual=True)
    world.connect("north")
    waiting = world.submit(fixed(north=2), warning=WARNING)
    world.settle()
    drain(world)
    drain(world)
    assert stops(world, waiting) == [None]
    world.settle()
    assert world.reasons(waiting, "requeued") == ["drained: north is to be empty"]


def test_a_drain_lets_alone_whose_program_is_over() -> None:
    """Its exit code is on its way, after all its output: it would be run twice."""
    world = World({"north": 4}, manual=True)
    world.connect("north")
    world.start_automation()
    job = running(world)
    (token,) = world.tokens(job)
    world.queries.grid["north"].over.add(token)
    drain(world)
    assert (stops(world, job), world.job(job).ending) == ([], None)


def test_of_its_walltime_a_program_is_warned_by_its_runners_and_its_exit_code_counts() -> None:
    world = World({"north": 4})
    job = running(world, run_time=80, code=7, walltime=100.0)
    world.advance(70)
    site, (token,) = world.sites["north"], world.tokens(job)
    site.warn(token)
    site.report_component(token)
    world.settle()
    assert (world.reasons(job, "warned"), stops(world, job)) == ([TOLD], [])
    cluster = world.queries.grid["north"]
    assert (cluster.leaving, cluster.preemptible) == (4, 0), "they will be free soon anyway"
    high = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(5)
    assert (world.state(job), world.state(high)) == (JobState.RUNNING, JobState.CLAIMING)
    world.advance(10)
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 7)
    assert world.state(high) is JobState.RUNNING


@pytest.mark.parametrize("warned", [False, True])
def test_at_its_walltime_a_program_is_stopped_at_once(warned: bool) -> None:
    world = World({"north": 4})
    job = running(world, walltime=100.0)
    world.advance(75)
    if warned:
        world.sites["north"].warn(world.tokens(job)[0])
    world.advance(26)
    assert (world.state(job), stops(world, job)) == (JobState.FAILED, [None])
    assert ("warned" in world.timeline_events(job), "not-warned" in world.timeline_events(job)) == (warned, not warned)
    assert world.job(job).reason == "walltime of 100 s exceeded"


def test_a_cancellation_warns_only_where_that_is_said() -> None:
    world = World({"north": 4})
    job = running(world)
    world.cancel(job)
    world.advance(1)
    assert (world.state(job), stops(world, job)) == (JobState.CANCELLED, [None])
    job = running(world)
    world.cancel(job, warn=True)
    world.advance(GRACE - 1)
    assert (world.state(job), world.job(job).ending) == (JobState.RUNNING, JobState.CANCELLED)
    world.advance(2)
    assert (world.state(job), stops(world, job)) == (JobState.CANCELLED, [WARNING])


@pytest.mark.parametrize("first", ["preempted", "warned"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_cancellation_ends_a_grace(first: str, restarted: bool) -> None:
    world = World({"north": 4})
    job = running(world)
    if first == "preempted":
        world.submit(fixed(north=4), priority=Priority.HIGH)
    else:
        world.cancel(job, warn=True)
    world.advance(5)
    if restarted:
        world.restart()
        world.connect("north")
    world.cancel(job)
    world.advance(0)
    assert (world.state(job), stops(world, job)) == (JobState.CANCELLED, [WARNING, None])
    assert "not-warned" not in world.timeline_events(job)


def test_one_with_a_warning_within_a_grace_is_another_end_and_no_shorter() -> None:
    world = World({"north": 4})
    job = running(world)
    world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(5)
    world.cancel(job, warn=True)
    world.step([JobCancelled(job, warn=True)])
    world.advance(GRACE - 6)
    assert world.state(job) is JobState.RUNNING
    world.advance(2)
    assert (world.state(job), stops(world, job)) == (JobState.CANCELLED, [WARNING])


def test_a_daemon_that_is_restarted_within_a_grace_lets_it_go_on() -> None:
    world = World({"north": 4}, Rules(claim_grace=5, barrier_timeout=20))
    low = running(world, run_time=1e6, warning=StopWarning(WarningSignal.TERM, 100.0))
    high = world.submit(fixed(north=4), priority=Priority.HIGH)
    world.advance(10)
    world.restart()
    world.connect("north")
    component = world.job(low).attempt.components[0]  # type: ignore[union-attr]
    assert (component.state, component.warned_at) == (ComponentState.STOPPING, 1.0)
    world.advance(85)
    assert (world.job(low).ending, len(stops(world, low))) == (JobState.QUEUED, 1)
    assert world.state(high) is JobState.CLAIMING, "it waits for nodes that it was promised"
    world.advance(10)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)
    assert world.timeline_events(low).count("warned") == 1


def test_a_cluster_says_in_vain_that_a_job_without_a_warning_was_warned() -> None:
    world = World({"north": 4})
    job = running(world, warning=None)
    world.sites["north"].warn(world.tokens(job)[0])
    world.settle()
    assert ("warned" in world.timeline_events(job), world.queries.grid["north"].leaving) == (False, 0)


@given(st.data())
def test_whatever_befalls_warned_jobs_they_come_to_their_end(data: st.DataObject) -> None:
    """And no law is broken on the way."""
    world = World({"north": 4, "south": 2}, Rules(claim_grace=5, barrier_timeout=20))
    world.sites["south"].supports_warnings = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(3, 10))):
        live = [ident for ident, job in world.jobs.items() if not job.state.is_final]
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
                drain(world)
            case "resume":
                _resume(world)
            case "restart":
                world.restart()
                for name in world.sites:
                    world.connect(name)
        world.advance(data.draw(st.sampled_from([0.0, 1.0, 7.0])))
    _resume(world)
    world.advance(3000)
    assert all(job.state.is_final for job in world.jobs.values())
    check_nothing_remains(world)


def _resume(world: World) -> None:
    world.step([ClusterResumed("north")])
