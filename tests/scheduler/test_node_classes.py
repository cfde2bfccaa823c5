"""Node classes: what policies see, what is promised, and which class a component receives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView, NodeClass, resize_classes
from koalapy.model.job import JobState, Token, parse_token
from koalapy.model.node_requirement import NodeFilter
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.reports import ClusterReport, NodeClassReport
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.policies.registry import builtin_policies
from koalapy.policies.resource_matching import ResourceMatching
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

SLOW, FAST = NodeClassReport("slow", 4, 4), NodeClassReport("fast", 4, 4, power=2.0, memory=64 << 30)


def make_status(*classes: NodeClassReport, idle: int | None = None, speed: float = 1.0) -> ClusterStatus:
    cluster = ClusterStatus("north", speed, contact=ContactStatus(connected=True))
    total = sum(node_class.total for node_class in classes)
    cluster.report(
        ClusterReport(
            total, sum(node_class.idle for node_class in classes) if idle is None else idle, node_classes=classes
        ),
        0.0,
    )
    return cluster


def idle_by_class(classes: tuple[NodeClass, ...]) -> dict[str, int]:
    return {node_class.name: node_class.idle for node_class in classes}


def offered_by_class(cluster: ClusterStatus) -> dict[str, int]:
    return idle_by_class(cluster.view(cluster.nodes.available).node_classes)


def test_view_has_reported_classes_with_default_power() -> None:
    cluster = make_status(SLOW, FAST, speed=0.5)
    assert cluster.view(8).node_classes == (NodeClass("slow", 4, 0.5, None, 4), NodeClass("fast", 4, 2.0, 64 << 30, 4))
    assert make_status().view(8).node_classes == (), "an agent without node classes"


def test_promise_reduces_its_class_until_reported() -> None:
    cluster = make_status(SLOW, FAST)
    cluster.nodes.promise("1.1.0", 3, NodeFilter("fast"))
    assert offered_by_class(cluster) == {"slow": 4, "fast": 1}
    allocated_fast = replace(FAST, idle=1)
    cluster.report(ClusterReport(8, 5, holding=frozenset({"1.1.0"}), node_classes=(SLOW, allocated_fast)), 1.0)
    assert offered_by_class(cluster) == {"slow": 4, "fast": 1}
    cluster.report(ClusterReport(8, 8, node_classes=(SLOW, FAST)), 2.0)
    assert offered_by_class(cluster) == {"slow": 4, "fast": 1}, "it has not ended and may still receive the nodes"
    cluster.nodes.release("1.1.0")
    assert offered_by_class(cluster) == {"slow": 4, "fast": 4}


def test_promise_without_class_takes_first_class() -> None:
    cluster = make_status(SLOW, FAST)
    cluster.nodes.promise("1.1.0", 5)
    assert offered_by_class(cluster) == {"slow": 0, "fast": 3}


def test_report_of_better_class_signals_gained_capacity() -> None:
    cluster = make_status(SLOW, replace(FAST, idle=0))
    cluster.nodes.capacity_gained = False
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1))), 1.0)
    assert cluster.nodes.capacity_gained
    cluster.nodes.capacity_gained = False
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1))), 2.0)
    assert not cluster.nodes.capacity_gained
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1, power=3.0))), 3.0)
    assert cluster.nodes.capacity_gained


def test_claim_behind_another_class_causes_no_doubt() -> None:
    cluster = make_status(SLOW, replace(FAST, idle=0), idle=4)
    cluster.nodes.promise("1.1.0", 2, NodeFilter("fast"))
    cluster.nodes.promise("2.1.0", 1)
    cluster.nodes.promise("3.1.0", 1, NodeFilter("slow"))
    assert cluster.nodes.idle_reported_for("2.1.0") == 0
    assert cluster.nodes.idle_reported_for("3.1.0") == 0
    assert cluster.nodes.idle_reported_for("1.1.0") == -2
    cluster.nodes.expect_release("1.1.0")
    cluster.nodes.release("1.1.0")
    assert cluster.nodes.idle_reported_for("3.1.0") == 3


def test_class_counts_are_adjusted_to_idle_nodes() -> None:
    cluster = make_status(FAST, FAST, replace(SLOW, idle=99), idle=5)
    assert sum(offered_by_class(cluster).values()) == 5
    cluster = make_status(replace(SLOW, idle=1), replace(FAST, idle=1), idle=6)
    assert offered_by_class(cluster) == {"slow": 2, "fast": 2, "": 2}, "two nodes are of unknown class"


CLASSES = st.lists(
    st.builds(
        lambda name, idle, used, power, memory: NodeClass(name, idle, power, memory, idle + used),
        st.sampled_from("abcdef"),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=4,
    unique_by=lambda node_class: node_class.name,
).map(tuple)


@given(CLASSES, st.integers(0, 60))
def test_resized_classes_add_up_to_idle_nodes(classes: tuple[NodeClass, ...], count: int) -> None:
    fitted = resize_classes(classes, count)
    assert sum(idle_by_class(fitted).values()) == (count if classes else 0)
    old_counts = idle_by_class(classes)
    grows = count >= sum(old_counts.values())
    for node_class in fitted:
        assert node_class.idle >= 0
        if node_class.name:
            assert (
                (node_class.idle >= old_counts[node_class.name])
                if grows
                else (node_class.idle <= old_counts[node_class.name])
            )
        else:
            assert node_class.power == min(c.power for c in classes), (
                "nodes of unknown class count with the lowest power"
            )
    if count == sum(node_class.total for node_class in classes):
        assert all(node_class.idle == node_class.total for node_class in fitted), "a completely idle cluster"
    assert resize_classes(fitted, count) == fitted


@pytest.mark.evidence("G9")
@pytest.mark.parametrize("named", [(), (NodeClass("fast", 2, total=2),)])
def test_resized_classes_have_one_unnamed_class(named: tuple[NodeClass, ...]) -> None:
    """A policy that gets two would place two components of no class on one cluster, and count as broken."""
    fitted = resize_classes((*named, NodeClass("", 3, total=3)), 10)
    assert idle_by_class(fitted) == {**idle_by_class(named), "": 10 - sum(each.idle for each in named)}
    assert len(fitted) == len(named) + 1
    answer = ResourceMatching().place(
        FlexibleRequest(9, max_components=1), GridView((ClusterView("north", 10, 10, node_classes=fitted),))
    )
    assert isinstance(answer, Placement)
    assert len({component.node_class for component in answer.components}) == len(answer.components)


@given(CLASSES, st.integers(0, 5), st.integers(0, 5))
def test_resized_classes_only_shrink_with_fewer_nodes(
    classes: tuple[NodeClass, ...], kept_count: int, taken_count: int
) -> None:
    count = sum(idle_by_class(classes).values())
    kept_counts = idle_by_class(resize_classes(classes, max(0, count - kept_count)))
    taken_counts = idle_by_class(resize_classes(classes, max(0, count - kept_count - taken_count)))
    assert all(nodes <= kept_counts[name] for name, nodes in taken_counts.items())


class FastNodes:
    """A policy that places on north's node class fast."""

    name = "fast-nodes"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        size, north = request.total_size, grid.get("north")
        if north is None or size > next((c.idle for c in north.node_classes if c.name == "fast"), 0):
            return Refusal("too few fast nodes")
        return Placement((PlacedComponent(size, "north", node_class="fast"),))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


