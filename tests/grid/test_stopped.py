"""What is stopped (SIGSTOP) and goes on: nobody's verdict may be older than the news it is made of."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.grid.embedded import Embedded
from tests.grid.world import until

MakeGrid = Callable[..., Embedded]
REST = 5.0
"""Seconds for which something is stopped, which is longer than what is left of the walltime."""


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


def start(grid: Embedded, *command: str) -> int:
    ident = grid.submit({"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}, *command, walltime=3)
    grid.wait_state(ident, "running")
    return ident


def test_an_agent_is_stopped_while_a_program_ends_in_time(embedded: Embedded) -> None:
    """Stopped for as long as a silence is overlooked, and longer."""
    ident = start(embedded, "sleep", "1")
    with stopped(embedded.agent("north").pid):
        until(lambda: embedded.cluster("north")["state"] == "unreachable", "the silence to be noticed")
        assert "has not answered for" in embedded.cluster("north")["reason"]
    job = embedded.wait(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_the_daemon_is_stopped_while_a_program_ends_in_time(embedded: Embedded) -> None:
    ident = start(embedded, "sleep", "1")
    assert embedded.daemon is not None
    with stopped(embedded.daemon.pid):
        time.sleep(REST)
    job = embedded.wait(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_a_program_that_does_not_end_is_ended_for_its_walltime(embedded: Embedded) -> None:
    """Also when its agent was stopped at that moment: it says so as soon as it can."""
    ident = start(embedded, "sleep", "600")
    with stopped(embedded.agent("north").pid):
        time.sleep(REST)
    job = embedded.wait(ident)
    assert (job["state"], job["reason"]) == ("failed", "walltime of 3 s exceeded")
