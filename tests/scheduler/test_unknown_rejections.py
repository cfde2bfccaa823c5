"""Rejections with unknown messages of a resource manager: the job tries other clusters before it fails."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.model.job_sizes import BarredSizes
from koalapy.model.job_spec import Priority
from koalapy.model.request import Request
from koalapy.scheduler.attempts.attempts import REFUSAL_PAUSE
from koalapy.scheduler.attempts.failures import MAX_REFUSALS, normalize_words
from koalapy.scheduler.cluster_conditions import MAX_WORDINGS, UnknownRefusals
from koalapy.scheduler.events import ClusterCleared, ClusterDrained, ClusterResumed
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

MESSAGE = "the project has no node hours left"


def reject_jobs(world: World, name: str, fault: str = "unknown", message: str = MESSAGE) -> None:
    world.sites[name].rejection_fault = lambda size: fault
    world.sites[name].rejection_message = lambda size: message


def clusters_of(world: World, job: int) -> set[str]:
    attempt = world.job(job).attempt
    return {c.cluster for c in attempt.components} if attempt else set()


def test_unknown_rejection_moves_jobs_to_other_cluster() -> None:
    world = World({"north": 8, "south": 4})
    reject_jobs(world, "north")
    jobs = [world.submit(flexible(1, max_components=1), owner="ada") for _ in range(33)]
    world.advance(200)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}
    assert {name for job in jobs for name in clusters_of(world, job)} == {"south"}
    assert max(world.job(job).restarts for job in jobs) == 0
    assert world.queries.grid["north"].health.errors == 0
    check_nothing_remains(world)


@pytest.mark.parametrize("kinds", [("owner", ["ada", "bob"]), ("application", ["wave", "melt"])])
def test_unknown_rejection_of_several_kinds_makes_cluster_unusable(kinds: tuple[str, list[str]]) -> None:
    field, values = kinds
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "unknown"
    numbers = iter(range(1000))
    world.sites["north"].rejection_message = lambda size: f"job {next(numbers)}: {MESSAGE}"
    jobs = [world.submit(flexible(1, max_components=1), **{field: values[number % 2]}) for number in range(10)]
    world.advance(50)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}
    health = world.queries.grid["north"].health
    assert health.unusable
    assert MESSAGE in health.note
    assert "several users or kinds" in health.note


def test_unknown_rejection_with_different_messages_is_no_cluster_error() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "unknown"
    world.sites["north"].rejection_message = lambda size: "too wide" if size > 1 else "too narrow"
    for size in (1, 2):
        for _ in range(4):
            world.submit(flexible(size, max_components=1))
    world.advance(100)
    assert world.queries.grid["north"].health.errors == 0


def test_unknown_rejection_between_accepted_jobs_is_no_cluster_error() -> None:
    world = World({"north": 8, "south": 4})
    for number in range(6):
        reject_jobs(world, "north")
        world.submit(flexible(1, max_components=1), owner=f"user{number}")
        world.sites["north"].rejection_fault = lambda size: ""
        world.submit(flexible(1, max_components=1), owner="taken")
        world.advance(1)
    assert world.queries.grid["north"].health.errors == 0


def test_unknown_rejection_by_only_cluster_is_retried_then_fails() -> None:
    world = World({"north": 4})
    reject_jobs(world, "north")
    job = world.submit(fixed(north=2))
    world.advance(REFUSAL_PAUSE - 1)
    assert world.state(job) is JobState.QUEUED
    reason = f"is tried again at 00:00:30: north has refused it, and is asked again at 00:00:30: {MESSAGE}"
    assert world.queries.waiting_reason(world.job(job)) == reason
    world.advance(20 * REFUSAL_PAUSE)
    failed = world.job(job)
    assert (failed.state, failed.generation, failed.restarts) == (JobState.FAILED, MAX_REFUSALS, 0)
    assert failed.reason == f"every cluster that could take it has refused it: north: {MESSAGE}"
    check_nothing_remains(world)


def test_unknown_rejection_by_only_cluster_delays_job_by_pause() -> None:
    world = World({"north": 4})
    reject_jobs(world, "north")
    job = world.submit(fixed(north=2))
    world.advance(1)
    world.sites["north"].rejection_fault = lambda size: ""
    world.advance(REFUSAL_PAUSE + 15)
    assert world.state(job) is JobState.SUCCEEDED


def test_unknown_rejection_by_all_clusters_fails_with_messages() -> None:
    world = World({"north": 8, "south": 4})
    reject_jobs(world, "north", message="no hours")
    reject_jobs(world, "south", message="no account here")
    job = world.submit(flexible(2, max_components=1))
    world.advance(20 * REFUSAL_PAUSE)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.endswith("north: no hours; south: no account here")


def test_unsuitable_job_is_not_retried_and_fails_after_all_clusters() -> None:
    world = World({"north": 8, "south": 4})
    reject_jobs(world, "north", "unsuitable", "time limit is too long")
    job = world.submit(flexible(2, max_components=1))
    world.advance(20)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"south"})
    reject_jobs(world, "south", "unsuitable", "time limit is too long")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert (world.state(job), world.job(job).generation) == (JobState.FAILED, 2)
    assert world.queries.grid["north"].health.errors == world.queries.grid["south"].health.errors == 0


@pytest.mark.parametrize("cause", ["away", "drained", "busy"])
def test_unknown_rejection_waits_for_unavailable_cluster(cause: str) -> None:
    world = World({"north": 8, "south": 4})
    reject_jobs(world, "north")
    if cause == "away":
        world.disconnect("south")
    elif cause == "drained":
        world.step([ClusterDrained("south", requeue=False, reason="disks")])
    else:
        user = world.sites["south"].add_local_user(4)
        world.sites["south"].send_report()
        world.settle()
    job = world.submit(flexible(2, max_components=1))
    world.advance(4000)
    assert world.state(job) is JobState.QUEUED, "one cluster has not rejected it"
    tries = world.job(job).generation
    assert 4 <= tries <= 9, "pauses between tries on the rejecting cluster grow"
    reason = world.queries.waiting_reason(world.job(job))
    assert "north has refused it, and is asked again at" in reason
    assert MESSAGE in reason
    if cause == "away":
        world.connect("south")
    elif cause == "drained":
        world.step([ClusterResumed("south")])
    else:
        world.sites["south"].remove_local_user(user)
        world.sites["south"].send_report()
        world.settle()
    world.advance(60)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"south"})


def test_unknown_rejection_moves_all_components_of_job() -> None:
    world = World({"east": 4, "north": 4, "south": 4})
    reject_jobs(world, "east")
    job = world.submit(nonfixed(3, 3))
    world.advance(30)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"north", "south"})
    check_nothing_remains(world)


def test_unknown_rejection_prevents_preemption_on_cluster() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(fixed(south=4), run_time=500, priority=Priority.HIGH)
    reject_jobs(world, "north")
    high_job = world.submit(flexible(4, max_components=1), run_time=500, priority=Priority.HIGH)
    world.advance(1)
    assert (world.state(high_job), world.job(high_job).barred_sizes(world.now)) == (
        JobState.QUEUED,
        {BarredSizes("north")},
    )
    world.sites["north"].rejection_fault = lambda size: ""
    low_job = world.submit(flexible(4, max_components=1), run_time=500)
    world.advance(REFUSAL_PAUSE - 5)
    assert (world.state(low_job), world.reasons(low_job, "preempted")) == (JobState.RUNNING, [])
    world.advance(20)
    assert (world.state(high_job), clusters_of(world, high_job)) == (JobState.RUNNING, {"north"})


def test_unknown_rejection_prevents_re_placement_to_cluster() -> None:
    world = World({"north": 8, "south": 4}, Rules(claiming="incremental"))
    reject_jobs(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert clusters_of(world, job) == {"south"}
    assert world.job(job).barred_sizes(world.now) == {BarredSizes("north")}


def test_explanation_names_rejection_message() -> None:
    world = World({"north": 8, "south": 4})
    user = world.sites["south"].add_local_user(4)
    world.sites["south"].send_report()
    world.settle()
    reject_jobs(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    explanation = explain(world.queries, world.job(job), world.timeline, world.now)
    (north,) = (finding for finding in explanation.clusters if finding.cluster == "north")
    assert north.reason.startswith("north has refused it, and is asked again at 00:00:30")
    assert MESSAGE in north.reason
    assert explanation.smallest_change is None
    world.sites["south"].remove_local_user(user)


def test_unknown_rejections_survive_daemon_restart() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["south"].add_local_user(4)
    world.sites["south"].send_report()
    world.settle()
    reject_jobs(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert world.job(job).generation == 1
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.advance(REFUSAL_PAUSE - 10)
    assert world.job(job).generation == 1, "the pause continues after the restart"
    world.advance(20)
    assert world.job(job).generation == 2


def test_unknown_rejections_are_cleared_by_operator() -> None:
    world = World({"north": 8, "south": 4})
    world.disconnect("south")
    reject_jobs(world, "north", "unsuitable")
    job = world.submit(flexible(2, max_components=1))
    world.advance(300)
    assert world.state(job) is JobState.QUEUED
    world.sites["north"].rejection_fault = lambda size: ""
    world.step([ClusterCleared("north")])
    world.advance(20)
    assert (world.state(job), world.job(job).refusals) == (JobState.SUCCEEDED, ())


def test_unknown_rejections_are_cleared_by_successful_probation() -> None:
    world = World({"north": 8, "south": 4}, Rules(probation_pause_max=120.0))
    world.disconnect("south")
    reject_jobs(world, "north")
    jobs = [world.submit(flexible(1, max_components=1), owner=f"user{number}") for number in range(5)]
    world.advance(7200)
    assert {world.state(job) for job in jobs} == {JobState.QUEUED}
    world.sites["north"].rejection_fault = lambda size: ""
    world.advance(120)
    barred = [job for job in jobs if world.job(job).barred_sizes(world.now)]
    assert barred, "some rejections must be stored"
    assert world.queries.grid["north"].health.probation
    trial = world.submit(flexible(1, max_components=1), run_time=1)
    world.advance(15)
    assert world.state(trial) is JobState.SUCCEEDED
    assert {world.state(job) for job in barred} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("limit", ["max_claiming_tries", "max_restarts"])
def test_unknown_rejection_uses_no_other_tries(limit: str) -> None:
    world = World({"north": 8, "south": 4})
    reject_jobs(world, "north")
    job = world.submit(flexible(2, max_components=1), **{limit: 1 if limit == "max_claiming_tries" else 0})
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


def test_message_normalization_removes_job_and_names() -> None:
    first = normalize_words("Job 17 (koala-17.1.0.a8f) of Ada  refused: no hours", ("ada", "wave"))
    second = normalize_words("job 4 (koala-4.2.0.77b) of bob refused: no hours", ("bob", ""))
    assert first == second == "job # # of # refused: no hours"


def test_messages_remembered_are_bounded() -> None:
    refusals, kinds = UnknownRefusals(), [("ada", "wave", flexible(1)), ("bob", "wave", flexible(1))]
    for number in range(3 * MAX_WORDINGS):
        assert not refusals.add(f"words {number}", kinds[0])
    assert not refusals.add("words 0", kinds[1]), "the oldest message was removed"
    assert refusals.add(f"words {3 * MAX_WORDINGS - 1}", kinds[1])
    assert len(refusals._by_words) == MAX_WORDINGS


drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 4)),
    st.builds(lambda sizes: nonfixed(*sizes), st.lists(st.integers(1, 3), min_size=1, max_size=2)),
    st.builds(lambda name: fixed(**{name: 2}), st.sampled_from(["east", "south"])),
)


@given(
    jobs_to_submit=st.lists(
        st.tuples(drawn_requests, st.sampled_from(["ada", "bob"]), st.sampled_from(Priority)), max_size=8
    ),
    fault=st.sampled_from(["unknown", "unsuitable"]),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    claiming=st.sampled_from(["atomic", "incremental"]),
)
def test_unknown_rejections_fail_no_placeable_job(
    jobs_to_submit: Sequence[tuple[Request, str, Priority]], fault: str, queue: str, claiming: str
) -> None:
    """One cluster with most nodes rejects everything; the others have capacity for each job."""
    world = World({"east": 4, "north": 9, "south": 4}, Rules(queue=queue, claiming=claiming))
    reject_jobs(world, "north", fault)
    jobs = [world.submit(request, owner=owner, priority=priority) for request, owner, priority in jobs_to_submit]
    world.advance(100 + 60 * len(jobs))
    assert {world.state(job) for job in jobs} <= {JobState.SUCCEEDED}
    assert not any("north" in clusters_of(world, job) for job in jobs)
    check_nothing_remains(world)
