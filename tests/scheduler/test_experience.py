"""What is learned of applications from jobs that ran."""

from collections.abc import Iterator
from math import exp, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.advice import Run, Size
from koalapy.model.job import JobSpec
from koalapy.policies.knowledge import HOPELESS, SURE, prior_slowdown
from koalapy.scheduler.advisor.experience import (
    MAX_RETAINED_APPLICATIONS,
    MAX_RETAINED_GROUPS,
    MAX_RETAINED_RUNS,
    Experience,
)
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

FOUR = Size(4)
ON = {1: ("north",), 2: ("north", "south"), 3: ("north", "south", "west")}


def ran(
    clusters: int, *seconds: float, size: Size = FOUR, application: str = "wave", killed: bool = False
) -> list[Run]:
    return [Run(application, size, ON[clusters], each, killed) for each in seconds]


def spec(total: int = 4, application: str = "wave") -> JobSpec:
    return JobSpec(flexible(total), ("program",), application=application)


def slowdown(experience: Experience, clusters: int, communication: float | None = None) -> float:
    return experience.slowdowns("wave", communication).on_clusters(ON[clusters]).value


def scattered(seed: int, scatter: float) -> Iterator[float]:
    """Run times around 100 s, by what the input is."""
    draws = Random(seed)
    while True:
        yield 100.0 * exp(draws.gauss(0.0, scatter))


def test_what_a_run_takes_is_not_drawn_away_by_one_odd_one() -> None:
    experience = Experience(runs=ran(1, 10.0, 11.0, 12.0, 500.0, 11.0))
    (seen,) = experience.seen("wave")
    assert (seen.size, seen.where, seen.runs, seen.killed) == (FOUR, (), 5, 0)
    assert seen.seconds.value == pytest.approx(11.0, rel=0.05)
    assert seen.seconds.high > 15.0, "but it leaves a doubt"


def test_only_the_last_runs_count() -> None:
    experience = Experience(runs=[*ran(1, *[100.0] * MAX_RETAINED_RUNS), *ran(1, *[10.0] * MAX_RETAINED_RUNS)])
    (seen,) = experience.seen("wave")
    assert (seen.runs, seen.seconds.value) == (MAX_RETAINED_RUNS, pytest.approx(10.0))


def test_the_books_do_not_grow_without_end() -> None:
    experience = Experience()
    for number in range(MAX_RETAINED_APPLICATIONS + 5):
        experience.add(Run(f"app-{number:05}", FOUR, ON[1], 1.0))
    assert len(experience.applications()) == MAX_RETAINED_APPLICATIONS
    assert experience.applications()[0] == "app-00005"
    for nodes in range(1, MAX_RETAINED_GROUPS + 6):
        experience.add(Run("many", Size(nodes), ON[1], 1.0))
    assert [seen.size.nodes for seen in experience.seen("many")] == list(range(6, MAX_RETAINED_GROUPS + 6))


def test_nothing_is_known_of_what_never_ran() -> None:
    experience = Experience(runs=ran(1, 10.0))
    assert experience.expected(spec(application="other"), ON[1]) is None
    assert experience.slowdowns("other").runs == 0
    assert experience.seen("other") == []


def test_a_slowdown_comes_from_runs_of_one_size_held_against_each_other() -> None:
    """That the larger size runs longer anyway says nothing."""
    runs = [
        *ran(1, 10.0, 10.0),
        *ran(2, 20.0, 20.0),
        *ran(1, 100.0, 100.0, size=Size(8)),
        *ran(2, 200.0, 200.0, size=Size(8)),
        *ran(2, 999.0, size=Size(16)),
    ]
    experience = Experience(runs=runs)
    assert experience.slowdowns("wave").runs == 4
    assert slowdown(experience, 2) == pytest.approx(2.0, rel=0.1)


def test_a_slowdown_is_drawn_from_what_is_assumed_to_what_is_seen() -> None:
    experiences = [Experience(runs=[*ran(1, *[10.0] * n), *ran(2, *[30.0] * n)]) for n in (0, 1, 2, 5, 20)]
    found = [slowdown(experience, 2) for experience in experiences]
    assert found == sorted(found)
    assert found[0] == pytest.approx(prior_slowdown(None))
    assert found[-1] == pytest.approx(3.0, rel=0.05)
    harmless_probability = [experience.slowdowns("wave").harmless_probability(ON[2]) for experience in experiences]
    assert harmless_probability == sorted(harmless_probability, reverse=True)
    assert harmless_probability[1] > 0.01, "a single run may be bad luck"
    assert harmless_probability[-1] < 1e-6


