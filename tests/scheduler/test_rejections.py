"""Rejections of components by a resource manager: faults of the job, of a limit, or of the cluster."""

from dataclasses import replace

import pytest

from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobState
from koalapy.model.job_spec import Priority
from koalapy.scheduler.attempts.health import LIMIT_PAUSE, MAX_LIMIT_PAUSE
from koalapy.scheduler.events import ClusterCleared
from koalapy.scheduler.explain.explain import explain
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World


def test_rejection_by_job_fault_fails_job_without_cluster_error() -> None:
    world = World({"north": 4, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "job"
    for _ in range(5):
        job = world.submit(fixed(north=2, south=2))
        world.advance(5)
        failed = world.job(job)
        assert (failed.state, failed.restarts, failed.reason) == (JobState.FAILED, 0, "north refused it: not 2 nodes")
    cluster = world.queries.grid["north"]
    assert (cluster.health.errors, cluster.state) == (0, ClusterState.USABLE)
    check_nothing_remains(world)


def test_rejections_by_cluster_fault_count_and_move_each_job() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "site"
    cluster, threshold = world.queries.grid["north"], world.rules.error_threshold
    for errors, is_unusable in ((threshold, False), (threshold + 1, True)):
        job = world.submit(flexible(3, max_components=1))
        world.advance(60)
        assert world.state(job) is JobState.SUCCEEDED
        assert (cluster.health.errors, cluster.health.unusable) == (errors, is_unusable)


def test_rejection_by_limit_moves_job_at_once() -> None:
    world = World({"north": 8, "south": 4})
    world.sites["north"].rejection_fault = lambda size: "limit"
    job = world.submit(flexible(3, max_components=1))
    world.advance(LIMIT_PAUSE / 2)
    moved = world.job(job)
    assert moved.attempt is not None
    assert [c.cluster for c in moved.attempt.components] == ["south"]
    assert (moved.state, moved.restarts) == (JobState.RUNNING, 0)
    assert world.reasons(job, "requeued") == ["claim-failed: north takes no more: not 3 nodes"]
    assert world.queries.grid["north"].health.errors == 0


def test_limit_lasting_keeps_large_job_waiting_and_runs_small_ones() -> None:
    world = World({"north": 8})
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    large_job = world.submit(flexible(5), run_time=1)
    world.advance(1)
    cluster = world.queries.grid["north"]
    assert (cluster.nodes.available, cluster.nodes.idle, cluster.nodes.used, cluster.state) == (
        4,
        8,
        0,
        ClusterState.USABLE,
    )
    assert "takes nothing of 5 nodes or more until" in cluster.status_text
    small_jobs = [world.submit(flexible(2), run_time=1) for _ in range(4)]
    world.advance(5)
    assert {world.state(job) for job in small_jobs} == {JobState.SUCCEEDED}
    assert world.state(large_job) is JobState.QUEUED
    world.advance(20 * LIMIT_PAUSE)
    assert world.state(large_job) is JobState.QUEUED
    tries = len(world.reasons(large_job, "placed"))
    assert 2 < tries < 10, "the pauses between tries grow"
    world.sites["north"].rejection_fault = lambda size: ""
    world.advance(MAX_LIMIT_PAUSE + 10)
    finished = world.job(large_job)
    assert (finished.state, finished.restarts) == (JobState.SUCCEEDED, 0)
    assert (cluster.health.limit, cluster.health.limits, cluster.health.errors) == (None, 0, 0)
    check_nothing_remains(world)


@pytest.mark.parametrize("priority", ["high", "low"])
def test_limit_prevents_repeated_preemption(priority: str) -> None:
    world = World({"north": 4})
    low_job = world.submit(flexible(4), run_time=200)
    world.advance(5)
    world.sites["north"].rejection_fault = lambda size: "limit"
    world.submit(flexible(4), priority=Priority(priority), run_time=1)
    world.advance(LIMIT_PAUSE / 2)
    assert len(world.reasons(low_job, "preempted")) == (priority == "high"), "only before the limit was known"
    placed_count = len(world.reasons(low_job, "placed"))
    world.advance(LIMIT_PAUSE / 4)
    assert len(world.reasons(low_job, "placed")) == placed_count


def test_claim_failure_names_resource_manager_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"north": 4})
    site = world.sites["north"]
    user = site.add_local_user(4)  # not yet reported
    job = world.submit(flexible(4), run_time=1)
    original_report = site.current_report
    monkeypatch.setattr(
        site, "current_report", lambda: replace(original_report(), problem="not answering since 10:00:00")
    )
    site.send_report(site.current_report())
    world.settle()
    world.advance(world.rules.claim_grace + 1)
    assert world.reasons(job, "requeued") == ["claim-failed: north: not answering since 10:00:00"]
    monkeypatch.undo()
    site.remove_local_user(user)
    site.send_report(site.current_report())
    world.settle()
    world.advance(10)
    assert world.state(job) is JobState.SUCCEEDED


def test_explanation_of_claim_names_resource_manager_problem() -> None:
    world = World({"north": 4}, manual=True)
    world.settle()
    job = world.submit(flexible(4))
    site = world.sites["north"]
    world.run_commands("north")
    site.send_report(replace(site.current_report(), problem="not answering since 10:00:00"))
    world.deliver("north")
    explanation = explain(world.queries, world.job(job), world.timeline, world.now)
    assert explanation.headline.endswith("; north: not answering since 10:00:00")


def test_limit_is_lifted_when_operator_clears_cluster() -> None:
    world = World({"north": 4})
    world.sites["north"].rejection_fault = lambda size: "limit"
    job = world.submit(flexible(4), run_time=1)
    world.advance(1)
    assert world.queries.grid["north"].nodes.available == 3
    world.sites["north"].rejection_fault = lambda size: ""
    world.step([ClusterCleared("north")])
    world.advance(5)
    assert world.state(job) is JobState.SUCCEEDED


def test_limit_is_lifted_when_job_ends() -> None:
    world = World({"north": 8})
    site = world.sites["north"]
    first = world.submit(flexible(4), run_time=8)
    world.advance(1)
    site.rejection_fault = lambda size: "limit" if sum(site.held.values()) else ""
    second = world.submit(flexible(4), run_time=1)
    world.advance(1)
    reason = "north takes nothing of 4 nodes or more until 00:00:16: not 4 nodes"
    assert world.queries.waiting_reason(world.job(second)) == reason, "4 nodes are idle there"
    world.advance(8)
    assert world.state(first) is JobState.SUCCEEDED
    assert world.state(second).is_active or world.state(second) is JobState.SUCCEEDED
    assert world.now < LIMIT_PAUSE


def test_limit_is_not_tested_by_each_of_many_ended_jobs() -> None:
    world = World({"north": 8})
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    large_job = world.submit(flexible(5), run_time=1)
    for _ in range(200):
        world.submit(flexible(1), run_time=2)
    world.advance(60)
    assert 1 < len(world.reasons(large_job, "placed")) <= 60 / LIMIT_PAUSE + 2


def test_waiting_reason_names_nodes_in_doubt() -> None:
    world = World({"north": 4})
    world.sites["north"].is_black_hole = True
    job = world.submit(flexible(4))
    world.advance(world.rules.claim_grace + 2)
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)).startswith("north has 1 idle node in doubt until")
