"""Start a program's processes, measure their use of the node, and signal and reap them with all descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from koalapy.runner.connections import Loop
    from koalapy.runner.exec_guard import ExecGuard

try:
    import ctypes
except ImportError:  # a Python built without libffi
    prctl = None
else:
    prctl = ctypes.CDLL(None).prctl
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
WAIT_FOR_THREADS = 0x40000000
"""``__WALL``: threads of traced processes, too."""
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def forbid_dumps() -> None:
    """Let only root read the memory of this process. Its children are not affected."""
    if prctl is None or prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        print("koala runner: cannot hide its memory; processes of its account may read its secret", file=sys.stderr)


class Processes:
    """All descendants of this runner, which as subreaper adopts those that lose their parent."""

    def __init__(self) -> None:
        self._terminated: set[int] = set()
        self._guards: dict[int, ExecGuard] = {}
        """The guard of each traced process and its descendants."""
        self._cpu_time_before = _children_cpu_time()
        """Processor seconds of the children of earlier jobs."""
        self.peak_memory = 0
        """Bytes of the largest of these processes."""
        if prctl is None or prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            print("koala runner: not a subreaper; detached processes may escape", file=sys.stderr)

    def start(
        self,
        argv: list[str],
        environment: dict[str, str],
        output: int,
        stdin: int | None = None,
        errors: int | None = None,
    ) -> int:
        """Start a child in a new session, with its output and errors going to ``output``. Raise ``OSError``.

        ``errors``: another file for its errors.
        """
        reading = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        actions = [
            reading if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output if errors is None else errors, 2),
        ]
        try:
            return os.posix_spawn(
                argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=[], setsigdef=RESET_SIGNALS
            )
        except NotImplementedError:  # a Python that was built for a C library of before 2018
            return _fork_and_exec(argv, environment, (output, output if errors is None else errors), stdin)

    def start_guarded(
        self, argv: list[str], environment: dict[str, str], output: int, guard: ExecGuard, errors: int | None = None
    ) -> int:
        """Start a child that is traced from before it executes its program. Raise ``Failure`` if that is forbidden."""
        gate, opener = os.pipe2(os.O_CLOEXEC)
        try:
            waiting = ["/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "koala-daemon", *argv]
            pid = self.start(waiting, environment, output, gate, errors)
            guard.attach(pid, max(argv[1:], key=len, default=""))
            self._guards[pid] = guard
            os.write(opener, b"\n")
        finally:
            os.close(gate)
            os.close(opener)
        return pid

    def reap(self) -> tuple[list[tuple[int, int]], bool]:
        """Return (pid, exit code or minus signal) of ended children, and whether any child remains."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG | WAIT_FOR_THREADS)
            except ChildProcessError:
                return ended, False
            if pid == 0:
                return ended, True
            if os.WIFSTOPPED(status):
                if self._guards:  # else the child asked to be traced
                    self._guard_of(pid).handle_stop(pid, status)
                continue
            self.peak_memory = max(self.peak_memory, used.ru_maxrss * 1024)
            ended.append((pid, os.waitstatus_to_exitcode(status)))

    @property
    def cpu_time(self) -> float:
        """Processor seconds of all reaped processes and of those that they had reaped.

        ``wait4`` tells those of the whole process, and of its children, for each of its traced threads.
        """
        return _children_cpu_time() - self._cpu_time_before

    def _guard_of(self, pid: int) -> ExecGuard:
        """Return the guard of a traced process; any running guard for a process that has lost its parents."""
        parent = pid
        while parent > 1 and parent not in self._guards:
            parent = parent_of(parent)
        guards = sorted(self._guards.values(), key=lambda guard: guard.is_running)
        return self._guards.get(parent, guards[-1])

    def end_sessions(self, sessions: Collection[int], number: int) -> bool:
        """Signal the descendants in sessions that ``start`` has begun. Return whether there were none.

        A process keeps its session when its parent ends. Forget the guards of sessions without processes.
        """
        members = [pid for pid in descendants(os.getpid()) if _read_stat(pid, 3) in sessions]
        for pid in members:
            signal_and_continue(pid, number)
        if not members:
            for pid in sessions:
                self._guards.pop(pid, None)
        return not members

    def signal_all(self, number: int) -> None:
        """Signal every descendant, but send SIGTERM only once to each, so that its handler does not run twice."""
        for pid in descendants(os.getpid()):
            if number == signal.SIGTERM and pid in self._terminated:
                continue
            self._terminated.add(pid)
            signal_and_continue(pid, number)

    def halt(self) -> None:
        """Suspend every descendant, including those that are started during the call."""
        halted: set[int] = set()
        while running := set(descendants(os.getpid())) - halted:
            for pid in running:
                _send_signal(pid, signal.SIGSTOP)
            halted |= running

    def resume(self) -> None:
        """Resume every descendant."""
        for pid in descendants(os.getpid()):
            _send_signal(pid, signal.SIGCONT)

    def warn(self, number: int, is_starter: Callable[[int], bool]) -> None:
        """Signal every descendant except those that start the program, and the parents of these."""
        parents = parents_below(os.getpid())
        spared: set[int] = set()
        for pid in filter(is_starter, parents):
            while pid in parents and pid not in spared:
                spared.add(pid)
                pid = parents[pid]
        for pid in parents.keys() - spared:
            signal_and_continue(pid, number)


