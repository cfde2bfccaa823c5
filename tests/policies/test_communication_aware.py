"""Communication-aware placement: properties, figure 2 of sonmez-2010, and a grid with one slow link."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView, Link
from koalapy.model.errors import UsageError
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.flexible import ClusterMinimization, whole_on_first
from koalapy.policies.registry import builtin_policies
from koalapy.policies.splitting import fill_in_turn
from tests.policies.grids import explained, flexible_requests, grid, grids, linked, shuffled, sites, summary, with_links

by_latency = CommunicationAware()
by_bandwidth = by_latency.configured({"metric": "bandwidth"})
in_groups = by_latency.configured({"group_latency": "2"})
POLICIES = [by_latency, by_bandwidth, in_groups]
NAMED = dict(zip(("latency", "bandwidth", "groups"), POLICIES, strict=True))


def all_to_all(view: GridView, latency: float = 1.0, **special: float) -> GridView:
    """Measure every pair and every cluster within itself; ``north_south=9`` overrides one link."""
    names = [cluster.name for cluster in view]
    links = {" ".join(pair): Link(latency, 100.0) for pair in [*combinations(names, 2), *((name,) for name in names)]}
    return with_links(view, links | {name.replace("_", " "): Link(value, 1 / value) for name, value in special.items()})


def measured_cost(policy: CommunicationAware, view: GridView, first: str, second: str) -> float | None:
    link = view.link_between(first, second)
    return link.bandwidth if policy is by_bandwidth else link.latency


def average_cost(policy: CommunicationAware, view: GridView, name: str) -> float:
    values = [measured_cost(policy, view, name, cluster.name) for cluster in view]
    costs = [value for value in values if value is not None]
    worst = float("inf")
    return worst if not costs else sum(costs) / len(costs) * (-1 if policy is by_bandwidth else 1)


def internal_cost(policy: CommunicationAware, view: GridView, name: str) -> float:
    value = measured_cost(policy, view, name, name)
    return float("inf") if value is None else value * (-1 if policy is by_bandwidth else 1)


@pytest.mark.parametrize("name", NAMED)
@given(request=flexible_requests(), views=shuffled(linked(grids())))
def test_communication_aware_combines_only_allowed_clusters(
    name: str, request: FlexibleRequest, views: tuple[GridView, GridView]
) -> None:
    policy, (view, _) = NAMED[name], views
    answer = policy.place(request, view)
    if isinstance(answer, Refusal):
        return
    names = [component.cluster for component in answer.components]
    assert sum(component.size for component in answer.components) == request.total_size
    assert len(set(names)) == len(names) <= (request.max_components or len(names))
    assert all(component.size >= request.min_component_size for component in answer.components)
    able = [cluster for cluster in view if cluster.usable_idle >= request.min_component_size]
    suffices = any(
        all(measured_cost(policy, view, a.name, b.name) is not None for a, b in combinations(combined, 2))
        and fill_in_turn(request, combined)
        for count in range(1, len(able) + 1)
        for combined in combinations(able, count)
    )
    for pair in combinations(names, 2):
        value = measured_cost(policy, view, *pair)
        assert not view.link_between(*pair).unreachable
        assert value is not None or not suffices, "there are others with all links between them measured"
        assert policy is not in_groups or (value is not None and value <= 2)


@pytest.mark.parametrize("name", ["latency", "bandwidth"])
@given(request=flexible_requests(), view=linked(grids()))
def test_communication_aware_refuses_only_unreachable_splits(
    name: str, request: FlexibleRequest, view: GridView
) -> None:
    answer = NAMED[name].place(request, view)
    able = [cluster for cluster in view if cluster.usable_idle >= request.min_component_size]
    possible = any(
        not any(view.link_between(a.name, b.name).unreachable for a, b in combinations(combined, 2))
        and fill_in_turn(request, combined)
        for count in range(1, len(able) + 1)
        for combined in combinations(able, count)
    )
    assert isinstance(answer, Placement) == bool(possible or whole_on_first(request, view.by_idle))


@given(
    st.lists(st.integers(1, 32), min_size=8, max_size=8),
    st.floats(0, 1),
    st.randoms(use_true_random=False),
    st.floats(0, 1),
    st.sampled_from([1, 1, 2, 5]),
    st.sampled_from([None, None, 2, 4]),
)
def test_communication_aware_on_empty_grid_places_any_request(
    nodes: list[int], share: float, random: Random, requested: float, min_size: int, max_count: int | None
) -> None:
    """Any share of the links between eight clusters is measured."""
    view = grid(**dict(zip("abcdefgh", nodes, strict=True)))
    pairs = [pair for pair in combinations("abcdefgh", 2) if random.random() < share]
    view = GridView(view.clusters, {pair: Link(random.random(), 1 / (1 + random.random())) for pair in pairs})
    request = FlexibleRequest(max(min_size, 1 + round(requested * (sum(nodes) - 1))), min_size, max_count)
    if isinstance(ClusterMinimization().place(request, view), Placement):
        for policy in (by_latency, by_bandwidth):
            assert isinstance(policy.place(request, view), Placement), summary(policy.place(request, view))


def test_communication_aware_with_many_unreachable_links_is_fast() -> None:
    """Each of a hundred clusters is unreachable from half of the others, so a complete search would take too long."""
    names = [f"c{number:02}" for number in range(100)]
    random = Random(1)
    links = {pair: Link(unreachable=True) for pair in combinations(names, 2) if random.random() < 0.5}
    view = GridView(grid(**dict.fromkeys(names, 4)).clusters, links)
    assert isinstance(by_latency.place(FlexibleRequest(24), view), Placement)
    refused = summary(by_latency.place(FlexibleRequest(200), view))
    assert "on clusters of which none was found unreachable from another" in refused


@pytest.mark.parametrize("name", NAMED)
@given(total=st.integers(1, 8), view=linked(grids()))
def test_communication_aware_single_cluster_has_best_network(name: str, total: int, view: GridView) -> None:
    policy = NAMED[name]
    able = sorted((internal_cost(policy, view, c.name), c.name) for c in view if c.usable_idle >= total)
    answer = policy.place(FlexibleRequest(total), view)
    if able:
        assert sites(answer) == [(total, able[0][1])]
    elif isinstance(answer, Placement):
        assert len(answer.components) > 1


@pytest.mark.parametrize("metric", ["latency", "bandwidth"])
@given(
    request=flexible_requests(),
    view=grids(),
    values=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=10, max_size=10),
)
def test_communication_aware_fills_clusters_by_average_cost(
    metric: str, request: FlexibleRequest, view: GridView, values: list[float]
) -> None:
    policy = NAMED[metric]
    pairs = [(a.name, b.name) for a in view for b in view if a.name <= b.name]
    links = {pair: Link(value, value) for pair, value in zip(pairs, values, strict=False)}
    view = GridView(view.clusters, links)
    answer = policy.place(request, view)
    assert isinstance(answer, Refusal) == isinstance(ClusterMinimization().place(request, view), Refusal)
    if isinstance(answer, Refusal) or len(answer.components) == 1:
        return
    usable = [c for c in view if c.usable_idle >= request.min_component_size]
    order = [c.name for c in sorted(usable, key=lambda c: (average_cost(policy, view, c.name), c.name))]
    names = [component.cluster for component in answer.components]
    assert names == [name for name in order if name in names]
    if request.max_components is None and request.min_component_size == 1:
        assert names == order[: len(names)]


# Examples


def test_communication_aware_places_the_job_of_figure_2() -> None:
    """24 nodes on 3 x 16 idle: as few clusters as by cluster minimization, but the pair with the best link."""
    view = all_to_all(grid(c1=16, c2=16, c3=16), c1_c2=5, c1_c3=3)
    answer = by_latency.place(FlexibleRequest(24), view)
    assert sites(answer) == [(16, "c3"), (8, "c2")]
    assert isinstance(answer, Placement)
    assert answer.reason == ("by lowest average latency: c3 (16 of 16, 1.67e+03 ms), c2 (8 of 16, 2.33e+03 ms)")
    assert sites(ClusterMinimization().place(FlexibleRequest(24), view)) == [(16, "c1"), (8, "c2")]


def test_communication_aware_avoids_a_slow_link() -> None:
    view = with_links(
        grid(north=8, south=6, west=6),
        {
            "north": Link(1e-4, 1e9),
            "south": Link(1e-4, 1e9),
            "west": Link(1e-4, 1e9),
            "north south": Link(5e-2, 1e7),
            "north west": Link(1e-3, 1e8),
            "south west": Link(1e-3, 1e8),
        },
    )
    request = FlexibleRequest(12)
    assert {c for _, c in sites(ClusterMinimization().place(request, view))} == {"north", "south"}
    for policy in (by_latency, by_bandwidth, by_latency.configured({"group_latency": "0.01"})):
        assert {c for _, c in sites(policy.place(request, view))} in ({"west", "north"}, {"west", "south"})
    assert sites(by_latency.place(request, view)) == [(6, "west"), (6, "north")]


def test_communication_aware_takes_fastest_sufficient_cluster() -> None:
    view = all_to_all(grid(north=8, south=6), north=2, south=1)
    answer = by_latency.place(FlexibleRequest(6), view)
    assert sites(answer) == [(6, "south")]
    assert isinstance(answer, Placement)
    assert answer.reason == (
        "south alone holds the job, and has the lowest latency within itself of those that do, 1e+03 ms"
    )
    assert sites(by_latency.place(FlexibleRequest(7), view)) == [(7, "north")]
    assert sites(by_latency.place(FlexibleRequest(2), grid(north=2))) == [(2, "north")]


def test_communication_aware_combines_slow_pair_only_if_needed() -> None:
    """The link between delft and leiden is unmeasured (sonmez-2010 V-A)."""
    links = {"amsterdam delft": Link(1.0), "amsterdam leiden": Link(1.0), "delft": Link(0.1)}
    view = with_links(grid(amsterdam=2, delft=(6, 9), leiden=(5, 9)), links)
    assert sites(by_latency.place(FlexibleRequest(8), view)) == [(6, "delft"), (2, "amsterdam")]
    assert sites(by_latency.place(FlexibleRequest(7), with_links(grid(amsterdam=2, delft=1, leiden=5), links))) == [
        (2, "amsterdam"),
        (5, "leiden"),
    ]
    answer = by_latency.place(FlexibleRequest(10), view)
    assert sites(answer) == [(6, "delft"), (2, "amsterdam"), (2, "leiden")]
    assert isinstance(answer, Placement)
    assert answer.reason.endswith("; not measured is the link between delft and leiden")


def test_communication_aware_never_combines_unreachable_clusters() -> None:
    links = {"amsterdam delft": Link(1.0), "delft leiden": Link(unreachable=True), "delft": Link(0.1)}
    view = with_links(grid(amsterdam=2, delft=(6, 9), leiden=(5, 9)), links)
    assert sites(by_latency.place(FlexibleRequest(7), with_links(grid(amsterdam=2, delft=1, leiden=5), links))) == [
        (2, "amsterdam"),
        (5, "leiden"),
    ]
    assert summary(by_latency.place(FlexibleRequest(10), view)) == (
        "needs 10 nodes; at most 8 are idle on clusters of which none was found unreachable from another "
        "(delft 6, leiden 5, amsterdam 2)"
    )
    beside = (
        "1 of the others cannot be combined with it: only clusters of which none was found unreachable from another are"
    )
    assert explained(by_latency, FlexibleRequest(10), view) == [
        ("amsterdam", "2 of 2 nodes idle, the request needs 10 in all", None),
        ("delft", f"6 of 9 nodes idle, the request needs 10 in all; {beside}", 2),
        ("leiden", f"5 of 9 nodes idle, the request needs 10 in all; {beside}", 3),
    ]


def test_communication_aware_takes_the_smallest_sufficient_group() -> None:
    near = {"a b": Link(1.0), "c d": Link(1.0), "c e": Link(1.0), "d e": Link(1.0)}
    far = {f"{x} {y}": Link(9.0) for x in "ab" for y in "cde"}
    view = with_links(grid(a=3, b=3, c=4, d=4, e=4), near | far)
    assert sites(in_groups.place(FlexibleRequest(6), view)) == [(3, "a"), (3, "b")]
    assert sites(in_groups.place(FlexibleRequest(7), view)) == [(4, "c"), (3, "d")]
    assert summary(in_groups.place(FlexibleRequest(13), view)) == (
        "needs 13 nodes; at most 12 are idle on clusters of one group, with latencies of at most 2 s between them "
        "(c 4, d 4, e 4, a 3 and 1 more)"
    )
    assert isinstance(by_latency.place(FlexibleRequest(13), view), Placement)


def test_communication_aware_follows_split_options() -> None:
    request = FlexibleRequest(6, split_options=((6,), (3, 3)))
    assert sites(by_latency.place(request, grid(north=4, south=3))) == [(3, "north"), (3, "south")]
    assert by_latency.explain(request, grid(north=4, south=3)) == ()


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        (
            "metrc",
            "latency",
            "policy communication-aware has no option metrc",
            "did you mean metric? known: group_latency, metric",
        ),
        ("metric", "lateny", "metric is lateny", "did you mean latency? known: bandwidth, latency"),
        ("group_latency", "-1", "group_latency is -1", "give a latency, such as 5ms or 0.005"),
        ("group_latency", "nan", "group_latency is nan", "give a latency, such as 5ms or 0.005"),
        ("group_latency", "1 min", "group_latency is 1 min", "give a latency, such as 5ms or 0.005"),
    ],
)
def test_communication_aware_checks_its_options(name: str, value: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        builtin_policies().resolve("communication-aware", FlexibleRequest(1), ((name, value),))
    error = refused.value
    assert (error.field, error.value, error.message, error.hint) == (f"policy_options.{name}", value, message, hint)
