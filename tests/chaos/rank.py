"""What every rank of a chaos job runs: it marks its own begin and end, and holds locks for as long as it lives.

``python -I -S rank.py GROUND TASK``. GROUND holds the file of marks and the folder of locks; TASK is JSON, as
``workload.py`` makes it. Standard library only: it is started thousands of times. It is the only witness that is not
koalapy itself, so it asks koalapy for nothing but names. A lock is held by the open file, hence by every process that
inherited it.
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
MOST_RANKS = 4096
"""Bytes of a job's lock file for each attempt: rank R of attempt G holds byte ``G * MOST_RANKS + R``."""
NO_INPUT = 97
"""Exit code of a rank that did not find its files."""
SHORT_LINE = 64
FLOCK = "hhqqi4x"
"""The kernel's ``struct flock``: type, whence, start, length, process."""


def line(job: str, generation: int, index: int, number: int, of: int, width: int) -> bytes:
    """One line of a rank's output, which nobody else writes."""
    said = f"{job} {generation} {index} {number}/{of} "
    return said.encode().ljust(width - 1, b".") + b"\n"


class Rank:
    """Who this is, as the runner or the resource manager says."""

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

    def lock(self, ground: str) -> None:
        """Take the node, and one's own place in the attempt; what somebody else has is trouble, to be told."""
        node = self._open(f"{ground}/{LOCKS}/node-{self.node}")
        if not _take(node, 0):
            self.trouble.append(f"node taken: {os.pread(node, 200, 0).decode(errors='replace')}")
        else:
            os.ftruncate(node, 0)
            os.pwrite(node, f"{self.job}.{self.generation}.{self.index} pid {os.getpid()}".encode(), 0)
        if self.local:
            return
        job = self._open(f"{ground}/{LOCKS}/job-{self.job}")
        first = self.generation * MOST_RANKS
        if not _take(job, first + self.index):
            self.trouble.append("rank taken: another process runs the same rank of the same attempt")
        for start, length in ((0, first), (first + MOST_RANKS, 0)):
            if (start or length) and (other := _held(job, start, length)) is not None:
                attempt, index = divmod(other, MOST_RANKS)
                self.trouble.append(f"attempt taken: rank {index} of attempt {attempt} lives")

    def mark(self, ground: str, what: str, **more: Any) -> None:
        """Append one line. One write of so few bytes at the end of a file is never mixed with another's."""
        own = {"job": self.job, "generation": self.generation, "index": self.index, "size": self.size}
        where = {"node": self.node, "host": self.host, "pid": os.getpid()}
        at = {"at": time.monotonic(), "clock": time.time()}
        text = json.dumps({"what": what, **own, **where, **at, **more}) + "\n"
        file = os.open(f"{ground}/{MARKS}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(file, text.encode())
        os.close(file)

    def _open(self, path: str) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(file, True)
        self._files.append(file)
        return file

    def lines(self) -> Iterator[bytes]:
        of, width = self.task["lines"], self.task["width"]
        return (line(self.job, self.generation, self.index, number, of, width) for number in range(1, of + 1))


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0)


def _take(file: int, start: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, start, 1))
    except OSError:
        return False
    return True


def _held(file: int, start: int, length: int) -> int | None:
    """The first byte of a range that somebody else holds; ``length`` 0 is up to the end."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length))
    kind, _, first, _, _ = struct.unpack(FLOCK, found)
    return None if kind == fcntl.F_UNLCK else max(first, start)


def main(arguments: list[str], environment: dict[str, str]) -> int:
    ground, task = arguments[0], json.loads(arguments[1])
    rank = Rank(task, environment)
    rank.lock(ground)
    rank.mark(ground, "begin", trouble=rank.trouble)
    if task.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (told := task.get("input")) and _read("input.txt") != told:
        rank.mark(ground, "end", code=NO_INPUT, lines=0)
        return NO_INPUT
    if task.get("straggler"):
        _leave_behind()
    _work(rank, ground)
    if task.get("input"):
        os.makedirs("out", exist_ok=True)
        with open(f"out/{rank.index}.txt", "w") as result:
            result.write(f"{rank.job} {rank.generation} {rank.index}")
    code = task["code"] if rank.index == task.get("fails", 0) else 0
    rank.mark(ground, "end", code=code, lines=task["lines"])
    return int(code)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return str(error)


def _leave_behind() -> None:
    """A process in a session of its own, which holds what its parent held."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()


def _work(rank: Rank, ground: str) -> None:
    """Write some lines over some time; loud ones write first, and say so."""
    task = rank.task
    seconds = task["seconds"]
    if task.get("loud"):
        rank.mark(ground, "loud")
    elif rank.index == task.get("fails", 0) and task["code"]:
        seconds *= 0.5  # before the others are through
    pause = 0.0 if task.get("loud") else seconds / (task["lines"] + 1)
    for text in rank.lines():
        time.sleep(pause)
        while text:
            text = text[os.write(1, text) :]
    time.sleep(seconds if task.get("loud") else pause)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
