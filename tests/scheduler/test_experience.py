"""Slowdowns and run times of applications learned from finished jobs."""

from collections.abc import Iterator
from math import exp, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.advice import Run, Size
from koalapy.model.job_spec import JobSpec
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


def make_runs(
    clusters: int, *seconds: float, size: Size = FOUR, application: str = "wave", killed: bool = False
) -> list[Run]:
    return [Run(application, size, ON[clusters], seconds_per_run, killed) for seconds_per_run in seconds]


def make_spec(total: int = 4, application: str = "wave") -> JobSpec:
    return JobSpec(flexible(total), ("program",), application=application)


def learned_slowdown(experience: Experience, clusters: int, communication: float | None = None) -> float:
    return experience.slowdowns("wave", communication).on_clusters(ON[clusters]).value


def draw_run_times(seed: int, scatter: float) -> Iterator[float]:
    """Yield run times around 100 s with log-normal scatter."""
    draws = Random(seed)
    while True:
        yield 100.0 * exp(draws.gauss(0.0, scatter))


def test_run_time_is_robust_to_single_outlier() -> None:
    experience = Experience(runs=make_runs(1, 10.0, 11.0, 12.0, 500.0, 11.0))
    (summary,) = experience.seen("wave")
    assert (summary.size, summary.where, summary.runs, summary.killed) == (FOUR, (), 5, 0)
    assert summary.seconds.value == pytest.approx(11.0, rel=0.05)
    assert summary.seconds.high > 15.0, "the interval stays wide"


def test_run_time_counts_only_last_runs() -> None:
    experience = Experience(
        runs=[*make_runs(1, *[100.0] * MAX_RETAINED_RUNS), *make_runs(1, *[10.0] * MAX_RETAINED_RUNS)]
    )
    (summary,) = experience.seen("wave")
    assert (summary.runs, summary.seconds.value) == (MAX_RETAINED_RUNS, pytest.approx(10.0))


def test_experience_is_bounded() -> None:
    experience = Experience()
    for number in range(MAX_RETAINED_APPLICATIONS + 5):
        experience.add(Run(f"app-{number:05}", FOUR, ON[1], 1.0))
    assert len(experience.applications()) == MAX_RETAINED_APPLICATIONS
    assert experience.applications()[0] == "app-00005"
    for nodes in range(1, MAX_RETAINED_GROUPS + 6):
        experience.add(Run("many", Size(nodes), ON[1], 1.0))
    assert [summary.size.nodes for summary in experience.seen("many")] == list(range(6, MAX_RETAINED_GROUPS + 6))


def test_experience_of_unknown_application_is_empty() -> None:
    experience = Experience(runs=make_runs(1, 10.0))
    assert experience.expected(make_spec(application="other"), ON[1]) is None
    assert experience.slowdowns("other").runs == 0
    assert experience.seen("other") == []


def test_slowdown_compares_runs_of_equal_size() -> None:
    """That a larger size runs longer does not count."""
    runs = [
        *make_runs(1, 10.0, 10.0),
        *make_runs(2, 20.0, 20.0),
        *make_runs(1, 100.0, 100.0, size=Size(8)),
        *make_runs(2, 200.0, 200.0, size=Size(8)),
        *make_runs(2, 999.0, size=Size(16)),
    ]
    experience = Experience(runs=runs)
    assert experience.slowdowns("wave").runs == 4
    assert learned_slowdown(experience, 2) == pytest.approx(2.0, rel=0.1)


def test_slowdown_moves_from_prior_to_observed() -> None:
    experiences = [Experience(runs=[*make_runs(1, *[10.0] * n), *make_runs(2, *[30.0] * n)]) for n in (0, 1, 2, 5, 20)]
    slowdowns = [learned_slowdown(experience, 2) for experience in experiences]
    assert slowdowns == sorted(slowdowns)
    assert slowdowns[0] == pytest.approx(prior_slowdown(None))
    assert slowdowns[-1] == pytest.approx(3.0, rel=0.05)
    harmless_probability = [experience.slowdowns("wave").harmless_probability(ON[2]) for experience in experiences]
    assert harmless_probability == sorted(harmless_probability, reverse=True)
    assert harmless_probability[1] > 0.01, "a single run is not a proof"
    assert harmless_probability[-1] < 1e-6


