from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import beyond_traces, scheduling_with_time
from experiments.beyond_traces import OfTraces, home_of
from experiments.experiment import Result
from experiments.scheduling_with_time import MIXES, draw_mix
from experiments.trace_windows import MACHINES, WindowJob, cut_machine, draw_window, shorten_name
from experiments.traces import Traces
from tests.experiments.traces import a_trace, swf_line

JOBS = 20
EXPERIMENTS = [one for one in beyond_traces.EXPERIMENTS if isinstance(one, OfTraces)]


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    """Return small traces for all that the experiments need."""
    for name in MACHINES:
        draws = Random(name)
        drawn = [(40 * number, draws.randrange(60, 3000), draws.randrange(1, 30)) for number in range(JOBS)]
        lines = [
            swf_line(number, submitted=arrival, ran=ran, processors=wide, user=number % 9)
            for number, (arrival, ran, wide) in enumerate(drawn)
        ]
        a_trace(tmp_path, name, lines)
    return Traces(tmp_path)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_compared_ways_use_the_same_jobs(experiment: OfTraces, traces: Traces) -> None:
    cells = [cell for cell in experiment.list_cells(1) if cell["trace"] == MACHINES[1]]
    results = [Result(cell, experiment.simulate_cell(cell, traces)) for cell in cells]
    assert {result.number("done") + result.number("wide") for result in results} == {JOBS}
    again = experiment.simulate_cell(results[-1].cell, traces)
    assert again == results[-1].values


def test_beyond_traces_makes_rows_remarks_and_figures(traces: Traces) -> None:
    for experiment in EXPERIMENTS:
        result = {
            (cell["setting"], cell["way"]): experiment.simulate_cell(cell, traces)
            for cell in experiment.list_cells(1)
            if cell["trace"] == MACHINES[0]
        }
        results = [Result(c, result[c["setting"], c["way"]]) for c in experiment.list_cells(2)]
        rows = experiment.build_rows(results)
        assert len(rows) == (len(MACHINES) + 1) * len(experiment.settings) * (len(experiment.ways) - 1)
        assert all(row.low <= row.ours <= row.high for row in rows)
        assert experiment.draw_figure(results).axes
        remarks = experiment.write_remarks(results)
        assert all(shorten_name(trace) in remarks for trace in MACHINES)


def test_window_depends_on_seed_and_starts_at_zero(traces: Traces) -> None:
    first, second = (draw_window(traces, MACHINES[0], seed, 10) for seed in (0, 1))
    assert first == draw_window(traces, MACHINES[0], 0, 10)
    assert first != second
    assert (first.jobs[0].arrives_at, len(first.jobs)) == (0.0, 10)
    assert len(draw_window(traces, MACHINES[0], 0, 500).jobs) == JOBS


def test_window_combines_processors_of_a_node(tmp_path: Path) -> None:
    traces = a_trace(tmp_path, "smp", [swf_line(1, processors=9)], header="; MaxProcs: 1152\n; MaxNodes: 144 (of 8)\n")
    cut = draw_window(traces, "smp", 0, 1)
    assert (cut.nodes, cut.jobs[0].nodes) == (144, 2)


@given(st.integers(4, 10**5))
def test_cutting_into_clusters_keeps_all_nodes(nodes: int) -> None:
    clusters = cut_machine(nodes)
    assert sum(clusters.values()) == nodes
    assert min(clusters.values()) >= 1


@given(st.integers(0, 10**6), st.sampled_from(["even", "uneven"]))
def test_home_of_user_is_the_same(user: int, setting: str) -> None:
    clusters = cut_machine(100)
    homes = {
        home_of(WindowJob(arrival, nodes, 1.0, user), clusters, setting) for arrival in (0.0, 9.0) for nodes in (1, 5)
    }
    assert len(homes) == 1
    assert homes <= set(clusters)


@pytest.mark.parametrize("mix", MIXES)
def test_mix_depends_on_seed_and_keeps_bounds(mix: str) -> None:
    window, (shortest, longest) = draw_mix(mix, 1, JOBS), MIXES[mix]
    assert window == draw_mix(mix, 1, JOBS) != draw_mix(mix, 2, JOBS)
    assert all(shortest <= job.ran <= longest and job.requested >= job.ran for job in window.jobs)


def test_stored_results_of_today_are_known_for_every_window() -> None:
    waiting = scheduling_with_time.Waiting()
    cells = [cell for cell in waiting.list_cells(waiting.seeds) if cell["way"] == "today"]
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell["trace"] for cell in cells} == {*waiting.traces, *MIXES}
