"""A cluster on which every start fails is excluded, and returns once it is repaired."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from koalapy.agent.lrm.local.adapter import START_FAILURES_FILE
from tests.grid.conftest import GRID_KINDS, grid_of_kind
from tests.grid.grid import Grid, wait_until
from tests.grid.testbed import Testbed

pytestmark = pytest.mark.processes

BROKEN = "north"
ON_IT = {"type": "fixed", "components": [{"size": 1, "cluster": BROKEN}]}


@pytest.fixture(params=GRID_KINDS)
def grid(request: pytest.FixtureRequest) -> Iterator[Grid]:
    yield from grid_of_kind(
        request,
        KOALA_RULES__PROBATION_PAUSE="1",
        KOALA_RULES__PROBATION_PAUSE_MAX="2",
        KOALA_RULES__RESTART_PAUSE_MAX="2",
    )


@contextmanager
def every_start_fails(grid: Grid) -> Iterator[None]:
    """Make every start fail on a cluster while its resource manager reports idle nodes."""
    if isinstance(grid, Testbed):
        nodes = [node for node in grid.worker_nodes if node.service.startswith(BROKEN)]
        # slurmd starts the batch script, which cannot run the programs that the runner needs.
        break_, mend = (
            "chmod 700 $(readlink -f /opt/koala/bin/python)",
            "chmod 755 $(readlink -f /opt/koala/bin/python)",
        )
        for node in nodes:
            node.shell(break_)
        try:
            yield
        finally:
            for node in nodes:
                node.shell(mend)
        return
    switch = Path(grid.get_cluster(BROKEN)["details"]["directory"], START_FAILURES_FILE)
    switch.write_text("1")
    try:
        yield
    finally:
        switch.unlink()


def test_cluster_with_failing_starts_is_excluded_until_repaired(grid: Grid) -> None:
    other_nodes = sum(size for name, size in grid.nodes.items() if name != BROKEN)
    with every_start_fails(grid):
        stubborn, *others = [grid.submit(ON_IT, "true", max_restarts=1000) for _ in range(3)]

        def count_restarts() -> int:
            return sum(grid.get_job(ident)["restarts"] for ident in (stubborn, *others))

        wait_until(lambda: grid.get_cluster(BROKEN)["state"] in ("unusable", "probation"), "three errors in a row")
        assert count_restarts() >= 3, "of one job or of several"
        assert grid.get_job(stubborn)["state"] not in ("succeeded", "failed")
        wide = [
            grid.submit({"type": "flexible", "total_size": other_nodes}, "true", max_restarts=1000) for _ in range(2)
        ]
        small = [grid.submit({"type": "flexible", "total_size": 1}, "true", max_restarts=1000) for _ in range(6)]
        for ident in (*wide, *small):
            job = grid.wait_for_end(ident)
            assert job["state"] == "succeeded", job
            assert BROKEN not in {component["cluster"] for component in job["components"]}

        given_up = count_restarts()
        wait_until(lambda: count_restarts() > given_up, "a trial that fails")
        assert grid.get_cluster(BROKEN)["state"] != "usable"
    assert {grid.wait_for_end(ident)["state"] for ident in (stubborn, *others)} == {"succeeded"}
    wait_until(lambda: grid.get_cluster(BROKEN)["state"] == "usable", "the cluster to be trusted again")
    assert grid.get_cluster(BROKEN)["errors"] == 0
    everything = sum(grid.nodes.values())
    assert (
        grid.wait_for_end(grid.submit({"type": "flexible", "total_size": everything}, "true"))["state"] == "succeeded"
    )
    grid.wait_until_idle()
