"""Ask the runner of a job's script to start a program on the job's nodes: ``mpirun`` inside a script.

The runner writes a command ``mpirun`` that starts this file with the runner's folder as its first argument. For a
translated script it also writes a command ``srun``, with the argument ``--srun``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

USAGE = """\
usage: mpirun [options] PROGRAM [arguments]

Start a program on the nodes of this job, on all of its clusters.

  -n, -np N              number of ranks; default: one for each slot of the job
  -N, --ppn N            ranks on each node
  -H, --host HOST,...    only on these nodes of KOALA_NODELIST
  --hostfile FILE        only on the nodes of a file, one host a line
  --cluster NAME,...     only on the nodes of these clusters
  -x NAME[=VALUE]        pass a variable to the ranks; repeatable
  --mca NAME VALUE       pass a parameter of Open MPI to the ranks; repeatable
  --wdir FOLDER          start ranks in this folder; default: the current one
  --oversubscribe        allow more ranks than slots

Rank 0 reads the standard input, if it is a file or a pipe.
"""
NUMBERS = {
    **dict.fromkeys(("-n", "-np", "--n", "--np", "-c"), "ranks"),
    **dict.fromkeys(("-N", "-npernode", "--npernode", "-ppn", "--ppn"), "per_node"),
}
HOSTS = ("-H", "-host", "--host")
CLUSTERS = ("--cluster", "--clusters")
HOST_FILES = ("-hostfile", "--hostfile", "-machinefile", "--machinefile")
FOLDERS = ("-wdir", "--wdir", "-wd", "--wd")
PARAMETERS = ("-mca", "--mca", "--omca")
OVERSUBSCRIBE = ("-oversubscribe", "--oversubscribe")
ALREADY = ("-allow-run-as-root", "--allow-run-as-root", "-q", "--quiet")
"""Options without an effect here."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")
PREFIX = "OMPI_MCA_"
OF_SYSTEMS = ("SLURM_", "SGE_", "JOB_ID", "JOB_NAME", "NSLOTS", "NHOSTS", "PE_", "PBS_", "LSB_", "LS_SUBCWD")
"""Prefixes of the variables that a translated script has, and its ranks with it."""
NOT_OF_STEPS = ("KOALA_", "SLURM_", "SLURMD_", "BASH_", "OMPI_", "PMIX_", "PRTE_")
"""Prefixes of variables that ranks do not get as they are."""
EMPTY_PIPE_MS = 100
"""Milliseconds within which the end of an empty pipe is noticed."""
OWN_OF_NODES = ("_", "HOSTNAME", "LD_LIBRARY_PATH", "OLDPWD", "PATH", "PWD", "SHLVL", "TMPDIR")
"""Variables that each node has itself."""
OF_TASKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables of the script that ranks have with other values."""
NAME_NODE = 'export SLURMD_NODENAME="$KOALA_HOST"; exec "$@"'
ENDED = "mpirun: the job of this script has ended: its nodes are no longer available"


def give_up(message: str) -> NoReturn:
    """Print an error and exit as for wrong usage."""
    print(f"{'srun' if SRUN in sys.argv[2:3] else 'mpirun'}: {message}", file=sys.stderr)
    sys.exit(2)


class Arguments:
    """The options of a command line, and the program after them."""

    def __init__(self, arguments: list[str]) -> None:
        self._words = list(arguments)
        self.request: dict[str, Any] = {
            "ranks": None,
            "per_node": None,
            "hosts": None,
            "clusters": None,
            "oversubscribe": False,
            "must_exist": False,
            "environment": {},
            "parameters": {k: v for k, v in os.environ.items() if k.startswith(PREFIX)},
        }
        self.folder = ""
        while self._words and self._words[0].startswith("-"):
            word = self._words.pop(0)
            if word == "--":
                break
            self._read_option(word)
        if not self._words:
            give_up("no program is given: name it after the options; see mpirun --help")
        if ":" in self._words:
            give_up("several programs with : are not supported: start one mpirun for each, with & between and wait")
        self.request["command"] = self._words

    def pass_variables(self) -> None:
        """Let ranks have the variables that a translated script exports, and those of its batch systems, which Open MPI
        does not pass."""
        passed = {n: v for n, v in os.environ.items() if not n.startswith(NOT_OF_STEPS) and n not in OWN_OF_NODES}
        self.request["parameters"].update(passed)
        names = sorted(name for name in os.environ if name.startswith(OF_SYSTEMS) and name not in OF_TASKS)
        pairs = [f"{name}={os.environ[name]}" for name in names]
        if "SLURMD_NODENAME" in os.environ:
            self.request["command"] = ["/bin/sh", "-c", NAME_NODE, "mpirun", *self.request["command"]]
        self.request["command"] = ["/usr/bin/env", *pairs, *self.request["command"]]

    def _read_option(self, word: str) -> None:
        """Read one option with its value."""
        name, equals, value = word.partition("=")
        if equals and name.startswith("--"):
            self._words.insert(0, value)
            word = name
        if word in NUMBERS:
            self.request[NUMBERS[word]] = self._number(word, self._next(word))
        elif word in HOSTS:
            pairs = [host.partition(":") for host in self._next(word).split(",")]
            self.request["hosts"] = {host: self._number(word, count) if colon else None for host, colon, count in pairs}
        elif word in CLUSTERS:
            self.request["clusters"] = self._next(word).split(",")
        elif word in HOST_FILES:
            self.request["hosts"] = self._read_host_file(word, self._next(word))
        elif word in FOLDERS:
            self.folder, self.request["must_exist"] = self._next(word), True
        elif word == "-x":
            self._read_variable(self._next(word))
        elif word in PARAMETERS:
            name = self._next(word)
            self.request["environment"][PREFIX + name] = self._next(word)
        elif word in ("--map-by", "-map-by"):
            self._read_mapping(self._next(word))
        elif word in ("--bind-to", "-bind-to") and self._words[:1] == ["none"]:
            self._words.pop(0)
        elif word in OVERSUBSCRIBE:
            self.request["oversubscribe"] = True
        elif word not in ALREADY:
            give_up(f"{word} is not supported in a job's script: leave it out; see mpirun --help")

    def _next(self, option: str) -> str:
        if not self._words:
            give_up(f"{option} has no value: give one")
        return self._words.pop(0)

    def _number(self, option: str, text: str) -> int:
        if not text.isdecimal() or len(text) > 8 or int(text) == 0:
            give_up(f"{option} is {text!r}: give a number of ranks from 1")
        return int(text)

    def _read_variable(self, text: str) -> None:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            give_up(f"-x {name}: this variable is not set: export it, or give -x {name}=VALUE")
        if not name or name.startswith("KOALA_"):
            give_up(f"-x {text}: koalapy sets the variables KOALA_… on each node: use another name")
        self.request["environment"][name] = value if equals else os.environ[name]

    def _read_mapping(self, text: str) -> None:
        kind, _, rest = text.partition(":")
        number, _, unit = rest.partition(":")
        if kind == "ppr" and unit == "node":
            self.request["per_node"] = self._number("--map-by ppr", number)
        elif text not in ("slot", "core"):
            give_up(f"--map-by {text} is not supported in a job's script: use --ppn N, or leave it out")

    def _read_host_file(self, option: str, path: str) -> dict[str, int | None]:
        """Return the hosts of a file, one a line, each with its number of slots or None."""
        try:
            with open(path, encoding="utf-8") as file:
                lines = [line.partition("#")[0].split() for line in file]
        except (OSError, ValueError) as error:
            give_up(f"{option} {path}: {getattr(error, 'strerror', None) or error}")
        hosts: dict[str, int | None] = {}
        for host, *words in filter(None, lines):
            counts = [word.partition("=")[2] for word in words if word.startswith("slots=")]
            hosts[host] = self._number(f"{option}: slots", counts[0]) if counts else None
        return hosts


SRUN = "--srun"
"""First argument, besides the folder, of a call as ``srun``."""
SRUN_NUMBERS = {"--ntasks": "ranks", "--ntasks-per-node": "per_node"}
SRUN_SHORT = {
    "-n": "--ntasks",
    "-N": "--nodes",
    "-c": "--cpus-per-task",
    "-w": "--nodelist",
    "-D": "--chdir",
    "-o": "--output",
    "-e": "--error",
    "-l": "--label",
    "-J": "--job-name",
    "-u": "--unbuffered",
    "-K": "--kill-on-bad-exit",
    "-m": "--distribution",
    "-O": "--overcommit",
    "-Q": "--quiet",
    "-s": "--oversubscribe",
    "-i": "--input",
}
SRUN_FLAGS = (
    *("--label", "--unbuffered", "--exact", "--exclusive", "--overlap", "--overcommit", "--oversubscribe"),
    *("--pty", "--quiet"),
)
SRUN_IGNORED = (
    *("--unbuffered", "--exact", "--exclusive", "--overlap", "--oversubscribe", "--job-name", "--mpi", "--cpu-bind"),
    *("--cpu_bind", "--hint", "--kill-on-bad-exit", "--mem", "--mem-per-cpu", "--quiet", "--distribution"),
)
"""Options of srun without an effect here."""
SRUN_OPTIONS = (*SRUN_NUMBERS, *SRUN_SHORT.values(), *SRUN_FLAGS, *SRUN_IGNORED, "--export")
SRUN_INPUT = (
    "only task 0 gets standard input, where Slurm gives it to all: if each reads it, name the file as an argument"
)
RUN_LABELLED = (
    'exec 3>&1; code=$({ { "$@" 2>&1 3>&- 4>&-; echo $? >&4; } '
    '| sed -u "s/^/$OMPI_COMM_WORLD_RANK: /" >&3; } 4>&1); exit "$code"'
)


class SrunArguments(Arguments):
    """The options of ``srun``, and the program after them, which gets the variables of Slurm's tasks."""

    def __init__(self, arguments: list[str]) -> None:
        self._label = self._has_terminal = self.input_is_of_first = False
        self._files: dict[int, str] = {}
        """Files for output and errors, by descriptor."""
        super().__init__(arguments)
        is_one = "1" in (str(self.request["ranks"]), os.environ.get("KOALA_SLOTS"))
        self.input_is_of_first = self.input_is_of_first or is_one
        if self._has_terminal and not is_one:
            give_up("--pty is for one task: add -n 1")
        self.request["command"] = ["/bin/sh", "-c", self._task_script(), "srun", *self.request["command"]]
        self.pass_variables()
        self._open_files()

    def _task_script(self) -> str:
        """Return the shell script that gives a task its variables, and executes its program."""
        of_rank = ["PROCID=$OMPI_COMM_WORLD_RANK", "LOCALID=$OMPI_COMM_WORLD_LOCAL_RANK", "NODEID=$KOALA_NODE_INDEX"]
        of_step = ["NTASKS=$OMPI_COMM_WORLD_SIZE", "NPROCS=$OMPI_COMM_WORLD_SIZE"]
        variables = " ".join(["SLURMD_NODENAME=$KOALA_HOST", *(f"SLURM_{text}" for text in (*of_rank, *of_step))])
        return f"export {variables}; " + (RUN_LABELLED if self._label else 'exec "$@"')

    def _read_option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, equals, value = SRUN_SHORT.get(word[:2], word), word[2:], word[2:].removeprefix("=")
        if name in SRUN_FLAGS or (name == "--kill-on-bad-exit" and not equals):
            value = ""
        elif not equals:
            value = self._next(name)
        if name in SRUN_NUMBERS:
            self.request[SRUN_NUMBERS[name]] = self._number(name, value)
        elif name == "--nodes":
            self.request["nodes"] = count = self._number(name, value)
            if count > (most := os.environ.get("KOALA_NODELIST", "").count(",") + 1):
                give_up(f"--nodes is {count}, but the job has {most}: ask for fewer")
        elif name == "--nodelist":
            self.request["hosts"] = dict.fromkeys(value.split(","))
        elif name == "--cpus-per-task":
            if value != os.environ.get("SLURM_CPUS_PER_TASK", "1"):
                give_up(f"{name} is {value!r}, but the job has another: give it in the #SBATCH lines only")
        elif name == "--chdir":
            self.folder, self.request["must_exist"] = value, True
        elif name in ("--output", "--error"):
            if "%" in value.replace("%j", ""):
                give_up(f"{name} is {value!r}: only %j is supported in names of files")
            self._files[1 if name == "--output" else 2] = value.replace("%j", os.environ.get("SLURM_JOB_ID", ""))
        elif name == "--input" and value == "0":
            self.input_is_of_first = True
        elif name == "--label":
            self._label = True
        elif name == "--pty":
            self._has_terminal = True
        elif name == "--overcommit":
            self.request["oversubscribe"] = True
        elif name == "--export" and value.split(",")[0] == "ALL":
            for text in value.split(",")[1:]:
                self._read_variable(text)
        elif name not in SRUN_IGNORED:
            give_up(f"{name} is not supported in a translated script: leave it out, or use koala mpirun")

    def _open_files(self) -> None:
        """Let standard output and error be the files that the options name."""
        for descriptor, path in sorted(self._files.items()):
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            except OSError as error:
                give_up(f"{path}: {error.strerror}")
            os.dup2(file, descriptor)
            if descriptor == 1 and 2 not in self._files:
                os.dup2(file, 2)


