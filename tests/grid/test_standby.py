"""Takeover by a standby daemon: the active one is killed, ended, suspended, or loses its database."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grid.standby import StandbyGrid
from tests.needs import find_postgresql
from tests.store.postgresql import Server

INSTALLED = find_postgresql()
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.skipif(not INSTALLED, reason="PostgreSQL missing")]
MAX_TAKEOVER_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    assert INSTALLED is not None
    server = Server(INSTALLED)
    server.start()
    yield server
    server.remove()


@pytest.fixture
def grid(server: Server, tmp_path: Path) -> Iterator[StandbyGrid]:
    grid = StandbyGrid(tmp_path, server.new_database())
    try:
        yield grid.begin()
    finally:
        grid.close()


def test_standby_after_kill_of_active_takes_over_and_job_continues(grid: StandbyGrid) -> None:
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    before = grid.wait_for_state(job, "running")
    rejection = grid.call("second", "POST", f"/api/v1/jobs/{job}/cancel", json={"reason": "x"})
    assert (rejection.status_code, rejection.json()["code"]) == (503, "daemon-standby")
    assert rejection.json()["active"] == grid.urls["first"]
    assert grid.call("second", "GET", f"/api/v1/jobs/{job}").json()["state"] == "running"

    takeover_s = grid.end_active(signal.SIGKILL)
    print(f"takeover after kill: {takeover_s:.2f} s")
    assert takeover_s < MAX_TAKEOVER_S
    gate.open()
    after = grid.wait_for_end(job)
    assert (after["state"], after["restarts"]) == ("succeeded", before["restarts"])
    assert grid.read_epochs() == [1, 2]
