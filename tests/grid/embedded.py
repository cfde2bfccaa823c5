"""A daemon with embedded clusters, started by ``koala serve``, and its processes in the process table."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from koalapy.audit.readers import GridFiles, read_grid
from koalapy.audit.rules import find_violations
from tests.grid.grid import MAX_WAIT_S, Folder, Gate, Grid, Load, NodeProcess, wait_until


class LocalGate(Gate):
    def open(self) -> None:
        Path(self.path).touch()


class LocalFolder(Folder):
    def __init__(self, directory: Path) -> None:
        self.path = str(directory)

    def read(self, name: str, cluster: str) -> str:
        return Path(self.path, name).read_text()


class LocalLoad(Load):
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=MAX_WAIT_S)


class EmbeddedGrid(Grid):
    """A daemon with a private data directory, which can be killed and started again."""

    python = sys.executable
    nodes = {"north": 4, "south": 4}  # noqa: RUF012
    six_nodes = {"type": "flexible", "total_size": 6}  # noqa: RUF012
    managers = ("north", "south")

    def __init__(self, directory: Path, **environment: str) -> None:
        super().__init__()
        self.directory = directory
        self._extra_environment = environment
        self.state = directory.parent / "state"
        """The directory in which the account registers its daemons."""
        self.host = "127.0.0.1"
        self._path_count = 0
        self.daemon: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"XDG_STATE_HOME": str(self.state)} | self._extra_environment

    def start(self, port: int = 0) -> "EmbeddedGrid":
        """Start the daemon on ``port``, or on a free one if it is 0, and wait until its clusters are usable."""
        self.connect(self.launch_daemon(port))
        return self

    def launch_daemon(self, port: int = 0) -> str:
        """Start the daemon and return its URL as soon as it serves; its clusters may not be usable yet."""
        self.daemon = subprocess.Popen(
            [*self.koala_command, "serve", "--host", self.host, "--port", str(port), "--data-dir", str(self.directory)],
            stdout=subprocess.PIPE,
            stderr=(self.directory.parent / "daemon.log").open("a"),
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        assert self.daemon.stdout is not None
        line = self.daemon.stdout.readline()
        if not line.startswith("koala serves "):
            pytest.fail(f"the daemon said {line!r} and {(self.directory.parent / 'daemon.log').read_text()[-2000:]}")
        # The koala command finds the token itself; other clients send it.
        token_file = self.directory / "token"
        self.admin_token = token_file.read_text().strip() if token_file.exists() else ""
        return line.split()[2]

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def stop_daemon(self) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout=MAX_WAIT_S)

    # Processes and nodes

    def list_processes(self, *needles: str) -> list[NodeProcess]:
        """Return processes of clusters and agents that have all needles in their environment or command line."""
        processes = []
        for process in psutil.process_iter():
            try:
                environment = _environment(process)
                node = environment.get("LOCALD_NODE_NAME", "")
                kill = _make_killer(process)
                candidate = NodeProcess(process.pid, process.ppid(), process.cmdline(), environment, node, kill)
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if (
                not is_zombie
                and str(self.directory) in candidate.text
                and all(needle in candidate.text for needle in needles)
            ):
                processes.append(candidate)
        return processes

    def list_workers(self, token: str = "") -> list[NodeProcess]:
        return self.list_processes("LOCALD_MARK=", f"KOALA_COMPONENT_TOKEN={token}")

    def list_runners(self, token: str = "", node: str = "") -> list[NodeProcess]:
        """Return the parents of workers, which the resource managers have forked."""
        workers = {w.pid: w for w in self.list_workers(token) if not node or w.node == node}
        # The children of a killed runner become children of the resource manager until it kills them.
        managers = {process.pid for process in self.list_processes("locald.py")} - {
            process.pid for process in self.list_all_runners()
        }
        runners = []
        for pid, worker in {w.parent: w for w in workers.values() if w.parent not in workers}.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid not in managers:
                    runners.append(NodeProcess(pid, 0, [], {}, worker.node, _make_killer(psutil.Process(pid))))
        return runners

    def list_all_runners(self) -> list[NodeProcess]:
        """Return all runners: children of a resource manager that are copies of it, as the manager is of its keeper."""
        copies = {process.pid: process for process in self.list_processes("locald.py")}
        return [
            process
            for process in copies.values()
            if process.parent in copies and copies[process.parent].parent in copies
        ]

    def find_resource_manager(self, cluster: str) -> NodeProcess:
        """Return the resource manager of a cluster: the child of its keeper."""
        copies = {process.pid: process for process in self.list_processes("locald.py") if cluster in process.command}
        (manager,) = [
            process
            for process in copies.values()
            if process.parent in copies and copies[process.parent].parent not in copies
        ]
        return manager

    def find_agent(self, cluster: str) -> NodeProcess:
        (agent,) = [process for process in self.list_processes("agent", "--embedded") if cluster in process.command]
        return agent

    def wait_until_idle(self) -> None:
        wait_until(
            lambda: not self.list_workers() and not self.list_all_runners(), "every process on the nodes to be gone"
        )
        wait_until(
            lambda: all(cluster["idle"] == cluster["total"] for cluster in self.list_clusters()),
            f"idle nodes: {self.list_clusters()}",
        )
        assert [cluster["used"] for cluster in self.list_clusters()] == [0] * len(self.list_clusters())

    # Faults

    def make_gate(self) -> LocalGate:
        return LocalGate(str(self._make_path("gate")))

    def make_folder(self) -> LocalFolder:
        path = self._make_path("folder")
        path.mkdir()
        return LocalFolder(path)

    def _make_path(self, prefix: str) -> Path:
        self._path_count += 1
        return self.directory.parent / f"{prefix}-{self._path_count}"

    def start_local_job(self, cluster: str, nodes: int) -> LocalLoad:
        environment = self.environment | {"KOALA_URL": self.url}
        command = [*self.koala_command, "local-run", cluster, str(nodes), "sleep", "300"]
        load = LocalLoad(subprocess.Popen(command, env=environment, text=True))
        wait_until(
            lambda: len([p for p in self.list_processes("LOCALD_MARK=") if "300" in p.command]) >= nodes, "it to run"
        )
        return load

    def kill_agent(self, cluster: str) -> None:
        disconnected, connected = (
            f"action='agent-{action}' cluster='{cluster}'" for action in ("disconnected", "connected")
        )
        counts_before = {line: self._count_in_log(line) for line in (disconnected, connected)}
        self.find_agent(cluster).kill()
        # The next agent may connect before the next poll, so count log lines instead of polling the state.
        wait_until(lambda: self._count_in_log(disconnected) > counts_before[disconnected], "the loss to be noticed")
        wait_until(
            lambda: (
                self.get_cluster(cluster)["state"] == "unreachable"
                or self._count_in_log(connected) > counts_before[connected]
            ),
            "the state to follow",
        )

    def _count_in_log(self, text: str) -> int:
        """Return how often a text is in the daemon's log."""
        return (self.directory.parent / "daemon.log").read_text().count(text)

    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        process = psutil.Process(self.find_agent(cluster).pid)
        process.suspend()
        return process.resume


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; that of daemons and agents cannot be read and is empty."""
    try:
        return process.environ()
    except psutil.AccessDenied:
        return {}


def _make_killer(process: psutil.Process) -> Callable[[], Any]:
    def kill() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    return kill


def list_violations(grid: EmbeddedGrid) -> list[str]:
    """Return what the auditor finds in the evidence of a grid, also while its daemon runs."""
    return [str(finding) for finding in find_violations(read_grid(GridFiles(grid.directory)))]


def close_grid(grid: EmbeddedGrid) -> None:
    """Stop a grid, and check that none of its processes is left."""
    if grid.daemon is None:
        return
    if grid.daemon.poll() is None:
        grid.cancel_all_jobs()
        assert grid.stop_daemon() == 0
    grid.http.close()
    wait_until(lambda: not grid.list_processes(), f"no process left: {grid.list_processes()}", 45.0)
