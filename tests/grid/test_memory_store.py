"""A daemon with its store in memory."""

from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid

pytestmark = pytest.mark.processes

HELLO = ("sh", "-c", "echo $KOALA_JOB:$0")


def test_jobs_of_memory_store_are_lost_with_daemon(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid(KOALA_DATABASE="memory:")
    first = grid.submit(grid.six_nodes, *HELLO, "first", launcher="processes")
    assert grid.wait_for_end(first)["state"] == "succeeded"
    assert grid.read_output(first).split() == ["1:first"] * 6
    assert grid.stop_daemon() == 0
    grid.start()
    assert "there is no job 1" in grid.run_koala("show", "1", check=False).stderr
    second = grid.submit(grid.six_nodes, *HELLO, "second", launcher="processes")
    assert second == 1, "numbers begin anew"
    assert grid.wait_for_end(second)["state"] == "succeeded"
    assert grid.read_output(second).split() == ["1:second"] * 6, "nothing of the first one's"
    assert not list(grid.directory.glob("*.db"))