class HalfFastSite(Site):
    """A site with half of its nodes fast, which requests without class receive last."""

    class_of: Callable[[Token], str]

    def held_by_class(self) -> dict[str, int]:
        """Return held nodes by class."""
        counts, slow = {"slow": 0, "fast": 0}, self.total - self.total // 2
        for name, size in sorted(self.held.items(), key=lambda item: self._class_of(item[0]) != "fast"):
            if self._class_of(name) == "fast":
                counts["fast"] += size
            else:
                slow_count = min(size, slow - counts["slow"])
                counts["slow"] += slow_count
                counts["fast"] += size - slow_count
        return counts

    def _class_of(self, name: str) -> str:
        return self.class_of(name) if name in self.runners else ""

    def _next_to_start(self) -> str | None:
        next_name = super()._next_to_start()
        if next_name is not None and self._class_of(next_name) == "fast":
            return next_name if self._size(next_name) <= self.total // 2 - self.held_by_class()["fast"] else None
        return next_name

    def current_report(self) -> ClusterReport:
        fast, held_counts = self.total // 2, self.held_by_class()
        slow = self.total - fast
        classes = (
            NodeClassReport("slow", slow, slow - held_counts["slow"]),
            NodeClassReport("fast", fast, fast - held_counts["fast"]),
        )
        return replace(super().current_report(), node_classes=classes)


