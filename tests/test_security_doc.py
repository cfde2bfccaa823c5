"""Every line of the threat model names tests that hold it, and these exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
DOCS = (TESTS.parent / "docs" / "security.md").read_text()
NAMED = re.compile(r"`((?:[a-z_]+/)*test_\w+\.py)(?:::(\w+))?`")


@cache
def functions(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """The tables' lines with the header of their table."""
    header = ""
    for line in text.splitlines():
        if not line.startswith("|"):
            header = ""
        elif not header:
            header = line
        elif not line.startswith("| ---"):
            yield header, [cell.strip() for cell in line.strip("|").split(" | ")]


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(DOCS)
    assert len(named) > 40
    missing = [
        (file, test)
        for file, test in named
        if not (TESTS / file).is_file() or (test and test not in functions(TESTS / file))
    ]
    assert missing == []


def test_every_line_of_the_threat_model_names_a_test() -> None:
    model = DOCS[DOCS.index("## The threat model") : DOCS.index("\n## Who is who")]
    found = [cells for header, cells in rows(model) if header.endswith("| held by |")]
    assert len(found) > 20
    for cells in found:
        assert len(cells) == 3, cells
        assert re.search(r"::test_\w+`", cells[2]), cells


def test_what_an_officer_asks_for_is_there() -> None:
    """Where the page says that it is, and with a test."""
    found = [cells for header, cells in rows(DOCS) if header.startswith("| asked for |")]
    assert len(found) == 19
    for asked, state, where, shown in found:
        assert state.startswith("present"), asked
        assert [name for name in re.findall(r"`([^`]+)`", where) if not (TESTS.parent / name).exists()] == [], asked
        assert re.search(r"::test_\w+`", shown), asked
    report = (TESTS.parent / "SECURITY.md").read_text()
    assert "Report a vulnerability" in report
    links = re.findall(r"\]\(([^)#]+)\)", report)
    assert len(links) >= 3
    assert [link for link in links if not (TESTS.parent / link).exists()] == []
