"""The resource matching policy: options, statistics, reasons, and comparison with other policies."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.placement import Placement
from koalapy.model.request import FlexibleRequest
from koalapy.policies.knowledge import Knowledge, LogNormal, Slowdowns, assume_slowdown, ccr_of
from koalapy.policies.matching import Mode, Problem, Share, find_matching, has_matching
from koalapy.policies.registry import builtin_policies
from koalapy.policies.resource_matching import ResourceMatching
from tests.policies.grids import explained, grid, grids, nonfixed, sites, summary, with_speeds, with_state
from tests.policies.test_matching import problems

MATCHING = ResourceMatching()
FREE = ResourceMatching(Mode.NON_SATURATED)
GB = 10**9
HEURISTICS = ("cluster-minimization", "communication-aware", "larger-first", "faster-first", "best-fit", "fastest-one")


def cluster_of_classes(name: str, total: int, *classes: NodeClass) -> ClusterView:
    return ClusterView(name, total, sum(node_class.idle for node_class in classes), node_classes=classes)


def informed_policy(policy: ResourceMatching = MATCHING, **facts: float | int) -> ResourceMatching:
    return policy.informed(Knowledge(**facts))  # type: ignore[arg-type]


def given_to(answer: object) -> list[tuple[int, str, str]]:
    assert isinstance(answer, Placement), answer
    return [(c.size, c.cluster, c.node_class) for c in answer.components]


@st.composite
def unlike_grids(draw: st.DrawFn) -> GridView:
    """Draw grids with node classes and uplinks, some of them unknown."""
    view = draw(grids(largest=8))
    clusters = []
    for cluster in view:
        first = draw(st.integers(0, cluster.idle))
        power, memory = st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([None, 8 * GB, 64 * GB])
        classes = (
            NodeClass("a", first, draw(power), draw(memory)),
            NodeClass("b", cluster.idle - first, draw(power), draw(memory)),
        )
        speed = draw(st.sampled_from([0.5, 1.0, 2.0]))
        clusters.append(replace(cluster, speed=speed, node_classes=classes if draw(st.booleans()) else ()))
    links = st.builds(Uplink, st.sampled_from([None, 0.0, 5.0, 50.0]), st.sampled_from([0.0, 4.0, 60.0]))
    uplinks = {cluster.name: draw(links) for cluster in clusters if draw(st.booleans())}
    return GridView(tuple(clusters), uplinks=uplinks)


requests = st.builds(
    lambda total, least, most: FlexibleRequest(total, min(least, total), most),
    st.integers(1, 16),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2, 3]),
)
knowledge = st.builds(
    Knowledge,
    communication=st.sampled_from([0.0, 0.3, 1.0]),
    bandwidth=st.sampled_from([0.0, 1.0, 4.0]),
    memory=st.sampled_from([0, 16 * GB]),
)


def fastest_shares(problem: Problem, placement: Placement) -> list[Share] | None:
    """Return the best nodes that a placement of another policy could get; None if they lack memory."""
    shares = []
    for site in problem.sites:
        remaining = placement.nodes_on(site.name)
        for kind in sorted(site.kinds, key=lambda kind: kind.slowdown):
            if share := min(remaining, kind.idle):
                shares.append(Share(site.name, kind.name, share))
                remaining -= share
        if remaining:
            return None
    return shares


@given(unlike_grids(), requests, knowledge, st.sampled_from([Mode.OPTIMAL, Mode.NON_SATURATED]))
def test_resource_matching_is_never_worse_than_other_policies(
    view: GridView, request: FlexibleRequest, knowledge: Knowledge, mode: Mode
) -> None:
    policy = ResourceMatching(mode, knowledge)
    problem, ours = policy.matching_problem(request, view), policy.place(request, view)
    for name in HEURISTICS:
        answer = builtin_policies().get(name).place(request, view)
        shares = fastest_shares(problem, answer) if isinstance(answer, Placement) else None
        if shares is None:
            continue
        theirs = problem.evaluate_shares(shares)
        if theirs.communication <= 1.0 or (mode is Mode.OPTIMAL and theirs.communication < inf):
            assert isinstance(ours, Placement), f"{name} found one"
            mine = problem.evaluate_shares(Share(c.cluster, c.node_class, c.size) for c in ours.components)
            assert mine.time <= theirs.time


@given(unlike_grids(), requests, knowledge, st.sampled_from(Mode))
def test_resource_matching_explanation_names_sufficient_nodes(
    view: GridView, request: FlexibleRequest, knowledge: Knowledge, mode: Mode
) -> None:
    policy = ResourceMatching(mode, knowledge)
    answer, reasons = policy.place(request, view), policy.explain(request, view)
    if isinstance(answer, Placement):
        assert reasons == ()
        return
    assert [reason.cluster for reason in reasons] == [cluster.name for cluster in view]
    for reason in reasons:
        cluster = view.get(reason.cluster)
        if reason.missing is not None and cluster is not None:
            extended = view.with_clusters([cluster.with_idle(cluster.idle + reason.missing)])
            assert isinstance(policy.place(request, extended), Placement)


@given(problems(), st.sampled_from(Mode))
def test_resource_matching_places_whatever_fits(problem: Problem, mode: Mode) -> None:
    assert has_matching(problem, mode) == (find_matching(problem, mode) is not None)


def test_resource_matching_without_knowledge_prefers_speed() -> None:
    view = with_speeds(grid(north=4, south=4, west=8), north=2.0, south=1.5)
    assert sites(MATCHING.place(FlexibleRequest(3), view)) == [(3, "north")]
    assert sites(MATCHING.place(FlexibleRequest(6), view)) == [(4, "north"), (2, "south")]
    assert sites(MATCHING.place(FlexibleRequest(8), view)) == [(4, "north"), (4, "south")]
    assert sites(MATCHING.place(FlexibleRequest(9), view)) == [(8, "west"), (1, "north")]


def test_resource_matching_makes_a_component_per_node_class() -> None:
    fast, slow = NodeClass("fast", 4, 1.0), NodeClass("slow", 8, 0.5)
    view = GridView((cluster_of_classes("north", 12, fast, slow),))
    assert given_to(MATCHING.place(FlexibleRequest(4), view)) == [(4, "north", "fast")]
    assert given_to(MATCHING.place(FlexibleRequest(6), view)) == [(6, "north", "slow")], "all wait for the slowest"
    assert given_to(MATCHING.place(FlexibleRequest(9), view)) == [(8, "north", "slow"), (1, "north", "fast")]


def test_resource_matching_reason_names_cost_and_bottleneck() -> None:
    north = cluster_of_classes("north", 8, NodeClass("fast", 4, 1.0), NodeClass("slow", 4, 0.8))
    view = GridView((north, ClusterView("south", 4, 4)), uplinks={"south": Uplink(20e6, 10e6)})
    answer = informed_policy(communication=0.2, bandwidth=10e6).place(FlexibleRequest(12), view)
    assert isinstance(answer, Placement)
    assert answer.reason == (
        "north 8 (4 slow, 4 fast), south 4: 1.39 × the run time on idle nodes of power 1; "
        "computation 1.25 × (north's slow), communication 1.95 × (south's uplink with 39.1 MB/s of 20 MB/s)"
    )
    alone = informed_policy(communication=0.2, bandwidth=10e6).place(FlexibleRequest(3), view)
    assert isinstance(alone, Placement)
    assert alone.reason == (
        "north 3 (3 fast): 1 × the run time on idle nodes of power 1; "
        "computation 1 × (north's fast), communication 1 × (one cluster)"
    )


def test_resource_matching_refusal_names_the_bottleneck() -> None:
    north = cluster_of_classes("north", 8, NodeClass("big", 2, memory=64 * GB), NodeClass("small", 4, memory=8 * GB))
    view = GridView((north, ClusterView("south", 4, 4)), uplinks={"south": Uplink(20e6, 15e6)})
    assert summary(MATCHING.place(FlexibleRequest(11), view)) == "needs 11 nodes; 10 are idle (north 6, south 4)"
    assert summary(informed_policy(memory=32 * GB).place(FlexibleRequest(8), view)) == (
        "needs 8 nodes with 32 GB of memory; idle with that are north 2 of 6, south 4 of 4"
    )
    bounded = FlexibleRequest(6, min_component_size=3)
    assert summary(informed_policy(memory=32 * GB).place(bounded, view)) == (
        "needs 6 nodes with 32 GB of memory within the request's bounds; idle with that are north 2 of 6, south 4 of 4"
    )
    assert summary(informed_policy(FREE, bandwidth=10e6).place(FlexibleRequest(9), view)) == (
        "needs 9 nodes, and every split saturates an uplink: "
        "south's uplink admits 0 of its 4 nodes with 10 MB/s each (15 MB/s of 20 MB/s are used)"
    )


def test_resource_matching_explains_bottleneck_of_each_cluster() -> None:
    north = cluster_of_classes("north", 8, NodeClass("big", 2, memory=64 * GB), NodeClass("small", 4, memory=8 * GB))
    view = GridView((north, ClusterView("south", 8, 4)), uplinks={"south": Uplink(20e6, 15e6)})
    policy = informed_policy(FREE, bandwidth=10e6, memory=32 * GB)
    assert explained(policy, FlexibleRequest(8), view) == [
        ("north", "6 of 8 nodes idle, 2 of them with 32 GB of memory; the request needs 8 in all", None),
        (
            "south",
            "4 of 8 nodes idle, the request needs 8 in all; "
            "south's uplink admits 0 of its 4 nodes with 10 MB/s each (15 MB/s of 20 MB/s are used)",
            4,
        ),
    ]
    drained = with_state(grid(north=3), "north", ClusterState.DRAINED)
    assert explained(MATCHING, FlexibleRequest(2), drained) == [("north", "drained", None)]


def test_resource_matching_accepts_nodes_of_unknown_memory() -> None:
    view = GridView(
        (cluster_of_classes("north", 4, NodeClass("new", 2), NodeClass("old", 2, memory=GB)), ClusterView("s", 2, 2))
    )
    assert given_to(informed_policy(memory=4 * GB).place(FlexibleRequest(4), view)) == [
        (2, "north", "new"),
        (2, "s", ""),
    ]


@pytest.mark.parametrize("mode", Mode)
def test_resource_matching_mode_is_an_option(mode: Mode) -> None:
    request = FlexibleRequest(4)
    policy = builtin_policies().resolve("resource-matching", request, (("mode", mode),))
    crowded = replace(grid(north=2, south=2), uplinks={"north": Uplink(1.0, 2.0)})
    assert isinstance(policy.place(request, crowded), Placement) == (mode is Mode.OPTIMAL)


@pytest.mark.parametrize(
    ("options", "field", "hint"),
    [
        ({"mode": "best"}, "policy_options.mode", "known: first-non-saturated, non-saturated, optimal"),
        ({"mod": "optimal"}, "policy_options.mod", "did you mean mode? known: mode"),
    ],
)
def test_resource_matching_with_invalid_option_is_rejected(options: dict[str, str], field: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        MATCHING.configured(options)
    assert (error.value.field, error.value.hint) == (field, hint)


def test_resource_matching_with_split_options_is_rejected() -> None:
    with pytest.raises(UsageError, match="splits a request itself"):
        builtin_policies().resolve("resource-matching", FlexibleRequest(4, split_options=((2, 2),)))
    with pytest.raises(TypeError):
        MATCHING.place(nonfixed(1), grid(north=1))


def test_knowledge_share_is_declared_or_from_slowdown() -> None:
    assert Knowledge(communication=0.3).share == 0.3
    assert Knowledge().share == pytest.approx(0.2), "of an application that is not known"
    for share in (0.15, 0.4, 0.6):
        assert Knowledge(slowdowns=Slowdowns(assume_slowdown(share))).share == pytest.approx(share)
        assert ccr_of(share) > 0.1
    assert Knowledge(slowdowns=Slowdowns(LogNormal(0.0, 0.1))).share == pytest.approx(0.1 / 1.1)
