"""What operators are called for, each made real: there is an alert that says what and why, and its remedy helps."""

from collections.abc import Callable
from typing import Any

import psutil

from tests.grid.embedded import Embedded
from tests.grid.world import until

MakeGrid = Callable[..., Embedded]
QUICK = {"KOALA_RULES__UNREACHABLE_AFTER": "1", "KOALA_ALERTS__HOLD": "0", "KOALA_ALERTS__RELEASE": "0"}


def alerts(grid: Embedded, kind: str = "") -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = grid.http.get("/api/v1/alerts").json()["alerts"]
    return [alert for alert in told if not kind or alert["kind"] == kind]


def told(grid: Embedded, kind: str, target: str) -> dict[str, Any]:
    """The one alert of that kind, once it is told."""
    (alert,) = until(lambda: alerts(grid, kind), f"an alert {kind}: {alerts(grid)}")
    assert alert["target"] == target, alert
    assert all(alert[text] for text in ("summary", "cause", "remedy")), alert
    return alert


def over(grid: Embedded, kind: str) -> None:
    until(lambda: not alerts(grid, kind), f"no alert {kind} any more: {alerts(grid)}")


def test_a_dead_agent(make_grid: MakeGrid) -> None:
    grid = make_grid(**QUICK)
    agent = grid.agent("south")
    psutil.Process(agent.pid).suspend()
    alert = told(grid, "agent-away", "cluster south")
    assert (alert["severity"], alert["cluster"]) == ("critical", "south")
    assert "its agent has not answered for 1 s" in alert["cause"]
    assert "pkill -f 'agent south --embedded'" in alert["remedy"]
    page = grid.run("alerts").stdout
    assert "CRITICAL  cluster south  agent-away" in page
    assert alert["remedy"] in page
    assert "agent south --embedded" in " ".join(agent.command)
    agent.kill()
    over(grid, "agent-away")
    assert grid.run("alerts").stdout == "nothing is wrong\n"
