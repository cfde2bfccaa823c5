"""The preempted jobs have the least total cost, compared with all possible choices."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.scheduler.claims.preemption import Candidate, PreemptionCost, choose_victims, total_cost

drawn_names = st.sampled_from(["north", "south", "west"])
drawn_costs = st.builds(PreemptionCost, st.integers(0, 6), st.integers(1, 3), st.integers(1, 3))
"""Small ranges, so that ties are frequent."""
drawn_frees = st.dictionaries(drawn_names, st.integers(1, 5), min_size=1, max_size=3)
drawn_jobs = st.lists(st.tuples(drawn_frees, drawn_costs), max_size=8)
drawn_missing = st.dictionaries(drawn_names, st.integers(0, 9), max_size=3)


def make_candidates(jobs: list[tuple[dict[str, int], PreemptionCost]]) -> list[Candidate]:
    return [Candidate(number, frees, cost) for number, (frees, cost) in enumerate(jobs, 1)]


def is_sufficient(chosen: Sequence[Candidate], lacking: dict[str, int]) -> bool:
    freed = Counter[str]()
    for candidate in chosen:
        freed.update(candidate.frees)
    return all(freed[name] >= count for name, count in lacking.items())


def sufficient_costs(candidates: list[Candidate], lacking: dict[str, int]) -> list[PreemptionCost]:
    """Return the cost of each sufficient choice of candidates."""
    sizes = range(len(candidates) + 1)
    choices = (choice for size in sizes for choice in combinations(candidates, size))
    return [total_cost(choice) for choice in choices if is_sufficient(choice, lacking)]


@given(jobs=drawn_jobs, lacking=drawn_missing)
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
    # A better choice frees as many nodes as one that was already discarded.
    jobs=[
        ({"south": 4}, PreemptionCost(4, 1, 1)),
        ({"north": 4}, PreemptionCost(4, 1, 1)),
        ({"north": 4, "south": 1}, PreemptionCost(3, 1, 1)),
        ({"north": 4, "south": 4}, PreemptionCost(6, 1, 1)),
        ({"south": 1}, PreemptionCost(2, 1, 1)),
    ],
    lacking={"north": 3, "south": 6},
)
def test_victims_have_minimal_cost(jobs: list[tuple[dict[str, int], PreemptionCost]], lacking: dict[str, int]) -> None:
    options = make_candidates(jobs)
    possible = sufficient_costs(options, lacking)
    chosen = choose_victims(options, lacking)
    if chosen is None:
        assert not possible
        return
    assert is_sufficient(chosen, lacking)
    assert total_cost(chosen) == min(possible)


@given(jobs=drawn_jobs, lacking=drawn_missing, steps=st.integers(0, 20))
@example(
    # The greedy choice takes the small job first, and then the large one, which alone suffices.
    jobs=[({"north": 1}, PreemptionCost(1, 1, 1)), ({"north": 4}, PreemptionCost(15, 1, 1))],
    lacking={"north": 4},
    steps=0,
)
def test_victims_within_step_limit_are_sufficient_and_necessary(
    jobs: list[tuple[dict[str, int], PreemptionCost]], lacking: dict[str, int], steps: int
) -> None:
    options = make_candidates(jobs)
    chosen = choose_victims(options, lacking, steps)
    assert (chosen is None) == (not sufficient_costs(options, lacking))
    if chosen is not None:
        assert is_sufficient(chosen, lacking)
        for victim in chosen:
            assert not is_sufficient([candidate for candidate in chosen if candidate is not victim], lacking)


def test_victims_single_costly_job_beats_two_cheaper() -> None:
    """The greedy choice would be the two small jobs, which cost less for each node."""
    options = make_candidates(
        [
            ({"north": 3}, PreemptionCost(10, 1, 1)),
            ({"north": 3}, PreemptionCost(9, 1, 1)),
            ({"north": 4}, PreemptionCost(15, 1, 1)),
        ]
    )
    assert choose_victims(options, {"north": 4}) == [options[2]]


def test_victims_of_unfinished_search_are_kept() -> None:
    """The fourth step finds the better choice; the search ends with the next."""
    costs = [({"north": 3}, 10), ({"north": 3}, 9), ({"north": 4}, 15), ({"north": 1}, 8)]
    options = make_candidates([(frees, PreemptionCost(work, 1, 1)) for frees, work in costs])
    assert choose_victims(options, {"north": 4}, 0) == [options[1], options[0]], "the greedy choice"
    assert choose_victims(options, {"north": 4}, 4) == [options[2]]


def test_victims_exclude_restarted_then_wider_jobs() -> None:
    restarted, wide_cost, plain_cost = PreemptionCost(0, 3, 1), PreemptionCost(0, 1, 2), PreemptionCost(0, 1, 1)
    options = make_candidates(
        [({"north": 1}, restarted), ({"north": 1, "south": 1}, wide_cost), ({"north": 1}, plain_cost)]
    )
    assert choose_victims(options, {"north": 1}) == [options[2]]
    assert choose_victims(options[:2], {"north": 1}) == [options[1]]
    pair_options = make_candidates(
        [({"north": 1}, plain_cost), ({"south": 1}, plain_cost), ({"north": 1, "south": 1}, wide_cost)]
    )
    assert choose_victims(pair_options, {"north": 1, "south": 1}) == [pair_options[2]], (
        "one lost attempt costs less than two"
    )


def test_victims_of_equal_cost_are_youngest() -> None:
    options = make_candidates([({"north": 1}, PreemptionCost(5, 1, 1))] * 4)
    assert choose_victims(options, {"north": 2}) == [options[3], options[2]]


def test_victims_of_many_equal_jobs_are_chosen_quickly() -> None:
    """Of equal jobs only as many as could be needed are considered."""
    options = make_candidates([({"north": 2}, PreemptionCost(1000 - number, 1, 1)) for number in range(1000)] * 10)
    chosen = choose_victims(options, {"north": 7})
    assert chosen is not None
    assert [candidate.cost.work for candidate in chosen] == [1, 1, 1, 1]
