"""PostgreSQL fails over to a replica while daemons with a URL of both servers run."""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.grid.grid import wait_until
from tests.grid.standby import StandbyGrid
from tests.needs import find_postgresql
from tests.store.postgresql import Server

INSTALLED = find_postgresql()
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.skipif(not INSTALLED, reason="PostgreSQL missing")]
ONE_NODE = {"type": "flexible", "total_size": 1}
NOT_RECEIVING = "alter system set primary_conninfo = ''", "select pg_reload_conf()"
ONLY_RECEIVED = "alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"


class Pair:
    """A server and a replica of it, with a grid of daemons that know both."""

    def __init__(self, folder: Path) -> None:
        assert INSTALLED is not None
        self.primary = Server(INSTALLED)
        self.primary.start()
        url = self.primary.new_database()
        self.replica = self.primary.replicate()
        both = f"{url},{self.replica.home}&target_session_attrs=read-write"
        self.grid = StandbyGrid(folder, both)

    def fail_over(self) -> None:
        """Stop the server as a crash does, and let the replica take its place."""
        self.primary.stop()
        self.replica.promote()

    def close(self) -> None:
        self.grid.close()
        with suppress(ProcessLookupError):
            self.primary.remove()
        self.replica.remove()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    try:
        pair.grid.begin()
        yield pair
    finally:
        pair.close()


def configure(server: Server, statements: tuple[str, ...]) -> None:
    for statement in statements:
        server.execute(statement)


def database_alerts(grid: StandbyGrid) -> list[dict[str, Any]]:
    return [alert for alert in grid.http.get("/api/v1/alerts").json()["alerts"] if alert["kind"] == "database"]


def kill_active(grid: StandbyGrid) -> None:
    """Kill the active daemon, and wait until the other one has taken over from the process that has ended."""
    active = grid.daemons[grid.active]
    active.kill()
    active.wait()
    grid.end_active(signal.SIGKILL)


def test_daemons_after_failover_without_loss_continue(pair: Pair) -> None:
    grid = pair.grid
    configure(pair.primary, ONLY_RECEIVED)
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    grid.wait_for_state(job, "running")
    began = time.monotonic()
    pair.fail_over()
    wait_until(grid.stores_changes, "the active daemon to write to the promoted server")
    print(f"failover: {time.monotonic() - began:.2f} s until a change is stored")
    wait_until(lambda: grid.call("second", "GET", f"/api/v1/jobs/{job}").status_code == 200, "the standby to read")
    later = grid.submit(ONE_NODE, "true")
    assert grid.wait_for_end(later)["state"] == "succeeded"
    assert grid.read_epochs() == [1]
    kill_active(grid)
    gate.open()
    ended = grid.wait_for_end(job)
    assert (ended["state"], ended["restarts"], grid.read_epochs()) == ("succeeded", 0, [1, 2])
    assert database_alerts(grid) == []
    assert grid.find_violations() == []


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_daemons_after_failover_that_loses_a_job_report_it(pair: Pair, is_killed: bool) -> None:
    """The active daemon writes nothing more, so that its lease ends if it is not killed."""
    grid = pair.grid
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    grid.wait_for_state(job, "running")
    configure(pair.replica, NOT_RECEIVING)
    number = grid.folder / "process"
    lost = grid.submit(ONE_NODE, "sh", "-c", f"echo $$ >{number}.new; mv {number}.new {number}; exec sleep 300")
    wait_until(number.exists, "its program to run")
    pair.fail_over()
    wait_until(lambda: "older copy" in grid.call("first", "POST", "/api/v1/tokens", json={}).text, "a rejected change")
    if is_killed:
        kill_active(grid)
    else:
        grid.end_active(signal.SIGCONT)
    grid.wait_until_usable()
    (alert,) = wait_until(lambda: database_alerts(grid), "an alert of the loss")
    assert f"job {lost} may be missing" in alert["cause"]
    assert grid.http.get(f"/api/v1/jobs/{lost}").status_code == 404
    process = Path("/proc", number.read_text().strip())
    wait_until(lambda: not process.exists(), "the program of the lost job to be ended")
    gate.open()
    ended = grid.wait_for_end(job)
    assert (ended["state"], ended["restarts"]) == ("succeeded", 0)
    assert grid.submit(ONE_NODE, "true") > lost
