"""What is learned of applications from jobs that ran."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.advice import Run, Size
from koalapy.model.job import JobSpec
from koalapy.placement.knowledge import Estimate, prior_slowdown, slowdown
from koalapy.scheduling.experience import KEPT_APPLICATIONS, KEPT_RUNS, KEPT_SIZES, Experience, Seen
from tests.scheduling.requests import flexible
from tests.scheduling.world import World

FOUR = Size(4)
ON = {1: ("north",), 2: ("north", "south"), 3: ("north", "south", "west")}


def ran(clusters: int, *seconds: float, size: Size = FOUR, application: str = "wave") -> list[Run]:
    return [Run(application, size, ON[clusters], each) for each in seconds]


def spec(total: int = 4, application: str = "wave") -> JobSpec:
    return JobSpec(flexible(total), ("program",), application=application)


def test_the_median_is_not_drawn_away_by_one_odd_run() -> None:
    experience = Experience(runs=ran(1, 10.0, 11.0, 12.0, 500.0, 11.0))
    assert experience.seen("wave") == [Seen(FOUR, 1, 5, 11.0)]
    assert experience.expected(spec(), ("south",)) == 11.0


def test_only_the_last_runs_count() -> None:
    experience = Experience(runs=[*ran(1, *[100.0] * KEPT_RUNS), *ran(1, *[10.0] * KEPT_RUNS)])
    assert experience.seen("wave") == [Seen(FOUR, 1, KEPT_RUNS, 10.0)]


def test_the_books_do_not_grow_without_end() -> None:
    experience = Experience()
    for number in range(KEPT_APPLICATIONS + 5):
        experience.add(Run(f"app-{number:05}", FOUR, ON[1], 1.0))
    assert len(experience.applications()) == KEPT_APPLICATIONS
    assert experience.applications()[0] == "app-00005"
    for nodes in range(1, KEPT_SIZES + 6):
        experience.add(Run("many", Size(nodes), ON[1], 1.0))
    assert [seen.size.nodes for seen in experience.seen("many")] == list(range(6, KEPT_SIZES + 6))


def test_nothing_is_known_of_what_never_ran() -> None:
    experience = Experience(runs=ran(1, 10.0))
    assert experience.expected(spec(application="other"), ON[1]) is None
    assert experience.ratios("other") == ()
    assert experience.seen("other") == []


def test_a_slowdown_comes_from_runs_of_one_size_held_against_each_other() -> None:
    """That the larger size runs longer anyway says nothing."""
    runs = [*ran(1, 10.0, 10.0), *ran(2, 20.0, 20.0), *ran(1, 100.0, 100.0, size=Size(8)),
            *ran(2, 200.0, 200.0, size=Size(8)), *ran(2, 999.0, size=Size(16))]  # fmt: skip
    ratios = Experience(runs=runs).ratios("wave")
    assert [(ratio.clusters, ratio.weight, ratio.runs) for ratio in ratios] == [(2, 1.0, 2)] * 2
    assert [ratio.log for ratio in ratios] == pytest.approx([log(2.0)] * 2)


def test_a_slowdown_is_drawn_from_what_is_assumed_to_what_is_seen() -> None:
    found = [slowdown(Experience(runs=[*ran(1, *[10.0] * n), *ran(2, *[30.0] * n)]).ratios("wave"), 2)
             for n in (0, 1, 2, 5, 20)]  # fmt: skip
    assert found == sorted(found)
    assert found[0] == pytest.approx(prior_slowdown(None))
    assert found[1] <= 1.25, "a single run may be bad luck"
    assert found[2] > 1.25, "two are enough of a warning"
    assert found[-1] == pytest.approx(3.0, rel=0.2)


def test_runs_on_three_clusters_tell_something_of_two() -> None:
    ratios = Experience(runs=[*ran(1, *[10.0] * 5), *ran(3, *[30.0] * 5)]).ratios("wave")
    assert 1.25 < slowdown(ratios, 2) < slowdown(ratios, 3) < 3.0


def test_declared_communication_is_what_is_assumed_before_anything_is_seen() -> None:
    """The paper's bounds are ratios of communication to computation: of 0.1, 0.25 and 0.5; Wave's is 4."""
    shares = (0.0, 1 / 11, 1 / 5, 1 / 3, 1 / 2, 4 / 5, 1.0)
    assert [round(prior_slowdown(share), 3) for share in shares] == [1.0, 1.0, 1.15, 1.4, 1.9, 3.75, 3.75]
    assert prior_slowdown(None) == pytest.approx(prior_slowdown(1 / 5))


def test_times_are_those_of_the_slowest_cluster() -> None:
    experience = Experience({"north": 1.0, "south": 2.0}, [Run("wave", FOUR, ("south",), 10.0)])
    assert experience.expected(spec(), ("south",)) == 10.0
    assert experience.expected(spec(), ("north",)) == 20.0
    assert experience.seen("wave") == [Seen(FOUR, 1, 1, 20.0)]


def test_without_a_run_on_one_cluster_those_on_several_tell_how_long_it_would_take() -> None:
    experience = Experience(runs=ran(2, 11.5, 11.5, 11.5))
    assert experience.times("wave", FOUR).alone == Estimate(pytest.approx(10.0), 3)
    assert experience.expected(spec(), ON[2]) == 11.5


def test_of_another_size_the_nearest_tells_roughly() -> None:
    experience = Experience(runs=[*ran(1, 10.0), *ran(1, 80.0, size=Size(32))])
    assert experience.times("wave", Size(6)).alone == Estimate(10.0, 1, exact=False)
    assert experience.times("wave", Size(24)).alone == Estimate(80.0, 1, exact=False)
    assert experience.times("wave", Size(4, 2)).alone == Estimate(10.0, 1, exact=False)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 1e4)), max_size=30))
def test_whatever_is_seen_expectations_are_positive_and_slowdowns_at_least_one(runs: list[tuple[int, float]]) -> None:
    experience = Experience(runs=[run for clusters, seconds in runs for run in ran(clusters, seconds)])
    for clusters in ON:
        assert slowdown(experience.ratios("wave"), clusters) >= 1.0
        expected = experience.expected(spec(), ON[clusters])
        assert (expected is None) == (not runs)
        assert expected is None or expected > 0.0


def test_a_job_is_learned_from_when_it_succeeds() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(flexible(6), lasts=20.0, application="wave")
    world.submit(flexible(2), lasts=5.0, application="broken", code=1)
    world.submit(flexible(2), lasts=5.0, command=("sh", "-c", "x"))
    world.advance(60.0)
    experience = world.scheduler.experience
    assert experience.applications() == ["wave"]
    (seen,) = experience.seen("wave")
    assert (seen.size, seen.clusters, seen.runs) == (Size(6), 2, 1)
    assert seen.seconds == pytest.approx(20.0, abs=0.5)