def test_the_more_runs_scatter_the_less_they_say() -> None:
    alike = Experience(runs=[*ran(1, 9.0, 10.0, 11.0, 10.0), *ran(2, 18.0, 22.0, 20.0, 20.0)]).slowdowns("wave")
    unlike = Experience(runs=[*ran(1, 1.0, 10.0, 100.0, 10.0), *ran(2, 2.0, 20.0, 200.0, 20.0)]).slowdowns("wave")
    assert alike.on_clusters(ON[2]).value == pytest.approx(2.0, rel=0.1)
    assert alike.harmless_probability(ON[2]) < HOPELESS < unlike.harmless_probability(ON[2])
    assert (
        unlike.on_clusters(ON[2]).high / unlike.on_clusters(ON[2]).low
        > 2 * alike.on_clusters(ON[2]).high / alike.on_clusters(ON[2]).low
    )


@pytest.mark.parametrize("scatter", [0.0, 0.5, 1.0, 1.5])
def test_differing_inputs_lock_hardly_any_application_out_that_is_as_fast_on_several(scatter: float) -> None:
    """Of the medians of four runs against four, of ten such applications up to four were locked out for good."""
    locked = 0
    for seed in range(60):
        seconds = scattered(seed, scatter)
        runs = [run for _ in range(4) for run in (*ran(1, next(seconds)), *ran(2, next(seconds)))]
        locked += Experience(runs=runs).slowdowns("wave").harmless_probability(ON[2]) <= HOPELESS
    assert locked <= 6


@pytest.mark.parametrize("scatter", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_with_enough_runs_the_interval_closes_around_the_truth(scatter: float, factor: float) -> None:
    """Sizes add up: none need have been seen often. Eighty of hundred intervals hold the truth, or nearly so many."""
    held = 0
    for seed in range(30):
        seconds = scattered(seed, scatter)
        runs = [
            run
            for size in (Size(4), Size(8), Size(16))
            for _ in range(30)
            for run in (*ran(1, next(seconds), size=size), *ran(2, factor * next(seconds), size=size))
        ]
        belief = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
        held += belief.low <= factor <= belief.high
        assert belief.high / belief.low < 1.0 + scatter
    assert held >= 20


def test_a_run_that_was_killed_says_at_least_as_long() -> None:
    """At a walltime of twice the run time on one cluster, with a slowdown of 2.5, none succeeds on several."""
    experience = Experience(runs=[*ran(1, *[100.0] * 20), *ran(2, *[200.0] * 3, killed=True)])
    slowdowns = experience.slowdowns("wave")
    assert (slowdowns.runs, slowdowns.killed) == (3, 3)
    assert slowdowns.on_clusters(ON[2]).value > 1.9
    assert slowdowns.harmless_probability(ON[2]) < 0.05
    assert [(seen.runs, seen.killed) for seen in experience.seen("wave")] == [(20, 0), (3, 3)]
    assert experience.expected(spec(), ON[2]) >= 190.0  # type: ignore[operator]


def test_one_that_was_killed_early_says_next_to_nothing() -> None:
    runs = [*ran(1, *[100.0] * 10), *ran(2, *[100.0] * 5)]
    before = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
    after = Experience(runs=[*runs, *ran(2, *[10.0] * 5, killed=True)]).slowdowns("wave").on_clusters(ON[2])
    assert (after.log, after.deviation) == pytest.approx((before.log, before.deviation), abs=1e-6)


@given(
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=8),
    st.floats(1.0, 1e3),
)
def test_one_that_was_killed_never_makes_a_slowdown_look_less(
    alone: list[float], together: list[float], bound: float
) -> None:
    runs = [*ran(1, *alone), *ran(2, *together)]
    before = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
    after = Experience(runs=[*runs, *ran(2, bound, killed=True)]).slowdowns("wave").on_clusters(ON[2])
    assert max(0.0, after.log) >= max(0.0, before.log) - 0.02, "but for what is simplified"


