"""Compare the scheduler in the experiments of sonmez-2010 with a short implementation of the paper's text."""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest

from experiments.experiment import Result
from experiments.sonmez_2010.das3 import DELFT, LEIDEN, build_grid, build_links, by_latency, run_times_of
from experiments.sonmez_2010.loads import PRIME, SERIES, WAVE, WAVE_2, WF, OfLoads, build_cell
from experiments.sonmez_2010.policies import CA, GROUPS, Figure2, Figure6, Figure9, Figure10, keep_background
from experiments.sonmez_2010.readings import (
    COSTS,
    ONE_CLUSTER,
    POISSON_READINGS,
    Cost,
    Figure9Times,
    Figure10Times,
    Table5Poisson,
)
from experiments.sonmez_2010.saturation import Table4, estimate_share, is_saturated, saturates_at
from experiments.sonmez_2010.workloads import SIZES, generate_stream, paper_rules
from experiments.traces import Traces
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.simulation import Simulation

Placed = list[tuple[float, list[tuple[str, int]]]]
"""The start time and the nodes by cluster of each job, in the order of arrival."""


def by_the_paper(jobs: Sequence[PlannedJob], idle: dict[str, int], times: Sequence[float], limit: int) -> Placed:
    """Place jobs by FCM, at submission and from the head of the queue at each completion. A ``limit`` of 0 means WF."""
    queue: deque[int] = deque()
    placed: Placed = [(-1.0, [])] * len(jobs)
    agenda: list[tuple[float, int, int]] = [(job.arrives_at, 1, number) for number, job in enumerate(jobs)]
    heapq.heapify(agenda)

    def place(number: int, now: float) -> bool:
        remaining, gang = jobs[number].spec.request.total_size, []
        for name in sorted(idle, key=lambda name: (-idle[name], name))[: limit or 1]:
            if remaining and idle[name]:
                gang.append((name, min(idle[name], remaining)))
                remaining -= gang[-1][1]
        if remaining:
            return False
        for name, nodes in gang:
            idle[name] -= nodes
        placed[number] = now, gang
        heapq.heappush(agenda, (now + times[len(gang) - 1], 0, number))
        return True

    while agenda:
        now, arrives, number = heapq.heappop(agenda)
        if not arrives:
            for name, nodes in placed[number][1]:
                idle[name] += nodes
            has_more = bool(agenda) and agenda[0][:2] == (now, 0)  # count ends at one moment as one
            while not has_more and queue and place(queue[0], now):
                queue.popleft()
        elif not place(number, now):
            queue.append(number)
    return placed


@pytest.mark.parametrize(("name", "limit"), [(WF, 0), (PRIME, 4), (WAVE, 4), (WAVE_2, 2)])
def test_sonmez_jobs_are_placed_as_in_the_paper(name: str, limit: int) -> None:
    series, simulated = SERIES[name], build_grid(DELFT)
    specs = {size: series.spec(size) for size in SIZES}
    jobs = list(generate_stream(specs, series.lasts, 0.85, simulated.nodes, 8000.0, seed=5))
    outcome = Simulation(simulated, paper_rules(), run_time=series.run_time).run(jobs)
    ours = sorted(outcome.jobs, key=lambda job: job.planned.arrives_at)
    curve = run_times_of({WF: "prime", PRIME: "prime"}.get(name, "wave"))
    expected = by_the_paper(jobs, {name: entry.nodes for name, entry in simulated.clusters.items()}, curve, limit)
    assert [(job.placed, list(job.gang)) for job in ours] == expected
    assert any(start > job.arrives_at for (start, _), job in zip(expected, jobs, strict=True))


def test_sonmez_stream_has_requested_utilisation_and_sizes() -> None:
    specs = {size: SERIES[PRIME].spec(size) for size in SIZES}
    jobs = list(generate_stream(specs, 200.0, 0.6, 204, 400_000.0, seed=1))
    used = sum(job.spec.request.total_size * job.lasts for job in jobs) / (204 * 400_000.0)
    assert used == pytest.approx(0.6, rel=0.03)
    other_jobs = list(generate_stream(specs, 180.0, 0.3, 204, 400_000.0, seed=1))
    assert [job.spec for job in jobs[: len(other_jobs)]] == [job.spec for job in other_jobs]


