"""The jobs that are stopped are those with which the least is lost: held against all choices that there are."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.scheduler.claims.preemption import Candidate, PreemptionCost, choose_victims, total_cost

names = st.sampled_from(["north", "south", "west"])
harms = st.builds(PreemptionCost, st.integers(0, 6), st.integers(1, 3), st.integers(1, 3))
"""Few of each, so that ties are many."""
frees = st.dictionaries(names, st.integers(1, 5), min_size=1, max_size=3)
jobs = st.lists(st.tuples(frees, harms), max_size=8)
lacking = st.dictionaries(names, st.integers(0, 9), max_size=3)


def candidates(jobs: list[tuple[dict[str, int], PreemptionCost]]) -> list[Candidate]:
    return [Candidate(number, frees, cost) for number, (frees, cost) in enumerate(jobs, 1)]


def suffice(chosen: Sequence[Candidate], lacking: dict[str, int]) -> bool:
    freed = Counter[str]()
    for candidate in chosen:
        freed.update(candidate.frees)
    return all(freed[name] >= count for name, count in lacking.items())


def all_that_suffice(candidates: list[Candidate], lacking: dict[str, int]) -> list[PreemptionCost]:
    """What is lost by each choice there is."""
    sizes = range(len(candidates) + 1)
    choices = (choice for size in sizes for choice in combinations(candidates, size))
    return [total_cost(choice) for choice in choices if suffice(choice, lacking)]


@given(jobs=jobs, lacking=lacking)
@example(
    jobs=[
        ({"north": 3}, PreemptionCost(9, 1, 1)),
        ({"north": 2}, PreemptionCost(5, 1, 1)),
        ({"north": 1}, PreemptionCost(3, 1, 1)),
    ],
    lacking={},
)
@example(jobs=[({"north": 2}, PreemptionCost(0, 1, 1))] * 3, lacking={"north": 0, "south": -1})
@example(
    # A better way comes to leave as many as one that is not worth its price any more.
    jobs=[
        ({"south": 4}, PreemptionCost(4, 1, 1)),
        ({"north": 4}, PreemptionCost(4, 1, 1)),
        ({"north": 4, "south": 1}, PreemptionCost(3, 1, 1)),
        ({"north": 4, "south": 4}, PreemptionCost(6, 1, 1)),
        ({"south": 1}, PreemptionCost(2, 1, 1)),
    ],
    lacking={"north": 3, "south": 6},
)
def test_no_other_choice_loses_less(jobs: list[tuple[dict[str, int], PreemptionCost]], lacking: dict[str, int]) -> None:
    some = candidates(jobs)
    possible = all_that_suffice(some, lacking)
    chosen = choose_victims(some, lacking)
    if chosen is None:
        assert not possible
        return
    assert suffice(chosen, lacking)
    assert total_cost(chosen) == min(possible)


@given(jobs=jobs, lacking=lacking, steps=st.integers(0, 20))
def test_where_that_takes_too_long_they_suffice_and_none_is_superfluous(
    jobs: list[tuple[dict[str, int], PreemptionCost]], lacking: dict[str, int], steps: int
) -> None:
    some = candidates(jobs)
    chosen = choose_victims(some, lacking, steps)
    assert (chosen is None) == (not all_that_suffice(some, lacking))
    if chosen is not None:
        assert suffice(chosen, lacking)
        for one in chosen:
            assert not suffice([other for other in chosen if other is not one], lacking)


def test_a_little_more_work_of_one_is_less_than_that_of_two() -> None:
    """The greedy choice would be the two small ones, of which each node costs less."""
    some = candidates(
        [
            ({"north": 3}, PreemptionCost(10, 1, 1)),
            ({"north": 3}, PreemptionCost(9, 1, 1)),
            ({"north": 4}, PreemptionCost(15, 1, 1)),
        ]
    )
    assert choose_victims(some, {"north": 4}) == [some[2]]


def test_what_was_found_when_it_takes_too_long_is_not_given_up() -> None:
    """The last step, with which nothing is found any more, is one too many."""
    harms = [({"north": 3}, 10), ({"north": 3}, 9), ({"north": 4}, 15), ({"north": 1}, 8)]
    some = candidates([(frees, PreemptionCost(work, 1, 1)) for frees, work in harms])
    assert choose_victims(some, {"north": 4}, 0) == [some[1], some[0]], "greedily"
    assert choose_victims(some, {"north": 4}, 4) == [some[2]]


def test_who_was_begun_more_often_is_spared_and_then_who_is_wider() -> None:
    often, wide, plain = PreemptionCost(0, 3, 1), PreemptionCost(0, 1, 2), PreemptionCost(0, 1, 1)
    some = candidates([({"north": 1}, often), ({"north": 1, "south": 1}, wide), ({"north": 1}, plain)])
    assert choose_victims(some, {"north": 1}) == [some[2]]
    assert choose_victims(some[:2], {"north": 1}) == [some[1]]
    two = candidates([({"north": 1}, plain), ({"south": 1}, plain), ({"north": 1, "south": 1}, wide)])
    assert choose_victims(two, {"north": 1, "south": 1}) == [two[2]], "one attempt is lost and not two"


def test_of_equals_the_youngest_go() -> None:
    some = candidates([({"north": 1}, PreemptionCost(5, 1, 1))] * 4)
    assert choose_victims(some, {"north": 2}) == [some[3], some[2]]


def test_thousands_of_alike_are_looked_at_once() -> None:
    """As many of a kind as could all be needed, and no more, so that it is exact, and quick."""
    many = candidates([({"north": 2}, PreemptionCost(1000 - number, 1, 1)) for number in range(1000)] * 10)
    chosen = choose_victims(many, {"north": 7})
    assert chosen is not None
    assert [candidate.cost.work for candidate in chosen] == [1, 1, 1, 1]