def test_where_all_were_killed_it_is_known_to_take_as_long_as_the_longest() -> None:
    experience = Experience(runs=ran(1, 50.0, 100.0, 80.0, killed=True))
    assert experience.expected(spec(), ON[1]) >= 100.0  # type: ignore[operator]


def test_one_slow_link_does_not_spoil_the_reputation_of_other_clusters_together() -> None:
    runs = ran(1, *[10.0] * 20)
    for seconds, where in ((10.0, ("north", "south")), (40.0, ("north", "west")), (10.0, ("south", "west"))):
        runs += [Run("wave", FOUR, where, seconds)] * 10
    slowdowns = Experience(runs=runs).slowdowns("wave")
    assert slowdowns.harmless_probability(("north", "south")) > SURE
    assert slowdowns.harmless_probability(("south", "west")) > SURE
    assert slowdowns.harmless_probability(("north", "west")) < HOPELESS
    assert HOPELESS < slowdowns.harmless_probability(("east", "south")) < SURE, "of others that is not known"


def test_runs_on_three_clusters_tell_something_of_two() -> None:
    experience = Experience(runs=[*ran(1, *[10.0] * 5), *ran(3, *[30.0] * 5)])
    assert 1.25 < slowdown(experience, 2) < slowdown(experience, 3) < 3.0
    slowdowns = experience.slowdowns("wave")
    assert slowdowns.on_clusters(ON[2]).deviation > slowdowns.on_clusters(ON[3]).deviation


@pytest.mark.parametrize(("factor", "harmless"), [(1.0, True), (2.5, False)])
def test_of_a_new_application_is_believed_what_all_others_do_here(factor: float, harmless: bool) -> None:
    runs = [
        run
        for number in range(12)
        for each, seconds in ((1, 10.0), (2, 10.0 * factor))
        for run in ran(each, *[seconds] * 5, application=f"app-{number}")
    ]
    found = Experience(runs=runs).slowdowns("new")
    assert (found.runs, found.harmless_probability(ON[2]) >= SURE) == (0, harmless)
    assert (found.harmless_probability(ON[2]) <= HOPELESS) == (not harmless)
    declared = Experience(runs=runs).slowdowns("new", 0.9)
    assert declared.on_clusters(ON[2]).value == pytest.approx(3.75), "what is declared goes before"


def test_where_applications_differ_a_new_one_may_be_like_any() -> None:
    runs = [
        run
        for number in range(12)
        for each, seconds in ((1, 10.0), (2, 30.0 if number % 2 else 10.0))
        for run in ran(each, *[seconds] * 5, application=f"app-{number}")
    ]
    assert HOPELESS < Experience(runs=runs).slowdowns("new").harmless_probability(ON[2]) < SURE


def test_declared_communication_is_what_is_assumed_before_anything_is_seen() -> None:
    """The paper's bounds are ratios of communication to computation: of 0.1, 0.25 and 0.5; Wave's is 4."""
    shares = (0.0, 1 / 11, 1 / 5, 1 / 3, 1 / 2, 4 / 5, 1.0)
    assert [round(prior_slowdown(share), 3) for share in shares] == [1.0, 1.0, 1.15, 1.4, 1.9, 3.75, 3.75]
    assert prior_slowdown(None) == pytest.approx(prior_slowdown(1 / 5))


def test_times_are_those_of_the_slowest_cluster() -> None:
    experience = Experience({"north": 1.0, "south": 2.0}, [Run("wave", FOUR, ("south",), 10.0)])
    assert experience.expected(spec(), ("south",)) == pytest.approx(10.0)
    assert experience.expected(spec(), ("north",)) == pytest.approx(20.0)
    assert [seen.seconds.value for seen in experience.seen("wave")] == [pytest.approx(20.0)]


def test_without_a_run_on_one_cluster_those_on_several_tell_how_long_it_would_take() -> None:
    experience = Experience(runs=ran(2, 11.5, 11.5, 11.5))
    single_cluster = experience.answer("wave", FOUR)[1].single_cluster
    assert single_cluster is not None
    assert single_cluster.value == pytest.approx(10.0)
    assert experience.expected(spec(), ON[2]) == pytest.approx(11.5)


