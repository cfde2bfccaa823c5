"""The pages of experiments agree with the stored results, and these with the present simulation."""

import ast
import re

import pytest

from experiments import pages
from experiments.experiment import Result
from experiments.registry import load_experiments
from experiments.results import load_results, path_of
from experiments.runs import Outcome
from experiments.traces import Traces, default_folder
from tests.docs.blocks import ROOT
from tests.needs import TRACES

FOLDER = ROOT / "experiments" / "published"
RESULTS = FOLDER / "results"
PUBLISHED = [name for name in load_experiments() if path_of(RESULTS, name).exists()]
MAX_SIMULATION_S = 1.5
"""Longest duration of a simulation that is repeated here."""


def load_outcome(name: str) -> Outcome:
    stored_results = load_results(RESULTS, name)
    assert stored_results is not None
    return Outcome(load_experiments()[name], stored_results)


def find_shortest_result(name: str) -> Result:
    stored_results = load_outcome(name).stored
    assert stored_results is not None
    return min(stored_results.results, key=lambda result: result.seconds)


REPEATED = [
    name
    for name in PUBLISHED
    if not load_experiments()[name].is_timed and find_shortest_result(name).seconds <= MAX_SIMULATION_S
]
"""Experiments with a repeated simulation."""


def test_published_results_belong_to_experiments() -> None:
    assert {path.stem for path in RESULTS.glob("*.parquet")} == set(PUBLISHED)
    assert len(PUBLISHED) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_experiment_page_agrees_with_its_results(name: str) -> None:
    outcome = load_outcome(name)
    page = (FOLDER / f"{outcome.experiment.paper}.md").read_text()
    plot = f"{name}.svg" if (FOLDER / f"{name}.svg").exists() else ""
    assert pages.format_section(outcome, plot) in page, (
        "python -m experiments report --results experiments/published/results"
    )


def test_experiment_index_links_all_published_results() -> None:
    index = (FOLDER / pages.INDEX).read_text()
    assert re.findall(r"^- .*\.md#([\w-]+)\)", index, re.MULTILINE) == PUBLISHED


@pytest.mark.parametrize("name", REPEATED)
def test_shortest_simulation_repeats_published_result(name: str) -> None:
    """If the scheduler decides differently now, run ``make experiments``."""
    experiment, traces, result = load_experiments()[name], Traces(default_folder()), find_shortest_result(name)
    if not all(map(traces.has, experiment.traces)):
        pytest.skip(TRACES.reason)
    assert dict(experiment.simulate_cell(result.cell, traces)) == {
        value: result_value for value, result_value in result.values.items() if result_value is not None
    }


def test_f_strings_leave_no_placeholder_unfilled() -> None:
    """A part of an f-string without ``f`` would print ``{LOCAL:.0%}``."""
    unfilled = re.compile(r"\{[A-Za-z_][\w.]*:[^{}\s]*\}")
    for path in sorted(path for folder in ("koalapy", "experiments") for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        pieces = [piece for text in texts for piece in text.values if isinstance(piece, ast.Constant)]
        for piece in pieces:
            assert not unfilled.search(str(piece.value)), f"{path}:{piece.lineno}"
