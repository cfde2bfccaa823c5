"""Build the reference of log actions from the calls that log them and from `koalapy.config.logs`."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from koalapy.config.logs import MAPPED_FIELDS, MEANINGS

CODE = Path(__file__).parents[2] / "koalapy"
LEVELS = ("debug", "info", "warning", "error", "critical")
RENDERED_FIELDS = {"exc_info": ("error", "traceback")}
"""Fields that the log replaces by others."""
LIBRARIES = ("agent, daemon", "warning, error, critical")
"""Processes and levels of the action `library`; the library sets the level."""


@dataclass(frozen=True)
class LogCall:
    """One call in the code that logs a line."""

    location: str
    action: str
    """Empty if it is missing, or computed at run time."""
    process: str
    level: str
    fields: frozenset[str]


@cache
def log_calls() -> tuple[LogCall, ...]:
    """Return all calls of loggers in the code."""
    return tuple(_find_calls())


def page() -> str:
    """Return the table of log actions as Markdown."""
    rows = [_row(action, meaning) for action, meaning in MEANINGS.items()]
    return "\n".join(
        ["\n| action | process | level | fields | meaning |", "| --- | --- | --- | --- | --- |", *rows, ""]
    )


def _row(action: str, meaning: str) -> str:
    calls = [call for call in log_calls() if call.action == action]
    processes = ", ".join(sorted({call.process for call in calls}))
    levels = ", ".join(sorted({call.level for call in calls}, key=LEVELS.index))
    if action == "library":
        processes, levels = LIBRARIES
    fields = {*MAPPED_FIELDS.get(action, ()), *(field for call in calls for field in call.fields)}
    names = ", ".join(f"`{field}`" for field in sorted(fields))
    return f"| `{action}` | {processes} | {levels} | {names} | {meaning} |"


def _find_calls() -> Iterator[LogCall]:
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (level := _level(node.func)):
                arguments = {keyword.arg: keyword.value for keyword in node.keywords}
                action = arguments.pop("action", None)
                name = str(action.value) if isinstance(action, ast.Constant) else ""
                fields = {
                    field for argument in arguments if argument for field in RENDERED_FIELDS.get(argument, (argument,))
                }
                folder = path.relative_to(CODE).parts[0]
                process = folder if folder in ("agent", "relay") else "daemon"
                yield LogCall(f"{path.name}:{node.lineno}", name, process, level, frozenset(fields))


def _level(function: ast.expr) -> str:
    """Return the level of a call of a logger; `log` means that the first argument is the level."""
    if not isinstance(function, ast.Attribute):
        return ""
    if function.attr not in (*LEVELS, "exception", "log", "fatal", "warn"):
        return ""
    logger = function.value
    is_logger = isinstance(logger, ast.Name) and logger.id in ("log", "logger", "logging", "structlog")
    return function.attr if is_logger else ""
