"""What makes a daemon unready is told within seconds, by the daemon where it can, and is over when its cause is."""

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

from koalapy.config.log_actions import MEANINGS
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import NodeProcess, wait_until
from tests.grid.test_stopped import stopped
from tests.needs import POSTGRESQL, find_postgresql, needs
from tests.service_manager import ServiceManager
from tests.store.postgresql import Server

pytestmark = [pytest.mark.processes, pytest.mark.grid]

HANGING = """
import os, pathlib, signal, time
def hang(*_):
    while pathlib.Path(os.environ["TMPDIR"], "hang").exists():
        time.sleep(0.02)
signal.signal(signal.SIGUSR1, hang)
"""
"""Whatever hangs, hangs in the loop's thread: here it does when it gets a signal, for as long as there is a file."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a disk of its own, where that can be had."""
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
def grid(disk: Path, manager: ServiceManager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    hanging = tmp_path_factory.mktemp("hanging")
    (hanging / "sitecustomize.py").write_text(HANGING)
    limits = {"KOALA_DISKS__LOW": "0", "KOALA_DISKS__LEAST": "400000"}
    logs = {"KOALA_LOG_FORMAT": "json", "KOALA_LOG_LEVEL": "debug"}
    grid = EmbeddedGrid(
        disk / "data", PYTHONPATH=str(hanging), TMPDIR=str(hanging), **limits, **logs, **manager.environment
    )
    try:
        yield grid.start()
    finally:
        close_grid(grid)


@pytest.fixture(autouse=True)
def _ready_before_and_after(grid: EmbeddedGrid) -> Iterator[None]:
    wait_until(lambda: faults(grid, clusters=True) == {}, "all to be well")
    yield
    wait_until(lambda: faults(grid, clusters=True) == {}, "all to be well again")


def asked(grid: EmbeddedGrid, path: str, **more: Any) -> httpx2.Response:
    """By a connection of its own, as a probe has one."""
    headers = {"Authorization": f"Bearer {grid.admin_token}"}
    return httpx2.get(f"{grid.url}{path}", headers=headers, **{"timeout": 60.0, **more})


def faults(grid: EmbeddedGrid, *, clusters: bool = False) -> dict[str, str]:
    """What fails, with the reasons, if the daemon says that it is not ready."""
    answer = asked(grid, f"/readyz?clusters={'true' if clusters else 'false'}")
    told = answer.json()
    assert told["ready"] is (answer.status_code == 200), told
    if answer.status_code == 200:
        return {}
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    failing = [check for check in told["checks"] if not check["ok"]]
    assert all(check["reason"] in told["detail"] for check in failing if check["needed"])
    return {" ".join(filter(None, (check["name"], check["cluster"]))): check["reason"] for check in failing}


def told(grid: EmbeddedGrid, name: str, *, clusters: bool = False) -> str:
    """Wait until a check fails; its reason."""
    return wait_until(lambda: faults(grid, clusters=clusters).get(name), f"{name} to be told")


def test_a_daemon_that_is_well_says_so_to_everybody_and_to_its_service_manager(
    grid: EmbeddedGrid, manager: ServiceManager
) -> None:
    manager.wait_for_message("WATCHDOG=1")
    first = manager.messages.index("READY=1")
    assert manager.messages[first + 1] == f"STATUS=serves {grid.url}"
    assert "WATCHDOG=1" not in manager.messages[:first]
    if "STATUS=ready" not in manager.messages:
        manager.wait_for_message("STATUS=ready")
    checks = asked(grid, "/readyz").json()["checks"]
    own = ["database", "lease", "engine", "disk"]
    assert [check["name"] for check in checks] == [*own, *["agent", "resource manager"] * 2]
    assert [check["needed"] for check in checks] == [check["name"] in own for check in checks]
    assert {(check["ok"], check["reason"]) for check in checks} == {(True, "")}
    assert asked(grid, "/livez").json() == {"status": "alive"}
    for seen in grid.list_processes():
        assert "NOTIFY_SOCKET" not in seen.environment, "nobody else speaks for the daemon"


def test_a_locked_database(grid: EmbeddedGrid) -> None:
    other = sqlite3.connect(grid.directory / "koala.db", isolation_level=None)
    other.execute("begin exclusive")
    assert "database" in told(grid, "database")
    health = asked(grid, "/healthz").json()
    assert (health["status"], health["ready"], len(health["problems"])) == ("degraded", False, 1)
    assert asked(grid, "/livez").status_code == 200, "to start it again would help nobody"
    other.rollback()
    other.close()


def test_a_full_disk(grid: EmbeddedGrid, disk: Path) -> None:
    with full(grid, disk):
        assert "disk of its data directory" in told(grid, "disk")
        assert asked(grid, "/healthz").json()["status"] == "degraded"


@contextmanager
def full(grid: EmbeddedGrid, disk: Path) -> Iterator[None]:
    """No file can grow: its disk is full, or where none may be mounted, the daemon has a limit on files."""
    assert grid.daemon is not None
    if not disk.is_mount():
        process = psutil.Process(grid.daemon.pid)
        before = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (4096, before[1]))
        yield
        process.rlimit(psutil.RLIMIT_FSIZE, before)
        return
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    yield
    filler.unlink()


