"""The small workload of a run: every kind of hand-over between daemon, agents, resource managers and runners."""

from collections.abc import Mapping
from typing import Any

from tests.chaos.rank import SHORT_LINE
from tests.chaos.workload import NETWORKS, Expected, PlannedJob

CLUSTERS = {"alder": 2, "birch": 2}
SETTINGS = {"clusters": {name: {"nodes": nodes, "network": NETWORKS[name]} for name, nodes in CLUSTERS.items()}}
FIRST, ARRAY, FILES, FAILS, LOW, HIGH, LAST, LONG = range(1, 9)
TASKS = 3
"""Tasks of the array."""


def _fixed(**sizes: int) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"cluster": name, "size": size} for name, size in sizes.items()]}


def _plan(
    number: int,
    kind: str,
    request: Mapping[str, Any],
    seconds: float,
    *,
    code: int = 0,
    lines: int = 2,
    expected: Expected = "succeeded",
    cancel_after: float | None = None,
    content: str = "",
    **fields: Any,
) -> PlannedJob:
    task = {"seconds": seconds, "lines": lines, "width": SHORT_LINE, "code": code}
    if content:
        task["input"], fields["collect"] = content, ["out/*"]
    body = {"name": f"{kind}-{number}", "request": request, "launcher": "processes", **fields}
    return PlannedJob(number, kind, body, task, expected, cancel_after, input=content)


def plan_jobs() -> list[PlannedJob]:
    """Return the jobs in the order of their submission."""
    one = {"type": "flexible", "total_size": 1}
    return [
        _plan(FIRST, "plain", _fixed(alder=1, birch=1), 0.2),
        _plan(ARRAY, "array", one, 0.05, array=f"1-{TASKS}%2"),
        _plan(FILES, "files", {"type": "nonfixed", "components": [{"size": 1}]}, 0.05, content="the input"),
        _plan(FAILS, "fails", one, 0.05, code=3, expected="failed"),
        _plan(LOW, "low", _fixed(alder=2), 1.5),
        _plan(LONG, "long", _fixed(birch=1), 120.0, expected="cancelled", cancel_after=0.0),
        _plan(LAST, "after", _fixed(birch=1), 0.05),
        _plan(HIGH, "high", _fixed(alder=2), 0.1, priority="high"),
    ]
