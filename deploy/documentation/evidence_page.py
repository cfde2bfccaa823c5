"""Build the page that lists, for each threat of docs/security.md, the tests that show its defence."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECURITY = ROOT / "docs" / "security.md"
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \|", re.MULTILINE)


def threats() -> dict[str, str]:
    """Return the threats and controls that docs/security.md lists, by their identifier (`U3`)."""
    return dict(ROW.findall(SECURITY.read_text(encoding="utf-8")))


@cache
def evidence_by_threat() -> dict[str, list[str]]:
    """Return the tests marked `@pytest.mark.evidence("U3")`, by identifier, as `folder/test_file.py::test_name`."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, identifiers in _marked_functions(path):
            for identifier in identifiers:
                tests.setdefault(identifier, []).append(f"{path.relative_to(ROOT / 'tests')}::{name}")
    return tests


def page() -> str:
    """Return the table of threats and their tests as Markdown."""
    tests = evidence_by_threat()
    rows = [
        f"| {identifier} | {text} | {'<br>'.join(f'`{test}`' for test in tests.get(identifier, []))} |"
        for identifier, text in threats().items()
    ]
    return "\n".join(["\n| id | threat or control | tests |", "| --- | --- | --- |", *rows, ""])


def _marked_functions(path: Path) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.evidence":
                    yield node.name, [ast.literal_eval(argument) for argument in decorator.args]