def _children_cpu_time() -> float:
    """Return the processor seconds of all reaped children of this process, with those that they had reaped."""
    from resource import RUSAGE_CHILDREN, getrusage

    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def signal_and_continue(pid: int, number: int) -> None:
    """Signal a process and resume it if it is suspended. Ignore one that has ended, or that ``sudo`` gave to root."""
    _send_signal(pid, number)
    _send_signal(pid, signal.SIGCONT)


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _fork_and_exec(argv: list[str], environment: dict[str, str], outputs: tuple[int, int], stdin: int | None) -> int:
    """Start a child without ``posix_spawn``. ``exec`` resets handled signals, and ``Popen`` the ignored ones."""
    import subprocess

    child = subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=outputs[0],
        stderr=outputs[1],
        close_fds=False,
        start_new_session=True,
    )
    child.returncode = 0  # reap() waits for it
    return child.pid


def raise_file_limit(count: int, node: str) -> None:
    """Allow this process and its children ``count`` open files. Raise ``Failure`` if the hard limit is lower."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise Failure(
            f"this job's first node, {node}, needs {count} open files, and may have {hard}: raise the hard limit of "
            "its jobs (ulimit -Hn), or ask for fewer nodes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def descendants(root: int) -> list[int]:
    """Return all processes below one, from /proc. Those that start or end during the call may be missed."""
    return list(parents_below(root))


def parents_below(root: int) -> dict[int, int]:
    """Return the parent of each process below one, parents before their children."""
    parents: dict[int, int] = {}
    pending = [root]
    while pending:
        parent = pending.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                    pending += (children := [int(pid) for pid in file.read().split()])
                parents.update(dict.fromkeys(children, parent))
        except OSError:
            continue
    return parents


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 when it is gone."""
    return _read_stat(pid, 1)


def processor_ticks(root: int) -> int:
    """Return the processor time that a process, all below it and their ended children have used, in clock ticks."""
    return sum(_read_stat(pid, field) for pid in (root, *descendants(root)) for field in range(11, 15))


def _read_stat(pid: int, field: int) -> int:
    """Return a number of ``/proc/PID/stat``; 0 when the process is gone.

    ``field``: 1 for the parent, 3 for the session, 11 to 14 for the processor time of it and its ended children.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[field])
    except (OSError, IndexError):
        return 0


def command_of(pid: int) -> list[str]:
    """Return the name of a process's program file, then its command line; nothing if the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
            arguments = file.read().split("\0")[:-1]
        return [os.path.basename(os.readlink(f"/proc/{pid}/exe")).split(" ")[0], *arguments]
    except OSError:
        return []


