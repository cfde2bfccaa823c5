"""The exact matching, compared with a mixed-integer model, a search over all matchings, and its definition."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.matching_by_highs import match_by_highs
from koalapy.policies.matching import Kind, Matching, Mode, Problem, Share, Site, find_matching

OPTIMAL, NON_SATURATED, FIRST = Mode


@st.composite
def sites(draw: st.DrawFn, name: str, idle: int = 4) -> Site:
    slowdown = st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0])
    kinds = tuple(
        Kind(f"{name}-{place}", draw(slowdown), draw(st.integers(0, idle))) for place in range(draw(st.integers(0, 3)))
    )
    capacity = draw(st.sampled_from([None, 0.0, 5.0, 10.0, 20.0]))
    return Site(name, kinds, capacity, draw(st.sampled_from([0.0, 2.0, 8.0])))


@st.composite
def problems(draw: st.DrawFn, most_sites: int = 5, idle: int = 4) -> Problem:
    communicating = draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    return Problem(
        draw(st.integers(1, 14)),
        tuple(draw(sites(f"s{place}", idle)) for place in range(draw(st.integers(0, most_sites)))),
        1.0 - communicating,
        communicating,
        draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])),
        draw(st.sampled_from([1, 1, 1, 2, 3])),
        draw(st.sampled_from([None, None, 1, 2, 3])),
    )


def make_site(name: str, *kinds: tuple[float, int], capacity: float | None = None, consumed: float = 0.0) -> Site:
    """Return a site: ``make_site("north", (1.0, 4), (2.0, 8))`` has 4 nodes of full speed and 8 of half speed."""
    node_kinds = tuple(Kind(f"{name}{place}", slowdown, idle) for place, (slowdown, idle) in enumerate(kinds))
    return Site(name, node_kinds, capacity, consumed)


def nodes_by_site(matching: Matching | None) -> dict[str, int]:
    assert matching is not None
    nodes: Counter[str] = Counter()
    for share in matching.shares:
        nodes[share.site] += share.nodes
    return dict(nodes)


def is_valid(problem: Problem, matching: Matching) -> bool:
    """Return whether a matching uses the requested number of nodes, only idle ones, and respects the bounds."""
    idle = {(problem_site.name, kind.name): kind.idle for problem_site in problem.sites for kind in problem_site.kinds}
    nodes = nodes_by_site(matching)
    return (
        sum(nodes.values()) == problem.nodes
        and len({share[:2] for share in matching.shares}) == len(matching.shares)
        and all(0 < share.nodes <= idle[share.site, share.kind] for share in matching.shares)
        and min(nodes.values()) >= problem.min_nodes_per_site
        and (problem.max_sites is None or len(nodes) <= problem.max_sites)
    )


def possible_matchings(problem: Problem) -> Iterator[Matching]:
    """Yield the matching of every number of nodes at every site, with the fastest nodes first."""
    for sizes in product(*(range(problem_site.idle + 1) for problem_site in problem.sites)):
        used = [size for size in sizes if size]
        if (
            sum(sizes) != problem.nodes
            or min(used) < problem.min_nodes_per_site
            or len(used) > (problem.max_sites or len(used))
        ):
            continue
        shares = []
        for problem_site, size in zip(problem.sites, sizes, strict=True):
            remaining = size
            for kind in sorted(problem_site.kinds, key=lambda kind: kind.slowdown):
                shares.append(Share(problem_site.name, kind.name, min(remaining, kind.idle)))
                remaining -= shares[-1].nodes
        matching = problem.evaluate_shares(share for share in shares if share.nodes)
        if matching.communication < inf:
            yield matching


@given(problems(), st.sampled_from(Mode))
def test_find_matching_equals_a_solver(problem: Problem, mode: Mode) -> None:
    ours, theirs = find_matching(problem, mode), match_by_highs(problem, mode)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None and mode is not FIRST:
        assert ours.time == pytest.approx(theirs.time, rel=1e-6)


@given(problems(most_sites=3, idle=3), st.sampled_from([OPTIMAL, NON_SATURATED]))
def test_find_matching_is_the_best_of_all_splits(problem: Problem, mode: Mode) -> None:
    ours = find_matching(problem, mode)
    times = [m.time for m in possible_matchings(problem) if mode is OPTIMAL or m.communication <= 1.0]
    assert (None if ours is None else ours.time) == (pytest.approx(min(times), rel=1e-12) if times else None)


@given(problems(), st.sampled_from(Mode))
def test_find_matching_keeps_the_bounds_of_the_problem(problem: Problem, mode: Mode) -> None:
    matching = find_matching(problem, mode)
    if matching is not None:
        assert is_valid(problem, matching)
        assert matching == problem.evaluate_shares(matching.shares)
        assert mode is OPTIMAL or matching.communication == 1.0


# Limits


def test_find_matching_of_one_node_uses_no_link() -> None:
    matching = find_matching(Problem(1, (make_site("north", (2.0, 1), capacity=0.0, consumed=9.0),), 0.5, 0.5, 10.0))
    assert matching == Matching((Share("north", "north0", 1),), 2.0, 1.0, 1.5)


@pytest.mark.parametrize("mode", Mode)
def test_find_matching_without_nodes_is_none(mode: Mode) -> None:
    assert find_matching(Problem(1, ()), mode) is None
    assert find_matching(Problem(1, (make_site("north"),)), mode) is None
    assert find_matching(Problem(1, (make_site("north", (1.0, 0)),)), mode) is None
    assert find_matching(Problem(2, (make_site("north", (1.0, 2)),), min_nodes_per_site=3), mode) is None


def test_find_matching_avoids_links_without_capacity() -> None:
    dead = (make_site("north", (1.0, 2), capacity=0.0), make_site("south", (1.0, 2), capacity=10.0))
    assert find_matching(Problem(4, dead, 0.5, 0.5, 1.0)) is None
    assert nodes_by_site(find_matching(Problem(4, dead, 1.0, 0.0, 0.0))) == {"north": 2, "south": 2}
    assert nodes_by_site(find_matching(Problem(2, dead, 0.5, 0.5, 1.0))) == {"north": 2}


def test_find_matching_counts_consumed_bandwidth() -> None:
    busy = (make_site("north", (1.0, 2), capacity=10.0, consumed=20.0), make_site("south", (1.0, 2)))
    matching = find_matching(Problem(4, busy, 0.5, 0.5))
    assert matching is not None
    assert (matching.communication, matching.time) == (2.0, 1.5)
    assert find_matching(Problem(4, busy, 0.5, 0.5), NON_SATURATED) is None


def test_uplink_demand_is_highest_at_half_of_the_job() -> None:
    # At 1 B/s a node, 4 of 8 nodes send 16/7 B/s to the other nodes, and 6 of them 12/7 B/s.
    halves = (make_site("north", (1.0, 6), capacity=2.0), make_site("south", (1.0, 6), capacity=2.0))
    matching = find_matching(Problem(8, halves, 0.5, 0.5, 1.0))
    assert sorted(nodes_by_site(matching).values()) == [2, 6]
    assert matching is not None
    assert matching.communication == 1.0
    exactly = tuple(replace(problem_site, capacity=16 / 7) for problem_site in halves)
    assert (
        find_matching(Problem(8, (exactly[0], replace(exactly[1], kinds=(Kind("s", 1.0, 4),))), 0.5, 0.5, 1.0))
        is not None
    )
    only_halves = tuple(replace(problem_site, kinds=(Kind("k", 1.0, 4),)) for problem_site in exactly)
    assert nodes_by_site(find_matching(Problem(8, only_halves, 0.5, 0.5, 1.0), NON_SATURATED)) == {
        "north": 4,
        "south": 4,
    }
    assert (
        find_matching(
            Problem(8, tuple(replace(problem_site, capacity=2.28) for problem_site in only_halves), 1, 1, 1.0), FIRST
        )
        is None
    )


def test_find_matching_balances_speed_and_links() -> None:
    # Either all on north, half of it at half speed, or half on south's fast nodes over a link of half the needed width.
    both = (make_site("north", (1.0, 4), (2.0, 4)), make_site("south", (1.0, 4), capacity=8 / 7))
    computes = find_matching(Problem(8, both, 0.9, 0.1, 1.0))
    talks = find_matching(Problem(8, both, 0.1, 0.9, 1.0))
    assert nodes_by_site(computes) == {"north": 4, "south": 4}
    assert nodes_by_site(talks) == {"north": 8}
    assert nodes_by_site(find_matching(Problem(8, both, 0.9, 0.1, 1.0), NON_SATURATED)) == {"north": 8}


def test_find_matching_ties_use_fast_nodes_and_few_clusters() -> None:
    many = (make_site("a", (1.0, 2)), make_site("b", (1.0, 3)), make_site("c", (1.0, 3)), make_site("d", (2.0, 9)))
    assert nodes_by_site(find_matching(Problem(5, many, 0.0, 1.0))) == {"b": 3, "c": 2}
    assert nodes_by_site(find_matching(Problem(9, many, 0.0, 1.0))) == {"d": 9}, "of one cluster, with no link at all"


@given(problems(most_sites=4, idle=3))
def test_find_matching_without_communication_uses_fewest_clusters(problem: Problem) -> None:
    problem = replace(problem, computing=1.0, communicating=0.0)
    matching = find_matching(problem)
    if matching is not None:
        time = pytest.approx(matching.time, rel=1e-12)
        as_fast = [possible for possible in possible_matchings(problem) if possible.time == time]
        assert len(nodes_by_site(matching)) == min(len(nodes_by_site(possible)) for possible in as_fast)


def test_find_matching_without_communication_ignores_load() -> None:
    narrow = (
        make_site("a", (1.0, 4), capacity=1.0),
        make_site("b", (1.0, 4), capacity=1.0),
        make_site("c", (1.0, 2)),
        make_site("d", (1.0, 2)),
    )
    assert len(nodes_by_site(find_matching(Problem(8, narrow, 1.0, 0.0, 1.0)))) == 2


def test_find_matching_leaves_faster_nodes_to_others() -> None:
    mixed = (make_site("north", (1.0, 4), (1.5, 4), (3.0, 4)), make_site("south", (1.5, 2)))
    matching = find_matching(Problem(6, mixed))
    assert matching is not None
    assert matching.shares == (Share("north", "north1", 4), Share("north", "north0", 2))
    assert find_matching(Problem(4, mixed)) == Matching((Share("north", "north0", 4),), 1.0, 1.0, 1.0)
    alike = (make_site("north", (1.5, 4), (1.0, 1), (1.5, 9)),)
    assert find_matching(Problem(4, alike)) == Matching((Share("north", "north0", 4),), 1.5, 1.0, 1.5)
