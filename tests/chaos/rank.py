"""The program of every rank: it writes marks of its begin and end, and holds locks until it ends.

``python -I -S rank.py GROUND TASK``. GROUND holds the file of marks and the folder of locks; TASK is JSON, as
``workload.py`` makes it. It uses only the standard library, since it is started thousands of times. It is the only
witness other than koalapy itself, so it takes nothing from koalapy but names. An open file holds a lock, hence every
process that inherited the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MARKS = "marks"
LOCKS = "locks"
MAX_RANKS = 4096
"""Bytes of a job's lock file for each attempt: rank R of attempt G holds byte ``G * MOST_RANKS + R``."""
NO_INPUT = 97
"""Exit code of a rank without its input file."""
SHORT_LINE = 64
FLOCK = "hhqqi4x"
"""The kernel's ``struct flock``: type, whence, start, length, process."""


def format_line(job: str, generation: int, index: int, number: int, line_count: int, width: int) -> bytes:
    """Return a line of output that is unique to a rank."""
    prefix = f"{job} {generation} {index} {number}/{line_count} "
    return prefix.encode().ljust(width - 1, b".") + b"\n"


class Rank:
    """The identity of this rank, given by the runner or the resource manager."""

    def __init__(self, task: dict[str, Any], environment: dict[str, str]) -> None:
        self.task = task
        self.local = task.get("local", "")
        self.job = self.local or environment["KOALA_JOB"]
        self.generation = 0 if self.local else int(environment["KOALA_GENERATION"])
        index = "LOCALD_NODE_INDEX" if self.local else "KOALA_NODE_INDEX"
        self.index = int(environment.get("OMPI_COMM_WORLD_RANK", environment[index]))
        self.size = int(task["size"]) if self.local else int(environment["KOALA_NODES"])
        self.node = environment["LOCALD_NODE_NAME"] if self.local else environment["KOALA_NODE"]
        self.host = environment["LOCALD_NODE"] if self.local else environment["KOALA_HOST"]
        self.trouble: list[str] = []
        self._files: list[int] = []

    def lock(self, folder: str) -> None:
        """Lock the node and the rank in the attempt; record locks of other processes as trouble."""
        node = self._open(f"{folder}/{LOCKS}/node-{self.node}")
        if not _lock_byte(node, 0):
            self.trouble.append(f"node taken: {os.pread(node, 200, 0).decode(errors='replace')}")
        else:
            os.ftruncate(node, 0)
            os.pwrite(node, f"{self.job}.{self.generation}.{self.index} pid {os.getpid()}".encode(), 0)
        if self.local:
            return
        job = self._open(f"{folder}/{LOCKS}/job-{self.job}")
        first = self.generation * MAX_RANKS
        if not _lock_byte(job, first + self.index):
            self.trouble.append("rank taken: another process runs the same rank of the same attempt")
        for start, length in ((0, first), (first + MAX_RANKS, 0)):
            if (start or length) and (locked_byte := _find_locked_byte(job, start, length)) is not None:
                attempt, index = divmod(locked_byte, MAX_RANKS)
                self.trouble.append(f"attempt taken: rank {index} of attempt {attempt} lives")

    def mark(self, folder: str, event: str, **fields: Any) -> None:
        """Append one mark. A single write of few bytes is not mixed with those of other processes."""
        identity = {"job": self.job, "generation": self.generation, "index": self.index, "size": self.size}
        location = {"node": self.node, "host": self.host, "pid": os.getpid()}
        times = {"time_s": time.monotonic(), "clock": time.time()}
        text = json.dumps({"event": event, **identity, **location, **times, **fields}) + "\n"
        file = os.open(f"{folder}/{MARKS}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(file, text.encode())
        os.close(file)

    def _open(self, path: str) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(file, True)
        self._files.append(file)
        return file

    def lines(self) -> Iterator[bytes]:
        line_count, width = self.task["lines"], self.task["width"]
        return (
            format_line(self.job, self.generation, self.index, number, line_count, width)
            for number in range(1, line_count + 1)
        )


def _pack_flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0)


def _lock_byte(file: int, start: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_WRLCK, start, 1))
    except OSError:
        return False
    return True


def _find_locked_byte(file: int, start: int, length: int) -> int | None:
    """Return the first byte of a range that another process locks; ``length`` 0 is up to the end."""
    lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _pack_flock(fcntl.F_WRLCK, start, length))
    kind, _, first, _, _ = struct.unpack(FLOCK, lock)
    return None if kind == fcntl.F_UNLCK else max(first, start)


def main(arguments: list[str], environment: dict[str, str]) -> int:
    folder, task = arguments[0], json.loads(arguments[1])
    rank = Rank(task, environment)
    rank.lock(folder)
    rank.mark(folder, "begin", trouble=rank.trouble)
    if task.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (content := task.get("input")) and _read("input.txt") != content:
        rank.mark(folder, "end", code=NO_INPUT, lines=0)
        return NO_INPUT
    if task.get("straggler"):
        _fork_straggler()
    _write_lines(rank, folder)
    if task.get("input"):
        os.makedirs("out", exist_ok=True)
        with open(f"out/{rank.index}.txt", "w") as result:
            result.write(f"{rank.job} {rank.generation} {rank.index}")
    code = task["code"] if rank.index == task.get("fails", 0) else 0
    rank.mark(folder, "end", code=code, lines=task["lines"])
    return int(code)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return str(error)


def _fork_straggler() -> None:
    """Fork a process in a new session, which inherits the locks."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()


def _write_lines(rank: Rank, folder: str) -> None:
    """Write lines at intervals; a loud rank writes all of them first, after a mark."""
    task = rank.task
    seconds = task["seconds"]
    if task.get("loud"):
        rank.mark(folder, "loud")
    elif rank.index == task.get("fails", 0) and task["code"]:
        seconds *= 0.5  # before the other ranks end
    pause = 0.0 if task.get("loud") else seconds / (task["lines"] + 1)
    for text in rank.lines():
        time.sleep(pause)
        while text:
            text = text[os.write(1, text) :]
    time.sleep(seconds if task.get("loud") else pause)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
