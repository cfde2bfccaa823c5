"""Ask the runner of a job's script to start a program on the job's nodes: ``mpirun`` inside a script.

The runner writes a command ``mpirun`` that starts this file with the runner's folder as its first argument.
"""

from __future__ import annotations

import contextlib
import json
import os
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
ENDED = "mpirun: the job of this script has ended: its nodes are no longer available"


def give_up(message: str) -> NoReturn:
    """Print an error and exit as for wrong usage."""
    print(f"mpirun: {message}", file=sys.stderr)
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


def folder_to_pass(chosen: str, job_folder: str) -> str:
    """Return the folder of ranks: relative to the job's folder if it is below it, else absolute."""
    path = os.path.abspath(chosen or os.getcwd())
    if path == job_folder:
        return ""
    return path[len(job_folder) + 1 :] if path.startswith(f"{job_folder}/") else path


def print_version(runner_folder: str) -> NoReturn:
    """Execute the ``mpirun`` that runs on this node, to print its version."""
    folders = [f for f in os.environ.get("PATH", os.defpath).split(":") if not f.startswith(runner_folder)]
    prefix = os.environ.get("KOALA_MPI_PREFIX")
    for path in [f"{prefix}/bin/mpirun"] if prefix else [f"{folder}/mpirun" for folder in folders]:
        if os.access(path, os.X_OK):
            os.execv(path, [path, "--version"])
    give_up("there is no Open MPI on this node")


def main(arguments: list[str]) -> int:
    """Start a program and return its exit code."""
    runner_folder, *words = arguments
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if words[:1] in (["--version"], ["-V"]):
        print_version(runner_folder)
    parsed = Arguments(words)
    with contextlib.suppress(OSError):
        if stat.S_ISREG(mode := os.fstat(0).st_mode) or stat.S_ISFIFO(mode):
            print("mpirun: ranks get no standard input: name the file as an argument of the program", file=sys.stderr)
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
