"""Hold ``mpirun`` or an MPI daemon, which other sites can direct, to this job's ranks, whatever they ask it for.

The daemon and all it forks are traced. When one of its children executes a program, the kernel stops the child before
the program's first instruction. Unless it is the shell with this job's rank script or a launch agent it is killed; else
it loses every variable that is not this site's own, so that none can load a library into the shell, and is traced no
longer.
"""

from __future__ import annotations

import errno
import os
import re
import signal

from koalapy.runner.rank_script import LAUNCHER, PER_RANK, SHELL
from koalapy.runner.settings import Failure

try:
    import ctypes
except ImportError:  # a Python built without libffi
    _libc = None
else:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    _libc.ptrace.restype = ctypes.c_long

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

PTRACE_CONT, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_LISTEN = 7, 17, 0x4206, 0x4208
PTRACE_EVENT_EXEC, PTRACE_EVENT_STOP = 4, 128
PTRACE_OPTIONS = 0x100000 | sum(1 << event for event in (1, 2, 3, PTRACE_EVENT_EXEC))
"""Report fork, vfork, clone and exec; a daemon whose runner is killed is killed, too."""
ENV_START, ENV_END = 49, 50
"""Fields of ``/proc/PID/stat``, counted from 0."""
ALLOWED = re.compile("|".join([*PER_RANK, "OPAL_PREFIX"]).encode())
MAX_REFUSALS = 10
"""Refused programs that are reported, each once: the user's output may not grow by what another site asks for."""


class ExecGuard:
    """Trace one MPI daemon. All methods must be called by the thread that started it."""

    def __init__(
        self,
        names: Collection[str],
        script: str,
        environment: Mapping[str, str],
        report_refusal: Callable[[str], None],
        launch_agents: Collection[Sequence[str]] = (),
    ) -> None:
        """``names``: a file that has one of them in its name is the daemon. ``environment`` is the daemon's.

        ``report_refusal`` is called with the name of a program that was refused. ``launch_agents`` are the first words
        of other commands that the daemon may start.
        """
        self._names = names
        self._launch_agents = [[os.fsencode(w) for w in words] for words in launch_agents]
        self._allowed = [[os.fsencode(w) for w in argv] for argv in (LAUNCHER, (SHELL, script, *LAUNCHER))]
        self._own = {os.fsencode(f"{name}={value}") for name, value in environment.items()}
        self._report_refusal = report_refusal
        self._refused: set[str] = set()
        self._starter, self._argument = 0, b""
        """The process that executes the daemon, or a script that does so or has a child do so."""
        self._daemon_pid = 0
        """0: the daemon does not run yet, but maybe a script of this site's that will start it."""

    @property
    def is_running(self) -> bool:
        """Whether the daemon runs, which is held from then on."""
        return self._daemon_pid != 0

    def attach(self, pid: int, argument: str) -> None:
        """Trace a process that is going to execute the daemon, with ``argument`` among its arguments.

        Raise ``Failure`` if this node does not allow that.
        """
        self._starter, self._argument = pid, os.fsencode(argument)
        if error := _ptrace(PTRACE_SEIZE, pid, PTRACE_OPTIONS):
            raise Failure(
                f"this node cannot hold MPI daemons that other clusters direct to the job's command "
                f"(ptrace: {os.strerror(error)}): allow processes to trace their children (kernel.yama.ptrace_scope "
                "at most 1; in a container no seccomp filter against ptrace)"
            )

    def handle_stop(self, pid: int, status: int) -> None:
        """Let a traced process or thread go on, or kill it; ``status`` is what ``waitpid`` says of its stop."""
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == PTRACE_EVENT_EXEC:
            self._handle_exec(pid)
        elif event == PTRACE_EVENT_STOP and number != signal.SIGTRAP:
            _ptrace(PTRACE_LISTEN, pid)  # it was stopped by a signal, and goes on when it is told so
        else:
            _ptrace(PTRACE_CONT, pid, 0 if event else number)

    def _handle_exec(self, pid: int) -> None:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")[:-1]
            is_daemon = any(name in os.path.basename(program) for name in self._names)
            if not self._daemon_pid and is_daemon and (pid == self._starter or self._argument in words):
                self._daemon_pid = pid
            if not self._daemon_pid or (is_daemon and pid == self._daemon_pid):  # series 5's mpirun executes prterun
                _ptrace(PTRACE_CONT, pid)
                return
            if program == os.path.realpath(SHELL) and self._may_start(words):
                self._clear_environment(pid)
                _ptrace(PTRACE_DETACH, pid)
                return
        except (OSError, ValueError):
            program = "a program"  # it was killed meanwhile, or cannot be looked at
        os.kill(pid, signal.SIGKILL)
        if program not in self._refused and len(self._refused) < MAX_REFUSALS:
            self._refused.add(program)
            self._report_refusal(program)

    def _may_start(self, words: list[bytes]) -> bool:
        """Whether a shell was given the job's rank script or a launch agent."""
        return words in self._allowed or any(words[: len(first)] == first for first in self._launch_agents)

    def _clear_environment(self, pid: int) -> None:
        """Overwrite the variables of a stopped process that are neither this site's own nor a rank's."""
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name, in parentheses, is the second field.
            fields = [b"", b"", *file.read().rpartition(b")")[2].split()]
        begin, end = int(fields[ENV_START]), int(fields[ENV_END])
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            variables = memory.read(end - begin)
            if len(variables) != end - begin:
                raise ValueError(f"the environment of process {pid} cannot be read")
            cleared = b"\0".join(
                v if v in self._own or ALLOWED.fullmatch(v.partition(b"=")[0]) else b"_" * len(v)
                for v in variables.split(b"\0")
            )
            memory.seek(begin)
            if memory.write(cleared) != len(cleared):
                raise ValueError(f"the environment of process {pid} cannot be changed")


def _ptrace(request: int, pid: int, data: int = 0) -> int:
    """Return 0, or the error's number; a process that is gone is no error."""
    if _libc is None:
        return errno.ENOSYS
    if _libc.ptrace(request, pid, None, data) != -1:
        return 0
    return 0 if ctypes.get_errno() == errno.ESRCH and request != PTRACE_SEIZE else ctypes.get_errno()
