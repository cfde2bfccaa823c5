"""Clusters that report idle nodes but do not allocate them, and clusters that are only busy (docs/adr/0012)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.scheduler.attempts.health import DOUBT_PAUSE, MAX_DOUBT_PAUSE
from koalapy.scheduler.events import ClusterCleared, Reported
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

RULES = Rules(claim_grace=10)


def create_world_with_hole(hole_size: int = 16, other_size: int = 8, rules: Rules = RULES) -> World:
    """Create a black-hole cluster, which reports idle nodes and starts nothing, and a normal one."""
    world = World({"hole": hole_size, "other": other_size}, rules)
    world.sites["hole"].is_black_hole = True
    return world


def submission_times(world: World, cluster: str, *jobs: JobId) -> list[float]:
    """Return the times at which components were submitted to a cluster."""
    job_ids = jobs or tuple(world.jobs)
    entries = [e for e in world.timeline if e.job in job_ids and e.event == "claiming" and f" on {cluster}" in e.reason]
    return [entry.at for entry in entries]


def test_doubt_sends_single_jobs_to_working_cluster() -> None:
    world = create_world_with_hole()
    for _ in range(50):
        job = world.submit(flexible(4), run_time=20)
        while not world.state(job).is_final:
            world.advance(5)
        assert world.state(job) is JobState.SUCCEEDED
    tries = submission_times(world, "hole")
    assert len(tries) <= 7, "without doubt there would be fifty"
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps), "pauses between tries grow"
    check_nothing_remains(world)


def test_doubt_limits_failed_claims_of_full_queue() -> None:
    world = create_world_with_hole()
    jobs = [world.submit(flexible(1), run_time=20) for _ in range(100)]
    world.advance(11)
    first_count = len(submission_times(world, "hole"))
    assert first_count == 16, "all nodes are claimed before the first failure"
    world.advance(600)
    assert all(world.state(job) is JobState.SUCCEEDED for job in jobs)
    assert len(submission_times(world, "hole")) - first_count <= 4
    check_nothing_remains(world)


def test_doubt_concerns_nodes_and_not_cluster() -> None:
    """A claim for four nodes failed; three of them may be available."""
    world = create_world_with_hole(other_size=1)
    world.submit(fixed(hole=4))
    world.advance(11)
    cluster = world.queries.grid["hole"]
    assert (cluster.nodes.available, cluster.nodes.idle, cluster.nodes.used) == (3, 16, 0)
    assert cluster.status_text == (
        f"has 13 idle nodes in doubt until 00:00:{10 + DOUBT_PAUSE:.0f}: a claim for 4 nodes was in vain"
    )
    smaller_job = world.submit(fixed(hole=3))
    assert world.state(smaller_job) is JobState.CLAIMING


def test_doubt_pauses_double_until_claim_succeeds() -> None:
    world = create_world_with_hole(other_size=0)
    job = world.submit(flexible(16), run_time=5)
    world.advance(4 * 3600)
    tries = submission_times(world, "hole", job)
    pauses = [round(later - earlier - 10) for earlier, later in pairwise(tries)]
    expected = [min(DOUBT_PAUSE * 2.0**n, MAX_DOUBT_PAUSE) for n in range(len(pauses))]
    assert pauses == [pytest.approx(pause, abs=2) for pause in expected]
    assert MAX_DOUBT_PAUSE in expected
    world.sites["hole"].end_black_hole()
    world.advance(MAX_DOUBT_PAUSE + 30)
    assert world.state(job) is JobState.SUCCEEDED
    cluster = world.queries.grid["hole"]
    assert (cluster.health.doubt, cluster.health.evidence.consecutive_failures, cluster.nodes.available) == (
        None,
        0,
        16,
    )
    world.sites["hole"].is_black_hole = True
    second_job = world.submit(flexible(16))
    world.advance(12 + DOUBT_PAUSE)
    assert len(submission_times(world, "hole", second_job)) == 2, "the pauses start again"


def test_doubt_does_not_arise_on_busy_cluster() -> None:
    """The cluster reports its local users; nodes that they release are offered at once."""
    world = World({"north": 8}, RULES)
    site = world.sites["north"]
    for _ in range(5):
        user = site.add_local_user(6)  # not yet reported
        job = world.submit(flexible(4), run_time=5)
        world.advance(11)
        assert world.state(job) is JobState.QUEUED
        assert world.reasons(job, "requeued") == ["claim-failed: local users of north were faster"]
        assert world.queries.grid["north"].health.doubt is None
        site.remove_local_user(user)
        world.settle()
        assert world.state(job) is JobState.CLAIMING
        world.advance(20)
        assert world.state(job) is JobState.SUCCEEDED


def test_doubt_of_nodes_behind_wide_local_job_ends_with_allocation() -> None:
    """In a strict queue the local job waits for all nodes, and idle nodes stay unused."""
    world = World({"north": 8, "south": 2}, RULES)
    site = world.sites["north"]
    first_user = site.add_local_user(2)
    world.settle()
    site.add_local_user(8)
    job = world.submit(fixed(north=4), run_time=5)
    world.advance(11)
    cluster = world.queries.grid["north"]
    assert (cluster.nodes.idle, cluster.nodes.available) == (6, 3)
    site.remove_local_user(first_user)
    effects = world.step([Reported("north", site.current_report())])
    assert cluster.health.doubt is None, "all eight nodes are allocated"
    assert "north" in effects.clusters, "operators are informed"
    site.remove_local_user("user-2")
    world.settle()
    assert (cluster.nodes.available, world.state(job)) == (4, JobState.CLAIMING)


def test_doubt_does_not_arise_behind_own_wide_job() -> None:
    world = World({"north": 8}, RULES)
    world.sites["north"].add_local_user(4)  # not yet reported
    wide = world.submit(fixed(north=6), run_time=5)
    narrow = world.submit(fixed(north=2), run_time=5)
    world.advance(11)
    assert world.reasons(wide, "requeued") == ["claim-failed: local users of north were faster"]
    assert world.queries.grid["north"].health.doubt is None
    world.sites["north"].remove_local_user("user-1")
    world.advance(60)
    assert {world.state(job) for job in (wide, narrow)} == {JobState.SUCCEEDED}


def test_doubt_is_not_ended_by_smaller_claim() -> None:
    world = create_world_with_hole(other_size=0)
    job = world.submit(flexible(16), run_time=5)
    world.advance(11)
    world.sites["hole"].end_black_hole()
    small = world.submit(flexible(2), run_time=5)
    world.advance(5)
    assert world.state(small) is JobState.RUNNING
    cluster = world.queries.grid["hole"]
    assert cluster.health.evidence.consecutive_failures == 1
    world.advance(DOUBT_PAUSE + 10)
    assert world.state(job) is JobState.SUCCEEDED
    assert (cluster.health.doubt, cluster.health.evidence.consecutive_failures) == (None, 0)


def test_doubt_is_explained_and_cleared_by_operator() -> None:
    world = create_world_with_hole(other_size=2)
    job = world.submit(fixed(hole=16), run_time=5)
    world.advance(11)
    explanation = explain(world.queries, world.job(job), [e for e in world.timeline if e.job == job], world.now)
    (cluster,) = explanation.clusters
    assert cluster.idle == 15
    assert "hole has 1 idle node in doubt until 00:00:40" in cluster.reason
    assert explanation.suffices == ("hole giving nodes that it says are idle, which is tried again",)
    world.sites["hole"].end_black_hole()
    world.step([ClusterCleared("hole")])
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED


def test_doubt_of_nodes_prevents_preemption() -> None:
    world = create_world_with_hole(hole_size=4, other_size=4)
    low = world.submit(fixed(other=4), run_time=200)
    high = world.submit(flexible(8), run_time=5, priority=Priority.HIGH)
    world.advance(12)
    assert len(world.reasons(low, "preempted")) == 1, "only before the first failed claim"
    assert world.state(high) is JobState.QUEUED
    world.advance(DOUBT_PAUSE / 2)
    assert (world.state(low), len(world.reasons(low, "preempted"))) == (JobState.RUNNING, 1)


def test_doubt_is_learned_again_after_restart() -> None:
    world = create_world_with_hole()
    job = world.submit(flexible(8), run_time=1000)
    world.advance(15)
    assert world.state(job) is JobState.RUNNING
    world.restart()
    for name in world.sites:
        world.connect(name)
    assert world.queries.grid["hole"].health.doubt is None
    world.cancel(job)
    later_jobs = [world.submit(flexible(8), run_time=20) for _ in range(3)]
    world.advance(120)
    assert all(world.state(later_job) is JobState.SUCCEEDED for later_job in later_jobs)
    assert len(submission_times(world, "hole", *later_jobs)) <= 4


def test_kept_nodes_of_preempted_job_are_not_promised_again() -> None:
    world = World({"north": 4, "south": 4}, Rules(claim_grace=10, barrier_timeout=60))
    running_jobs = [world.submit(fixed(**{name: 4}), run_time=1e6) for name in world.sites]
    world.advance(1)
    world.sites["north"].stuck_components.update(world.tokens(running_jobs[0]))
    high = world.submit(nonfixed(4), run_time=5, priority=Priority.HIGH)
    assert "north" in world.reasons(high, "claiming")[0]
    world.advance(70)
    assert world.reasons(high, "requeued") == ["claim-failed: north does not let go of 4 nodes"]
    assert world.state(high) is JobState.SUCCEEDED, "in south"


@given(
    sizes=st.lists(st.integers(1, 8), min_size=5, max_size=30),
    hole_size=st.integers(1, 20),
    repaired_at=st.integers(1, 400),
)
def test_doubt_never_blocks_other_clusters_and_ends_after_repair(
    sizes: list[int], hole_size: int, repaired_at: int
) -> None:
    world = create_world_with_hole(hole_size, 8)
    jobs = [world.submit(flexible(size, max_components=1), run_time=10) for size in sizes]
    world.advance(repaired_at)
    world.sites["hole"].end_black_hole()
    world.advance(60 * len(jobs) + 60)
    assert all(world.state(job) is JobState.SUCCEEDED for job in jobs)
    first_claims = 16 + sum(sizes)  # upper bound of claims before doubt arises
    assert len(submission_times(world, "hole")) <= first_claims + len(sizes)
    last_job = world.submit(fixed(hole=hole_size), run_time=1)
    world.advance(MAX_DOUBT_PAUSE + 60)
    assert world.state(last_job) is JobState.SUCCEEDED
    check_nothing_remains(world)
