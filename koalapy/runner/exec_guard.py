"""Let ``mpirun`` and MPI daemons, which other sites can direct, start only the job's ranks on this node.

The daemon and all it forks are traced. When one of its children executes a program, the kernel stops the child before
the program's first instruction. A child is killed unless it is the shell with this job's rank script or a launch agent.
Such a child loses every variable that is not this site's own, so that none can load a library into the shell, and is
then no longer traced.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal

from koalapy.runner.folders import replace_file
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

SHELL = "/bin/sh"
SCRIPT_NAME = "koala-rank"
INPUT_NAME, OPENED_SUFFIX = "stdin", ".opened"
"""Name of the FIFO that is rank 0's standard input, and the suffix of the file that rank 0 creates when it reads it."""
SCRIPT_VARIABLE = "KOALA_RANK_SCRIPT"
LAUNCHER = (SHELL, "-c", f'exec {SHELL} "${SCRIPT_VARIABLE}"')
"""The command that ``mpirun`` starts on every node; each node's script contains the command of its plan."""
RANK_VARIABLES = (
    *(f"PMIX_SERVER_URI{version}" for version in ("", 2, 21, 3, 31, 4, 41, 5, 51, 6, 61, 7, 71)),
    *("PMIX_BFROP_BUFFER_TYPE", "PMIX_DSTORE_21_BASE_PATH", "PMIX_DSTORE_ESH_BASE_PATH", "PMIX_GDS_MODULE"),
    *("PMIX_HOSTNAME", "PMIX_ID", "PMIX_KEEPALIVE_PIPE", "PMIX_NAMESPACE", "PMIX_PARAM_FILE_PASSED"),
    *("PMIX_PTL_MODULE", "PMIX_RANK", "PMIX_REINCARNATION", "PMIX_SECURITY_MODE", "PMIX_SERVER_TMPDIR"),
    *("PMIX_SYSTEM_TMPDIR", "PMIX_VERSION", "PRTE_LAUNCHED", "PRTE_SHARED_FS"),
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_FILE_LOCATION"),
    *("OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_TOOL_NAME", "OMPI_UNIVERSE_SIZE", "OMPI_VERSION"),
    *("OMPI_WORLD_LOCAL_SIZE", "OMPI_WORLD_SIZE", "OPAL_USER_PARAMS_GIVEN", "OPAL_SYS_PARAMS_GIVEN"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid"),
    *("OMPI_MCA_ess_base_num_procs", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_orte_app_num"),
    *("OMPI_MCA_orte_ess_node_rank", "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_hnp_uri"),
    *("OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_local_daemon_uri"),
    *("OMPI_MCA_orte_node_regex", "OMPI_MCA_orte_num_nodes", "OMPI_MCA_orte_precondition_transports"),
    *("OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_orte_top_session_dir", "OMPI_MCA_pmix"),
    "OMPI_MCA_shmem_RUNTIME_QUERY_hint",
)
"""Variables of a rank or run, the only ones that a rank takes from its MPI daemon."""
NOT_PLAIN = "*[!]A-Za-z0-9_.,:;/@%+=^~()[-]*"
"""Shell pattern of values that these variables never have."""
REFUSAL = "koala: this node starts only the command of the job: MPI_Comm_spawn and MPIPoolExecutor are not supported"


def write_rank_script(
    folder: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    workdir: str,
    source: str = "",
    binding: Sequence[str] = (),
) -> str:
    """Write the script into a folder of this run and return its path.

    ``prefix``: the folder of this node's Open MPI, which ranks need if that of ``mpirun`` was moved. An MPI daemon
    passes the script the command that it was asked to start. The script rejects any but ``LAUNCHER``, and runs the
    job's command in ``workdir``. ``source``: the standard input of rank 0, if this node has it; rank 0 marks that it
    reads a FIFO of this folder. ``binding``: lines that bind a rank to its processors.
    """
    path = f"{folder}/{SCRIPT_NAME}"
    text = _format_script(command, environment, prefix, workdir, source, binding)
    replace_file(path, os.fsencode(text), sync=False)
    return path


def _format_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    folder: str,
    source: str,
    binding: Sequence[str],
) -> str:
    """Return the shell script that runs a rank in ``folder``, with this environment and the rank's variables."""
    opened = " && ".join(f'[ "${{{i}-}}" = {shlex.quote(argument)} ]' for i, argument in enumerate(LAUNCHER, 1))
    # env takes a word with = in it for a variable. Of two values for one variable it uses the last.
    arguments = [*((SHELL, "-c", 'exec "$0" "$@"') if "=" in command[0] else ()), *command]
    variables = [f"{name}={value}" for name, value in environment.items() if name != SCRIPT_VARIABLE]
    lines = [
        f"[ $# -eq 0 ] || {{ [ $# -eq {len(LAUNCHER)} ] && {opened}; }} ||",
        f"{{ echo {shlex.quote(REFUSAL)} >&2; exit 126; }}",
        f"cd {shlex.quote(folder)} || exit 126",
        f"set -- {shlex.join([*variables, *arguments])}",
        f"not_plain={shlex.quote(NOT_PLAIN)}",
        *(
            f'case "${{{name}-}}" in ""|$not_plain) ;; *) set -- "{name}=${{{name}-}}" "$@";; esac'
            for name in RANK_VARIABLES
        ),
        *binding,
    ]
    if "OPAL_PREFIX" not in environment:
        lines.append(f'[ -z "${{OPAL_PREFIX-}}" ] || set -- {shlex.quote(f"OPAL_PREFIX={prefix}")} "$@"')
    if source:
        # The mark tells the runner that the end of the input will be noticed.
        mark = f": >{shlex.quote(source + OPENED_SUFFIX)}; " if os.path.basename(source) == INPUT_NAME else ""
        opening = f'exec <{shlex.quote(source)}; {mark}exec /usr/bin/env -i "$@"'
        lines.append(f'[ "${{OMPI_COMM_WORLD_RANK-}}" != 0 ] || {{ {opening}; }}')
    return "\n".join([*lines, 'exec /usr/bin/env -i "$@" </dev/null', ""])


PTRACE_CONT, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_LISTEN = 7, 17, 0x4206, 0x4208
PTRACE_EVENT_EXEC, PTRACE_EVENT_STOP = 4, 128
PTRACE_OPTIONS = 0x100000 | sum(1 << event for event in (1, 2, 3, PTRACE_EVENT_EXEC))
"""Report fork, vfork, clone and exec; kill the daemon if its runner is killed."""
ENV_START, ENV_END = 49, 50
"""Fields of ``/proc/PID/stat``, counted from 0."""
ALLOWED = re.compile("|".join([*RANK_VARIABLES, "OPAL_PREFIX"]).encode())
MAX_REFUSALS = 10
"""Refused programs that are reported, each once: the user's output may not grow by what another site asks for."""


class ExecGuard:
    """A tracer of one MPI daemon. All methods must be called by the thread that started it."""

    def __init__(
        self,
        names: Collection[str],
        script: str,
        environment: Mapping[str, str],
        report_refusal: Callable[[str], None],
        launch_agents: Collection[Sequence[str]] = (),
    ) -> None:
        """``names``: a file with one of them in its name is the daemon. ``environment`` is the daemon's.

        ``report_refusal`` is called with the name of a program that was refused. ``launch_agents`` are the first words
        of other commands that the daemon may start.
        """
        self._names = names
        self._launch_agents = [[os.fsencode(w) for w in arguments] for arguments in launch_agents]
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
        """Whether the daemon runs; its children are checked from then on."""
        return self._daemon_pid != 0

    def attach(self, pid: int, argument: str) -> None:
        """Trace a process that is going to execute the daemon, with ``argument`` among its arguments.

        Raise ``Failure`` if this node does not allow that.
        """
        self._starter, self._argument = pid, os.fsencode(argument)
        if error := _ptrace(PTRACE_SEIZE, pid, PTRACE_OPTIONS):
            raise Failure(
                f"this node cannot restrict MPI daemons that other clusters direct "
                f"(ptrace: {os.strerror(error)}): allow processes to trace their children (kernel.yama.ptrace_scope "
                "at most 1; in a container no seccomp filter against ptrace)"
            )

    def handle_stop(self, pid: int, status: int) -> None:
        """Let a traced process or thread go on, or kill it; ``status`` is what ``waitpid`` says of its stop."""
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == PTRACE_EVENT_EXEC:
            self._handle_exec(pid)
        elif event == PTRACE_EVENT_STOP and number != signal.SIGTRAP:
            _ptrace(PTRACE_LISTEN, pid)  # stopped by a signal, until SIGCONT
        else:
            _ptrace(PTRACE_CONT, pid, 0 if event else number)

    def _handle_exec(self, pid: int) -> None:
        """Let a traced process run an allowed program, or kill it and report the program."""
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")[:-1]
            is_daemon = any(name in os.path.basename(program) for name in self._names)
            if not self._daemon_pid and is_daemon and (pid == self._starter or self._argument in arguments):
                self._daemon_pid = pid
            if not self._daemon_pid or (is_daemon and pid == self._daemon_pid):  # mpirun of Open MPI 5 executes prterun
                _ptrace(PTRACE_CONT, pid)
                return
            is_agent = any(arguments[: len(first)] == first for first in self._launch_agents)
            if program == os.path.realpath(SHELL) and (is_agent or arguments in self._allowed):
                self._clear_environment(pid)
                _ptrace(PTRACE_DETACH, pid)
                return
        except (OSError, ValueError):
            program = "a program"  # it was killed, or cannot be inspected
        os.kill(pid, signal.SIGKILL)
        if program not in self._refused and len(self._refused) < MAX_REFUSALS:
            self._refused.add(program)
            self._report_refusal(program)

    def _clear_environment(self, pid: int) -> None:
        """Overwrite the variables of a stopped process that neither this site sets nor a rank needs."""
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
    """Return 0, or the error's number; a process that is gone is not an error."""
    if _libc is None:
        return errno.ENOSYS
    if _libc.ptrace(request, pid, None, data) != -1:
        return 0
    return 0 if ctypes.get_errno() == errno.ESRCH and request != PTRACE_SEIZE else ctypes.get_errno()