def test_slowdown_of_scattered_runs_is_less_certain() -> None:
    alike = Experience(runs=[*make_runs(1, 9.0, 10.0, 11.0, 10.0), *make_runs(2, 18.0, 22.0, 20.0, 20.0)]).slowdowns(
        "wave"
    )
    unlike = Experience(runs=[*make_runs(1, 1.0, 10.0, 100.0, 10.0), *make_runs(2, 2.0, 20.0, 200.0, 20.0)]).slowdowns(
        "wave"
    )
    assert alike.on_clusters(ON[2]).value == pytest.approx(2.0, rel=0.1)
    assert alike.harmless_probability(ON[2]) < HOPELESS < unlike.harmless_probability(ON[2])
    assert (
        unlike.on_clusters(ON[2]).high / unlike.on_clusters(ON[2]).low
        > 2 * alike.on_clusters(ON[2]).high / alike.on_clusters(ON[2]).low
    )


@pytest.mark.parametrize("scatter", [0.0, 0.5, 1.0, 1.5])
def test_slowdown_with_varying_inputs_rarely_excludes_harmless_application(scatter: float) -> None:
    """With medians of four runs each, up to four of ten such applications were excluded."""
    locked = 0
    for seed in range(60):
        seconds = draw_run_times(seed, scatter)
        runs = [run for _ in range(4) for run in (*make_runs(1, next(seconds)), *make_runs(2, next(seconds)))]
        locked += Experience(runs=runs).slowdowns("wave").harmless_probability(ON[2]) <= HOPELESS
    assert locked <= 6


@pytest.mark.parametrize("scatter", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_slowdown_interval_converges_to_truth(scatter: float, factor: float) -> None:
    """Evidence of several sizes is combined. About 80 % of the intervals contain the truth."""
    hits = 0
    for seed in range(30):
        seconds = draw_run_times(seed, scatter)
        runs = [
            run
            for size in (Size(4), Size(8), Size(16))
            for _ in range(30)
            for run in (*make_runs(1, next(seconds), size=size), *make_runs(2, factor * next(seconds), size=size))
        ]
        belief = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
        hits += belief.low <= factor <= belief.high
        assert belief.high / belief.low < 1.0 + scatter
    assert hits >= 20


def test_slowdown_of_killed_runs_is_lower_bound() -> None:
    """With a walltime of twice the run time and a slowdown of 2.5, no co-allocated run succeeds."""
    experience = Experience(runs=[*make_runs(1, *[100.0] * 20), *make_runs(2, *[200.0] * 3, killed=True)])
    slowdowns = experience.slowdowns("wave")
    assert (slowdowns.runs, slowdowns.killed) == (3, 3)
    assert slowdowns.on_clusters(ON[2]).value > 1.9
    assert slowdowns.harmless_probability(ON[2]) < 0.05
    assert [(summary.runs, summary.killed) for summary in experience.seen("wave")] == [(20, 0), (3, 3)]
    assert experience.expected(make_spec(), ON[2]) >= 190.0  # type: ignore[operator]


def test_slowdown_ignores_runs_killed_early() -> None:
    runs = [*make_runs(1, *[100.0] * 10), *make_runs(2, *[100.0] * 5)]
    first = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
    updated = Experience(runs=[*runs, *make_runs(2, *[10.0] * 5, killed=True)]).slowdowns("wave").on_clusters(ON[2])
    assert (updated.log, updated.deviation) == pytest.approx((first.log, first.deviation), abs=1e-6)


@given(
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=8),
    st.floats(1.0, 1e3),
)
def test_slowdown_never_decreases_by_killed_run(
    single_times: list[float], multi_times: list[float], bound: float
) -> None:
    runs = [*make_runs(1, *single_times), *make_runs(2, *multi_times)]
    first = Experience(runs=runs).slowdowns("wave").on_clusters(ON[2])
    updated = Experience(runs=[*runs, *make_runs(2, bound, killed=True)]).slowdowns("wave").on_clusters(ON[2])
    assert max(0.0, updated.log) >= max(0.0, first.log) - 0.02, "beyond the approximation error"


