"""``koala what-if`` on a live grid with running and waiting jobs."""

import json
from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]


def test_what_if_shows_forecast_with_and_without_change(make_grid: MakeGrid) -> None:
    grid = make_grid()
    runs = grid.submit({"type": "flexible", "total_size": 8}, *grid.make_gate().hold, walltime=600)
    grid.wait_for_state(runs, "running")
    waits = grid.submit({"type": "flexible", "total_size": 8}, "true", walltime=60)
    page = grid.run_koala("what-if", "--add", "west=8")
    assert page.returncode == 0, page.stderr
    assert page.stdout.splitlines()[0].split() == ["START", "MEAN", "WAIT", "UNTIL", "THEY", "END", "SIMULATIONS"]
    line = next(line for line in page.stdout.splitlines() if line.startswith(str(waits)))
    assert line.endswith("its walltime")

    answer = json.loads(grid.run_koala("what-if", "--add", "west=8", "--json").stdout)
    as_it_is, changed = ({job["job"]: job for job in answer[variant]["jobs"]} for variant in ("as_it_is", "changed"))
    assert set(as_it_is) == {runs, waits}
    assert 0 < as_it_is[waits]["starts"]["middle"] <= 600
    assert 0 < changed[waits]["starts"]["middle"] < as_it_is[waits]["starts"]["middle"], "what starting takes"

    soon = json.loads(grid.run_koala("what-if", "--horizon", "1m", "--json").stdout)["as_it_is"]
    assert soon["horizon"] == 60
    assert soon["started"]["low"] <= soon["started"]["high"] <= 1

    refused = grid.run_koala("what-if", "--drain", "nowhere")
    assert refused.returncode != 0
    assert "nowhere" in refused.stderr
    grid.cancel_all_jobs()
    grid.wait_until_idle()
