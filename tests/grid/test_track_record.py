"""What is foretold of a real daemon's jobs is kept and held against what came; and a dry run tells of the start."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.grid.embedded import Embedded
from tests.grid.world import until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., Embedded]


def coverage(grid: Embedded) -> dict[str, Any]:
    found = json.loads(grid.run("advisor", "record", "--json").stdout)["coverage"]
    return {told["kind"]: told for told in found if told["days"] == 7}


def test_what_was_foretold_is_held_against_what_came_after_a_restart(make_grid: MakeGrid) -> None:
    grid = make_grid()
    gate = grid.gate()
    runs = grid.submit({"type": "flexible", "total_size": 8}, *gate.hold, walltime=600)
    grid.wait_state(runs, "running")
    wide = ["submit", "--flexible", "8", "--walltime", "60", "--dry-run"]
    page = grid.run(*wide, "--", "true")
    assert page.returncode == 0, page.stderr
    assert "starts  " in page.stdout
    until(
        lambda: json.loads(grid.run(*wide, "--json", "--", "true").stdout)["expected"]["starts"] is not None,
        "the start to be foretold",
    )
    assert coverage(grid) == {}, "of what is not submitted nothing is kept"

    waits = grid.submit({"type": "flexible", "total_size": 8}, "true", walltime=60)
    gone = grid.submit({"type": "flexible", "total_size": 8}, "true", walltime=60)
    assert grid.run("what-if").returncode == 0
    assert coverage(grid)["start"]["open"] == 2
    assert grid.run("cancel", str(gone)).returncode == 0
    grid.kill()
    grid.start()
    gate.open()
    grid.wait_state(waits, "succeeded")
    until(lambda: coverage(grid)["start"]["predictions"] == 1, "the start to be held against what was foretold")
    start = coverage(grid)["start"]
    assert (start["jobs"], start["open"], start["censored"]) == (1, 0, 1)
    assert start["within"] + start["early"] + start["late"] == 1.0
    assert "start" in grid.run("advisor", "record").stdout
    assert '"at_once": true' in grid.run(*wide, "--json", "--", "true").stdout
