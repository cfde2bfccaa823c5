"""Takeover by a standby daemon: the active one is killed, ended, suspended, or loses its database."""

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from koalapy.store.database import LEASE_SECONDS
from tests.grid.grid import MAX_WAIT_S, wait_until
from tests.grid.standby import StandbyGrid
from tests.needs import find_postgresql
from tests.store.postgresql import Server, SlowProxy

INSTALLED = find_postgresql()
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.skipif(not INSTALLED, reason="PostgreSQL missing")]
MAX_TAKEOVER_S = 5.0
ONE_NODE = {"type": "flexible", "total_size": 1}


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


def test_standby_after_kill_or_end_of_active_takes_over_and_jobs_continue(grid: StandbyGrid) -> None:
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    before = grid.wait_for_state(job, "running")
    assert "local-address" in grid.log_of("second")
    rejection = grid.call("second", "POST", f"/api/v1/jobs/{job}/cancel", json={"reason": "x"})
    assert (rejection.status_code, rejection.json()["code"]) == (503, "daemon-standby")
    assert rejection.json()["active"] == grid.urls["first"]
    assert grid.call("second", "GET", f"/api/v1/jobs/{job}").json()["state"] == "running"

    printing = grid.submit(ONE_NODE, "sh", "-c", "for i in $(seq 100); do echo line $i; sleep 0.1; done")
    grid.wait_for_state(printing, "running")
    following = grid.start_koala("logs", "-f", str(printing))
    assert following.stdout is not None
    first_line = following.stdout.readline()

    takeover_s = grid.end_active(signal.SIGKILL)
    print(f"takeover after kill: {takeover_s:.2f} s")
    assert takeover_s < LEASE_SECONDS / 2
    output = first_line + following.stdout.read()
    assert [line for line in output.splitlines() if line.startswith("line")] == [f"line {i}" for i in range(1, 101)]
    assert following.wait(MAX_WAIT_S) == 0
    assert grid.daemons["first"].wait() == -signal.SIGKILL
    grid.start_one("first", "stands by at")

    takeover_s = grid.end_active(signal.SIGTERM)  # as for an upgrade
    print(f"takeover after SIGTERM: {takeover_s:.2f} s")
    assert grid.daemons["second"].wait(timeout=MAX_WAIT_S) == 0
    assert "it was released" in grid.log_of("first")
    submission = grid.run_koala("submit", "--flexible", "1", "--", "true")
    assert submission.returncode == 0, submission.stderr
    gate.open()
    after = grid.wait_for_end(job)
    assert (after["state"], after["restarts"]) == ("succeeded", before["restarts"])
    assert grid.read_epochs() == [1, 2, 3]


