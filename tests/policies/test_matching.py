"""The exact matching, held against a mixed-integer model, against trying everything, and against its own definition."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.matching_by_highs import match_by_highs
from koalapy.policies.matching.exact import Mode, find_matching
from koalapy.policies.matching.problem import Kind, Matching, Problem, Share, Site

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


def site(name: str, *kinds: tuple[float, int], capacity: float | None = None, consumed: float = 0.0) -> Site:
    """``site("north", (1.0, 4), (2.0, 8))``: 4 nodes of full speed, 8 of half of it."""
    each = tuple(Kind(f"{name}{place}", slowdown, idle) for place, (slowdown, idle) in enumerate(kinds))
    return Site(name, each, capacity, consumed)


def counts(matching: Matching | None) -> dict[str, int]:
    assert matching is not None
    given: Counter[str] = Counter()
    for share in matching.shares:
        given[share.site] += share.nodes
    return dict(given)


def keeps(problem: Problem, matching: Matching) -> bool:
    """Whether a matching is one at all: as many nodes as wanted, no more than there are, within the bounds."""
    idle = {(each.name, kind.name): kind.idle for each in problem.sites for kind in each.kinds}
    given = counts(matching)
    return (
        sum(given.values()) == problem.nodes
        and len({share[:2] for share in matching.shares}) == len(matching.shares)
        and all(0 < share.nodes <= idle[share.site, share.kind] for share in matching.shares)
        and min(given.values()) >= problem.min_nodes_per_site
        and (problem.max_sites is None or len(given) <= problem.max_sites)
    )


def best_of_all(problem: Problem, mode: Mode) -> float | None:
    """The least T, by trying every number of nodes for every site, the fastest of each."""
    best = inf
    for sizes in product(*(range(each.idle + 1) for each in problem.sites)):
        used = [size for size in sizes if size]
        if (
            sum(sizes) != problem.nodes
            or min(used) < problem.min_nodes_per_site
            or len(used) > (problem.max_sites or len(used))
        ):
            continue
        shares = []
        for each, size in zip(problem.sites, sizes, strict=True):
            left = size
            for kind in sorted(each.kinds, key=lambda kind: kind.slowdown):
                shares.append(Share(each.name, kind.name, min(left, kind.idle)))
                left -= shares[-1].nodes
        found = problem.evaluate_shares(share for share in shares if share.nodes)
        if found.communication < inf and (mode is OPTIMAL or found.communication <= 1.0):
            best = min(best, found.time)
    return None if best == inf else best


@given(problems(), st.sampled_from(Mode))
def test_it_is_as_good_as_what_a_solver_finds(problem: Problem, mode: Mode) -> None:
    ours, theirs = find_matching(problem, mode), match_by_highs(problem, mode)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None and mode is not FIRST:
        assert ours.time == pytest.approx(theirs.time, rel=1e-6)


@given(problems(most_sites=3, idle=3), st.sampled_from([OPTIMAL, NON_SATURATED]))
def test_it_is_the_best_of_all(problem: Problem, mode: Mode) -> None:
    ours, best = find_matching(problem, mode), best_of_all(problem, mode)
    assert (None if ours is None else ours.time) == (None if best is None else pytest.approx(best, rel=1e-12))


@given(problems(), st.sampled_from(Mode))
def test_it_is_what_was_asked_for(problem: Problem, mode: Mode) -> None:
    found = find_matching(problem, mode)
    if found is not None:
        assert keeps(problem, found)
        assert found == problem.evaluate_shares(found.shares)
        assert mode is OPTIMAL or found.communication == 1.0


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_clusters_decides_nothing_but_ties(problem: Problem, random: st.randoms) -> None:  # type: ignore[valid-type]
    shuffled = list(problem.sites)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = find_matching(problem), find_matching(replace(problem, sites=tuple(shuffled)))
    assert (one and one.time) == (other and other.time)


@given(problems(), st.data())
def test_more_idle_nodes_never_make_it_worse(problem: Problem, data: st.DataObject) -> None:
    if not any(each.kinds for each in problem.sites):
        return
    place = data.draw(st.sampled_from([place for place, each in enumerate(problem.sites) if each.kinds]))
    grown = list(problem.sites)
    first, *rest = grown[place].kinds
    grown[place] = replace(grown[place], kinds=(first._replace(idle=first.idle + 2), *rest))
    for mode in (OPTIMAL, NON_SATURATED):
        before, after = find_matching(problem, mode), find_matching(replace(problem, sites=tuple(grown)), mode)
        assert before is None or (after is not None and after.time <= before.time)


@given(problems())
def test_the_modes_stand_in_order(problem: Problem) -> None:
    optimal, free, first = (find_matching(problem, mode) for mode in Mode)
    assert (free is None) == (first is None)
    if free is not None and first is not None:
        assert optimal is not None
        assert optimal.time <= free.time <= first.time


@given(problems(most_sites=3))
def test_node_by_node_it_is_the_same_problem(problem: Problem) -> None:
    """As the paper has it: a variable for each node."""
    split = tuple(
        replace(
            each,
            kinds=tuple(Kind(f"{kind.name}.{n}", kind.slowdown, 1) for kind in each.kinds for n in range(kind.idle)),
        )
        for each in problem.sites
    )
    whole, single = find_matching(problem), find_matching(replace(problem, sites=split))
    assert (whole and whole.time) == (single and single.time)


# Limits


def test_a_job_of_one_node_uses_no_link() -> None:
    found = find_matching(Problem(1, (site("north", (2.0, 1), capacity=0.0, consumed=9.0),), 0.5, 0.5, 10.0))
    assert found == Matching((Share("north", "north0", 1),), 2.0, 1.0, 1.5)


@pytest.mark.parametrize("mode", Mode)
def test_nothing_is_matched_with_nothing(mode: Mode) -> None:
    assert find_matching(Problem(1, ()), mode) is None
    assert find_matching(Problem(1, (site("north"),)), mode) is None
    assert find_matching(Problem(1, (site("north", (1.0, 0)),)), mode) is None
    assert find_matching(Problem(2, (site("north", (1.0, 2)),), min_nodes_per_site=3), mode) is None


def test_a_link_that_carries_nothing_is_of_no_use_to_who_communicates() -> None:
    dead = (site("north", (1.0, 2), capacity=0.0), site("south", (1.0, 2), capacity=10.0))
    assert find_matching(Problem(4, dead, 0.5, 0.5, 1.0)) is None
    assert counts(find_matching(Problem(4, dead, 1.0, 0.0, 0.0))) == {"north": 2, "south": 2}
    assert counts(find_matching(Problem(2, dead, 0.5, 0.5, 1.0))) == {"north": 2}


def test_who_sends_nothing_is_slowed_down_by_what_others_send_all_the_same() -> None:
    busy = (site("north", (1.0, 2), capacity=10.0, consumed=20.0), site("south", (1.0, 2)))
    found = find_matching(Problem(4, busy, 0.5, 0.5))
    assert found is not None
    assert (found.communication, found.time) == (2.0, 1.5)
    assert find_matching(Problem(4, busy, 0.5, 0.5), NON_SATURATED) is None


def test_half_and_half_is_what_loads_links_most() -> None:
    # 8 nodes, 1 B/s each: 4 of them send 16/7 B/s to the others, 6 of them 12/7.
    halves = (site("north", (1.0, 6), capacity=2.0), site("south", (1.0, 6), capacity=2.0))
    found = find_matching(Problem(8, halves, 0.5, 0.5, 1.0))
    assert sorted(counts(found).values()) == [2, 6]
    assert found is not None
    assert found.communication == 1.0
    exactly = tuple(replace(each, capacity=16 / 7) for each in halves)
    assert (
        find_matching(Problem(8, (exactly[0], replace(exactly[1], kinds=(Kind("s", 1.0, 4),))), 0.5, 0.5, 1.0))
        is not None
    )
    only_halves = tuple(replace(each, kinds=(Kind("k", 1.0, 4),)) for each in exactly)
    assert counts(find_matching(Problem(8, only_halves, 0.5, 0.5, 1.0), NON_SATURATED)) == {"north": 4, "south": 4}
    assert (
        find_matching(Problem(8, tuple(replace(each, capacity=2.28) for each in only_halves), 1, 1, 1.0), FIRST) is None
    )


def test_speed_and_links_are_weighed_against_each_other() -> None:
    # All on north, at half the speed, or half of it on south's fast nodes over a link that is too narrow by half.
    both = (site("north", (1.0, 4), (2.0, 4)), site("south", (1.0, 4), capacity=8 / 7))
    computes = find_matching(Problem(8, both, 0.9, 0.1, 1.0))
    talks = find_matching(Problem(8, both, 0.1, 0.9, 1.0))
    assert counts(computes) == {"north": 4, "south": 4}
    assert counts(talks) == {"north": 8}
    assert counts(find_matching(Problem(8, both, 0.9, 0.1, 1.0), NON_SATURATED)) == {"north": 8}


def test_of_equals_it_takes_the_fastest_nodes_and_the_fewest_clusters() -> None:
    many = (site("a", (1.0, 2)), site("b", (1.0, 3)), site("c", (1.0, 3)), site("d", (2.0, 9)))
    assert counts(find_matching(Problem(5, many, 0.0, 1.0))) == {"b": 3, "c": 2}
    assert counts(find_matching(Problem(9, many, 0.0, 1.0))) == {"d": 9}, "of one cluster, with no link at all"


def fewest_sites(problem: Problem, time: float) -> int:
    """The fewest sites of all matchings with this T, by trying every number of nodes for every site."""
    fewest = inf
    for sizes in product(*(range(each.idle + 1) for each in problem.sites)):
        used = [size for size in sizes if size]
        if (
            sum(sizes) != problem.nodes
            or min(used) < problem.min_nodes_per_site
            or len(used) > (problem.max_sites or len(used))
        ):
            continue
        shares = []
        for each, size in zip(problem.sites, sizes, strict=True):
            for kind in sorted(each.kinds, key=lambda kind: kind.slowdown):
                shares.append(Share(each.name, kind.name, min(size, kind.idle)))
                size -= shares[-1].nodes
        found = problem.evaluate_shares(share for share in shares if share.nodes)
        if found.communication < inf and found.time == pytest.approx(time, rel=1e-12):
            fewest = min(fewest, len(used))
    return int(fewest)


@given(problems(most_sites=4, idle=3))
def test_match_without_communication_uses_the_fewest_clusters(problem: Problem) -> None:
    problem = replace(problem, computing=1.0, communicating=0.0)
    found = find_matching(problem)
    if found is not None:
        assert len(counts(found)) == fewest_sites(problem, found.time)


def test_match_without_communication_heeds_no_load() -> None:
    narrow = (
        site("a", (1.0, 4), capacity=1.0),
        site("b", (1.0, 4), capacity=1.0),
        site("c", (1.0, 2)),
        site("d", (1.0, 2)),
    )
    assert len(counts(find_matching(Problem(8, narrow, 1.0, 0.0, 1.0)))) == 2


def test_within_a_cluster_faster_nodes_than_the_slowest_that_is_used_are_left_to_others() -> None:
    mixed = (site("north", (1.0, 4), (1.5, 4), (3.0, 4)), site("south", (1.5, 2)))
    found = find_matching(Problem(6, mixed))
    assert found is not None
    assert found.shares == (Share("north", "north1", 4), Share("north", "north0", 2))
    assert find_matching(Problem(4, mixed)) == Matching((Share("north", "north0", 4),), 1.0, 1.0, 1.0)
    alike = (site("north", (1.5, 4), (1.0, 1), (1.5, 9)),)
    assert find_matching(Problem(4, alike)) == Matching((Share("north", "north0", 4),), 1.5, 1.0, 1.5)
