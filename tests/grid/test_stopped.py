"""What is stopped (SIGSTOP) and goes on: nobody's verdict may be older than the news it is made of."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Gate, wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
WALLTIME = 10.0
"""Seconds; within them a program begins that is told to end at once, and ends, however busy this machine is."""


@pytest.fixture
def embedded(make_grid: MakeGrid) -> EmbeddedGrid:
    return make_grid()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def start(grid: EmbeddedGrid, *command: str) -> tuple[int, Callable[[], bool]]:
    """A job that runs, and whether its walltime is over."""
    request = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}
    ident = grid.submit(request, *command, walltime=WALLTIME)
    grid.wait_for_state(ident, "running")
    seen = time.monotonic()
    return ident, lambda: time.monotonic() - seen > WALLTIME + 1


def let_end(grid: EmbeddedGrid, ident: int, gate: Gate) -> None:
    wait_until(lambda: len(grid.list_programs(ident)) == 2, "its programs to run")
    gate.open()
    wait_until(lambda: not grid.list_programs(ident), "its programs to end")


def test_an_agent_is_stopped_while_a_program_ends_in_time(embedded: EmbeddedGrid) -> None:
    """Stopped for as long as a silence is overlooked, and longer."""
    gate = embedded.make_gate()
    ident, is_late = start(embedded, *gate.hold)
    with stopped(embedded.find_agent("north").pid):
        let_end(embedded, ident, gate)
        wait_until(lambda: embedded.get_cluster("north")["state"] == "unreachable", "the silence to be noticed")
        assert "has not answered for" in embedded.get_cluster("north")["reason"]
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_the_daemon_is_stopped_while_a_program_ends_in_time(embedded: EmbeddedGrid) -> None:
    gate = embedded.make_gate()
    ident, is_late = start(embedded, *gate.hold)
    assert embedded.daemon is not None
    with stopped(embedded.daemon.pid):
        let_end(embedded, ident, gate)
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_a_program_that_does_not_end_is_ended_for_its_walltime(embedded: EmbeddedGrid) -> None:
    """Also when its agent was stopped at that moment: it says so as soon as it can."""
    ident, is_late = start(embedded, "sleep", "600")
    with stopped(embedded.find_agent("north").pid):
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["reason"]) == ("failed", "walltime of 10 s exceeded")
