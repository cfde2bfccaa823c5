"""A real daemon with embedded clusters, as ``koala serve`` starts it, and a look at the process table afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil
import pytest

DEADLINE = 45.0

T = TypeVar("T")


def until(look: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Look again and again until there is something; fails with ``what`` was waited for."""
    end = time.monotonic() + deadline
    while not (found := look()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline:g} s in vain: {what}")
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Seen:
    """A process as it was when it was seen; it may be gone by now."""

    process: psutil.Process
    parent: int
    command: list[str]
    environment: dict[str, str]

    @property
    def text(self) -> str:
        return " ".join([*self.command, *(f"{name}={value}" for name, value in self.environment.items())])

    @property
    def node(self) -> str:
        return self.environment.get("LOCALD_NODE_NAME", "")

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()


class Grid:
    """A daemon in a directory of its own; may be killed and started again."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.environment = dict(os.environ) | environment
        for name in ("KOALA_URL", "KOALA_TOKEN", "KOALA_DATA_DIR"):
            self.environment.pop(name, None)
        self.daemon: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> "Grid":
        self.daemon = subprocess.Popen(
            [*self.koala, "serve", "--port", "0", "--data-dir", str(self.directory)],
            stdout=subprocess.PIPE, stderr=(self.directory.parent / "daemon.log").open("a"),
            text=True, env=self.environment, start_new_session=True,
        )  # fmt: skip
        assert self.daemon.stdout is not None
        line = self.daemon.stdout.readline()
        if not line.startswith("koala serves "):
            pytest.fail(f"the daemon said {line!r} and {(self.directory.parent / 'daemon.log').read_text()[-2000:]}")
        self.url = line.split()[2]
        self.http = httpx2.Client(base_url=self.url, timeout=90.0)
        until(lambda: all(c["state"] == "usable" and c["total"] for c in self.clusters()), "clusters to be usable")
        return self

    @property
    def koala(self) -> list[str]:
        return [sys.executable, "-m", "koalapy.cli.main"]

    def run(self, *arguments: str, timeout: float = DEADLINE, **more: Any) -> subprocess.CompletedProcess[str]:
        """The ``koala`` command against this daemon."""
        environment = self.environment | {"KOALA_URL": self.url}
        return subprocess.run(
            [*self.koala, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, **more
        )

    def kill(self) -> None:
        """As the kernel would: no word of farewell."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def end(self) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout=DEADLINE)

    # What it says

    def clusters(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.http.get("/api/v1/clusters").json()["clusters"]
        return answer

    def cluster(self, name: str) -> dict[str, Any]:
        return next(c for c in self.clusters() if c["name"] == name)

    def submit(self, request: dict[str, Any], *command: str, **more: Any) -> int:
        more.setdefault("launcher", "processes")
        body = {"request": request, "command": list(command), **more}
        answer = self.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def job(self, ident: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}").json()
        return answer

    def wait(self, ident: int, deadline: float = DEADLINE) -> dict[str, Any]:
        """The job when it is over."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            job: dict[str, Any] = self.http.get(f"/api/v1/jobs/{ident}", params={"wait": 5}).json()
            if job["state"] in ("succeeded", "failed", "cancelled"):
                return job
        pytest.fail(f"job {ident} is {job['state']} ({job['reason']}) after {deadline:g} s: {job['timeline']}")

    def wait_state(self, ident: int, *states: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(ident)
            return job if job["state"] in states else None

        return until(look, f"job {ident} to be {' or '.join(states)}")  # type: ignore[return-value]

    def logs(self, ident: int) -> str:
        return str(self.http.get(f"/api/v1/jobs/{ident}/logs").text)

    def cancel(self, ident: int) -> None:
        assert self.http.post(f"/api/v1/jobs/{ident}/cancel").status_code == 200

    # What is really there

    def processes(self, *needles: str) -> list["Seen"]:
        """Processes of this grid's clusters and agents whose environment or command line has all the needles."""
        found = []
        for process in psutil.process_iter():
            try:
                seen = Seen(process, process.ppid(), process.cmdline(), process.environ())
                gone = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not gone and str(self.directory) in seen.text and all(n in seen.text for n in needles):
                found.append(seen)
        return found

    def workers(self, token: str = "") -> list["Seen"]:
        """Programs and MPI daemons on the nodes, of one component or of all."""
        return self.processes("LOCALD_MARK=", f"KOALA_COMPONENT_TOKEN={token}")

    def runners(self, token: str = "", node: str = "") -> list[psutil.Process]:
        """Runners with something to do: forked by their cluster's resource manager, parents of what runs on a node."""
        workers = {w.process.pid: w for w in self.workers(token) if not node or w.node == node}
        return [
            psutil.Process(p) for p in {w.parent for w in workers.values()} - workers.keys() if psutil.pid_exists(p)
        ]

    def forks(self) -> list["Seen"]:
        """All runners: children of a resource manager that are copies of it."""
        managers = {seen.process.pid: seen for seen in self.processes("locald.py")}
        return [seen for seen in managers.values() if seen.parent in managers]

    def settle(self) -> None:
        """Nothing runs, nothing is held, every node is idle."""
        until(lambda: not self.workers() and not self.forks(), "every process on the nodes to be gone")
        until(lambda: all(c["idle"] == c["total"] for c in self.clusters()), f"idle nodes: {self.clusters()}")
        assert [c["used"] for c in self.clusters()] == [0] * len(self.clusters())


@pytest.fixture
def make_grid(tmp_path: Path) -> Iterator[Callable[..., Grid]]:
    """Starts daemons with settings of their own; afterwards no process may be left of them."""
    grids: list[Grid] = []

    def make(**environment: str) -> Grid:
        directory = tmp_path / f"grid-{len(grids)}"
        directory.mkdir()
        grids.append(Grid(directory / "data", **environment))
        return grids[-1].start()

    yield make
    for grid in grids:
        close(grid)


def close(grid: Grid) -> None:
    """End a grid and prove that nothing of it is left."""
    if grid.daemon is None:
        return
    if grid.daemon.poll() is None:
        for job in grid.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"]:
            grid.http.post(f"/api/v1/jobs/{job['id']}/cancel")
            grid.wait(job["id"])
        assert grid.end() == 0
    grid.http.close()
    until(lambda: not grid.processes(), f"no process left: {grid.processes()}", 45.0)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """One daemon for the tests of a module that leave it as they found it."""
    directory = tmp_path_factory.mktemp("grid")
    grid = Grid(directory / "data").start()
    yield grid
    grid.settle()
    close(grid)
