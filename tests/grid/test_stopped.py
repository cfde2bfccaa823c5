"""Agents and daemons that are suspended by SIGSTOP must not judge walltimes by old reports."""

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
"""Seconds within which a program starts and ends even on a busy machine."""


@pytest.fixture
def embedded(make_grid: MakeGrid) -> EmbeddedGrid:
    return make_grid()


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def start_job(grid: EmbeddedGrid, *command: str) -> tuple[int, Callable[[], bool]]:
    """Start a job, and return it with a function that tells whether its walltime has passed."""
    request = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}
    ident = grid.submit(request, *command, walltime=WALLTIME)
    grid.wait_for_state(ident, "running")
    started_at = time.monotonic()
    return ident, lambda: time.monotonic() - started_at > WALLTIME + 1


def finish_job(grid: EmbeddedGrid, ident: int, gate: Gate) -> None:
    wait_until(lambda: len(grid.list_programs(ident)) == 2, "its programs to run")
    gate.open()
    wait_until(lambda: not grid.list_programs(ident), "its programs to end")


def test_program_ending_while_agent_is_suspended_succeeds(embedded: EmbeddedGrid) -> None:
    """Suspend the agent until the daemon reports its cluster as unreachable."""
    gate = embedded.make_gate()
    ident, is_late = start_job(embedded, *gate.hold)
    with suspended(embedded.find_agent("north").pid):
        finish_job(embedded, ident, gate)
        wait_until(lambda: embedded.get_cluster("north")["state"] == "unreachable", "the silence to be noticed")
        assert "has not answered for" in embedded.get_cluster("north")["reason"]
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_program_ending_while_daemon_is_suspended_succeeds(embedded: EmbeddedGrid) -> None:
    gate = embedded.make_gate()
    ident, is_late = start_job(embedded, *gate.hold)
    assert embedded.daemon is not None
    with suspended(embedded.daemon.pid):
        finish_job(embedded, ident, gate)
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job["timeline"]


def test_program_over_walltime_is_ended_despite_suspension(embedded: EmbeddedGrid) -> None:
    """Suspend the agent until the walltime is over; the agent reports the end afterwards."""
    ident, is_late = start_job(embedded, "sleep", "600")
    with suspended(embedded.find_agent("north").pid):
        wait_until(is_late, "the walltime to be over")
    job = embedded.wait_for_end(ident)
    assert (job["state"], job["reason"]) == ("failed", "walltime of 10 s exceeded")