def test_sonmez_run_reports_waits_and_utilisation(tmp_path: Path) -> None:
    low, high = (OfLoads.simulate_cell(build_cell(WF, percent, 0), Traces(tmp_path)) for percent in (10, 20))
    assert low["response"] == pytest.approx(200.0, abs=0.5)
    assert low["co-allocated"] == 0.0
    assert float(str(high["used"])) == pytest.approx(0.2, abs=0.03)
    assert float(str(high["queued late"])) < 5.0


def result(percent: int, early: float, late: float, seed: int = 0, series: str = WF) -> Result:
    return Result(build_cell(series, percent, seed), {"queued early": early, "queued late": late})


def test_sonmez_workload_with_growing_queue_is_saturated() -> None:
    assert is_saturated(result(85, 400.0, 600.0))
    assert not is_saturated(result(85, 500.0, 600.0))
    assert not is_saturated(result(85, 100.0, 300.0))


def test_sonmez_utilisation_with_half_saturated_is_saturated() -> None:
    assert saturates_at({85: 0.4, 90: 0.9}) == 90
    assert saturates_at({85: 0.5, 90: 0.9}) == 85
    assert saturates_at({85: 0.1, 90: 0.2}) == 95
    fraction, low, high = estimate_share([True, False, False, False])
    assert (fraction, round(low, 3), round(high, 3)) == (0.25, 0.046, 0.699)


def test_sonmez_table_4_has_paper_intervals_and_seed_share() -> None:
    table = Table4()
    cells = table.list_cells(2)
    results = [
        Result(entry, {"queued early": 1.0, "queued late": 1000.0 * (entry["percent"] == 90)}) for entry in cells
    ]
    rows = {row.label: row for row in table.build_rows(results)}
    assert (rows["WF: saturated at"].ours, rows["WF: saturated at"].paper) == (90, 90)
    assert rows["– WF at 90 %"].ours == 100.0
    assert rows["FCM W-Wave: saturated at"].ours == 80


def test_sonmez_distant_clusters_slow_down_wave() -> None:
    factor = by_latency(run_times_of("wave"))
    job = PlannedJob(0.0, SERIES[WAVE].spec(8), 200.0)

    def factor_of(*names: str) -> float:
        return factor(job, [(name, 2) for name in names])

    assert factor_of("delft") == factor_of("vrije") == 1.0
    assert (
        factor_of("amsterdam", "multimedian")
        < factor_of("vrije", "amsterdam")
        < factor_of("vrije", "leiden")
        < factor_of("vrije", "delft")
    )
    curve, clusters = run_times_of("wave"), build_grid(DELFT).clusters
    assert factor_of(*clusters) == pytest.approx(curve[3] / curve[0])
    means = [fmean(curve[0] * factor_of(*names) for names in combinations(clusters, count)) for count in (2, 3)]
    assert means == pytest.approx(curve[1:3], rel=0.06)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_sonmez_run_time_models_agree_on_one_and_four_clusters(cost: Cost) -> None:
    job, near = PlannedJob(0.0, SERIES[WAVE].spec(8), ONE_CLUSTER), ("amsterdam", "multimedian")

    def factor_of(*names: str) -> float:
        return ONE_CLUSTER * cost.run_time(job, [(name, 2) for name in names])

    assert factor_of("vrije") == ONE_CLUSTER
    assert factor_of(*build_grid(DELFT).clusters) == pytest.approx(cost.four)
    assert factor_of(*near) < factor_of("vrije", "leiden") < factor_of("vrije", "delft")
    assert (factor_of("vrije", *near) == pytest.approx(factor_of("vrije", "amsterdam"))) == (
        cost.weigh is max and not cost.by_number
    )


def test_sonmez_mean_latency_cost_is_independent_of_clusters() -> None:
    factor = COSTS["mean latency, 350 s"].run_time
    job = PlannedJob(0.0, SERIES[WAVE].spec(8), ONE_CLUSTER)
    two, three = (
        factor(job, [(name, 2) for name in names])
        for names in (("amsterdam", "vrije"), ("amsterdam", "multimedian", "vrije"))
    )
    assert three < two, "two near ones beside a distant one bring the mean down"