def test_run_time_of_only_killed_runs_is_at_least_longest() -> None:
    experience = Experience(runs=make_runs(1, 50.0, 100.0, 80.0, killed=True))
    assert experience.expected(make_spec(), ON[1]) >= 100.0  # type: ignore[operator]


def test_slowdown_of_slow_link_does_not_affect_other_pairs() -> None:
    runs = make_runs(1, *[10.0] * 20)
    for seconds, clusters in ((10.0, ("north", "south")), (40.0, ("north", "west")), (10.0, ("south", "west"))):
        runs += [Run("wave", FOUR, clusters, seconds)] * 10
    slowdowns = Experience(runs=runs).slowdowns("wave")
    assert slowdowns.harmless_probability(("north", "south")) > SURE
    assert slowdowns.harmless_probability(("south", "west")) > SURE
    assert slowdowns.harmless_probability(("north", "west")) < HOPELESS
    assert HOPELESS < slowdowns.harmless_probability(("east", "south")) < SURE, "other pairs stay unknown"


def test_slowdown_on_three_clusters_informs_two() -> None:
    experience = Experience(runs=[*make_runs(1, *[10.0] * 5), *make_runs(3, *[30.0] * 5)])
    assert 1.25 < learned_slowdown(experience, 2) < learned_slowdown(experience, 3) < 3.0
    slowdowns = experience.slowdowns("wave")
    assert slowdowns.on_clusters(ON[2]).deviation > slowdowns.on_clusters(ON[3]).deviation


@pytest.mark.parametrize(("factor", "harmless"), [(1.0, True), (2.5, False)])
def test_slowdown_of_new_application_follows_other_applications(factor: float, harmless: bool) -> None:
    runs = [
        run
        for number in range(12)
        for cluster_count, seconds in ((1, 10.0), (2, 10.0 * factor))
        for run in make_runs(cluster_count, *[seconds] * 5, application=f"app-{number}")
    ]
    slowdowns = Experience(runs=runs).slowdowns("new")
    assert (slowdowns.runs, slowdowns.harmless_probability(ON[2]) >= SURE) == (0, harmless)
    assert (slowdowns.harmless_probability(ON[2]) <= HOPELESS) == (not harmless)
    declared = Experience(runs=runs).slowdowns("new", 0.9)
    assert declared.on_clusters(ON[2]).value == pytest.approx(3.75), "the declared share has priority"


def test_slowdown_of_new_application_is_open_if_others_differ() -> None:
    runs = [
        run
        for number in range(12)
        for cluster_count, seconds in ((1, 10.0), (2, 30.0 if number % 2 else 10.0))
        for run in make_runs(cluster_count, *[seconds] * 5, application=f"app-{number}")
    ]
    assert HOPELESS < Experience(runs=runs).slowdowns("new").harmless_probability(ON[2]) < SURE


def test_slowdown_prior_follows_declared_communication() -> None:
    """The ratios of communication to computation in the paper are 0.1, 0.25 and 0.5; that of Wave is 4."""
    shares = (0.0, 1 / 11, 1 / 5, 1 / 3, 1 / 2, 4 / 5, 1.0)
    assert [round(prior_slowdown(share), 3) for share in shares] == [1.0, 1.0, 1.15, 1.4, 1.9, 3.75, 3.75]
    assert prior_slowdown(None) == pytest.approx(prior_slowdown(1 / 5))


def test_run_time_scales_with_slowest_cluster() -> None:
    experience = Experience({"north": 1.0, "south": 2.0}, [Run("wave", FOUR, ("south",), 10.0)])
    assert experience.expected(make_spec(), ("south",)) == pytest.approx(10.0)
    assert experience.expected(make_spec(), ("north",)) == pytest.approx(20.0)
    assert [summary.seconds.value for summary in experience.seen("wave")] == [pytest.approx(20.0)]


