"""Jobs that share nodes: an embedded cluster's resource manager and the scheduler's counts agree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.local.jobs import JobTable, LocalJob, LocalNode
from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.model.node_requirement import ANY_NODE, Gpus, NodeFilter, NodeRequirement
from koalapy.model.reports import ClusterReport, NodePartReport
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus

GB = 1 << 30
CLASSES = {
    "small": NodeClassSettings(nodes=2, cores=4, memory=8 * GB),
    "gpu": NodeClassSettings(nodes=2, cores=8, memory=64 * GB, gpus={"a100": 2, "h100": 1}),
    "unknown": NodeClassSettings(nodes=1, memory=8 * GB),
}
REQUIREMENTS = st.builds(
    NodeRequirement,
    cores=st.integers(1, 5),
    memory=st.sampled_from([None, None, GB, 6 * GB, 40 * GB]),
    gpus=st.sampled_from([None, None, Gpus(1), Gpus(2), Gpus(1, "a100"), Gpus(1, "h100")]),
    share=st.sampled_from([True, True, True, False]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(1, 3), st.one_of(REQUIREMENTS, REQUIREMENTS, st.none())),
        st.tuples(st.just("deliver"), st.none(), st.none()),
        st.tuples(st.just("end"), st.integers(0, 9), st.none()),
        st.tuples(st.just("report"), st.none(), st.none()),
    ),
    max_size=40,
)


class SharedCluster:
    """An embedded cluster without processes, and the scheduler's record of it."""

    def __init__(self) -> None:
        cluster = LocalCluster(Path("/nowhere"), "north", 5)
        self.lrm = LocalLrm(cluster, "koala-", node_classes=CLASSES, share=True)
        self.table = JobTable([LocalNode(f"north-{address}", address) for address in cluster.addresses])
        self.status = ClusterStatus("north", contact=ContactStatus(connected=True))
        self.in_transit: list[tuple[str, int, NodeRequirement | None]] = []
        self._placed = 0
        self.send_report()

    def send_report(self) -> None:
        records = [job.as_record() for job in self.table.active_jobs]
        held = {address for record in records for address in record["nodes"]}
        classes = self.lrm._classes.report(lambda names: len(names - held), self.lrm._used_parts(records))
        idle, holding = len(self.table.idle_nodes()), frozenset(job.name for job in self.table.running.values())
        self.status.report(ClusterReport(5, idle, holding=holding, node_classes=classes, shares=True), 0.0)

    def count_available(self, nodes: NodeFilter) -> int:
        """Return the available nodes that a component may get."""
        view = self.status.view(self.status.nodes.available)
        if nodes.requirement is not None:
            selected = view.select_nodes(nodes.requirement)
            return 0 if selected is None else selected.idle
        return view.idle

    def place(self, size: int, requirement: NodeRequirement | None) -> bool:
        """Promise nodes to a component if the scheduler has enough; return whether it has."""
        nodes = ANY_NODE if requirement is None else NodeFilter(requirement=requirement)
        if self.count_available(nodes) < size:
            return False
        self._placed += 1
        token = f"{self._placed}.1.0"
        self.status.nodes.promise(token, size, nodes, preemptible=True)
        self.in_transit.append((token, size, requirement))
        return True

    def deliver(self) -> LocalJob:
        """Submit the component that was placed first; return its job, as far as it has started."""
        token, size, requirement = self.in_transit.pop(0)
        eligible = None
        if requirement is not None:
            eligible = self.lrm._classes.admitted_nodes("", requirement, size, self.lrm.cluster.addresses)
        parts = self.lrm._parts_for(requirement) if requirement is not None else {}
        request: dict[str, Any] = {"name": token, "nodes": size, "argv": ["true"], "cwd": "/"}
        job = self.table.submit_job(request | {"eligible": sorted(eligible or ()), "parts": parts})
        self.table.start_next_job()
        return job

    def end(self, number: int) -> None:
        """End one of the running jobs."""
        running = list(self.table.running.values())
        if running:
            job = running[number % len(running)]
            self.table.end_job(job)
            self.status.nodes.release(job.name)