@pytest.mark.parametrize(
    ("name", "process", "words"),
    [
        ("agent", EmbeddedGrid.find_agent, "its agent has not answered for"),
        ("resource manager", EmbeddedGrid.find_resource_manager, "not answering since"),
    ],
)
def test_an_agent_and_a_resource_manager_that_hang(
    grid: EmbeddedGrid, name: str, process: Callable[[EmbeddedGrid, str], NodeProcess], words: str
) -> None:
    """Their cluster's jobs wait; others' do not, so that the daemon is ready unless these are asked for."""
    with stopped(process(grid, "north").pid):
        assert words in told(grid, f"{name} north", clusters=True)
        wait_until(lambda: faults(grid) == {}, "the daemon itself to be ready")
        assert asked(grid, "/healthz").json()["status"] == "degraded"
        anybody = httpx2.get(f"{grid.url}/readyz", timeout=60.0).json()
        reasons = {check["reason"] for check in anybody["checks"] if check["cluster"]}
        assert reasons == {"", "send a token to see the reason"}


def test_a_loop_that_hangs_is_told_of_by_those_who_stand_in_for_it(
    grid: EmbeddedGrid, manager: ServiceManager, tmp_path: Path
) -> None:
    assert grid.daemon is not None
    gate = Path(grid.environment["TMPDIR"], "hang")
    gate.touch()
    grid.daemon.send_signal(signal.SIGUSR1)
    answer = wait_until(lambda: unless_silent(lambda: asked(grid, "/readyz", timeout=1.0)), "somebody to answer")
    problem = answer.json()
    assert (answer.status_code, problem["ready"]) == (503, False)
    assert "loop has not moved for" in problem["detail"]
    assert [check["name"] for check in problem["checks"]] == ["engine"]
    for path in ("/livez", "/healthz", "/api/v1/jobs"):
        assert asked(grid, path).status_code == 503
    manager.drop_messages()
    manager.check_no_message("WATCHDOG=1")
    gate.unlink()
    manager.wait_for_message("WATCHDOG=1")
    wait_until(lambda: asked(grid, "/livez").status_code == 200, "the loop to answer itself")
    log = (grid.directory.parent / "daemon.log").read_text()
    (line,) = [line for line in log.splitlines() if "loop-hangs" in line]
    assert "sitecustomize.py" in line, "where it hung"


def unless_silent(ask: Callable[[], httpx2.Response]) -> httpx2.Response | None:
    try:
        return ask()
    except httpx2.TransportError:
        return None


def test_a_daemon_that_is_stopped_as_a_whole_is_noticed_by_its_silence(
    grid: EmbeddedGrid, manager: ServiceManager
) -> None:
    assert grid.daemon is not None
    with stopped(grid.daemon.pid):
        with pytest.raises(httpx2.TimeoutException):
            asked(grid, "/readyz", timeout=1.0)
        manager.drop_messages()
        manager.check_no_message("WATCHDOG=1")
    manager.wait_for_message("WATCHDOG=1")
    assert asked(grid, "/livez").status_code == 200
    log = (grid.directory.parent / "daemon.log").read_text()
    assert log.count("loop-hangs") <= 1, "what was asleep does not hang"


def test_a_daemon_that_ends_says_so_first(grid: EmbeddedGrid, manager: ServiceManager) -> None:
    """And is ended and started anew by its service manager, when that hears nothing: jobs go on."""
    gate = grid.make_gate()
    ident = grid.submit({"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, *gate.hold)
    grid.wait_for_state(ident, "running")
    assert grid.daemon is not None
    psutil.Process(grid.daemon.pid).suspend()
    os.waitid(os.P_PID, grid.daemon.pid, os.WSTOPPED)  # until then it may still say what it is about to say
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


def test_its_log_is_of_objects_with_events_that_are_documented(grid: EmbeddedGrid) -> None:
    """After all of that, of daemon and agents."""
    lines = [json.loads(line) for line in (grid.directory.parent / "daemon.log").read_text().splitlines()]
    actions = {line["action"] for line in lines}
    assert actions <= MEANINGS.keys()
    assert {"daemon-serves", "database-away", "disk-full", "loop-hangs", "agent-serves", "lrm-lost"} <= actions
    assert {line["cluster"] for line in lines if line["action"] == "agent-serves"} == {"north", "south"}
    job = [(line["state"], line["before"]) for line in lines if line["action"] == "job-changed" and line["job"] == 1]
    assert (job[0], job[-1]) == (("claiming", None), ("succeeded", "running"))


@needs(POSTGRESQL)
def test_postgresql_that_hangs_and_one_that_is_gone(tmp_path: Path, make_grid: Callable[..., EmbeddedGrid]) -> None:
    programs = find_postgresql()
    assert programs is not None
    server = Server(programs)
    server.start()
    try:
        grid = make_grid(KOALA_DATABASE=server.new_database(), KOALA_CLUSTERS='{"north": {"nodes": 1}}')
        assert server._process is not None
        own = psutil.Process(server._process.pid)
        processes = [own, *own.children(recursive=True)]
        for process in processes:
            process.suspend()
        assert "has not answered" in told(grid, "database")
        for process in processes:
            process.resume()
        wait_until(lambda: faults(grid) == {}, "all to be well again")
        server.stop()
        assert "does not answer" in told(grid, "database")
        server.start()
        wait_until(lambda: faults(grid) == {}, "all to be well once more")
        close_grid(grid)
    finally:
        server.remove()
