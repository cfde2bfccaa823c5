"""Starting a program's processes and ending them, with all they started themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
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


def conceal() -> None:
    """From now on nobody but root reads this process's memory; what it starts is as always."""
    if prctl is None or prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        print("koala runner: not concealed; others of its account may read its secret", file=sys.stderr)


class Processes:
    """Everything this runner started, however deep: as subreaper it inherits whatever loses its parent."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._guards: dict[int, ExecGuard] = {}
        """By the process that each traces with all below it."""
        if prctl is None or prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            print("koala runner: not a subreaper; detached processes may escape", file=sys.stderr)

    def start(self, argv: list[str], environment: dict[str, str], output: int, stdin: int | None = None) -> int:
        """Start a child in a session of its own, output and errors to ``output``; ``OSError`` when it cannot be run."""
        reading = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        actions = [
            reading if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ]
        try:
            return os.posix_spawn(
                argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=[], setsigdef=RESET_SIGNALS
            )
        except NotImplementedError:  # a Python that was built for a C library of before 2018
            return _start(argv, environment, output, stdin)

    def start_guarded(self, argv: list[str], environment: dict[str, str], output: int, guard: ExecGuard) -> int:
        """Start a child that is traced before it executes its program; ``Failure`` if this node does not allow it."""
        gate, opener = os.pipe2(os.O_CLOEXEC)
        try:
            waiting = ["/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "koala-daemon", *argv]
            pid = self.start(waiting, environment, output, gate)
            guard.attach(pid, max(argv[1:], key=len, default=""))
            self._guards[pid] = guard
            os.write(opener, b"\n")
        finally:
            os.close(gate)
            os.close(opener)
        return pid

    def reap(self) -> tuple[list[tuple[int, int]], bool]:
        """The (pid, exit code or minus signal) of children that ended, and whether any process is left."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | WAIT_FOR_THREADS)
            except ChildProcessError:
                return ended, False
            if pid == 0:
                return ended, True
            if os.WIFSTOPPED(status):
                if self._guards:  # else a child has asked itself to be traced
                    self._guard_of(pid).handle_stop(pid, status)
                continue
            ended.append((pid, os.waitstatus_to_exitcode(status)))

    def _guard_of(self, pid: int) -> ExecGuard:
        """Return the guard of a traced process; for one that has lost its parents, one that holds it."""
        parent = pid
        while parent > 1 and parent not in self._guards:
            parent = parent_of(parent)
        guards = sorted(self._guards.values(), key=lambda guard: guard.is_running)
        return self._guards.get(parent, guards[-1])

    def signal_all(self, number: int) -> None:
        """Tell every descendant; SIGTERM each but once, so that a handler is not run twice."""
        for pid in descendants(os.getpid()):
            if number == signal.SIGTERM and pid in self._told:
                continue
            self._told.add(pid)
            tell(pid, number)

    def halt(self) -> None:
        """Stop every descendant where it is, those that are started meanwhile included."""
        halted: set[int] = set()
        while found := set(descendants(os.getpid())) - halted:
            for pid in found:
                _signal(pid, signal.SIGSTOP)
            halted |= found

    def resume(self) -> None:
        """Let every descendant go on."""
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGCONT)

    def warn(self, number: int, is_starter: Callable[[int], bool]) -> None:
        """Tell every descendant but those that start the program, and whatever is above one of these."""
        parents = parents_below(os.getpid())
        spared: set[int] = set()
        for pid in filter(is_starter, parents):
            while pid in parents and pid not in spared:
                spared.add(pid)
                pid = parents[pid]
        for pid in parents.keys() - spared:
            tell(pid, number)


def tell(pid: int, number: int) -> None:
    """Signal a process, also one that was stopped; nothing if it is gone."""
    _signal(pid, number)
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _start(argv: list[str], environment: dict[str, str], output: int, stdin: int | None) -> int:
    """The same by fork and exec. Signals that have a handler get their default by that; others it resets itself."""
    import subprocess

    child = subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=output,
        stderr=output,
        close_fds=False,
        start_new_session=True,
    )
    child.returncode = 0  # whoever waits for all children takes leave of this one, too
    return child.pid


def allow_files(wanted: int, node: str) -> None:
    """Let this process, and what it starts, have so many open files at least; ``Failure`` where that is forbidden."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise Failure(
            f"this job's first node, {node}, needs {wanted} open files, and may have {hard}: raise the hard limit of "
            "its jobs (ulimit -Hn), or ask for fewer nodes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descendants(root: int) -> list[int]:
    """All processes below one, from /proc; those that come or go meanwhile may be missed."""
    return list(parents_below(root))


def parents_below(root: int) -> dict[int, int]:
    """The parent of each process below one, those above before those below them."""
    found: dict[int, int] = {}
    unseen = [root]
    while unseen:
        parent = unseen.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                    unseen += (children := [int(pid) for pid in file.read().split()])
                found.update(dict.fromkeys(children, parent))
        except OSError:
            continue
    return found


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def command_of(pid: int) -> list[str]:
    """A process's program, by the name of its file, and the words that it was started with; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
            words = file.read().split("\0")[:-1]
        return [os.path.basename(os.readlink(f"/proc/{pid}/exe")).split(" ")[0], *words]
    except OSError:
        return []


def require_program(name: str, environment: dict[str, str]) -> str:
    """Return the executable file that a command's first word names.

    Raise ``Failure`` as a shell says it: 127 for a program that is not found, 126 for a file that cannot be executed.
    """
    if path := find_program(name, environment):
        return path
    candidates = [name] if "/" in name else [os.path.join(folder, name) for folder in _folders(environment)]
    if "/" in name and os.path.isdir(name):
        raise Failure(f"cannot run {name}: it is a folder; name a file in it", 126)
    for path in candidates:
        if os.path.isfile(path):
            hint = f"chmod +x {path}, or name its interpreter before it"
            raise Failure(f"cannot run {name}: permission denied, it is not executable; {hint}", 126)
    raise Failure(f"command not found: {name}", 127)


def _folders(environment: dict[str, str]) -> list[str]:
    return environment.get("PATH", os.defpath).split(os.pathsep)


def find_program(name: str, environment: dict[str, str]) -> str | None:
    """The executable file a command's first word names, or None."""
    folders = [""] if "/" in name else _folders(environment)
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