def test_the_fewer_nodes_a_run_had_the_less_it_says_of_many() -> None:
    """Whether more nodes are for more work or for the same nobody has told: 36,000 s on one say nothing of 64."""
    experience = Experience(runs=ran(1, *[36_000.0] * 5, size=Size(1)))
    two = experience.answer("wave", Size(2))[1].single_cluster
    assert two is not None
    assert two.low < 18_000.0 * 1.05
    assert two.high > 36_000.0 * 0.95
    assert experience.expected(spec(64), ON[1]) is None
    assert Experience(runs=ran(1, 10.0, size=Size(4))).expected(
        JobSpec(flexible(4), ("program",), application="wave", processes_per_node=2), ON[1]
    ) == pytest.approx(10.0)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_how_run_times_fall_with_nodes_is_learned_from_sizes(power: float) -> None:
    sizes = [Size(1), Size(4), Size(16)]
    runs = [run for size in sizes for run in ran(1, *[3600.0 / size.nodes**power] * 10, size=size)]
    experience = Experience(runs=runs)
    assert experience.expected(spec(64), ON[1]) == pytest.approx(3600.0 / 64**power, rel=0.5)
    assert experience.expected(spec(8), ON[1]) == pytest.approx(3600.0 / 8**power, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 1e4), st.booleans()), max_size=30))
def test_whatever_is_seen_expectations_are_positive_and_intervals_hold_them(
    runs: list[tuple[int, float, bool]],
) -> None:
    told = [run for clusters, seconds, killed in runs for run in ran(clusters, seconds, killed=killed)]
    experience = Experience(runs=told)
    for clusters in ON:
        belief = experience.slowdowns("wave").on_clusters(ON[clusters])
        assert 0.0 < belief.low <= belief.value <= belief.high < inf
        expected = experience.expected(spec(), ON[clusters])
        assert expected is None or 0.0 < expected < inf
        assert runs or expected is None
    for seen in experience.seen("wave"):
        assert 0.0 < seen.seconds.low <= seen.seconds.value <= seen.seconds.high < inf


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 1e4)), min_size=1, max_size=20), st.randoms())
def test_the_order_of_runs_changes_nothing(runs: list[tuple[int, float]], draws: Random) -> None:
    told = [run for clusters, seconds in runs for run in ran(clusters, seconds)]
    other = draws.sample(told, len(told))
    one, another = (Experience(runs=each).slowdowns("wave").on_clusters(ON[2]) for each in (told, other))
    assert (one.log, one.deviation) == pytest.approx((another.log, another.deviation), rel=1e-6, abs=1e-9)


def test_a_job_is_learned_from_when_it_succeeds() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(flexible(6), run_time=20.0, application="wave")
    world.submit(flexible(2), run_time=5.0, application="broken", code=1)
    world.submit(flexible(2), run_time=5.0, command=("sh", "-c", "x"))
    world.advance(60.0)
    experience = world.queries.experience
    assert experience.applications() == ["wave"]
    (seen,) = experience.seen("wave")
    assert (seen.size, seen.where, seen.runs) == (Size(6), ("north", "south"), 1)
    assert seen.seconds.value == pytest.approx(20.0, abs=0.5)


def test_a_job_that_is_killed_at_its_walltime_is_learned_from_too() -> None:
    """A slowdown of 2.5 and a walltime of twice the run time: all that are co-allocated fail, and teach that."""
    world = World({"north": 4, "south": 4})
    for _ in range(5):
        world.submit(flexible(4), run_time=20.0, walltime=40.0, application="wave")
        world.submit(fixed(north=2, south=2), run_time=50.0, walltime=40.0, application="wave")
        world.submit(fixed(north=2, south=2), run_time=50.0, walltime=60.0, code=1, application="wave")
    world.advance(900.0)
    cancelled = world.submit(fixed(north=2, south=2), run_time=500.0, walltime=400.0, application="wave")
    world.advance(50.0)
    world.cancel(cancelled)
    world.advance(10.0)
    slowdowns = world.queries.experience.slowdowns("wave")
    assert (slowdowns.runs, slowdowns.killed) == (5, 5)
    assert slowdowns.harmless_probability(("north", "south")) < 0.05
