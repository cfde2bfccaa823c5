"""What the code logs, by the code itself."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CODE = Path(__file__).parents[2] / "koalapy"
LEVELS = ("debug", "info", "warning", "error", "critical")
ADDED = {"exc_info": ("error", "traceback")}
"""What a field becomes when it is written."""


@dataclass(frozen=True)
class Line:
    """One call that logs."""

    where: str
    action: str
    """Empty where it is missing, or made up at run time."""
    by: str
    level: str
    fields: frozenset[str]


@cache
def lines() -> tuple[Line, ...]:
    return tuple(_read_lines())


def _read_lines() -> Iterator[Line]:
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (level := _level(node.func)):
                given = {word.arg: word.value for word in node.keywords}
                action = given.pop("action", None)
                name = action.value if isinstance(action, ast.Constant) else ""
                told = {new for field in given if field for new in ADDED.get(field, (field,))}
                by = "agent" if path.is_relative_to(CODE / "agent") else "daemon"
                yield Line(f"{path.name}:{node.lineno}", str(name), by, level, frozenset(told))


def _level(called: ast.expr) -> str:
    """Of a call of a logger's; ``log`` leaves open which."""
    if not isinstance(called, ast.Attribute) or called.attr not in (*LEVELS, "exception", "log", "fatal", "warn"):
        return ""
    logger = called.value
    is_one = isinstance(logger, ast.Name) and logger.id in ("log", "logger", "logging", "structlog")
    return called.attr if is_one else ""
