"""Check the values of the figures of lerida-2008 and both solvers on the problems of the production policy."""

from statistics import fmean

import pytest

from experiments import lerida_2008 as lerida
from experiments.experiment import Cell, Experiment, Result
from experiments.registry import load_experiments
from experiments.traces import Traces
from koalapy.model.placement import Placement
from koalapy.model.request import FlexibleRequest
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.matching import Mode, find_matching
from koalapy.policies.resource_matching import ResourceMatching

SEEDS = 6


@pytest.fixture(scope="module")
def slowdowns(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    traces = Traces(tmp_path_factory.mktemp("traces"))
    figure = lerida.Figure5()
    return [Result(cell, figure.simulate_cell(cell, traces)) for cell in figure.list_cells(SEEDS)]


def mean(results: list[Result], mode: Mode, pnbw: int, value: str = "SC") -> float:
    usual = {name: lerida.USUAL[name] for name in ("uplink", "tasks", "communication")}
    return fmean(r.number(value) for r in results if r.has_parameters(mode=mode.value, pnbw=pnbw, **usual))


def test_lerida_more_communication_saturates_more_links(slowdowns: list[Result]) -> None:
    optimal, free = ([mean(slowdowns, mode, pnbw) for pnbw in lerida.PNBW] for mode in lerida.MODES)
    assert optimal == sorted(optimal)
    assert optimal[0] < optimal[-1]
    assert free == [1.0] * len(lerida.PNBW)


def test_lerida_non_saturated_mode_is_never_faster(slowdowns: list[Result]) -> None:
    for pnbw in lerida.PNBW:
        assert mean(slowdowns, Mode.OPTIMAL, pnbw, "T") <= mean(slowdowns, Mode.NON_SATURATED, pnbw, "T")


def test_lerida_makes_rows_and_figure_of_all_parameters(slowdowns: list[Result]) -> None:
    figure = lerida.Figure5()
    rows = figure.build_rows(slowdowns)
    assert len(rows) == len({row.label for row in rows}) == len(slowdowns) / SEEDS
    assert {row.paper for row in rows} == {None, 1.0}
    assert all(row.low <= row.ours <= row.high for row in rows)
    assert figure.draw_figure(slowdowns) is not None
    assert all(result.values.keys().isdisjoint(result.cell.parameters) for result in slowdowns), "columns of one table"


@pytest.mark.parametrize("mode", Mode)
def test_lerida_uses_the_production_policy(mode: Mode) -> None:
    cell = lerida.build_cell(3, mode, pnbw=75)
    problem, knowledge = lerida.problem_of(cell), Knowledge(communication=0.5, bandwidth=0.75 * lerida.NODE_LINK)
    placement = ResourceMatching(mode, knowledge).place(FlexibleRequest(32), lerida.grid_of(cell))
    matching = find_matching(problem, mode)
    assert isinstance(placement, Placement)
    assert matching is not None
    assert [(c.cluster, c.node_class, c.size) for c in placement.components] == list(matching.shares)


def small(figure: Experiment) -> list[Cell]:
    """Select a cell with few clusters for each setting, to limit the run time."""
    return [cell for cell in figure.list_cells(1) if lerida.read_number(cell, "clusters") <= 4]


@pytest.mark.parametrize("figure", [lerida.Figure7(), lerida.Figure8()])
def test_lerida_measures_both_solvers(figure: Experiment, tmp_path: object) -> None:
    results = [Result(cell, figure.simulate_cell(cell, Traces(tmp_path))) for cell in small(figure)]  # type: ignore[arg-type]
    rows = figure.build_rows(results)
    assert len(rows) == len({row.label for row in rows}) == 2 * len(results)
    assert {row.label.rpartition(": ")[2] for row in rows} == {"HiGHS", "exact"}
    assert figure.draw_figure(results) is not None
    assert all(result.values.keys().isdisjoint(result.cell.parameters) for result in results), "columns of one table"


def test_lerida_experiments_belong_to_their_paper() -> None:
    names = [name for name, experiment in load_experiments().items() if experiment.paper == "lerida-2008"]
    assert names == [f"lerida-2008-fig-{number}" for number in (5, 6, 7, 8)]
    assert all(experiment.write_remarks([]) for name, experiment in load_experiments().items() if name in names)
