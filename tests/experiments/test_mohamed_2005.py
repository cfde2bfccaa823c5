from itertools import pairwise

import pytest

from experiments.experiment import Cell, Result
from experiments.mohamed_2005 import (
    EVERY,
    FAILURES,
    KINDS,
    OTHERS,
    UNRELIABLE,
    Figure2,
    Figure3,
    Figure5a,
    build_grid,
    generate_jobs,
    simulate_workload,
)
from koalapy.model.job_spec import Priority


def test_mohamed_workload_follows_section_4_2() -> None:
    jobs = list(generate_jobs(1, 300))
    shapes = {tuple(part.size for part in job.spec.request.components) for job in jobs}
    assert shapes == {(12,) * 3, (9,) * 4, (24,) * 3, (18,) * 4, (12,) * 6, (9,) * 8}
    assert {(sum(shape), len(shape)) for shape in shapes} == set(KINDS)
    assert all(30.0 <= job.lasts <= 192.0 for job in jobs)
    assert all(first.arrives_at <= second.arrives_at for first, second in pairwise(jobs))
    for job in jobs:
        files = {file for part in job.spec.request.components for file in part.inputs}
        (file,) = files
        assert file.size in (4e9, 8e9)
        assert len(set(file.sites)) == 2
    assert {job.spec.priority for job in jobs} == set(Priority)


def test_mohamed_only_one_cluster_fails_almost_always() -> None:
    assert {name for name, cell in build_grid(0.1).clusters.items() if cell.failures} == {UNRELIABLE}
    assert all(cell.failures is None for cell in build_grid(0.0).clusters.values())


def test_mohamed_jobs_with_more_components_fail_more_often() -> None:
    values = simulate_workload(Cell({"failures": FAILURES}, 3), jobs=60)
    assert values["succeeded"] == 1.0
    assert 0.5 < float(str(values["used"])) <= 1.0
    total = simulate_workload(Cell({"failures": 0.0}, 3), jobs=60)
    assert all(value == 0.0 for name, value in total.items() if name.startswith("failures"))
    assert any(float(str(value)) > 0.0 for name, value in values.items() if name.startswith("failures"))


def test_mohamed_equal_cells_give_equal_values() -> None:
    first = Cell({"failures": FAILURES}, 2)
    assert simulate_workload(first, jobs=30) == simulate_workload(first, jobs=30)


def test_mohamed_rows_exclude_seeds_without_such_jobs() -> None:
    def values(seed: int) -> dict[str, float]:
        values = {f"placement {s} in {p} {priority}": 10.0 * p for s, p in KINDS for priority in Priority}
        if seed == 0:
            del values["placement 72 in 8 high"], values["placement 72 in 8 low"]
        return values

    results = [Result(cell, values(cell.seed)) for cell in Figure5a().list_cells(3)]
    rows = {row.label: row for row in Figure5a().build_rows(results)}
    assert rows["72 in 8, high"].ours == 80.0
    assert rows["72 in 8 less 72 in 3"].ours == pytest.approx(50.0)
    assert rows["high priority less low"].ours == pytest.approx(0.0)


def test_mohamed_failures_count_all_and_ended_attempts() -> None:
    def values(cell: Cell) -> dict[str, float]:
        usual = cell["every"] == EVERY
        values = {}
        for size, parts in KINDS:
            for priority, share in ((Priority.HIGH, 40.0), (Priority.LOW, 30.0 if usual else 45.0)):
                values[f"failures {size} in {parts} {priority}"] = share
                values[f"failures of runs to an end {size} in {parts} {priority}"] = 100.0 - share
        return values

    figure = Figure3()
    results = [Result(cell, values(cell)) for cell in figure.list_cells(2)]
    rows = {row.label: row.ours for row in figure.build_rows(results)}
    assert rows["36 in 3, low"] == 30.0, "what other rates give is not in it"
    assert rows["high priority less low"] == pytest.approx(10.0)
    assert rows["failures of runs to an end: high priority less low"] == pytest.approx(-10.0)
    for every in OTHERS:
        assert rows[f"a job every {every:g} s: high priority less low"] == pytest.approx(-5.0)


def test_mohamed_figures_are_drawn_from_run_values() -> None:
    results = [Result(cell, simulate_workload(cell, jobs=30)) for cell in Figure2().list_cells(1)]
    for figure in (Figure2(), Figure3()):
        assert figure.draw_figure(results).axes
        assert figure.write_remarks(results)
    assert Figure2().build_rows(results)[0].ours == 100.0
