import json
import re
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import pages, tables
from experiments.experiment import Experiment, Row
from experiments.papers import PAPERS
from experiments.runs import Outcome, RunOptions, run_experiments
from experiments.traces import Traces
from koalapy.model.errors import UsageError
from tests.experiments.toys import Here, Squares, Traced


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    asked: list[Experiment] = [Squares(), Traced()]
    return run_experiments(RunOptions(asked, tmp_path / "results", Traces(tmp_path)), Here())


def test_page_has_table_plot_remarks_and_provenance(tmp_path: Path, outcomes: list[Outcome]) -> None:
    written = pages.write_pages(tmp_path / "docs", outcomes)
    assert [path.name for path in written] == ["huang-2007.md", "README.md"]
    page = written[0].read_text()
    assert PAPERS["huang-2007"] in page
    assert "| square of 2 |     4 | 4.0500 | 3.4147 – 4.6853 | +1.25%" in page
    assert "The paper has no squares." in page
    assert "2 repetitions, 6 simulations" in page
    assert "`python -m experiments run huang-2007-squares`" in page
    (plot,) = re.findall(r"!\[.*\]\((.*)\)", page)
    assert (tmp_path / "docs" / plot).read_text().startswith("<?xml")


def test_index_links_experiments_with_results(tmp_path: Path, outcomes: list[Outcome]) -> None:
    pages.write_pages(tmp_path, outcomes)
    index = (tmp_path / pages.INDEX).read_text()
    for page, anchor in re.findall(r"\]\(([\w.-]+)#([\w-]+)\)", index):
        assert f"\n## {anchor}\n" in (tmp_path / page).read_text()
    assert "#huang-2007-squares" in index
    assert "traced" not in index


def test_pages_of_same_results_are_equal(tmp_path: Path, outcomes: list[Outcome]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    pages.write_pages(first, outcomes)
    pages.write_pages(second, outcomes)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_pages_with_unwritable_folder_name_it(tmp_path: Path, outcomes: list[Outcome]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*/file/docs: Not a directory"):
        pages.write_pages(tmp_path / "file" / "docs", outcomes)


def test_json_has_all_rows_and_lists_missing_experiments(outcomes: list[Outcome]) -> None:
    content = tables.export_json(outcomes)
    assert content == json.loads(json.dumps(content, allow_nan=False))
    assert [(row["experiment"], row["label"]) for row in content["rows"]] == [
        ("huang-2007-squares", f"square of {number}") for number in (1, 2, 3)
    ]
    assert {"label", "paper", "ours", "low", "high"} < set(content["rows"][0])
    squares, traced = content["experiments"]
    assert (squares["cells"], squares["repetitions"], squares["problems"]) == (6, 2, [])
    assert traced["problems"]


def test_table_omits_columns_without_values() -> None:
    single, repeated = Row("a", None, 1.0, 1.0, 1.0), Row("b", 2.0, 1.0, 0.5, 1.5)
    assert "paper" not in tables.format_table([single])
    assert "interval" not in tables.format_table([single])
    assert "| b    " not in tables.format_table([single])
    both = tables.format_table([single, repeated], "hours")
    assert [cell.strip() for cell in both.splitlines()[0].split("|")[1:-1]] == [
        "hours",
        "paper",
        "ours",
        "95 % interval",
        "difference",
    ]
    assert "-50.00%" in both


def test_format_number_of_none_is_a_dash() -> None:
    assert [tables.format_number(value) for value in (None, nan, inf, -inf)] == ["-"] * 4
    assert tables.format_difference(Row("a", 0.0, 3.0, 3.0, 3.0)) == "3"
    assert tables.format_difference(Row("a", 0.0, 0.0, 0.0, 0.0)) == "equal"
    assert tables.format_difference(Row("a", 1.0, nan, nan, nan)) == "-"


@given(st.floats(-1e9, 1e9))
def test_format_number_is_close_to_its_value(value: float) -> None:
    assert float(tables.format_number(value)) == pytest.approx(value, rel=1e-4, abs=1e-4)