class ClassedWorld(World):
    """A simulated grid of clusters with half of their nodes fast."""

    site_class = HalfFastSite

    def __init__(self, *args: Any, **options: Any) -> None:
        policies = builtin_policies()
        policies.register(FastNodes())
        super().__init__(*args, policies=policies, **options)
        classes: dict[Token, str] = {}

        def class_of(token: Token) -> str:
            job_id, _, index, _ = parse_token(token)
            attempt = self.jobs[job_id].attempt
            if token not in classes and attempt is not None:
                classes[token] = attempt.components[index].node_class
            return classes[token]

        for site in self.sites.values():
            assert isinstance(site, HalfFastSite)
            site.class_of = class_of


def test_component_receives_nodes_of_its_class() -> None:
    world = ClassedWorld({"north": 8})
    world.advance(1)
    first = world.submit(flexible(3), policy="fast-nodes", run_time=50.0)
    second = world.submit(flexible(3), policy="fast-nodes", run_time=50.0)
    third = world.submit(flexible(4), run_time=5.0)
    world.advance(1)
    assert [world.state(job) for job in (first, second, third)] == [JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    attempt = world.job(first).attempt
    assert attempt is not None
    assert [c.node_class for c in attempt.components] == ["fast"]
    assert offered_by_class(world.queries.grid["north"]) == {"slow": 0, "fast": 1}
    world.advance(20)
    assert world.state(second) is JobState.QUEUED, "the released nodes are slow"
    world.advance(40)
    assert world.state(second) is JobState.RUNNING


def test_class_of_component_survives_daemon_restart() -> None:
    world = ClassedWorld({"north": 8})
    world.advance(1)
    job = world.submit(flexible(3), policy="fast-nodes", run_time=50.0)
    world.restart()
    world.connect("north")
    world.advance(1)
    assert offered_by_class(world.queries.grid["north"]) == {"slow": 4, "fast": 1}
    assert world.state(job) is JobState.RUNNING


def test_doubt_after_failed_class_claim_concerns_that_class() -> None:
    world = ClassedWorld({"north": 8}, Rules(claim_grace=10))
    world.sites["north"].is_black_hole = True
    world.advance(1)
    job = world.submit(flexible(2), policy="fast-nodes")
    world.advance(11)
    cluster = world.queries.grid["north"]
    assert cluster.health.doubt is not None
    assert str(cluster.health.doubt).endswith("a claim for 2 nodes of the class fast was in vain")
    assert offered_by_class(cluster) == {"slow": 4, "fast": 1}, "one of the two nodes may be available"
    world.advance(25)
    assert len(world.reasons(job, "claiming")) == 1, "it does not claim again while the nodes are in doubt"
    world.sites["north"].end_black_hole()
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 12)), min_size=1, max_size=12))
def test_classes_add_up_and_all_jobs_finish(jobs: list[tuple[int, bool, int]]) -> None:
    """Invariants of the simulated grid are checked at each step."""
    world = ClassedWorld({"north": 8})
    job_ids = []
    for size, needs_fast, pause in jobs:
        job_ids.append(world.submit(flexible(size), policy="fast-nodes" if needs_fast else "", run_time=10.0))
        world.advance(pause)
        cluster = world.queries.grid["north"]
        assert sum(offered_by_class(cluster).values()) == cluster.nodes.available
    world.advance(600)
    assert {world.state(job_id) for job_id in job_ids} == {JobState.SUCCEEDED}
    assert offered_by_class(world.queries.grid["north"]) == {"slow": 4, "fast": 4}


def test_view_with_changed_idle_count_keeps_classes() -> None:
    view = ClusterView("north", 8, 8, node_classes=(NodeClass("slow", 4), NodeClass("fast", 4)))
    assert idle_by_class(view.with_idle(3).node_classes) == {"slow": 0, "fast": 3}