def test_sonmez_figures_9_and_10_pair_policies_by_seed() -> None:
    def values(seed: int, policy: str, percent: int) -> dict[str, float]:
        late = 1000.0 if percent >= (80 if policy == CA else 70) else 10.0
        return {"response": (50.0 if policy == CA else 100.0) * (1 + seed), "queued early": 10.0, "queued late": late}

    ten, nine = Figure10Times(), Figure9Times()
    of_ten, of_nine = (
        [
            Result(entry, values(entry.seed, str(entry["policy"]), int(entry["percent"])))
            for entry in experiment.list_cells(2)
        ]
        for experiment in (ten, nine)
    )
    rows = {row.label: row for row in ten.build_rows(of_ten)}
    for cost in COSTS:
        assert rows[f"{cost}; with Delft: CA at 50 %"].ours == -50.0
        assert (
            rows[f"{cost}; with Delft: FCM saturated at"].ours,
            rows[f"{cost}; with Delft: CA saturated at"].ours,
        ) == (70, 80)
    assert [row.ours for row in nine.build_rows(of_nine)] == [pytest.approx(-75.0)] * len(COSTS) * 2 * 3
    assert {row.paper for row in nine.build_rows(of_nine)} == {-50, -230}


def test_sonmez_first_reading_of_poisson_equals_table_5(tmp_path: Path) -> None:
    table, traces = Table5Poisson(), Traces(tmp_path)
    first = {
        entry["series"]: entry for entry in table.list_cells(1) if entry["reading"] == next(iter(POISSON_READINGS))
    }
    assert table.simulate_cell(first[WF], traces) == OfLoads.simulate_cell(build_cell(WF, table.percent, 0), traces)
    results = [Result(entry, {"response": 95.0 if entry["series"] != WF else 100.0}) for entry in table.list_cells(2)]
    assert [row.ours for row in table.build_rows(results)] == [pytest.approx(-5.0)] * len(POISSON_READINGS)


def test_sonmez_delft_and_leiden_have_no_measured_link() -> None:
    assert (DELFT, LEIDEN) not in build_links()
    assert DELFT not in build_grid(DELFT).clusters
    assert build_grid(DELFT).nodes == 204
    assert build_grid(LEIDEN).nodes == 240


def test_sonmez_steady_local_users_keep_their_part_of_each_cluster() -> None:
    grid = build_grid(DELFT)
    users = list(keep_background(grid, 0.25, 100.0))
    assert {user.cluster: user.nodes for user in users} == {
        name: round(0.25 * cluster.nodes) for name, cluster in grid.clusters.items()
    }
    assert {(user.at, user.lasts) for user in users} == {(0.0, 200.0)}


def test_sonmez_equal_cells_give_equal_values(tmp_path: Path) -> None:
    table, single = Table4(), build_cell(WAVE, 30, 3)
    assert table.simulate_cell(single, Traces(tmp_path)) == table.simulate_cell(single, Traces(tmp_path))


def test_sonmez_figure_2_equals_the_paper(tmp_path: Path) -> None:
    figure = Figure2()
    results = [Result(entry, figure.simulate_cell(entry, Traces(tmp_path))) for entry in figure.list_cells(1)]
    assert all(row.ours == row.paper for row in figure.build_rows(results))


def test_sonmez_groups_keep_jobs_off_distant_clusters(tmp_path: Path) -> None:
    figure = Figure10()
    cells = {
        entry["policy"]: entry
        for entry in figure.list_cells(1)
        if entry["percent"] == 30 and entry["grid"] == "with Delft"
    }
    values = {policy: figure.simulate_cell(entry, Traces(tmp_path)) for policy, entry in cells.items()}
    assert (
        float(str(values[GROUPS]["response"])) < min(float(str(entry["response"])) for entry in values.values()) + 1e-9
    )


def test_sonmez_figures_6_and_9_pair_seeds_by_jobs() -> None:
    for figure, expected in ((Figure6(), 0.0), (Figure9(), 10.0)):
        results = []
        for entry in figure.list_cells(3):
            response = 100.0 * (1 + entry.seed) + (10.0 if entry.parameters.get("policy") == CA else 0.0)
            results.append(Result(entry, {"response": response, "co-allocated": 0.5}))
        compared = [row for row in figure.build_rows(results) if row.paper is not None]
        assert compared
        assert {(row.ours, row.low, row.high) for row in compared} == {(expected, expected, expected)}