def require_program(name: str, environment: dict[str, str]) -> str:
    """Return the executable file that a command's first word names.

    Raise ``Failure`` as a shell says it: 127 for a program that is not found, 126 for a file that cannot be executed.
    """
    if path := find_program(name, environment):
        return path
    candidates = [name] if "/" in name else [os.path.join(folder, name) for folder in _path_folders(environment)]
    if "/" in name and os.path.isdir(name):
        raise Failure(f"cannot run {name}: it is a folder; name a file in it", 126)
    for path in candidates:
        if os.path.isfile(path):
            hint = f"chmod +x {path}, or name its interpreter before it"
            raise Failure(f"cannot run {name}: permission denied, it is not executable; {hint}", 126)
    raise Failure(f"command not found: {name}", 127)


def _path_folders(environment: dict[str, str]) -> list[str]:
    return environment.get("PATH", os.defpath).split(os.pathsep)


def find_program(name: str, environment: dict[str, str]) -> str | None:
    """Return the executable file that a command's first word names, or None."""
    folders = [""] if "/" in name else _path_folders(environment)
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def check_node() -> int:
    """Start a shell as programs of jobs are started, and print this node's name if that succeeds."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    processes = Processes()
    processes.start(["/bin/sh", "-c", "echo started"], dict(os.environ), writing)
    os.close(writing)
    with open(reading, "rb") as output:
        started = output.read() == b"started\n"
    os.wait()
    if started:
        print(f"koala-runner {socket.gethostname()}")
    return 0 if started else 1


FIRST_INTERVAL_S = 1.0
MAX_INTERVAL_S = 30.0
INTERVAL_GROWTH = 0.1
"""Interval between two readings, relative to the time for which the program has run."""
COST_FACTOR = 500.0
"""Minimum interval relative to the duration of a reading, so that readings cost at most 0.2 % of a processor."""


class UsageMeter:
    """The use of this node by the program, from the start of its first process.

    The kernel counts the processor time of all ended descendants, since this runner adopts and reaps them. The memory
    of all running processes together is read from ``/proc`` at intervals. A short program has the memory of its
    largest process, which the kernel reports at its end.
    """

    def __init__(self, loop: Loop, processes: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop, self._processes, self._clock = loop, processes, clock
        self._started_at: float | None = None
        self._peak_memory = 0

    def start(self) -> None:
        """Begin to measure. Later calls have no effect."""
        if self._started_at is None:
            self._started_at = self._clock()
            self._loop.set_alarm("usage", FIRST_INTERVAL_S, self._read_memory)

    def finish(self) -> dict[str, Any] | None:
        """Return the use of the node once all processes are reaped; None if the program never started.

        ``cpu``: processor seconds; ``seconds`` that the program ran; ``memory``: largest memory in bytes.
        """
        if self._started_at is None:
            return None
        self._loop.cancel_alarm("usage")
        return {
            "cpu": round(self._processes.cpu_time, 6),
            "seconds": round(max(0.0, self._clock() - self._started_at), 6),
            "processors": len(os.sched_getaffinity(0)),
            "memory": max(self._peak_memory, self._processes.peak_memory),
        }

    def _read_memory(self) -> None:
        """Read the memory of all processes of the program, and plan the next reading."""
        assert self._started_at is not None
        began = self._clock()
        page_size = os.sysconf("SC_PAGE_SIZE")
        self._peak_memory = max(self._peak_memory, sum(map(resident_pages, descendants(os.getpid()))) * page_size)
        now = self._clock()
        interval = min(MAX_INTERVAL_S, max(FIRST_INTERVAL_S, INTERVAL_GROWTH * (now - self._started_at)))
        self._loop.set_alarm("usage", max(interval, COST_FACTOR * (now - began)), self._read_memory)


def resident_pages(pid: int) -> int:
    """Return the pages of a process that are in memory; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