def test_run_time_on_one_cluster_is_derived_from_several() -> None:
    experience = Experience(runs=make_runs(2, 11.5, 11.5, 11.5))
    single_cluster = experience.answer("wave", FOUR)[1].single_cluster
    assert single_cluster is not None
    assert single_cluster.value == pytest.approx(10.0)
    assert experience.expected(make_spec(), ON[2]) == pytest.approx(11.5)


def test_run_time_of_few_nodes_says_little_about_many() -> None:
    """It is unknown whether more nodes are used for more work: 36,000 s on one node say nothing of 64."""
    experience = Experience(runs=make_runs(1, *[36_000.0] * 5, size=Size(1)))
    estimate = experience.answer("wave", Size(2))[1].single_cluster
    assert estimate is not None
    assert estimate.low < 18_000.0 * 1.05
    assert estimate.high > 36_000.0 * 0.95
    assert experience.expected(make_spec(64), ON[1]) is None
    assert Experience(runs=make_runs(1, 10.0, size=Size(4))).expected(
        JobSpec(flexible(4), ("program",), application="wave", processes_per_node=2), ON[1]
    ) == pytest.approx(10.0)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_run_time_scaling_is_learned_from_sizes(power: float) -> None:
    sizes = [Size(1), Size(4), Size(16)]
    runs = [run for size in sizes for run in make_runs(1, *[3600.0 / size.nodes**power] * 10, size=size)]
    experience = Experience(runs=runs)
    assert experience.expected(make_spec(64), ON[1]) == pytest.approx(3600.0 / 64**power, rel=0.5)
    assert experience.expected(make_spec(8), ON[1]) == pytest.approx(3600.0 / 8**power, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 1e4), st.booleans()), max_size=30))
def test_run_time_estimates_are_positive_and_within_intervals(runs: list[tuple[int, float, bool]]) -> None:
    all_runs = [run for clusters, seconds, killed in runs for run in make_runs(clusters, seconds, killed=killed)]
    experience = Experience(runs=all_runs)
    for clusters in ON:
        belief = experience.slowdowns("wave").on_clusters(ON[clusters])
        assert 0.0 < belief.low <= belief.value <= belief.high < inf
        expected = experience.expected(make_spec(), ON[clusters])
        assert expected is None or 0.0 < expected < inf
        assert runs or expected is None
    for summary in experience.seen("wave"):
        assert 0.0 < summary.seconds.low <= summary.seconds.value <= summary.seconds.high < inf


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 1e4)), min_size=1, max_size=20), st.randoms())
def test_slowdown_is_independent_of_run_order(runs: list[tuple[int, float]], draws: Random) -> None:
    all_runs = [run for clusters, seconds in runs for run in make_runs(clusters, seconds)]
    shuffled_runs = draws.sample(all_runs, len(all_runs))
    slowdown, shuffled_slowdown = (
        Experience(runs=sequence).slowdowns("wave").on_clusters(ON[2]) for sequence in (all_runs, shuffled_runs)
    )
    assert (slowdown.log, slowdown.deviation) == pytest.approx(
        (shuffled_slowdown.log, shuffled_slowdown.deviation), rel=1e-6, abs=1e-9
    )


def test_experience_includes_successful_jobs() -> None:
    world = World({"north": 4, "south": 4})
    world.submit(flexible(6), run_time=20.0, application="wave")
    world.submit(flexible(2), run_time=5.0, application="broken", code=1)
    world.submit(flexible(2), run_time=5.0, command=("sh", "-c", "x"))
    world.advance(60.0)
    experience = world.queries.experience
    assert experience.applications() == ["wave"]
    (summary,) = experience.seen("wave")
    assert (summary.size, summary.where, summary.runs) == (Size(6), ("north", "south"), 1)
    assert summary.seconds.value == pytest.approx(20.0, abs=0.5)


def test_experience_includes_jobs_killed_at_walltime() -> None:
    """With a slowdown of 2.5 and a walltime of twice the run time, all co-allocated runs fail."""
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
