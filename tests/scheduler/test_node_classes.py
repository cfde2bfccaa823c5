"""Nodes that differ: what policies see of them, what is promised, and who is given which."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView, NodeClass, resize_classes
from koalapy.model.job import JobState, Token, parse_token
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.reports import ClusterReport, NodeClassReport
from koalapy.model.request import Request, RequestType
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

SLOW, FAST = NodeClassReport("slow", 4, 4), NodeClassReport("fast", 4, 4, power=2.0, memory=64 << 30)


def status(*classes: NodeClassReport, idle: int | None = None, speed: float = 1.0) -> ClusterStatus:
    cluster = ClusterStatus("north", speed, contact=ContactStatus(connected=True))
    total = sum(each.total for each in classes)
    cluster.report(
        ClusterReport(total, sum(each.idle for each in classes) if idle is None else idle, node_classes=classes), 0.0
    )
    return cluster


def idle(classes: tuple[NodeClass, ...]) -> dict[str, int]:
    return {each.name: each.idle for each in classes}


def seen(cluster: ClusterStatus) -> dict[str, int]:
    return idle(cluster.view(cluster.available).node_classes)


def test_policies_see_what_was_reported_and_the_clusters_speed_where_no_power_was() -> None:
    cluster = status(SLOW, FAST, speed=0.5)
    assert cluster.view(8).node_classes == (NodeClass("slow", 4, 0.5, None, 4), NodeClass("fast", 4, 2.0, 64 << 30, 4))
    assert status().view(8).node_classes == (), "an agent of before there were classes"


def test_what_is_promised_is_taken_from_its_class_until_it_is_reported() -> None:
    cluster = status(SLOW, FAST)
    cluster.promise("1.1.0", 3, "fast")
    assert seen(cluster) == {"slow": 4, "fast": 1}
    assert (cluster.available_of("fast"), cluster.available_of("slow"), cluster.available_of("")) == (1, 4, 5)
    assert cluster.available_of("of another life") == 0
    held = replace(FAST, idle=1)
    cluster.report(ClusterReport(8, 5, holding=frozenset({"1.1.0"}), node_classes=(SLOW, held)), 1.0)
    assert seen(cluster) == {"slow": 4, "fast": 1}
    cluster.report(ClusterReport(8, 8, node_classes=(SLOW, FAST)), 2.0)
    assert seen(cluster) == {"slow": 4, "fast": 1}, "it has not ended: it may get them still"
    cluster.release("1.1.0")
    assert seen(cluster) == {"slow": 4, "fast": 4}


def test_who_asks_for_no_class_gets_what_is_given_first() -> None:
    cluster = status(SLOW, FAST)
    cluster.promise("1.1.0", 5)
    assert seen(cluster) == {"slow": 0, "fast": 3}


def test_a_node_of_a_better_class_wakes_who_waits_though_there_are_no_more_nodes() -> None:
    cluster = status(SLOW, replace(FAST, idle=0))
    cluster.capacity_gained = False
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1))), 1.0)
    assert cluster.capacity_gained
    cluster.capacity_gained = False
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1))), 2.0)
    assert not cluster.capacity_gained
    cluster.report(ClusterReport(8, 4, node_classes=(replace(SLOW, idle=3), replace(FAST, idle=1, power=3.0))), 3.0)
    assert cluster.capacity_gained


def test_who_waited_behind_a_claim_for_a_class_casts_no_doubt() -> None:
    cluster = status(SLOW, replace(FAST, idle=0), idle=4)
    cluster.promise("1.1.0", 2, "fast")
    cluster.promise("2.1.0", 1)
    cluster.promise("3.1.0", 1, "slow")
    assert cluster.idle_reported_for("2.1.0") == 0
    assert cluster.idle_reported_for("3.1.0") == 0
    assert cluster.idle_reported_for("1.1.0") == -2
    cluster.expect_release("1.1.0")
    cluster.release("1.1.0")
    assert cluster.idle_reported_for("3.1.0") == 3


def test_classes_that_do_not_add_up_or_come_twice_are_made_to() -> None:
    cluster = status(FAST, FAST, replace(SLOW, idle=99), idle=5)
    assert sum(seen(cluster).values()) == 5
    cluster = status(replace(SLOW, idle=1), replace(FAST, idle=1), idle=6)
    assert seen(cluster) == {"slow": 2, "fast": 2, "": 2}, "of two it is not known which they are"


CLASSES = st.lists(
    st.builds(
        lambda name, idle, more, power, memory: NodeClass(name, idle, power, memory, idle + more),
        st.sampled_from("abcdef"),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=4,
    unique_by=lambda each: each.name,
).map(tuple)


@given(CLASSES, st.integers(0, 60))
def test_classes_always_add_up_to_the_idle_nodes(classes: tuple[NodeClass, ...], count: int) -> None:
    fitted = resize_classes(classes, count)
    assert sum(idle(fitted).values()) == (count if classes else 0)
    before = idle(classes)
    more = count >= sum(before.values())
    for each in fitted:
        assert each.idle >= 0
        if each.name:
            assert (each.idle >= before[each.name]) if more else (each.idle <= before[each.name])
        else:
            assert each.power == min(c.power for c in classes), "nobody is promised more than there is"
    if count == sum(each.total for each in classes):
        assert all(each.idle == each.total for each in fitted), "the whole cluster"
    assert resize_classes(fitted, count) == fitted


@given(CLASSES, st.integers(0, 5), st.integers(0, 5))
def test_what_is_offered_of_the_idle_nodes_only_shrinks(classes: tuple[NodeClass, ...], kept: int, taken: int) -> None:
    count = sum(idle(classes).values())
    before = idle(resize_classes(classes, max(0, count - kept)))
    after = idle(resize_classes(classes, max(0, count - kept - taken)))
    assert all(nodes <= before[name] for name, nodes in after.items())


class FastNodes:
    """A policy that wants nodes of north's class fast."""

    name = "fast-nodes"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        size, north = request.total_size, grid.get("north")
        if north is None or size > next((c.idle for c in north.node_classes if c.name == "fast"), 0):
            return Refusal("too few fast nodes")
        return Placement((PlacedComponent(size, "north", node_class="fast"),))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


