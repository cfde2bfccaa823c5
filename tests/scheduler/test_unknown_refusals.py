"""A resource manager refuses jobs in words that koalapy does not know: they are tried elsewhere before they fail."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState, Priority
from koalapy.model.request import Request
from koalapy.scheduler.attempts.failures import MAX_REFUSALS, REFUSAL_PAUSE, normalize_words
from koalapy.scheduler.cluster_conditions import MAX_WORDINGS, UnknownRefusals
from koalapy.scheduler.events import ClusterCleared, ClusterDrained, ClusterResumed
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

WORDS = "the project has no node hours left"


def refusing(world: World, name: str, concerns: str = "unknown", words: str = WORDS) -> None:
    world.sites[name].rejection_fault = lambda size: concerns
    world.sites[name].rejection_message = lambda size: words


def clusters_of(world: World, job: int) -> set[str]:
    attempt = world.job(job).attempt
    return {c.cluster for c in attempt.components} if attempt else set()


def test_refused_jobs_of_one_kind_run_on_the_other_cluster() -> None:
    world = World({"north": 8, "south": 4})
    refusing(world, "north")
    jobs = [world.submit(flexible(1, max_components=1), owner="ada") for _ in range(33)]
    world.advance(200)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}
    assert {name for job in jobs for name in clusters_of(world, job)} == {"south"}
    assert max(world.job(job).restarts for job in jobs) == 0
    assert world.queries.grid["north"].health.errors == 0
    check_nothing_remains(world)


@pytest.mark.parametrize("kinds", [("owner", ["ada", "bob"]), ("application", ["wave", "melt"])])
def test_the_same_words_for_several_kinds_of_jobs_make_the_cluster_unusable(kinds: tuple[str, list[str]]) -> None:
    field, values = kinds
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "unknown"
    numbers = iter(range(1000))
    world.sites["north"].rejection_message = lambda size: f"job {next(numbers)}: {WORDS}"
    jobs = [world.submit(flexible(1, max_components=1), **{field: values[number % 2]}) for number in range(10)]
    world.advance(50)
    assert {world.state(job) for job in jobs} == {JobState.SUCCEEDED}
    health = world.queries.grid["north"].health
    assert health.unusable
    assert WORDS in health.note
    assert "several users or kinds" in health.note


def test_words_that_differ_between_kinds_are_no_error_of_the_cluster() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "unknown"
    world.sites["north"].rejection_message = lambda size: "too wide" if size > 1 else "too narrow"
    for size in (1, 2):
        for _ in range(4):
            world.submit(flexible(size, max_components=1))
    world.advance(100)
    assert world.queries.grid["north"].health.errors == 0


def test_a_cluster_that_takes_others_meanwhile_gets_no_error() -> None:
    world = World({"north": 8, "south": 4})
    for number in range(6):
        refusing(world, "north")
        world.submit(flexible(1, max_components=1), owner=f"user{number}")
        world.sites["north"].rejection_fault = lambda size: ""
        world.submit(flexible(1, max_components=1), owner="taken")
        world.advance(1)
    assert world.queries.grid["north"].health.errors == 0


def test_the_only_cluster_is_asked_again_before_the_job_fails() -> None:
    world = World({"north": 4})
    refusing(world, "north")
    job = world.submit(fixed(north=2))
    world.advance(REFUSAL_PAUSE - 1)
    assert world.state(job) is JobState.QUEUED
    said = f"is tried again at 00:00:30: north has refused it, and is asked again at 00:00:30: {WORDS}"
    assert world.queries.waiting_reason(world.job(job)) == said
    world.advance(20 * REFUSAL_PAUSE)
    done = world.job(job)
    assert (done.state, done.generation, done.restarts) == (JobState.FAILED, MAX_REFUSALS, 0)
    assert done.reason == f"every cluster that could take it has refused it: north: {WORDS}"
    check_nothing_remains(world)


def test_a_refusal_that_is_over_costs_a_job_on_the_only_cluster_a_pause() -> None:
    world = World({"north": 4})
    refusing(world, "north")
    job = world.submit(fixed(north=2))
    world.advance(1)
    world.sites["north"].rejection_fault = lambda size: ""
    world.advance(REFUSAL_PAUSE + 15)
    assert world.state(job) is JobState.SUCCEEDED


def test_a_job_that_all_clusters_refuse_fails_with_the_words_of_each() -> None:
    world = World({"north": 8, "south": 4})
    refusing(world, "north", words="no hours")
    refusing(world, "south", words="no account here")
    job = world.submit(flexible(2, max_components=1))
    world.advance(20 * REFUSAL_PAUSE)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.endswith("north: no hours; south: no account here")


def test_an_unsuitable_job_is_never_tried_there_again_and_fails_at_once_where_all_say_so() -> None:
    world = World({"north": 8, "south": 4})
    refusing(world, "north", "unsuitable", "time limit is too long")
    job = world.submit(flexible(2, max_components=1))
    world.advance(20)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"south"})
    refusing(world, "south", "unsuitable", "time limit is too long")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert (world.state(job), world.job(job).generation) == (JobState.FAILED, 2)
    assert world.queries.grid["north"].health.errors == world.queries.grid["south"].health.errors == 0


@pytest.mark.parametrize("why", ["away", "drained", "busy"])
def test_a_refused_job_waits_for_the_cluster_that_could_take_it(why: str) -> None:
    world = World({"north": 8, "south": 4})
    refusing(world, "north")
    if why == "away":
        world.disconnect("south")
    elif why == "drained":
        world.step([ClusterDrained("south", requeue=False, reason="disks")])
    else:
        user = world.sites["south"].add_local_user(4)
        world.sites["south"].send_report()
        world.settle()
    job = world.submit(flexible(2, max_components=1))
    world.advance(4000)
    assert world.state(job) is JobState.QUEUED, "it is not over: one cluster has not refused it"
    tries = world.job(job).generation
    assert 4 <= tries <= 9, "the cluster that refused it is asked again, ever more rarely"
    reason = world.queries.waiting_reason(world.job(job))
    assert "north has refused it, and is asked again at" in reason
    assert WORDS in reason
    if why == "away":
        world.connect("south")
    elif why == "drained":
        world.step([ClusterResumed("south")])
    else:
        world.sites["south"].remove_local_user(user)
        world.sites["south"].send_report()
        world.settle()
    world.advance(60)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"south"})


def test_a_co_allocated_job_leaves_the_cluster_that_refused_one_component() -> None:
    world = World({"east": 4, "north": 4, "south": 4})
    refusing(world, "east")
    job = world.submit(nonfixed(3, 3))
    world.advance(30)
    assert (world.state(job), clusters_of(world, job)) == (JobState.SUCCEEDED, {"north", "south"})
    check_nothing_remains(world)


def test_nobody_is_preempted_on_a_cluster_that_has_refused_the_job() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(fixed(south=4), run_time=500, priority=Priority.HIGH)
    refusing(world, "north")
    high = world.submit(flexible(4, max_components=1), run_time=500, priority=Priority.HIGH)
    world.advance(1)
    assert (world.state(high), world.job(high).barred_clusters(world.now)) == (JobState.QUEUED, {"north"})
    world.sites["north"].rejection_fault = lambda size: ""
    low = world.submit(flexible(4, max_components=1), run_time=500)
    world.advance(REFUSAL_PAUSE - 5)
    assert (world.state(low), world.reasons(low, "preempted")) == (JobState.RUNNING, [])
    world.advance(20)
    assert (world.state(high), clusters_of(world, high)) == (JobState.RUNNING, {"north"})


def test_a_component_is_not_moved_to_a_cluster_that_has_refused_its_job() -> None:
    world = World({"north": 8, "south": 4}, Rules(claiming="incremental"))
    refusing(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert clusters_of(world, job) == {"south"}
    assert world.job(job).barred_clusters(world.now) == {"north"}


def test_explain_names_the_words_and_offers_nothing_on_the_cluster_that_refused() -> None:
    world = World({"north": 8, "south": 4})
    busy = world.sites["south"].add_local_user(4)
    world.sites["south"].send_report()
    world.settle()
    refusing(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    told = explain(world.queries, world.job(job), world.timeline, world.now)
    (north,) = (finding for finding in told.clusters if finding.cluster == "north")
    assert north.reason.startswith("north has refused it, and is asked again at 00:00:30")
    assert WORDS in north.reason
    assert told.smallest_change is None
    world.sites["south"].remove_local_user(busy)


def test_refusals_outlive_the_daemon() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["south"].add_local_user(4)
    world.sites["south"].send_report()
    world.settle()
    refusing(world, "north")
    job = world.submit(flexible(2, max_components=1))
    world.advance(1)
    assert world.job(job).generation == 1
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.advance(REFUSAL_PAUSE - 10)
    assert world.job(job).generation == 1, "it is not tried there before its pause is over"
    world.advance(20)
    assert world.job(job).generation == 2


def test_an_operator_who_clears_a_cluster_has_its_refusals_forgotten() -> None:
    world = World({"north": 8, "south": 4})
    world.disconnect("south")
    refusing(world, "north", "unsuitable")
    job = world.submit(flexible(2, max_components=1))
    world.advance(300)
    assert world.state(job) is JobState.QUEUED
    world.sites["north"].rejection_fault = lambda size: ""
    world.step([ClusterCleared("north")])
    world.advance(20)
    assert (world.state(job), world.job(job).refusals) == (JobState.SUCCEEDED, ())


def test_a_cluster_that_has_passed_its_trial_gets_the_jobs_that_it_refused_before() -> None:
    world = World({"north": 8, "south": 4}, Rules(probation_pause_max=120.0))
    world.disconnect("south")
    refusing(world, "north")
    jobs = [world.submit(flexible(1, max_components=1), owner=f"user{number}") for number in range(5)]
    world.advance(7200)
    assert {world.state(job) for job in jobs} == {JobState.QUEUED}
    world.sites["north"].rejection_fault = lambda size: ""
    world.advance(120)
    barred = [job for job in jobs if world.job(job).barred_clusters(world.now)]
    assert barred, "else there is nothing to forget"
    assert world.queries.grid["north"].health.probation
    trial = world.submit(flexible(1, max_components=1), run_time=1)
    world.advance(15)
    assert world.state(trial) is JobState.SUCCEEDED
    assert {world.state(job) for job in barred} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("limit", ["max_claiming_tries", "max_restarts"])
def test_a_refusal_uses_up_no_other_tries(limit: str) -> None:
    world = World({"north": 8, "south": 4})
    refusing(world, "north")
    job = world.submit(flexible(2, max_components=1), **{limit: 1 if limit == "max_claiming_tries" else 0})
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED


def test_words_are_the_same_whatever_job_they_name() -> None:
    one = normalize_words("Job 17 (koala-17.1.0.a8f) of Ada  refused: no hours", ("ada", "wave"))
    other = normalize_words("job 4 (koala-4.2.0.77b) of bob refused: no hours", ("bob", ""))
    assert one == other == "job # # of # refused: no hours"


def test_only_so_many_wordings_are_remembered() -> None:
    refusals, kinds = UnknownRefusals(), [("ada", "wave", flexible(1)), ("bob", "wave", flexible(1))]
    for number in range(3 * MAX_WORDINGS):
        assert not refusals.add(f"words {number}", kinds[0])
    assert not refusals.add("words 0", kinds[1]), "it was forgotten"
    assert refusals.add(f"words {3 * MAX_WORDINGS - 1}", kinds[1])
    assert len(refusals._by_words) == MAX_WORDINGS


requests = st.one_of(
    st.builds(flexible, st.integers(1, 4)),
    st.builds(lambda sizes: nonfixed(*sizes), st.lists(st.integers(1, 3), min_size=1, max_size=2)),
    st.builds(lambda name: fixed(**{name: 2}), st.sampled_from(["east", "south"])),
)


@given(
    wanted=st.lists(st.tuples(requests, st.sampled_from(["ada", "bob"]), st.sampled_from(Priority)), max_size=8),
    concerns=st.sampled_from(["unknown", "unsuitable"]),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    claiming=st.sampled_from(["atomic", "incremental"]),
)
def test_no_job_fails_beside_clusters_that_take_it(
    wanted: Sequence[tuple[Request, str, Priority]], concerns: str, queue: str, claiming: str
) -> None:
    """One cluster with most nodes refuses everything; the others have room for each job."""
    world = World({"east": 4, "north": 9, "south": 4}, Rules(queue=queue, claiming=claiming))
    refusing(world, "north", concerns)
    jobs = [world.submit(request, owner=owner, priority=priority) for request, owner, priority in wanted]
    world.advance(100 + 60 * len(jobs))
    assert {world.state(job) for job in jobs} <= {JobState.SUCCEEDED}
    assert not any("north" in clusters_of(world, job) for job in jobs)
    check_nothing_remains(world)
