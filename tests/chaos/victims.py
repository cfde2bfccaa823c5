"""Finding the processes of one grid, and only those, and sending them signals."""

import json
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
    """A process that was seen to belong to the grid, by what it is held by: its number cannot become another's."""

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
    def alive(self) -> bool:
        return not select.select([self.handle], [], [], 0)[0]

    def close(self) -> None:
        os.close(self.handle)


def victim(kind: str, pid: int, directory: Path, cluster: str = "") -> Victim | None:
    """None when it is gone, or not of this grid."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if belongs(pid, directory):
        return Victim(kind, pid, handle, cluster)
    os.close(handle)
    return None


def belongs(pid: int, directory: Path) -> bool:
    """Whether a process names the grid's folder in its command line or environment."""
    return any(str(directory).encode() in _read(pid, what) for what in ("cmdline", "environ"))


def agents(daemon: int, directory: Path) -> list[Victim]:
    """Children of the daemon; those that just begin count from when they are ``koala agent``."""
    found = [(child.pid, _words(child)) for child in _children(daemon)]
    named = [(pid, cluster) for pid, words in found if "agent" in words for cluster in CLUSTERS if cluster in words]
    return _victims("agent", named, directory)


def managers(directory: Path) -> list[Victim]:
    """The resource managers, by the files that tell where they are."""
    named = []
    for cluster in CLUSTERS:
        with suppress(OSError, ValueError, KeyError):
            told = json.loads((directory / "clusters" / cluster / "lrm" / "locald.json").read_text())
            named.append((int(told["pid"]), cluster))
    return _victims("lrm", named, directory)


def runners(directory: Path) -> list[Victim]:
    """Children of the resource managers that are copies of them: orphans that they adopted are not."""
    found: list[tuple[int, str]] = []
    for manager in managers(directory):
        own = [child.pid for child in _children(manager.pid) if any("locald.py" in word for word in _words(child))]
        found += [(pid, manager.cluster) for pid in own]
        manager.close()
    return _victims("runner", found, directory)


def mpi_daemons(directory: Path) -> list[Victim]:
    """``mpirun`` and the MPI daemons, wherever below the runners."""
    found: list[tuple[int, str]] = []
    for runner in runners(directory):
        below = _children(runner.pid, all_below=True)
        found += [(process.pid, runner.cluster) for process in below if _name(process) in MPI]
        runner.close()
    return _victims("mpi", found, directory)


def _victims(kind: str, named: list[tuple[int, str]], directory: Path) -> list[Victim]:
    found = (victim(kind, pid, directory, cluster) for pid, cluster in sorted(named))
    return [one for one in found if one is not None]


def everything(directory: Path) -> dict[int, str]:
    """All processes of the grid that are left, zombies apart, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and belongs(process.pid, directory):
            found[process.pid] = " ".join(_words(process) or [_name(process)])[:200]
    return found


def kill_all(directory: Path, within: float = 10.0) -> None:
    """Nothing of the grid outlives those who made it, whatever happened."""
    end = time.monotonic() + within
    while (left := everything(directory)) and time.monotonic() < end:
        for pid in left:
            if found := victim("", pid, directory):
                found.signal(signal.SIGKILL)
                found.close()
        time.sleep(0.1)


def _children(pid: int, *, all_below: bool = False) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=all_below)
    return []


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""