class HalfFast(Site):
    """Half of its nodes are fast, and given last to who asks for none."""

    class_of: Callable[[Token], str]

    def taken(self) -> dict[str, int]:
        """Nodes that are held, by class."""
        taken, slow = {"slow": 0, "fast": 0}, self.total - self.total // 2
        for name, size in sorted(self.held.items(), key=lambda held: self._class(held[0]) != "fast"):
            if self._class(name) == "fast":
                taken["fast"] += size
            else:
                first = min(size, slow - taken["slow"])
                taken["slow"] += first
                taken["fast"] += size - first
        return taken

    def _class(self, name: str) -> str:
        return self.class_of(name) if name in self.runners else ""

    def _next_to_start(self) -> str | None:
        first = super()._next_to_start()
        if first is not None and self._class(first) == "fast":
            return first if self._size(first) <= self.total // 2 - self.taken()["fast"] else None
        return first

    def current_report(self) -> ClusterReport:
        fast, taken = self.total // 2, self.taken()
        slow = self.total - fast
        classes = (
            NodeClassReport("slow", slow, slow - taken["slow"]),
            NodeClassReport("fast", fast, fast - taken["fast"]),
        )
        return replace(super().current_report(), node_classes=classes)


class ClassedWorld(World):
    """Of clusters that are half fast."""

    site_class = HalfFast

    def __init__(self, *args: Any, **more: Any) -> None:
        policies = builtin_policies()
        policies.register(FastNodes())
        super().__init__(*args, policies=policies, **more)
        known: dict[Token, str] = {}

        def class_of(token: Token) -> str:
            ident, _, index, _ = parse_token(token)
            attempt = self.jobs[ident].attempt
            if token not in known and attempt is not None:
                known[token] = attempt.components[index].node_class
            return known[token]

        for site in self.sites.values():
            assert isinstance(site, HalfFast)
            site.class_of = class_of


def test_a_component_gets_nodes_of_the_class_that_it_was_placed_on() -> None:
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
    assert seen(world.queries.grid["north"]) == {"slow": 0, "fast": 1}
    world.advance(20)
    assert world.state(second) is JobState.QUEUED, "the nodes that came free are slow"
    world.advance(40)
    assert world.state(second) is JobState.RUNNING


def test_its_class_outlives_the_daemon() -> None:
    world = ClassedWorld({"north": 8})
    world.advance(1)
    job = world.submit(flexible(3), policy="fast-nodes", run_time=50.0)
    world.restart()
    world.connect("north")
    world.advance(1)
    assert seen(world.queries.grid["north"]) == {"slow": 4, "fast": 1}
    assert world.state(job) is JobState.RUNNING


def test_a_claim_for_a_class_in_vain_casts_doubt_on_that_class_alone() -> None:
    world = ClassedWorld({"north": 8}, Rules(claim_grace=10))
    world.sites["north"].is_black_hole = True
    world.advance(1)
    job = world.submit(flexible(2), policy="fast-nodes")
    world.advance(11)
    cluster = world.queries.grid["north"]
    assert cluster.doubt is not None
    assert str(cluster.doubt).endswith("a claim for 2 nodes of the class fast was in vain")
    assert seen(cluster) == {"slow": 4, "fast": 1}, "one of the two may well be there"
    world.advance(25)
    assert len(world.reasons(job, "claiming")) == 1, "it is not claimed for again while they do not count"
    world.sites["north"].end_black_hole()
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 12)), min_size=1, max_size=12))
def test_whatever_comes_the_classes_add_up_and_nobody_waits_in_vain(jobs: list[tuple[int, bool, int]]) -> None:
    """The laws of the world are checked at each step, that nobody waits whom a scan would place among them."""
    world = ClassedWorld({"north": 8})
    idents = []
    for size, wants_fast, pause in jobs:
        idents.append(world.submit(flexible(size), policy="fast-nodes" if wants_fast else "", run_time=10.0))
        world.advance(pause)
        cluster = world.queries.grid["north"]
        assert sum(seen(cluster).values()) == cluster.available
    world.advance(600)
    assert {world.state(ident) for ident in idents} == {JobState.SUCCEEDED}
    assert seen(world.queries.grid["north"]) == {"slow": 4, "fast": 4}


def test_a_view_keeps_its_classes_when_it_is_asked_what_if() -> None:
    view = ClusterView("north", 8, 8, node_classes=(NodeClass("slow", 4), NodeClass("fast", 4)))
    assert idle(view.with_idle(3).node_classes) == {"slow": 0, "fast": 3}
