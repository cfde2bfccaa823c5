from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.experiment import Cell, Result, Row, group_results
from experiments.huang_2007 import Table1
from experiments.intervals import mean_interval, student_quantile
from experiments.papers import PAPERS
from experiments.registry import find_experiment, load_experiments
from experiments.traces import Traces, default_folder
from koalapy.model.errors import NotFoundError, UsageError
from tests.experiments.traces import a_trace, swf_line


def test_experiments_have_paper_names_and_distinct_cells() -> None:
    for name, experiment in load_experiments().items():
        assert name == experiment.name
        assert name.startswith(experiment.paper + "-")
        assert experiment.paper in PAPERS
        assert experiment.title
        keys = [cell.key for cell in experiment.list_cells(2)]
        assert len(set(keys)) == len(keys) > 0
        assert set(keys) >= {cell.key for cell in experiment.list_cells(1)}


def test_select_of_unknown_experiment_names_it() -> None:
    with pytest.raises(NotFoundError, match="no experiment 'huang-2007-table-9'"):
        find_experiment("huang-2007-table-9")


def test_table_1_of_huang_counts_jobs_by_queue(tmp_path: Path) -> None:
    lines = [swf_line(site, queue=site, processors=site, ran=10 * site + 0.555) for site in range(1, 6)]
    lines += [swf_line(6, queue=1, status=0, processors=99), swf_line(7, queue=1, processors=4, ran=20)]
    traces = a_trace(tmp_path, Table1.traces[0], lines)
    table = Table1()
    rows = {
        row.label: row.ours
        for row in table.build_rows([Result(c, table.simulate_cell(c, traces)) for c in table.list_cells(1)])
    }
    assert rows["site 1: jobs"] == 2
    assert rows["site 1: most processors"] == 4
    assert rows["site 1: mean processors"] == 2  # of 2.5
    assert rows["site 3: mean run time (s)"] == 30.55  # of 30.555


def test_traces_list_malformed_lines(tmp_path: Path) -> None:
    traces = a_trace(tmp_path, "damaged", [swf_line(1), "1 2 3", swf_line(2).replace("60", "sixty", 1), swf_line(3)])
    trace = traces.read("damaged")
    assert [job.number for job in trace.jobs] == [1, 3]
    assert [line.removeprefix(f"{traces.path('damaged')} ") for line in trace.malformed] == [
        "line 3 has 3 fields, not 18",
        "line 4: field 4, the run time, is 'sixty'",
    ]


def test_missing_trace_is_named(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    assert not traces.has("none")
    with pytest.raises(UsageError, match=r"no trace .*/none\.swf\.xz"):
        traces.read("none")


def test_traces_folder_is_read_from_environment() -> None:
    assert default_folder({"KOALA_TRACES": "/somewhere"}) == Path("/somewhere")
    assert default_folder({}).parts[-3:] == ("shared", "data", "traces")


def test_cells_with_equal_parameters_and_seed_are_equal() -> None:
    cell, same = Cell({"policy": "worst-fit", "load": 0.5}, 3), Cell({"load": 0.5, "policy": "worst-fit"}, 3)
    assert cell.key == same.key
    assert cell.key != Cell(cell.parameters, 4).key
    results = [Result(cell, {"x": 1.0}), Result(Cell({"policy": "auto", "load": 0.5}, 3), {"x": 2.0})]
    assert list(group_results(results, "load", "policy")) == [(0.5, "worst-fit"), (0.5, "auto")]
    assert results[0].has_parameters(load=0.5, policy="worst-fit")
    assert not results[0].has_parameters(load=0.5, policy="auto")


def test_interval_of_one_value_is_none() -> None:
    assert Row.from_values("one", [3.0], 4.0) == Row("one", 4.0, 3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        Row.from_values("none", [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_interval_contains_the_mean(values: list[float]) -> None:
    mean, low, high = mean_interval(values)
    assert low <= mean <= high
    assert mean == pytest.approx(fmean(values), abs=1e-6)


def test_interval_covers_the_true_mean_in_95_percent() -> None:
    random = Random("intervals")
    covered = 0
    for _ in range(4000):
        _, low, high = mean_interval([random.gauss(5.0, 2.0) for _ in range(5)])
        covered += low <= 5.0 <= high
    assert 0.94 < covered / 4000 < 0.96


def test_student_quantiles_match_published_values() -> None:
    published = {1: 12.706, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 1000: 1.962}
    assert {degrees: student_quantile(degrees) for degrees in published} == pytest.approx(published, abs=4e-3)
