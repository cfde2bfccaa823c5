"""Metrics of decisions: reasons for failed placements, claims and attempts."""

from collections import Counter
from functools import cached_property

import pytest

from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.cluster import ClusterState
from koalapy.model.job import JobState
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.limits import UserLimits
from koalapy.model.placement import RefusalKind
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure, Effects
from koalapy.scheduler.rules import QueueMode, Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_failures import break_component
from tests.scheduler.test_owner_limits import make_limits
from tests.scheduler.world import World


class Counting(World):
    """A simulated grid that records the daemon's metrics."""

    @cached_property
    def instruments(self) -> Instruments:
        return Instruments()

    def apply_effects(self, effects: Effects) -> Effects:
        self.instruments.count_effects(effects)
        return super().apply_effects(effects)


def test_metrics_successful_jobs_are_counted_once() -> None:
    world = Counting({"north": 4, "south": 4})
    world.submit(flexible(6))
    world.submit(fixed(south=1), priority=Priority.HIGH)
    world.submit(fixed(south=1), internal=True)
    world.advance(60)
    instruments = world.instruments
    assert instruments.submitted == {Priority.LOW: 1, Priority.HIGH: 1}
    assert instruments.ended == {(JobState.SUCCEEDED, priority): 1 for priority in Priority}
    assert sum(instruments.placements.values()) == 2
    assert sum(count for (_, several), count in instruments.placements.items() if several) == 1
    assert instruments.claims == {"north": 1, "south": 3}, "internal jobs claim nodes, too"
    assert (instruments.requeued, instruments.preemptions) == (0, 0)
    assert not instruments.claims_failed
    assert not instruments.attempts_failed


def test_metrics_count_placement_without_enough_nodes() -> None:
    world = Counting({"north": 4})
    world.submit(fixed(north=4), run_time=1e6)
    world.advance(1)
    initial_counts = Counter(world.instruments.refusals)
    world.submit(flexible(2))
    assert world.instruments.refusals[RefusalKind.NODES] > initial_counts[RefusalKind.NODES]
    world.disconnect("north")
    world.advance(1)
    assert world.queries.grid["north"].state is ClusterState.UNREACHABLE


@pytest.mark.parametrize("mode", ["scan", "head", "fcfs"])
def test_metrics_owner_limit_is_counted_separately(mode: QueueMode) -> None:
    owner_limits = make_limits(UserLimits(nodes=2))
    world = Counting({"north": 8}, Rules(queue=mode, scan_interval=10), limits=owner_limits)
    for _ in range(2):
        world.submit(flexible(2), owner="ada", run_time=1e6)
    world.advance(25)
    assert world.instruments.refusals[RefusalKind.LIMIT] > 0
    assert set(+world.instruments.refusals) == {RefusalKind.LIMIT}


def test_metrics_claim_lost_to_local_users_is_counted() -> None:
    world = Counting({"north": 4, "south": 4}, Rules(claim_grace=10))
    world.sites["south"].add_local_user(2)  # not yet reported
    job = world.submit(fixed(north=2, south=4))
    world.advance(11)
    assert world.state(job) is JobState.QUEUED
    assert world.instruments.claims_failed == {("south", ClaimFailure.LOCAL_USERS): 1}
    assert (world.instruments.requeued, sum(world.instruments.attempts_failed.values())) == (1, 0)


def test_metrics_preemption_and_kept_nodes_are_counted() -> None:
    world = Counting({"north": 4}, Rules(claim_grace=10, barrier_timeout=60))
    site = world.sites["north"]
    preempted_job = world.submit(fixed(north=2), run_time=1e6)
    world.advance(1)
    site.stuck_components.update(world.tokens(preempted_job))
    site.add_local_user(1)  # not yet reported
    world.submit(fixed(north=3), priority=Priority.HIGH)
    world.advance(65)
    assert world.instruments.claims_failed[("north", ClaimFailure.KEPT)] == 1
    assert world.instruments.preemptions == 1


def test_metrics_reclaim_at_home_site_is_counted() -> None:
    world = Counting({"north": 4}, Rules(sharing="feasible"))
    world.submit(fixed(north=4), run_time=1e6)
    world.advance(1)
    world.submit(fixed(north=4), home_site="north")
    world.advance(1)
    assert (world.instruments.reclaims, world.instruments.preemptions) == (1, 0)


@pytest.mark.parametrize("launcher", list(Launcher))
def test_metrics_lost_node_counts_cluster_failure(launcher: Launcher) -> None:
    world = Counting({"north": 4, "south": 4})
    job = world.submit(flexible(6), launcher=launcher)
    world.advance(5)
    broken = world.job(job).token(0)
    cluster = world.site_of(broken).name
    break_component(world, broken)
    assert world.instruments.attempts_failed == {(cluster, AttemptFailure.CLUSTER): 1}


def test_metrics_early_end_is_counted() -> None:
    world = Counting({"north": 4})
    world.submit(fixed(north=4))
    world.settle()
    world.sites["north"].end_component("1.1.0")
    world.settle()
    assert world.instruments.attempts_failed[("north", AttemptFailure.ENDED_EARLY)] >= 1


def test_metrics_silent_cluster_counts_lost_attempt() -> None:
    world = Counting({"north": 4}, lease=29.0)
    job = world.submit(fixed(north=4), run_time=1e6)
    world.advance(5)
    world.disconnect("north")
    world.advance(120)
    assert world.job(job).restarts == 1
    assert world.instruments.attempts_failed == {("north", AttemptFailure.LOST): 1}


def test_metrics_program_failure_counts_no_attempt_failure() -> None:
    world = Counting({"north": 4})
    world.submit(fixed(north=1), code=3)
    world.advance(60)
    assert world.instruments.ended == {(JobState.FAILED, Priority.LOW): 1}
    assert not world.instruments.attempts_failed
