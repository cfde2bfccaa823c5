"""Background load on a simulated cluster that also runs jobs of the scheduler."""

from collections import deque
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koalapy.workload.background import LONGEST, Keeper, LocalJob


class Cluster:
    """A first-come-first-served cluster with steps of one second."""

    def __init__(self, total: int, ours: Random | None) -> None:
        self.total, self._draws = total, ours
        self.now = 0.0
        self._running: list[tuple[float, int]] = []
        self._ours: list[tuple[float, int]] = []
        self._queue: deque[LocalJob] = deque()

    @property
    def background(self) -> int:
        return sum(nodes for _, nodes in self._running)

    @property
    def idle(self) -> int:
        return self.total - self.background - sum(nodes for _, nodes in self._ours)

    def submit(self, job: LocalJob) -> None:
        self._queue.append(job)

    def step(self) -> None:
        self.now += 1.0
        self._running = [entry for entry in self._running if entry[0] > self.now]
        self._ours = [entry for entry in self._ours if entry[0] > self.now]
        while self._queue and self._queue[0].nodes <= self.idle:
            job = self._queue.popleft()
            self._running.append((self.now + job.seconds, job.nodes))
        if self._draws is not None and not self._queue and self._draws.random() < 0.1:
            nodes = self._draws.randint(1, max(1, self.total // 2))
            if nodes <= self.idle:
                self._ours.append((self.now + self._draws.uniform(5, 15), nodes))


def mean_background(
    total: int, target: float, seed: int, *, lasts: int = 600, seconds: float = 20.0, told_every: int = 1
) -> float:
    """Return the mean fraction of nodes used by local users. The cluster reports every ``told_every`` seconds."""
    cluster = Cluster(total, Random(f"{seed}/ours"))
    keeper = Keeper(target, Random(seed), seconds=seconds)
    observed, reported = [], 0
    for step in range(lasts):
        if step % told_every == 0:
            reported = cluster.background
        keeper.record_nodes(cluster.now, total, reported)
        for job in keeper.draw_arrivals(1.0):
            assert 1 <= job.nodes <= total
            assert 0 < job.seconds <= LONGEST
            cluster.submit(job)
        cluster.step()
        observed.append(cluster.background)
    return fmean(observed) / total


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 64), st.sampled_from([0.1, 0.2, 0.3]), st.integers(0, 10**6), st.sampled_from([1, 5]))
def test_keeper_mean_load_is_near_its_target(total: int, target: float, seed: int, told_every: int) -> None:
    assert abs(mean_background(total, target, seed, told_every=told_every) - target) <= 0.05


@pytest.mark.parametrize("target", [0.1, 0.3])
def test_keeper_over_many_runs_has_no_bias(target: float) -> None:
    means = [mean_background(4, target, seed, lasts=300, seconds=10.0, told_every=5) for seed in range(30)]
    assert fmean(means) == pytest.approx(target, abs=0.015)


def test_keeper_arrivals_are_random() -> None:
    cluster = Cluster(32, None)
    keeper = Keeper(0.3, Random(1), seconds=20.0)
    arrivals = []
    for _ in range(2000):
        keeper.record_nodes(cluster.now, 32, cluster.background)
        jobs = list(keeper.draw_arrivals(1.0))
        arrivals.append(len(jobs))
        for job in jobs:
            cluster.submit(job)
        cluster.step()
    mean = fmean(arrivals)
    variance = fmean((n - mean) ** 2 for n in arrivals)
    # Both are equal for a Poisson process; the correction changes the variance slightly in either direction.
    assert 0.4 < variance / mean < 2.0


def test_keeper_with_enough_local_users_submits_nothing() -> None:
    keeper = Keeper(0.2, Random(1), seconds=20.0)
    submitted = []
    for second in range(300):
        keeper.record_nodes(float(second), 10, 5)
        submitted += list(keeper.draw_arrivals(1.0)) if second > 60 else []
    assert submitted == []


def test_keeper_counts_waiting_jobs_as_outstanding() -> None:
    keeper = Keeper(0.2, Random(1), seconds=20.0)
    submitted: list[LocalJob] = []
    for second in range(100):
        keeper.record_nodes(float(second), 10, 0)  # the scheduler's jobs use all nodes
        submitted += keeper.draw_arrivals(1.0)
    # The deficit grows by two node-seconds a second and bounds the work of outstanding jobs.
    assert sum(job.nodes * job.seconds for job in submitted) <= 2 * (100 + 2 * 20) + 3 * 60


def test_keeper_replaces_rejected_jobs() -> None:
    keeper = Keeper(0.2, Random(1), seconds=5.0)
    submitted = []
    for second in range(60):
        keeper.record_nodes(float(second), 10, 0)
        for job in keeper.draw_arrivals(1.0):
            submitted.append(job)
            keeper.remove_job(job)
    assert sum(job.nodes * job.seconds for job in submitted) > 2 * 60


def test_keeper_of_cluster_without_nodes_submits_nothing() -> None:
    keeper = Keeper(0.2, Random(1), seconds=5.0)
    assert list(keeper.draw_arrivals(10.0)) == []
    keeper.record_nodes(0.0, 0, 0)
    assert list(keeper.draw_arrivals(1000.0)) == []


def test_keeper_does_not_compensate_long_gaps() -> None:
    keeper = Keeper(0.2, Random(1), seconds=5.0)
    keeper.record_nodes(0.0, 10, 2)
    keeper.record_nodes(5000.0, 10, 2)
    work = sum(job.nodes * job.seconds for job in keeper.draw_arrivals(1.0))
    assert work < 100