def check_nodes(cluster: SharedCluster) -> None:
    """Check that no node has more jobs than it has cores, memory and GPUs, or another job with an exclusive one."""
    groups = {address: group for group in cluster.lrm._classes.groups for address in group.nodes}
    for node in cluster.table.nodes:
        if len(node.jobs) > 1:
            group, parts = groups[node.address], [job.parts[node.address] for job in node.jobs]
            assert sum(part["cores"][0] for part in parts) <= (group.cores or 0)
            assert sum(part["memory"][0] for part in parts) <= (group.memory or 0)
            assert sum(part["gpus"][0] for part in parts if "gpus" in part) <= sum(gpus.count for gpus in group.gpus)
            for gpus in group.gpus:
                typed = [part[f"gpus:{gpus.type}"] for part in parts if f"gpus:{gpus.type}" in part]
                assert sum(amount for amount, capacity in typed if capacity is not None) <= gpus.count


@given(STEPS)
def test_components_that_share_start_at_once_where_the_scheduler_counts_nodes(steps: list[Any]) -> None:
    """Whatever the order of placements, submissions, ends and reports: no node is promised twice."""
    cluster = SharedCluster()
    for step, number, requirement in steps:
        if step == "place":
            cluster.place(number, requirement)
        elif step == "deliver" and cluster.in_transit:
            assert cluster.deliver().state == "running"
        elif step == "end":
            cluster.end(number)
        elif step == "report":
            cluster.send_report()
        check_nodes(cluster)
        assert all(part.idle >= 0 for part in cluster.status.nodes.parts)
    while cluster.in_transit:
        assert cluster.deliver().state == "running"
    while cluster.table.running:
        cluster.end(0)
    cluster.send_report()
    assert (cluster.status.nodes.available, cluster.status.nodes.parts, cluster.status.nodes.expected) == (5, (), 5)


def test_exclusive_job_gets_no_node_that_others_share() -> None:
    cluster = SharedCluster()
    part = NodeRequirement(cores=2, share=True)
    assert cluster.place(4, part)
    cluster.deliver()
    cluster.send_report()
    assert cluster.status.nodes.available == 1
    assert not cluster.place(2, NodeRequirement(cores=2))
    assert not cluster.place(2, None)
    assert cluster.status.nodes.preemptible == 0, "the end of one job frees no node"
    assert cluster.place(4, part)
    assert not cluster.place(1, part), "the nodes of a component count until a report has them"
    cluster.deliver()
    cluster.send_report()
    assert {(part.name, part.cores, part.idle) for part in cluster.status.nodes.parts} == {("gpu", 4, 2)}


@pytest.mark.parametrize(
    ("requirement", "left"),
    [
        (NodeRequirement(cores=1), NodePartReport(2, 3, 6 * GB)),
        (NodeRequirement(cores=1, memory=7 * GB), NodePartReport(2, 3, GB)),
        (NodeRequirement(cores=2, memory=GB), NodePartReport(2, 2, 7 * GB)),
        (NodeRequirement(cores=2, memory=8 * GB), None),
    ],
)
def test_memory_of_a_part_is_that_of_its_cores_by_default(
    requirement: NodeRequirement, left: NodePartReport | None
) -> None:
    cluster = SharedCluster()
    others = "127.0.1.[3-5]"
    assert cluster.place(2, replace(requirement, exclude=(others,), share=True))
    cluster.deliver()
    cluster.send_report()
    records = [job.as_record() for job in cluster.table.active_jobs]
    reports = cluster.lrm._classes.report(lambda _: 0, cluster.lrm._used_parts(records))
    assert reports[0].parts == (() if left is None else (left,))
    for memory, least in ((None, 2 * GB), (GB, GB)):
        next_job = NodeRequirement(1, memory, share=True)
        parts = [part for part in cluster.status.nodes.parts if next_job.is_met_by(part)]
        assert bool(parts) == (left is not None and (left.memory or 0) >= least), "what is counted"
        if parts:
            assert cluster.place(5, next_job)
            assert cluster.deliver().state == "running", "and what is given"
            cluster.end(1)
