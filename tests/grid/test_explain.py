"""Why a job waits, asked of a real daemon; and that its smallest change starts it."""

import json
import shlex
from collections.abc import Callable

import pytest

from tests.grid.embedded import Embedded

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., Embedded]


def test_the_smallest_change_of_a_waiting_job_runs(make_grid: MakeGrid) -> None:
    grid = make_grid()
    load = grid.local_load("south", 2)
    job = grid.submit({"type": "flexible", "total_size": 4, "max_components": 1}, *grid.gate().hold)
    grid.wait_state(job, "running")
    waiting = grid.submit({"type": "flexible", "total_size": 3, "max_components": 1}, "true")

    page = grid.run("explain", str(waiting))
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith(f"job {waiting} waits: needs 3 nodes")
    assert "our jobs have 4" in page.stdout
    assert "local users have 2" in page.stdout
    assert "suffices  1 more idle node in south" in page.stdout
    found = json.loads(grid.run("explain", str(waiting), "--json").stdout)
    assert found["headline"] == grid.job(waiting)["reason"]
    change = found["smallest_change"]
    assert (change["field"], change["text"]) == ("priority", "give it high priority: it would preempt others")

    command = next(line.strip() for line in page.stdout.splitlines() if " && koala submit " in line)
    cancel, submit = (shlex.split(part)[1:] for part in command.split(" && "))
    assert grid.run(*cancel).returncode == 0
    dry = grid.run(submit[0], "--dry-run", *submit[1:])
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("would be placed at once on north (3 nodes)")
    changed = int(grid.run(submit[0], "-q", *submit[1:]).stdout)
    assert grid.wait(changed)["state"] == "succeeded"
    assert grid.job(waiting)["state"] == "cancelled"

    grid.cancel_all()
    load.stop()
    grid.settle()


def test_fewer_nodes_run_where_fewer_are_idle(make_grid: MakeGrid) -> None:
    grid = make_grid()
    load = grid.local_load("south", 3)
    waiting = grid.submit({"type": "flexible", "total_size": 6}, "true")
    change = json.loads(grid.run("explain", str(waiting), "--json").stdout)["smallest_change"]
    assert change["text"] == "ask for 5 nodes"
    grid.cancel(waiting)
    answer = grid.http.post("/api/v1/jobs", json=change["submission"])
    assert answer.status_code == 201, answer.text
    assert grid.wait(answer.json()["id"])["state"] == "succeeded"
    load.stop()
    grid.settle()
