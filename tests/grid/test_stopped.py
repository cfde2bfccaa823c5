"""What is stopped (SIGSTOP) and goes on: nobody's verdict may be older than the news it is made of."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.grid.embedded import Embedded
from tests.grid.world import Gate, until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., Embedded]
WALLTIME = 10.0
"""Seconds; within them a program begins that is told to end at once, and ends, however busy this machine is."""


@pytest.fixture
def embedded(make_grid: MakeGrid) -> Embedded:
    return make_grid()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def start(grid: Embedded, *command: str) -> tuple[int, Callable[[], bool]]:
    """A job that runs, and whether its walltime is over."""
    request = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}
    ident = grid.submit(request, *command, walltime=WALLTIME)
    grid.wait_state(ident, "running")
    seen = time.monotonic()
    return ident, lambda: time.monotonic() - seen > WALLTIME + 1


def let_end(grid: Embedded, ident: int, gate: Gate) -> None:
    until(lambda: len(grid.programs(ident)) == 2, "its programs to run")
    gate.open()
    until(lambda: not grid.programs(ident), "its programs to end")


def test_an_agent_is_stopped_while_a_program_ends_in_time(embedded: Embedded) -> None:
    """Stopped for as long as a silence is overlooked, and longer."""
    gate = embedded.gate()
    ident, is_late = start(embedded, *gate.hold)
    with stopped(embedded.agent("north").pid):
        let_end(embedded, ident, gate)
        until(lambda: embedded.cluster("north")["state"] == "unreachable", "the silence to be noticed")
        assert "has not answered for" in embedded.cluster("north")["reason"]
        until(is_late, "the walltime to be over")
    job = embedded.wait(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_the_daemon_is_stopped_while_a_program_ends_in_time(embedded: Embedded) -> None:
    gate = embedded.gate()
    ident, is_late = start(embedded, *gate.hold)
    assert embedded.daemon is not None
    with stopped(embedded.daemon.pid):
        let_end(embedded, ident, gate)
        until(is_late, "the walltime to be over")
    job = embedded.wait(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_a_program_that_does_not_end_is_ended_for_its_walltime(embedded: Embedded) -> None:
    """Also when its agent was stopped at that moment: it says so as soon as it can."""
    ident, is_late = start(embedded, "sleep", "600")
    with stopped(embedded.agent("north").pid):
        until(is_late, "the walltime to be over")
    job = embedded.wait(ident)
    assert (job["state"], job["reason"]) == ("failed", "walltime of 10 s exceeded")
