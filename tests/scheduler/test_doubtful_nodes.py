"""Clusters that say their nodes are idle and do not give them, and those that are only busy (docs/adr/0012)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState, Priority
from koalapy.scheduler.attempts.health import DOUBT_PAUSE, MAX_DOUBT_PAUSE
from koalapy.scheduler.events import ClusterCleared, Reported
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

RULES = Rules(claim_grace=10)


def with_hole(hole: int = 16, other: int = 8, rules: Rules = RULES) -> World:
    """One cluster says that all its nodes are idle, and starts nothing; the other is as it should be."""
    world = World({"hole": hole, "other": other}, rules)
    world.sites["hole"].is_black_hole = True
    return world


def tries_on(world: World, cluster: str, *jobs: JobId) -> list[float]:
    """When components were handed to a cluster."""
    wanted = jobs or tuple(world.jobs)
    told = [e for e in world.timeline if e.job in wanted and e.event == "claiming" and f" on {cluster}" in e.reason]
    return [entry.at for entry in told]


def test_one_after_the_other_jobs_go_where_nodes_are_given() -> None:
    world = with_hole()
    for _ in range(50):
        job = world.submit(flexible(4), run_time=20)
        while not world.state(job).is_final:
            world.advance(5)
        assert world.state(job) is JobState.SUCCEEDED
    tries = tries_on(world, "hole")
    assert len(tries) <= 7, "fifty without a doubt"
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps == sorted(gaps), "ever more rarely"
    check_nothing_remains(world)


def test_a_full_queue_loses_one_claim_at_a_time_after_the_first_ones() -> None:
    world = with_hole()
    jobs = [world.submit(flexible(1), run_time=20) for _ in range(100)]
    world.advance(11)
    first = len(tries_on(world, "hole"))
    assert first == 16, "nobody knew"
    world.advance(600)
    assert all(world.state(job) is JobState.SUCCEEDED for job in jobs)
    assert len(tries_on(world, "hole")) - first <= 4
    check_nothing_remains(world)


def test_the_doubt_is_of_nodes_and_not_of_the_cluster() -> None:
    """Three of the four that were claimed may well be there."""
    world = with_hole(other=1)
    world.submit(fixed(hole=4))
    world.advance(11)
    cluster = world.queries.grid["hole"]
    assert (cluster.available, cluster.idle, cluster.used) == (3, 16, 0)
    assert cluster.status_text == (
        f"has 13 idle nodes in doubt until 00:00:{10 + DOUBT_PAUSE:.0f}: a claim for 4 nodes was in vain"
    )
    smaller = world.submit(fixed(hole=3))
    assert world.state(smaller) is JobState.CLAIMING


def test_pauses_double_up_to_a_bound_and_a_claim_that_holds_ends_the_doubt() -> None:
    world = with_hole(other=0)
    job = world.submit(flexible(16), run_time=5)
    world.advance(4 * 3600)
    tries = tries_on(world, "hole", job)
    pauses = [round(after - before - 10) for before, after in pairwise(tries)]
    expected = [min(DOUBT_PAUSE * 2.0**n, MAX_DOUBT_PAUSE) for n in range(len(pauses))]
    assert pauses == [pytest.approx(each, abs=2) for each in expected]
    assert MAX_DOUBT_PAUSE in expected
    world.sites["hole"].end_black_hole()
    world.advance(MAX_DOUBT_PAUSE + 30)
    assert world.state(job) is JobState.SUCCEEDED
    cluster = world.queries.grid["hole"]
    assert (cluster.doubt, cluster.evidence.consecutive_failures, cluster.available) == (None, 0, 16)
    world.sites["hole"].is_black_hole = True
    again = world.submit(flexible(16))
    world.advance(12 + DOUBT_PAUSE)
    assert len(tries_on(world, "hole", again)) == 2, "it begins anew"


def test_a_cluster_that_is_only_busy_is_believed() -> None:
    """It says so: what its local users give back is offered at once."""
    world = World({"north": 8}, RULES)
    site = world.sites["north"]
    for _ in range(5):
        user = site.add_local_user(6)  # not yet reported
        job = world.submit(flexible(4), run_time=5)
        world.advance(11)
        assert world.state(job) is JobState.QUEUED
        assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]
        assert world.queries.grid["north"].doubt is None
        site.remove_local_user(user)
        world.settle()
        assert world.state(job) is JobState.CLAIMING
        world.advance(20)
        assert world.state(job) is JobState.SUCCEEDED


def test_idle_nodes_behind_a_wide_local_job_are_in_doubt_until_somebody_takes_them() -> None:
    """A strict queue: the local job waits for all nodes, and nobody gets those that are idle meanwhile."""
    world = World({"north": 8, "south": 2}, RULES)
    site = world.sites["north"]
    first = site.add_local_user(2)
    world.settle()
    site.add_local_user(8)
    job = world.submit(fixed(north=4), run_time=5)
    world.advance(11)
    cluster = world.queries.grid["north"]
    assert (cluster.idle, cluster.available) == (6, 3)
    site.remove_local_user(first)
    effects = world.step([Reported("north", site.current_report())])
    assert cluster.doubt is None, "all eight are taken: these were there"
    assert "north" in effects.clusters, "operators are shown that"
    site.remove_local_user("user-2")
    world.settle()
    assert (cluster.available, world.state(job)) == (4, JobState.CLAIMING)


def test_a_runner_behind_our_own_wide_one_proves_nothing() -> None:
    world = World({"north": 8}, RULES)
    world.sites["north"].add_local_user(4)  # not yet reported
    wide = world.submit(fixed(north=6), run_time=5)
    narrow = world.submit(fixed(north=2), run_time=5)
    world.advance(11)
    assert world.reasons(wide, "requeued") == ["claim-failed: local users of north were faster"]
    assert world.queries.grid["north"].doubt is None
    world.sites["north"].remove_local_user("user-1")
    world.advance(60)
    assert {world.state(job) for job in (wide, narrow)} == {JobState.SUCCEEDED}


def test_a_smaller_claim_that_holds_says_nothing_of_larger_ones() -> None:
    world = with_hole(other=0)
    job = world.submit(flexible(16), run_time=5)
    world.advance(11)
    world.sites["hole"].end_black_hole()
    small = world.submit(flexible(2), run_time=5)
    world.advance(5)
    assert world.state(small) is JobState.RUNNING
    cluster = world.queries.grid["hole"]
    assert cluster.evidence.consecutive_failures == 1
    world.advance(DOUBT_PAUSE + 10)
    assert world.state(job) is JobState.SUCCEEDED
    assert (cluster.doubt, cluster.evidence.consecutive_failures) == (None, 0)


def test_who_waits_is_told_of_the_doubt_and_an_operator_ends_it() -> None:
    world = with_hole(other=2)
    job = world.submit(fixed(hole=16), run_time=5)
    world.advance(11)
    found = explain(world.queries, world.job(job), [e for e in world.timeline if e.job == job], world.now)
    (cluster,) = found.clusters
    assert cluster.idle == 15
    assert "hole has 1 idle node in doubt until 00:00:40" in cluster.reason
    assert found.suffices == ("hole giving nodes that it says are idle, which is tried again",)
    world.sites["hole"].end_black_hole()
    world.step([ClusterCleared("hole")])
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED


def test_nobody_is_preempted_for_nodes_in_doubt() -> None:
    world = with_hole(hole=4, other=4)
    low = world.submit(fixed(other=4), run_time=200)
    high = world.submit(flexible(8), run_time=5, priority=Priority.HIGH)
    world.advance(12)
    assert len(world.reasons(low, "preempted")) == 1, "once, before that was known"
    assert world.state(high) is JobState.QUEUED
    world.advance(DOUBT_PAUSE / 2)
    assert (world.state(low), len(world.reasons(low, "preempted"))) == (JobState.RUNNING, 1)


def test_a_restart_forgets_and_learns_anew_by_one_claim() -> None:
    world = with_hole()
    job = world.submit(flexible(8), run_time=1000)
    world.advance(15)
    assert world.state(job) is JobState.RUNNING
    world.restart()
    for name in world.sites:
        world.connect(name)
    assert world.queries.grid["hole"].doubt is None
    world.cancel(job)
    others = [world.submit(flexible(8), run_time=20) for _ in range(3)]
    world.advance(120)
    assert all(world.state(other) is JobState.SUCCEEDED for other in others)
    assert len(tries_on(world, "hole", *others)) <= 4


def test_nodes_that_a_preempted_job_does_not_give_back_are_promised_to_nobody_again() -> None:
    world = World({"north": 4, "south": 4}, Rules(claim_grace=10, barrier_timeout=60))
    held = [world.submit(fixed(**{name: 4}), run_time=1e6) for name in world.sites]
    world.advance(1)
    world.sites["north"].stuck_components.update(world.tokens(held[0]))
    high = world.submit(nonfixed(4), run_time=5, priority=Priority.HIGH)
    assert "north" in world.reasons(high, "claiming")[0]
    world.advance(70)
    assert world.reasons(high, "requeued") == ["claim-failed: north does not let go of 4 nodes"]
    assert world.state(high) is JobState.SUCCEEDED, "in south"


@given(sizes=st.lists(st.integers(1, 8), min_size=5, max_size=30), hole=st.integers(1, 20), mended=st.integers(1, 400))
def test_holes_keep_nobody_from_nodes_elsewhere_and_are_used_again_when_mended(
    sizes: list[int], hole: int, mended: int
) -> None:
    world = with_hole(hole, 8)
    jobs = [world.submit(flexible(size, max_components=1), run_time=10) for size in sizes]
    world.advance(mended)
    world.sites["hole"].end_black_hole()
    world.advance(60 * len(jobs) + 60)
    assert all(world.state(job) is JobState.SUCCEEDED for job in jobs)
    waves = 16 + sum(sizes)  # at first as many as it has nodes; then ever fewer
    assert len(tries_on(world, "hole")) <= waves + len(sizes)
    last = world.submit(fixed(hole=hole), run_time=1)
    world.advance(MAX_DOUBT_PAUSE + 60)
    assert world.state(last) is JobState.SUCCEEDED
    check_nothing_remains(world)
