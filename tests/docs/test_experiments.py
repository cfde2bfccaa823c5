"""The pages of experiments tell what their results say, and the results are what is simulated today."""

import ast
import re

import pytest

from experiments import pages
from experiments.experiment import Result
from experiments.registry import experiments
from experiments.results import load, path_of
from experiments.runs import Outcome
from experiments.traces import Traces, default_folder
from tests.docs.blocks import ROOT
from tests.needs import TRACES

FOLDER = ROOT / "experiments" / "published"
RESULTS = FOLDER / "results"
TOLD = [name for name in experiments() if path_of(RESULTS, name).exists()]
SHORT = 1.5
"""Seconds of a simulation that is made again here."""


def outcome_of(name: str) -> Outcome:
    kept = load(RESULTS, name)
    assert kept is not None
    return Outcome(experiments()[name], kept)


def shortest(name: str) -> Result:
    kept = outcome_of(name).kept
    assert kept is not None
    return min(kept.results, key=lambda result: result.seconds)


AGAIN = [name for name in TOLD if not experiments()[name].is_timed and shortest(name).seconds <= SHORT]
"""Those of which a simulation is made again."""


def test_there_are_results_of_experiments_alone() -> None:
    assert {path.stem for path in RESULTS.glob("*.parquet")} == set(TOLD)
    assert len(TOLD) > 0


@pytest.mark.parametrize("name", TOLD)
def test_a_page_says_what_the_results_say(name: str) -> None:
    outcome = outcome_of(name)
    page = (FOLDER / f"{outcome.experiment.paper}.md").read_text()
    plot = f"{name}.svg" if (FOLDER / f"{name}.svg").exists() else ""
    assert pages.section(outcome, plot) in page, "python -m experiments report --results experiments/published/results"


def test_the_index_leads_to_all_that_have_results() -> None:
    index = (FOLDER / pages.INDEX).read_text()
    assert re.findall(r"^- .*\.md#([\w-]+)\)", index, re.MULTILINE) == TOLD


@pytest.mark.parametrize("name", AGAIN)
def test_the_results_are_those_of_today(name: str) -> None:
    """Of the shortest simulation of each; when the scheduler decides otherwise than it did, make experiments."""
    experiment, traces, result = experiments()[name], Traces(default_folder()), shortest(name)
    if not all(map(traces.has, experiment.traces)):
        pytest.skip(TRACES.reason)
    assert dict(experiment.run(result.cell, traces)) == {
        value: found for value, found in result.values.items() if found is not None
    }


def test_no_text_has_a_value_that_was_not_filled_in() -> None:
    """A piece of a longer f-string without its ``f`` shows ``{LOCAL:.0%}`` to the reader."""
    unfilled = re.compile(r"\{[A-Za-z_][\w.]*:[^{}\s]*\}")
    for path in sorted(path for folder in ("koalapy", "experiments") for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        pieces = [piece for text in texts for piece in text.values if isinstance(piece, ast.Constant)]
        for piece in pieces:
            assert not unfilled.search(str(piece.value)), f"{path}:{piece.lineno}"