def test_active_while_database_restarts_or_refuses_stays_active(grid: StandbyGrid, server: Server) -> None:
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    grid.wait_for_state(job, "running")
    server.stop()
    server.start()
    wait_until(grid.stores_changes, "the active daemon to write again")
    wait_until(lambda: grid.call("second", "GET", f"/api/v1/jobs/{job}").status_code == 200, "the standby to read")

    name = grid.database.split("/")[3].partition("?")[0]
    with psycopg.connect(host=str(server.home), user="koala", dbname=name) as blocking:
        blocking.execute("select * from lease for update")
        time.sleep(6.0)
    wait_until(grid.stores_changes, "the active daemon to write again")
    with psycopg.connect(host=str(server.home), user="koala", dbname="postgres", autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false")
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
        assert grid.call("second", "POST", "/api/v1/jobs", json={}).json()["code"] == "daemon-standby"
        time.sleep(3.0)
        admin.execute(f"alter database {name} allow_connections true")
    wait_until(grid.stores_changes, "the active daemon to write again")
    gate.open()
    assert grid.wait_for_end(job)["state"] == "succeeded"
    assert grid.read_epochs() == [1]


def set_read_only(server: Server, *, is_on: bool) -> None:
    server.execute(f"alter system set default_transaction_read_only = {'on' if is_on else 'off'}")
    server.execute("select pg_reload_conf()")


@pytest.mark.nightly
def test_active_while_database_is_read_only_rejects_changes_and_stays_active(grid: StandbyGrid, server: Server) -> None:
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    grid.wait_for_state(job, "running")
    set_read_only(server, is_on=True)
    try:
        wait_until(lambda: not grid.stores_changes(), "changes to be rejected")
        began = time.monotonic()
        body = {"request": ONE_NODE, "command": ["true"], "launcher": "processes"}
        while time.monotonic() < began + LEASE_SECONDS + 8.0:
            answer = grid.call("first", "POST", "/api/v1/jobs", json=body)
            assert (answer.status_code, "read-only" in answer.text) == (503, True), answer.text
            answer = grid.call("second", "GET", f"/api/v1/jobs/{job}")
            assert answer.status_code == 200, answer.text
    finally:
        set_read_only(server, is_on=False)
    wait_until(grid.stores_changes, "the active daemon to write again")
    gate.open()
    assert grid.wait_for_end(job)["state"] == "succeeded"
    assert grid.read_epochs() == [1]


@pytest.mark.nightly
def test_active_while_database_is_slow_stays_active(server: Server, tmp_path: Path) -> None:
    proxy = SlowProxy(server, tmp_path)
    grid = StandbyGrid(tmp_path, server.new_database().replace(str(server.home), str(tmp_path)))
    try:
        grid.begin()
        proxy.delay_s, began = 0.5, time.monotonic()
        jobs = []
        while time.monotonic() < began + LEASE_SECONDS + 8.0:
            submission = grid.run_koala("submit", "--flexible", "1", "--", "true")
            print(f"{time.monotonic() - began:.1f} s: {submission.stdout or submission.stderr}")
            jobs += [int(number) for number in re.findall(r"\d+", submission.stdout)[:1]]
        proxy.delay_s = 0.0
        assert jobs
        wait_until(lambda: grid.read_states(jobs) == {"succeeded"}, "all jobs to end")
        assert grid.read_epochs() == [1]
        assert grid.find_violations() == []
    finally:
        grid.close()
        proxy.close()


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_active_while_disk_of_database_is_full_rejects_changes_and_goes_on_afterwards(tmp_path: Path) -> None:
    assert INSTALLED is not None
    server = Server(INSTALLED, disk_mb=120)
    server.start()
    grid = StandbyGrid(tmp_path, server.new_database())
    try:
        grid.begin()
        body = {"request": ONE_NODE, "command": ["true"], "launcher": "processes", "environment": {"FILL": "x" * 1000}}
        began, accepted, rejections = time.monotonic(), list[int](), list[str]()
        with server.fill_disk():
            while time.monotonic() < began + LEASE_SECONDS + 8.0:
                answer = grid.http.post("/api/v1/jobs:batch", json={"jobs": [body] * 10})
                assert answer.status_code in (201, 503), answer.text
                if answer.status_code == 201:
                    accepted += answer.json()["jobs"]
                else:
                    rejections.append(answer.json()["detail"])
                time.sleep(1.0)
        answer = wait_until(
            lambda: (posted := grid.http.post("/api/v1/jobs", json=body)).status_code == 201 and posted,
            "a job to be accepted",
        )
        accepted.append(answer.json()["id"])
        wait_until(lambda: grid.read_states(accepted) == {"succeeded"}, "all jobs to end")
        assert any("No space left on device" in detail for detail in rejections)
        print(f"{len(accepted)} jobs accepted, {len(rejections)} rejections, daemon runs {grid.read_epochs()}")
        assert grid.find_violations() == []
    finally:
        try:
            grid.close()
        finally:
            server.remove()


@pytest.mark.nightly
def test_suspended_active_loses_lease_by_time_and_stands_by_when_it_continues(grid: StandbyGrid) -> None:
    gate = grid.make_gate()
    job = grid.submit(grid.six_nodes, *gate.hold)
    before = grid.wait_for_state(job, "running")
    stopped = grid.active
    takeover_s = grid.end_active(signal.SIGSTOP)
    print(f"takeover after SIGSTOP: {takeover_s:.2f} s")
    assert LEASE_SECONDS - 3.0 < takeover_s < LEASE_SECONDS + 10.0
    grid.wait_until_usable()
    grid.daemons[stopped].send_signal(signal.SIGCONT)
    grid.expect_line(stopped, f"koala stands by at {grid.urls[stopped]}; {grid.urls[grid.active]} is active")
    rejection = grid.call(stopped, "POST", f"/api/v1/jobs/{job}/cancel", json={"reason": "x"})
    assert rejection.json()["code"] == "daemon-standby"
    gate.open()
    after = grid.wait_for_end(job)
    assert (after["state"], after["restarts"]) == ("succeeded", before["restarts"])
    grid.end_active(signal.SIGKILL)
    assert grid.read_epochs() == [1, 2, 3]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "jobs"), [(20, 200)])
def test_standby_after_kills_under_load_loses_no_job(server: Server, tmp_path: Path, kills: int, jobs: int) -> None:
    """Kill the active daemon again and again while many jobs wait and run; audit all that was written."""
    chance, takeovers, numbers = random.Random(7), list[float](), list[int]()
    grid = StandbyGrid(tmp_path, server.new_database(), nodes=8)
    try:
        grid.begin()
        for _ in range(kills):
            numbers += grid.fill_queue(jobs, chance)
            time.sleep(chance.uniform(1.0, 4.0))
            killed = grid.active
            takeovers.append(grid.end_active(signal.SIGKILL))
            grid.daemons[killed].wait()
            grid.start_one(killed, "stands by at")
        print(f"{len(numbers)} jobs, {kills} takeovers: median {statistics.median(takeovers):.2f} s,", end=" ")
        print(f"maximum {max(takeovers):.2f} s, all {[round(each, 2) for each in takeovers]}", flush=True)
        wait_until(lambda: grid.count_unfinished() == 0, "all jobs to end", 900.0)
        states = grid.read_states(numbers)
        assert states == {"succeeded"}
        assert len(set(numbers)) == len(numbers)
        assert grid.find_violations() == []
        assert statistics.median(takeovers) < MAX_TAKEOVER_S
    finally:
        with suppress(AssertionError):
            grid.close()
