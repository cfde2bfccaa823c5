"""Check that tests of ring 1 neither sleep nor replace a duration of a module: ``python -m tests.check_rings``."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OTHER_RINGS = {"processes", "testbed", "nightly", "promise"}
DURATION = re.compile(
    r"_?[A-Z0-9_]*(TIMEOUT|DELAY|INTERVAL|PAUSE|AFTER|WAIT|PATIENCE|SECONDS|TIME|GRACE|SILENCE|OVERDUE|RETRY|_S)[A-Z0-9_]*"
)
"""Names of constants that hold a number of seconds."""
HERE = Path(__file__).parent
NEVER_IN_RING_1 = {"benchmarks", "chaos", "crash", "fuzz", "grid", "proof", "experiments"}
"""Folders with helpers for tests of other rings only."""

HELPERS = {"signals.py", "virtual_time.py"}
"""Files that wait on behalf of tests."""


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Return line and reason of each offence in the tests of ring 1 of a file."""
    tree = ast.parse(source)
    if any(_is_marked_file(node) for node in tree.body):
        return
    for node in tree.body:
        if not _is_marked(node):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and (reason := _offence(inner)):
                    yield inner.lineno, reason


def _is_marked_file(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and _names_other_ring(node.value)
    )


def _is_marked(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and any(
        _names_other_ring(decorator) for decorator in node.decorator_list
    )


def _names_other_ring(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Attribute) and inner.attr in OTHER_RINGS for inner in ast.walk(node))


def _offence(call: ast.Call) -> str:
    if not isinstance(call.func, ast.Attribute):
        return ""
    arguments = call.args
    if call.func.attr == "sleep" and not (
        arguments and isinstance(arguments[0], ast.Constant) and arguments[0].value == 0
    ):
        return "sleeps; wait for a signal (tests/signals.py)"
    if call.func.attr == "setattr" and len(arguments) == 3 and isinstance(arguments[1], ast.Constant):
        name = arguments[1].value
        if isinstance(name, str) and DURATION.fullmatch(name) and isinstance(arguments[0], ast.Name | ast.Attribute):
            return f"replaces {ast.unparse(arguments[0])}.{name}; pass it to a constructor"
    return ""


def main() -> int:
    count = 0
    for path in sorted(HERE.rglob("*.py")):
        if path.relative_to(HERE).parts[0] not in NEVER_IN_RING_1 and path.name not in HELPERS:
            for line, reason in findings(path.read_text()):
                print(f"{path.relative_to(HERE.parent)}:{line}: {reason}")
                count += 1
    print(f"{count} offences in ring 1" if count else "ring 1 neither sleeps nor replaces durations", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
