"""A real daemon with embedded clusters, as ``koala serve`` starts it, and a look at the process table."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.grid.world import DEADLINE, Folder, Gate, Load, Seen, World, until


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
        self._process.wait(timeout=DEADLINE)


class Embedded(World):
    """A daemon in a directory of its own; may be killed and started again."""

    python = sys.executable
    nodes = {"north": 4, "south": 4}  # noqa: RUF012
    six = {"type": "flexible", "total_size": 6}  # noqa: RUF012

    def __init__(self, directory: Path, **environment: str) -> None:
        super().__init__()
        self.directory = directory
        self._more = environment
        self.state = directory.parent / "state"
        """Where the account registers its daemons."""
        self.host = "127.0.0.1"
        self._made = 0
        self.daemon: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"XDG_STATE_HOME": str(self.state)} | self._more

    def start(self, port: int = 0) -> "Embedded":
        """``port`` 0: any free one."""
        self.connect(self.launch(port))
        return self

    def launch(self, port: int = 0) -> str:
        """Start the daemon; its URL as soon as it serves, whatever its clusters do."""
        self.daemon = subprocess.Popen(
            [*self.koala, "serve", "--host", self.host, "--port", str(port), "--data-dir", str(self.directory)],
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
        # The command finds it by itself; what asks the daemon past the command shows what is in its directory.
        own = self.directory / "token"
        self.shown = own.read_text().strip() if own.exists() else ""
        return line.split()[2]

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def end(self) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout=DEADLINE)

    # What is really there

    def processes(self, *needles: str) -> list[Seen]:
        """Processes of this grid's clusters and agents whose environment or command line has all the needles."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = _environment(process)
                node = environment.get("LOCALD_NODE_NAME", "")
                kill = _killer(process)
                seen = Seen(process.pid, process.ppid(), process.cmdline(), environment, node, kill)
                gone = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not gone and str(self.directory) in seen.text and all(n in seen.text for n in needles):
                found.append(seen)
        return found

    def workers(self, token: str = "") -> list[Seen]:
        return self.processes("LOCALD_MARK=", f"KOALA_COMPONENT_TOKEN={token}")

    def runners(self, token: str = "", node: str = "") -> list[Seen]:
        """Forked by their cluster's resource manager, parents of what runs on a node."""
        workers = {w.pid: w for w in self.workers(token) if not node or w.node == node}
        # What a killed runner leaves is for a moment the resource manager's own.
        managers = {seen.pid for seen in self.processes("locald.py")} - {seen.pid for seen in self.forks()}
        found = []
        for pid, worker in {w.parent: w for w in workers.values() if w.parent not in workers}.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid not in managers:
                    found.append(Seen(pid, 0, [], {}, worker.node, _killer(psutil.Process(pid))))
        return found

    def forks(self) -> list[Seen]:
        """Return all runners: children of a resource manager that are copies of it, as the manager is of its keeper."""
        copies = {seen.pid: seen for seen in self.processes("locald.py")}
        return [seen for seen in copies.values() if seen.parent in copies and copies[seen.parent].parent in copies]

    def resource_manager(self, cluster: str) -> Seen:
        """Return the resource manager of a cluster: the child of its keeper."""
        copies = {seen.pid: seen for seen in self.processes("locald.py") if cluster in seen.command}
        (manager,) = [
            seen for seen in copies.values() if seen.parent in copies and copies[seen.parent].parent not in copies
        ]
        return manager

    def agent(self, cluster: str) -> Seen:
        (agent,) = [p for p in self.processes("agent", "--embedded") if cluster in p.command]
        return agent

    def settle(self) -> None:
        until(lambda: not self.workers() and not self.forks(), "every process on the nodes to be gone")
        until(lambda: all(c["idle"] == c["total"] for c in self.clusters()), f"idle nodes: {self.clusters()}")
        assert [c["used"] for c in self.clusters()] == [0] * len(self.clusters())

    # What may befall it

    def gate(self) -> LocalGate:
        return LocalGate(str(self._new("gate")))

    def folder(self) -> LocalFolder:
        path = self._new("folder")
        path.mkdir()
        return LocalFolder(path)

    def _new(self, what: str) -> Path:
        self._made += 1
        return self.directory.parent / f"{what}-{self._made}"

    def local_load(self, cluster: str, nodes: int) -> LocalLoad:
        environment = self.environment | {"KOALA_URL": self.url}
        command = [*self.koala, "local-run", cluster, str(nodes), "sleep", "300"]
        load = LocalLoad(subprocess.Popen(command, env=environment, text=True))
        until(lambda: len([p for p in self.processes("LOCALD_MARK=") if "300" in p.command]) >= nodes, "it to run")
        return load

    def kill_agent(self, cluster: str) -> None:
        lost, next_one = (f"action='agent-{what}' cluster='{cluster}'" for what in ("disconnected", "connected"))
        earlier = {line: self._logged(line) for line in (lost, next_one)}
        self.agent(cluster).kill()
        # The next one may be there before we look again, but what is in the log stays.
        until(lambda: self._logged(lost) > earlier[lost], "the loss to be noticed")
        until(
            lambda: self.cluster(cluster)["state"] == "unreachable" or self._logged(next_one) > earlier[next_one],
            "the loss to be taken in",
        )

    def _logged(self, words: str) -> int:
        """How often the daemon's log has them."""
        return (self.directory.parent / "daemon.log").read_text().count(words)

    def suspend_agent(self, cluster: str) -> Callable[[], None]:
        process = psutil.Process(self.agent(cluster).pid)
        process.suspend()
        return process.resume


def _environment(process: psutil.Process) -> dict[str, str]:
    """Daemons and agents do not show theirs."""
    try:
        return process.environ()
    except psutil.AccessDenied:
        return {}


def _killer(process: psutil.Process) -> Callable[[], Any]:
    def kill() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    return kill


def close(grid: Embedded) -> None:
    """End a grid and prove that nothing of it is left."""
    if grid.daemon is None:
        return
    if grid.daemon.poll() is None:
        grid.cancel_all()
        assert grid.end() == 0
    grid.http.close()
    until(lambda: not grid.processes(), f"no process left: {grid.processes()}", 45.0)
