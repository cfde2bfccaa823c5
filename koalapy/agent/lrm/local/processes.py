"""Find, signal and end Linux processes through /proc and prctl. Standard library only."""

import ctypes
import os
import signal
import time
from collections.abc import Container, Iterable
from contextlib import suppress

MARK = "LOCALD_MARK"
"""Environment variable that identifies processes of an embedded cluster after they have lost their parents.

Its value ends with ``@`` and the cluster's directory.
"""
LOCK_FILE = "locald.pid"
SOCKET_NAME = "locald.sock"
"""Names in the cluster's directory: of the file that locald and its keeper hold locked, and of locald's socket."""
CANNOT_RUN = 2
HELD_BY_ANOTHER = 3
"""Exit codes of locald: it cannot run as asked; another one holds the directory."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_MAX_ENVIRONMENT = 4 << 20
_EXEC_PAUSES_S = [0.0003 * number for number in range(1, 11)]
"""Pauses between looks at a process that shows no environment. They differ, for programs that exec at a fixed rate."""
_POLL_INTERVAL_S = 0.02


def adopt_orphans() -> None:
    """Make this process the parent of all descendants that lose their own parent from now on."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends; end it now if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def redirect_streams(output: str, mode: int) -> None:
    """Read standard input from /dev/null, and append standard output and error to a file. Raise ``OSError``."""
    null = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    for target, source in ((0, null), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.close(null)
    os.close(sink)


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is a descendant of another; True for one that has gone or has no visible id.

    A process between the two may end at any time, which gives its children another parent.
    """
    if pid == 0:
        return True
    line = [pid]
    while line[-1] > 1 and line[-1] != ancestor:
        parent = _parent_of(line[-1])
        if len(line) > 1 and _parent_of(line[-2]) != line[-1]:
            line.pop()
        elif parent is None:
            return True
        else:
            line.append(parent)
    return line[-1] == ancestor


def process_trees(roots: Iterable[int]) -> list[int]:
    """Return these processes and all their descendants, parents first."""
    pids = list(roots)
    for pid in pids:
        pids += _children_of(pid)
    return pids


def find_orphans(started: Container[int]) -> list[int]:
    """Return the children of this process that it did not start, but adopted when their parents ended."""
    return [pid for pid in _children_of(os.getpid()) if pid not in started]


def end_children(grace_s: float = 0.0) -> None:
    """Wait up to ``grace_s`` for children to end, then kill them and their descendants until none is left.

    The calling process must adopt orphans, so that no descendant escapes.
    """
    deadline = time.monotonic() + grace_s
    while _reap_children():
        if time.monotonic() >= deadline:
            send_signal(process_trees(find_orphans(())), signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)


def _reap_children() -> bool:
    """Collect the children that have ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes; skip those that are gone or belong to another account."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def read_mark(pid: int) -> str:
    """Return the mark of a process: the variable in its environment that names job, node and cluster.

    Return an empty text if there is none or it cannot be read.
    """
    prefix = MARK.encode() + b"="
    variables = read_environment(pid).split(b"\0")
    return next((os.fsdecode(entry[len(prefix) :]) for entry in variables if entry.startswith(prefix)), "")


def read_owner(pid: int) -> int | None:
    """Return the real user id of a process; None if it is gone."""
    fields = _read(pid, "status").partition(b"\nUid:")[2].split(maxsplit=1)
    return int(fields[0]) if fields else None


def read_environment(pid: int) -> bytes:
    """Return a process's initial environment as /proc has it; empty if it cannot be read.

    During an exec the kernel shows a part of it or nothing: wait until that is over.
    """
    environment = b""
    for pause in _EXEC_PAUSES_S:
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                environment = file.read(_MAX_ENVIRONMENT) or b""  # at once: between two reads an exec may cut it
        except OSError:
            return b""
        # A process without memory is a zombie or the kernel's own.
        has_memory = _read(pid, "statm").partition(b" ")[0] not in (b"", b"0")
        if environment.endswith(b"\0") or not (environment or has_memory):
            break
        time.sleep(pause)
    return environment


def _children_of(pid: int) -> list[int]:
    """Return the ids of a process's children as the kernel lists them; none if the process is gone."""
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                children += map(int, listing.read().split())
    return children


def _parent_of(pid: int) -> int | None:
    """Return the parent's id; 0 if that is in another namespace, as in a container; None if the process is gone."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else None


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty for a process that is gone or belongs to another account."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
