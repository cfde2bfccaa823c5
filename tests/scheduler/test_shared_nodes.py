"""Jobs that share nodes in the simulated grid: placement, claims, reservations and preemption."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState, Token, parse_token
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Placement
from koalapy.model.reports import ClusterReport, NodeClassReport, NodePartReport
from koalapy.scheduler.explain.explain import explain_submission
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

CORES = 4
"""Cores of each node."""


class SharingSite(Site):
    """A site with nodes of four cores, which gives a part of each to components that share nodes."""

    spec_of: Callable[[Token], JobSpec]

    def __init__(self, *args: Any) -> None:
        self.nodes_held: dict[str, list[int]] = {}
        super().__init__(*args)

    def used_cores(self) -> list[list[int]]:
        """Return the cores of each component or user on each node; ``CORES`` for all of a node."""
        used: list[list[int]] = [[] for _ in range(self.total)]
        for name in self.held:
            for node in self.nodes_held[name]:
                used[node].append(self._cores_of(name))
        return used

    def _cores_of(self, name: str) -> int:
        spec = self.spec_of(name) if name in self.runners else None
        return (spec.cores or CORES) if spec is not None and spec.share else CORES

    @property
    def idle(self) -> int:
        return sum(not used for used in self.used_cores()) - self.down

    def _next_to_start(self) -> str | None:
        name = next(iter(self.queue), None)
        if name is None:
            return None
        cores, used = self._cores_of(name), self.used_cores()
        nodes = [node for node in range(self.total) if sum(used[node]) + cores <= CORES]
        nodes.sort(key=lambda node: not used[node])
        if len(nodes) < self._size(name):
            return None
        self.nodes_held[name] = nodes[: self._size(name)]
        return name

    def current_report(self) -> ClusterReport:
        counts = Counter(CORES - sum(used) for used in self.used_cores() if used and sum(used) < CORES)
        parts = tuple(NodePartReport(nodes, cores) for cores, nodes in sorted(counts.items()))
        classes = (NodeClassReport("", self.total, self.idle, cores=CORES, parts=parts),)
        users = {node for name in self.held if name in self.local_users for node in self.nodes_held[name]}
        return replace(super().current_report(), background=len(users), node_classes=classes, shares=True)


class SharingWorld(World):
    site_class = SharingSite

    def __init__(self, sizes: Mapping[str, int], rules: Rules | None = None, **options: Any) -> None:
        super().__init__(sizes, rules, **options)
        for site in self.sites.values():
            assert isinstance(site, SharingSite)
            site.spec_of = lambda token: self.jobs[parse_token(token).job].spec
        self.advance(1)

    def share(self, size: int = 1, cores: int = 1, **fields: Any) -> JobId:
        return self.submit(flexible(size), share=True, cores=cores, **fields)

    def nodes_of(self, job: JobId) -> list[int]:
        return [
            node
            for site in self.sites.values()
            if isinstance(site, SharingSite)
            for token in self.tokens(job)
            for node in site.nodes_held[token]
        ]

    def check_nodes(self) -> None:
        for site in self.sites.values():
            assert isinstance(site, SharingSite)
            assert all(sum(used) <= CORES for used in site.used_cores())


def test_jobs_that_share_are_placed_on_partly_used_nodes() -> None:
    world = SharingWorld({"north": 1})
    jobs = [world.share(cores=2, run_time=100), world.share(cores=1, run_time=100)]
    world.advance(5)
    assert [world.state(job) for job in jobs] == [JobState.RUNNING] * 2
    whole, wide = world.submit(flexible(1)), world.share(cores=2)
    world.advance(5)
    assert [world.state(job) for job in (whole, wide)] == [JobState.QUEUED] * 2
    spec = JobSpec(flexible(1), ("true",), cores=1, share=True)
    assert explain_submission(world.queries, spec, world.now).placement is not None
    assert isinstance(world.queries.questions.ask(spec, world.queries.grid.view()), Placement)
    text = explain_submission(world.queries, replace(spec, cores=3), world.now).clusters[0].reason
    assert "1 partly used node can be shared" in text
    world.advance(300)
    assert {world.state(job) for job in (*jobs, whole, wide)} == {JobState.SUCCEEDED}


def test_site_that_does_not_share_gives_whole_nodes() -> None:
    world = World({"north": 2})
    jobs = [world.submit(flexible(1), share=True, cores=1, run_time=100) for _ in range(3)]
    world.advance(5)
    assert [world.state(job) for job in jobs] == [JobState.RUNNING, JobState.RUNNING, JobState.QUEUED]
    urgent = world.submit(flexible(1), priority=Priority.HIGH)
    world.advance(5)
    assert world.state(urgent) is not JobState.QUEUED, "it preempts a job that has a whole node"


def test_job_of_high_priority_does_not_preempt_a_part_of_a_node() -> None:
    world = SharingWorld({"north": 1})
    low = world.share(run_time=50)
    world.advance(5)
    urgent = world.submit(flexible(1), priority=Priority.HIGH)
    world.advance(20)
    assert (world.state(low), world.state(urgent)) == (JobState.RUNNING, JobState.QUEUED)
    world.advance(100)
    assert {world.state(low), world.state(urgent)} == {JobState.SUCCEEDED}
    assert world.job(low).restarts == 0


@pytest.mark.parametrize("cores", [1, CORES])
def test_job_that_shares_nodes_preempts_no_other(cores: int) -> None:
    world = SharingWorld({"north": 1})
    low = world.submit(flexible(1), run_time=50)
    world.advance(5)
    urgent = world.share(cores=cores, priority=Priority.HIGH)
    assert explain_submission(world.queries, world.job(urgent).spec, world.now).placement is None
    world.advance(20)
    assert (world.state(low), world.state(urgent)) == (JobState.RUNNING, JobState.QUEUED)
    world.advance(100)
    assert {world.state(low), world.state(urgent)} == {JobState.SUCCEEDED}


def test_components_that_share_are_not_preempted_after_a_restart() -> None:
    world = SharingWorld({"north": 1})
    world.share(run_time=100)
    world.advance(5)
    world.restart()
    assert world.queries.grid["north"].nodes.preemptible == 1, "the site has not reported yet"
    world.connect("north")
    world.advance(5)
    assert world.queries.grid["north"].nodes.preemptible == 0


@pytest.mark.parametrize("share", [{}, {"share": True, "cores": CORES}])
def test_aged_job_keeps_others_from_sharing_its_nodes(share: dict[str, Any]) -> None:
    """Without the plan, small jobs would always overlap, so that no node would ever be idle."""
    world = SharingWorld({"north": 2}, Rules(plan_after=0, scan_interval=10, high_scans_per_low=1))
    for _ in range(3):
        world.share(cores=1, run_time=30)
        world.advance(5)
    aged = world.submit(fixed(north=2), run_time=10, **share)
    for _ in range(60):
        world.share(cores=1, run_time=30)
        world.advance(5)
        world.check_nodes()
    assert world.state(aged) is JobState.SUCCEEDED


JOBS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from([0, 1, 1, 2, 3, 4]),
        st.sampled_from([Priority.LOW, Priority.LOW, Priority.HIGH]),
        st.sampled_from(["", "resource-matching", "larger-first"]),
        st.integers(0, 8),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


def run_sharing_jobs(world: SharingWorld, jobs: list[tuple[int, int, Priority, str, int, int]]) -> None:
    """Submit jobs between those of local users until all have finished; 0 cores: a job that shares no node."""
    job_ids, users = [], []
    for size, cores, priority, policy, pause, local in jobs:
        fields: dict[str, Any] = {"share": True, "cores": cores} if cores else {}
        job_ids.append(world.submit(flexible(size), priority=priority, policy=policy, **fields))
        if local:
            users.append(world.sites["south"].add_local_user(local))
        for _ in range(pause):
            world.advance(1)
            world.check_nodes()
    for name in users:
        world.sites["south"].remove_local_user(name)
    for _ in range(9):
        world.advance(100)
        world.check_nodes()
    assert {world.state(job) for job in job_ids} == {JobState.SUCCEEDED}


LOW, HIGH = Priority.LOW, Priority.HIGH
LOST_TO_LOCAL_USERS = [
    (3, 1, LOW, "", 1, 0),
    *[(1, 0, LOW, "", 0, 0)] * 6,
    (1, 0, LOW, "", 0, 1),
    (1, 1, LOW, "", 0, 1),
    (2, 1, LOW, "", 7, 0),
    (1, 1, HIGH, "", 0, 0),
    (1, 0, LOW, "", 3, 0),
]
"""Local users are faster than a job of two nodes, and a job of high priority may then share one of them."""


@given(JOBS)
@example(LOST_TO_LOCAL_USERS)
def test_no_node_has_more_jobs_than_cores_and_all_jobs_finish(
    jobs: list[tuple[int, int, Priority, str, int, int]],
) -> None:
    """Invariants of the simulated grid are checked at each step."""
    world = SharingWorld({"north": 2, "south": 3})
    run_sharing_jobs(world, jobs)
    for cluster in world.queries.grid.clusters():
        assert (cluster.nodes.available, cluster.nodes.parts, cluster.nodes.leaving) == (
            cluster.last_report.total,
            (),
            0,
        )
