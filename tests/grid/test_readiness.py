"""Readiness of a daemon: each fault is reported within seconds and ends with its cause."""

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from koalapy.config.logs import MEANINGS
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import NodeProcess, wait_until
from tests.grid.test_stopped import suspended
from tests.needs import POSTGRESQL, find_postgresql, needs
from tests.service_manager import ServiceManager
from tests.store.postgresql import Server

pytestmark = [pytest.mark.processes, pytest.mark.grid]

HANG_ON_SIGNAL = """
import os, pathlib, signal, time
def hang(*_):
    while pathlib.Path(os.environ["TMPDIR"], "hang").exists():
        time.sleep(0.02)
signal.signal(signal.SIGUSR1, hang)
"""
"""A module that makes the event loop hang on SIGUSR1 while a file exists."""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder on a small disk, or an ordinary one if no disk can be mounted."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceManager]:
    manager = ServiceManager(tmp_path_factory.mktemp("manager"))
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def grid(small_disk: Path, manager: ServiceManager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    hanging = tmp_path_factory.mktemp("hanging")
    (hanging / "sitecustomize.py").write_text(HANG_ON_SIGNAL)
    limits = {"KOALA_DISKS__LOW": "0", "KOALA_DISKS__LEAST": "400000"}
    logs = {"KOALA_LOG_FORMAT": "json", "KOALA_LOG_LEVEL": "debug"}
    grid = EmbeddedGrid(
        small_disk / "data", PYTHONPATH=str(hanging), TMPDIR=str(hanging), **limits, **logs, **manager.environment
    )
    try:
        yield grid.start()
    finally:
        close_grid(grid)


@pytest.fixture(autouse=True)
def _ready_before_and_after(grid: EmbeddedGrid) -> Iterator[None]:
    wait_until(lambda: read_faults(grid, clusters=True) == {}, "all to be well")
    yield
    wait_until(lambda: read_faults(grid, clusters=True) == {}, "all to be well again")


def send_probe(grid: EmbeddedGrid, path: str, **options: Any) -> httpx2.Response:
    """Send a request on a new connection, as a probe does."""
    headers = {"Authorization": f"Bearer {grid.admin_token}"}
    return httpx2.get(f"{grid.url}{path}", headers=headers, **{"timeout": 60.0, **options})


def read_faults(grid: EmbeddedGrid, *, clusters: bool = False) -> dict[str, str]:
    """Return the reasons of failed checks by name, or nothing if the daemon is ready."""
    answer = send_probe(grid, f"/readyz?clusters={'true' if clusters else 'false'}")
    report = answer.json()
    assert report["ready"] is (answer.status_code == 200), report
    if answer.status_code == 200:
        return {}
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    failing = [check for check in report["checks"] if not check["ok"]]
    assert all(check["reason"] in report["detail"] for check in failing if check["needed"])
    return {" ".join(filter(None, (check["name"], check["cluster"]))): check["reason"] for check in failing}


def wait_for_fault(grid: EmbeddedGrid, name: str, *, clusters: bool = False) -> str:
    """Wait until a check fails, and return its reason."""
    return wait_until(lambda: read_faults(grid, clusters=clusters).get(name), f"a fault of {name}")


def test_healthy_daemon_reports_ready_to_probes_and_systemd(grid: EmbeddedGrid, manager: ServiceManager) -> None:
    manager.wait_for_message("WATCHDOG=1")
    first = manager.messages.index("READY=1")
    assert manager.messages[first + 1] == f"STATUS=serves {grid.url}"
    assert "WATCHDOG=1" not in manager.messages[:first]
    if "STATUS=ready" not in manager.messages:
        manager.wait_for_message("STATUS=ready")
    checks = send_probe(grid, "/readyz").json()["checks"]
    check_names = ["database", "lease", "engine", "disk"]
    assert [check["name"] for check in checks] == [*check_names, *["agent", "resource manager"] * 2]
    assert [check["needed"] for check in checks] == [check["name"] in check_names for check in checks]
    assert {(check["ok"], check["reason"]) for check in checks} == {(True, "")}
    assert send_probe(grid, "/livez").json() == {"status": "alive"}
    for process in grid.list_processes():
        assert "NOTIFY_SOCKET" not in process.environment, "nobody else speaks for the daemon"


def test_locked_database_makes_daemon_unready(grid: EmbeddedGrid) -> None:
    connection = sqlite3.connect(grid.directory / "koala.db", isolation_level=None)
    connection.execute("begin exclusive")
    assert "database" in wait_for_fault(grid, "database")
    health = send_probe(grid, "/healthz").json()
    assert (health["status"], health["ready"], len(health["problems"])) == ("degraded", False, 1)
    assert send_probe(grid, "/livez").status_code == 200, "to start it again would help nobody"
    connection.rollback()
    connection.close()


def test_full_disk_makes_daemon_unready(grid: EmbeddedGrid, small_disk: Path) -> None:
    with full_disk(grid, small_disk):
        assert "disk of its data directory" in wait_for_fault(grid, "disk")
        assert send_probe(grid, "/healthz").json()["status"] == "degraded"


@contextmanager
def full_disk(grid: EmbeddedGrid, disk: Path) -> Iterator[None]:
    """Fill the disk, or limit the size of the daemon's files where no disk can be mounted."""
    assert grid.daemon is not None
    if not disk.is_mount():
        process = psutil.Process(grid.daemon.pid)
        limit = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (4096, limit[1]))
        yield
        process.rlimit(psutil.RLIMIT_FSIZE, limit)
        return
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    yield
    filler.unlink()


