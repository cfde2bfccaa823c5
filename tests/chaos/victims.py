"""Find the processes of one grid, and send signals to them."""

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.workload import CLUSTERS

MPI = ("prted", "orted", "prterun", "mpirun")


@dataclass(frozen=True)
class Victim:
    """A process of the grid, held by a file descriptor so that its id cannot be reused."""

    kind: str
    pid: int
    handle: int
    cluster: str = ""

    def signal(self, number: signal.Signals) -> bool:
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def is_alive(self) -> bool:
        return not select.select([self.handle], [], [], 0)[0]

    def close(self) -> None:
        os.close(self.handle)


def open_victim(kind: str, pid: int, directory: Path, cluster: str = "") -> Victim | None:
    """Return the process as a victim, or None if it has ended or is not of this grid."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if is_of_grid(pid, directory):
        return Victim(kind, pid, handle, cluster)
    os.close(handle)
    return None


def is_of_grid(pid: int, directory: Path) -> bool:
    """Tell whether a process names the grid's folder in its command line or environment."""
    return any(str(directory).encode() in _read(pid, file) for file in ("cmdline", "environ"))


def find_agents(daemon: int, directory: Path) -> list[Victim]:
    """Return the agents: children of the daemon that execute ``koala agent``."""
    commands = [(child.pid, _read_arguments(child)) for child in _list_children(daemon)]
    agents = [
        (pid, cluster)
        for pid, arguments in commands
        if "agent" in arguments
        for cluster in CLUSTERS
        if cluster in arguments
    ]
    return _open_victims("agent", agents, directory)


def find_resource_managers(directory: Path) -> list[Victim]:
    """Return the resource managers, by the ids in their state files."""
    managers = []
    for cluster in CLUSTERS:
        with suppress(OSError, ValueError, KeyError):
            pid = (directory / "clusters" / cluster / "lrm" / "locald.pid").read_text()
            managers.append((int(pid), cluster))
    return _open_victims("lrm", managers, directory)


def find_runners(directory: Path) -> list[Victim]:
    """Return the runners: children of the resource managers with their command line, unlike adopted orphans."""
    runners: list[tuple[int, str]] = []
    for manager in find_resource_managers(directory):
        copies = [
            child.pid
            for child in _list_children(manager.pid)
            if any("locald.py" in argument for argument in _read_arguments(child))
        ]
        runners += [(pid, manager.cluster) for pid in copies]
        manager.close()
    return _open_victims("runner", runners, directory)


def find_mpi_daemons(directory: Path) -> list[Victim]:
    """Return the ``mpirun`` processes and MPI daemons below the runners."""
    daemons: list[tuple[int, str]] = []
    for runner in find_runners(directory):
        descendants = _list_children(runner.pid, all_below=True)
        daemons += [(process.pid, runner.cluster) for process in descendants if _read_name(process) in MPI]
        runner.close()
    return _open_victims("mpi", daemons, directory)


def _open_victims(kind: str, processes: list[tuple[int, str]], directory: Path) -> list[Victim]:
    victims = (open_victim(kind, pid, directory, cluster) for pid, cluster in sorted(processes))
    return [candidate for candidate in victims if candidate is not None]


def list_processes(directory: Path) -> dict[int, str]:
    """Return the command lines of all processes of the grid by id, without zombies."""
    processes = {}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and is_of_grid(process.pid, directory):
            processes[process.pid] = " ".join(_read_arguments(process) or [_read_name(process)])[:200]
    return processes


def kill_all(directory: Path, timeout_s: float = 10.0) -> None:
    """Kill all processes of the grid."""
    end = time.monotonic() + timeout_s
    while (remaining := list_processes(directory)) and time.monotonic() < end:
        for pid in remaining:
            if process := open_victim("", pid, directory):
                process.signal(signal.SIGKILL)
                process.close()
        time.sleep(0.1)


def _list_children(pid: int, *, all_below: bool = False) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=all_below)
    return []


def _read_arguments(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _read_name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""
