"""No process of koalapy executes data from another process as code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import koalapy

PACKAGE = Path(koalapy.__file__).parent
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "unsafe_load", "full_load", "ProcessPoolExecutor", "Manager", "Queue"}
"""Names of functions that run text as code, or classes of the standard library that pickle."""
FROM_ASYNCIO_OR_QUEUE = {"asyncio", "queue"}
ALLOWED = {"model/construction.py": {"exec"}, "client/executor.py": {"pickle"}, "client/remote_call.py": {"pickle"}}
"""Code made of names of the package only, as ``dataclasses`` makes its constructors. Calls of users' functions and
their results, which the user's own process and jobs read."""


def find_code_runners(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from (name for name in names if name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name in CALLS and owner not in FROM_ASYNCIO_OR_QUEUE:
                yield name


@pytest.mark.evidence("J4")
def test_package_modules_do_not_run_data_as_code() -> None:
    names_by_module = {
        str(path.relative_to(PACKAGE)): set(find_code_runners(path)) for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert {path: names for path, names in names_by_module.items() if names} == ALLOWED