def folder_to_pass(chosen: str, job_folder: str) -> str:
    """Return the folder of ranks: relative to the job's folder if it is below it, else absolute."""
    path = os.path.abspath(chosen or os.getcwd())
    if path == job_folder:
        return ""
    return path[len(job_folder) + 1 :] if path.startswith(f"{job_folder}/") else path


def is_ended_pipe() -> bool:
    """Return whether standard input is a pipe that was closed without data, as GNU parallel gives to each command."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return poll.poll(EMPTY_PIPE_MS) == [(0, select.POLLHUP)]


def find_input() -> str:
    """Return a path to standard input for rank 0, if it is a pipe or a file of which nothing was read; else empty.

    Rank 0 opens a file anew, so that a loop of the script that reads the same file goes on.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(0).st_mode
        if stat.S_ISFIFO(mode) and is_ended_pipe():
            return ""
        if stat.S_ISFIFO(mode) or (stat.S_ISREG(mode) and os.lseek(0, 0, os.SEEK_CUR) == 0):
            return f"/proc/{os.getpid()}/fd/0"
        if not stat.S_ISCHR(mode):
            print("mpirun: rank 0 gets no standard input: name the file as an argument of the program", file=sys.stderr)
    return ""


def print_version(runner_folder: str) -> NoReturn:
    """Execute the ``mpirun`` that runs on this node, to print its version."""
    folders = [f for f in os.environ.get("PATH", os.defpath).split(":") if not f.startswith(runner_folder)]
    prefix = os.environ.get("KOALA_MPI_PREFIX")
    for path in [f"{prefix}/bin/mpirun"] if prefix else [f"{folder}/mpirun" for folder in folders]:
        if os.access(path, os.X_OK):
            os.execv(path, [path, "--version"])
    give_up("there is no Open MPI on this node")


