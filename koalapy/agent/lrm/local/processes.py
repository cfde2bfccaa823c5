"""Linux processes as /proc and prctl show them: trees, marks, orphans. Standard library only."""

import ctypes
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from contextlib import suppress

MARK = "LOCALD_MARK"
"""Environment variable by which processes of a local cluster are known after they have lost their parents."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
# Kernels without CONFIG_PROC_CHILDREN do not have the file.
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
_EXEC_PAUSES = [0.0003 * number for number in range(1, 11)]
"""Seconds between looks at a process that shows no environment; all different, for programs that execute in turn."""
_PATIENT_LOOK = 0.02
"""Seconds between two looks at processes that are let end by themselves."""
_NUMBERS_STAY_UNIQUE = 5.0
"""Seconds in which the kernel does not come round to a process number again."""


def adopt_orphans() -> None:
    """From now on descendants whose parents end become children of this process."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process is a descendant of another; one that has gone, or is not to be seen here, might have been.

    A process between the two may end meanwhile, and its children have another parent then.
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


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; ends it now if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def trees_of(roots: Iterable[int]) -> list[int]:
    """The processes given and all their descendants, parents first."""
    children = _children_by_kernel if _KERNEL_LISTS_CHILDREN else _children_by_scan()
    found = list(roots)
    for pid in found:
        found += children(pid)
    return found


class Adopted:
    """Finds the children of this process that it did not start itself: orphans handed to it."""

    def __init__(self) -> None:
        self._foreign: set[int] = set()
        self._fresh_until = 0.0

    def besides(self, started: Container[int]) -> list[int]:
        """All children but those ``started``."""
        children = _children_by_kernel(os.getpid()) if _KERNEL_LISTS_CHILDREN else self._scan(started)
        return [pid for pid in children if pid not in started]

    def _scan(self, started: Container[int]) -> list[int]:
        """Look only at processes not seen before: one that was not a descendant of ours never becomes a child."""
        now = time.monotonic()
        if now > self._fresh_until:  # by then a process number may have been used again
            self._foreign.clear()
        self._fresh_until = now + _NUMBERS_STAY_UNIQUE
        present = set(_all_pids())
        self._foreign &= present
        found, us = [], os.getpid()
        for pid in sorted(present - self._foreign):
            if pid not in started:
                parent = _parent_of(pid)
                if parent == us:
                    found.append(pid)
                elif parent in self._foreign or parent in (None, 0, 1):
                    self._foreign.add(pid)
        return found


def end_children(patience: float = 0.0) -> None:
    """Wait up to ``patience`` seconds for the children to end by themselves, then kill them and their descendants until
    none is left. The calling process adopts orphans: no descendant leaves it."""
    adopted, deadline = Adopted(), time.monotonic() + patience
    while _has_children():
        if time.monotonic() >= deadline:
            send(trees_of(adopted.besides(())), signal.SIGKILL)
        time.sleep(_PATIENT_LOOK)


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each; those gone or not ours are left out."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def mark_of(pid: int) -> str:
    """The mark in the environment the process was started with; empty when it has none or cannot be read."""
    name = MARK.encode() + b"="
    variables = environment_of(pid).split(b"\0")
    return next((os.fsdecode(each[len(name) :]) for each in variables if each.startswith(name)), "")


def environment_of(pid: int) -> bytes:
    """What a process was started with, as /proc has it; empty where that cannot be read.

    While it executes another program it shows a part, or nothing: its end is waited for.
    """
    shown = b""
    for pause in _EXEC_PAUSES:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                shown = file.read()
        except OSError:
            return b""
        if shown.endswith(b"\0") or not (shown or _has_memory(pid)):
            break
        time.sleep(pause)
    return shown


def is_of(pid: int, directory: str) -> bool:
    """Whether a process is that of a directory's locald, or comes from it.

    Its own mark only root can read, and that of what it forked: these are known by a part of their command line.
    """
    command = f"\0--dir\0{directory}\0".encode(errors="surrogateescape")
    return mark_of(pid).endswith(f"@{directory}") or command in _read(pid, "cmdline")


def kill_marked(directory: str, within: float, patience: float = 0.0) -> int:
    """Kill an earlier locald of a directory, and every process that it left; wait until they are gone.

    For ``patience`` seconds they are let end by themselves: a runner that ends its program finds more of it.
    Returns how many were killed. Raises ``TimeoutError`` when some stay longer than ``within`` seconds after that.
    """
    began = time.monotonic()
    deadline = began + patience + within
    killed = 0
    while marked := [pid for pid in _all_pids() if pid != os.getpid() and is_of(pid, directory)]:
        if time.monotonic() < began + patience:
            time.sleep(_PATIENT_LOOK)
            continue
        for pid in marked:
            killed += _kill_and_wait(pid, directory, deadline)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"processes of {directory} cannot be killed: {marked}")
    return killed


def _has_children() -> bool:
    """Collect the children that have ended; return whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _has_memory(pid: int) -> bool:
    """Whether there is such a process, and it is neither over nor the kernel's own."""
    pages = _read(pid, "statm").partition(b" ")[0]
    return pages not in (b"", b"0")


def _read(pid: int, name: str) -> bytes:
    """What the kernel shows of a process; nothing of one that is gone, or another account's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _kill_and_wait(pid: int, directory: str, deadline: float) -> int:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        if not is_of(pid, directory):  # the number may belong to another process by now
            return 0
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return 1
    finally:
        os.close(handle)


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _children_by_kernel(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                found += map(int, listing.read().split())
    return found


def _children_by_scan() -> Callable[[int], list[int]]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _all_pids():
        if parent := _parent_of(pid):
            children[parent].append(pid)
    return lambda pid: children.get(pid, [])


def _parent_of(pid: int) -> int | None:
    """Its number; 0 when that is of another namespace, as for what is started in a container; None: it has gone."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else None