@pytest.mark.parametrize(
    ("name", "process", "text"),
    [
        ("agent", EmbeddedGrid.find_agent, "its agent has not answered for"),
        ("resource manager", EmbeddedGrid.find_resource_manager, "not answering since"),
    ],
)
def test_hanging_agent_or_resource_manager_is_reported(
    grid: EmbeddedGrid, name: str, process: Callable[[EmbeddedGrid, str], NodeProcess], text: str
) -> None:
    """The daemon is unready only in the answer that includes clusters, since other clusters run jobs."""
    with suspended(process(grid, "north").pid):
        assert text in wait_for_fault(grid, f"{name} north", clusters=True)
        wait_until(lambda: read_faults(grid) == {}, "the daemon itself to be ready")
        assert send_probe(grid, "/healthz").json()["status"] == "degraded"
        anybody = httpx2.get(f"{grid.url}/readyz", timeout=60.0).json()
        reasons = {check["reason"] for check in anybody["checks"] if check["cluster"]}
        assert reasons == {"", "send a token to see the reason"}


def test_hanging_event_loop_sends_no_heartbeat(grid: EmbeddedGrid, manager: ServiceManager, tmp_path: Path) -> None:
    assert grid.daemon is not None
    gate, log = Path(grid.environment["TMPDIR"], "hang"), grid.directory.parent / "daemon.log"
    gate.touch()
    grid.daemon.send_signal(signal.SIGUSR1)
    wait_until(lambda: "loop-hangs" in log.read_text(), "the watchdog to notice")
    manager.drop_messages()
    manager.check_no_message("WATCHDOG=1")
    gate.unlink()
    manager.wait_for_message("WATCHDOG=1")
    assert send_probe(grid, "/livez").status_code == 200
    (line,) = [line for line in log.read_text().splitlines() if "loop-hangs" in line]
    assert "sitecustomize.py" in line, "where it hung"


def test_stopped_daemon_answers_no_probe(grid: EmbeddedGrid, manager: ServiceManager) -> None:
    assert grid.daemon is not None
    with suspended(grid.daemon.pid):
        with pytest.raises(httpx2.TimeoutException):
            send_probe(grid, "/readyz", timeout=1.0)
        manager.drop_messages()
        manager.check_no_message("WATCHDOG=1")
    manager.wait_for_message("WATCHDOG=1")
    assert send_probe(grid, "/livez").status_code == 200
    log = (grid.directory.parent / "daemon.log").read_text()
    assert log.count("loop-hangs") <= 1, "what was asleep does not hang"


def test_ending_daemon_reports_stopping(grid: EmbeddedGrid, manager: ServiceManager) -> None:
    """Restart the daemon as a service manager does after missing watchdog messages; jobs continue."""
    gate = grid.make_gate()
    ident = grid.submit({"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, *gate.hold)
    grid.wait_for_state(ident, "running")
    assert grid.daemon is not None
    psutil.Process(grid.daemon.pid).suspend()
    os.waitid(os.P_PID, grid.daemon.pid, os.WSTOPPED)  # until then it may still send a message
    manager.drop_messages()
    manager.check_no_message("WATCHDOG=1")
    grid.kill_daemon()
    grid.start()
    manager.wait_for_message("READY=1")
    gate.open()
    assert grid.wait_for_end(ident)["state"] == "succeeded"
    assert grid.stop_daemon() == 0
    manager.wait_for_message("STOPPING=1")
    grid.start()


def test_log_lines_are_documented_json_events(grid: EmbeddedGrid) -> None:
    """Check the logs of daemon and agents after the other tests."""
    lines = [json.loads(line) for line in (grid.directory.parent / "daemon.log").read_text().splitlines()]
    actions = {line["action"] for line in lines}
    assert actions <= MEANINGS.keys()
    assert {"daemon-serves", "database-away", "disk-full", "loop-hangs", "agent-serves", "lrm-lost"} <= actions
    assert {line["cluster"] for line in lines if line["action"] == "agent-serves"} == {"north", "south"}
    job = [(line["state"], line["before"]) for line in lines if line["action"] == "job-changed" and line["job"] == 1]
    assert (job[0], job[-1]) == (("claiming", None), ("succeeded", "running"))


@needs(POSTGRESQL)
def test_hanging_or_stopped_postgresql_makes_daemon_unready(
    tmp_path: Path, make_grid: Callable[..., EmbeddedGrid]
) -> None:
    programs = find_postgresql()
    assert programs is not None
    server = Server(programs)
    server.start()
    try:
        grid = make_grid(KOALA_DATABASE=server.new_database(), KOALA_CLUSTERS='{"north": {"nodes": 1}}')
        assert server._process is not None
        postgres = psutil.Process(server._process.pid)
        processes = [postgres, *postgres.children(recursive=True)]
        for process in processes:
            process.suspend()
        assert "has not answered" in wait_for_fault(grid, "database")
        for process in processes:
            process.resume()
        wait_until(lambda: read_faults(grid) == {}, "all to be well again")
        server.stop()
        assert "does not answer" in wait_for_fault(grid, "database")
        server.start()
        wait_until(lambda: read_faults(grid) == {}, "all to be well once more")
        close_grid(grid)
    finally:
        server.remove()