def open_closed_descriptors() -> None:
    """Let standard descriptors that the caller has closed be the null device, since they are passed to the runner."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets this number, the lowest free one


def main(arguments: list[str]) -> int:
    """Start a program and return its exit code."""
    open_closed_descriptors()
    runner_folder, *words = arguments
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if words[:1] in (["--version"], ["-V"]):
        print_version(runner_folder)
    parsed = SrunArguments(words[1:]) if words[:1] == [SRUN] else Arguments(words)
    if "KOALA_TRANSLATED" in os.environ and not isinstance(parsed, SrunArguments):
        parsed.pass_variables()
    parsed.request["input_file"] = find_input()
    if parsed.request["input_file"] and isinstance(parsed, SrunArguments) and not parsed.input_is_of_first:
        print(f"srun: {SRUN_INPUT}, or give --input=0", file=sys.stderr)
    try:
        with open(f"{runner_folder}/folder", encoding="utf-8", errors="surrogateescape") as file:
            parsed.request["folder"] = folder_to_pass(parsed.folder, file.read())
        connection = connect(f"{runner_folder}/calls")
    except OSError:
        print(ENDED, file=sys.stderr)
        return 1
    request = json.dumps(parsed.request).encode() + b"\n"
    with contextlib.suppress(OSError):  # the runner says why it rejects a call
        socket.send_fds(connection, [request[:1]], [1, 2])
        connection.sendall(request[1:])
    for name in SIGNALS:
        signal.signal(getattr(signal, name), lambda number, _: pass_signal(connection, number))
    return follow(connection)


def connect(path: str) -> socket.socket:
    """Connect to the runner's socket, by its folder, since a path of a socket has at most 107 characters."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.close(folder)
    return connection


def pass_signal(connection: socket.socket, number: int) -> None:
    """Let the program get a signal of this process."""
    try:
        connection.sendall(json.dumps({"signal": signal.Signals(number).name[3:]}).encode() + b"\n")
    except OSError:
        return


def follow(connection: socket.socket) -> int:
    """Print what the runner says about the program, and return its exit code."""
    with connection.makefile("rb") as lines, contextlib.suppress(OSError):
        for line in lines:
            message = json.loads(line)
            if "code" in message:
                return int(message["code"])
            print(message["say"], file=sys.stderr, flush=True)
    print(ENDED, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
