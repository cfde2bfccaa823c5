"""Read what a program writes, label it, write it to the user's files, and keep it until the agent acknowledges it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from koalapy.runner.folders import replace_file
from koalapy.runner.output_streams import LineLabels, mark_stream
from koalapy.runner.plan import FILE_PATTERN, has_file_per_rank
from koalapy.runner.session import seal_file
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runner.connections import Loop
    from koalapy.runner.plan import Plan, Role

MAX_OPEN_FILES = 64
"""Files of ranks that stay open at a time."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Follow no link that another account may have made there, and wait for no reader of a named pipe."""


class OutputFile:
    """A file in the program's working directory. In its name ``%N`` is the node, ``%r`` the rank, ``%%`` a percent."""

    def __init__(self, name: str, node: str, say: Callable[[str], None]) -> None:
        """``say`` is called with the first error of writing. ``node``: name of this node in messages."""
        self._name, self._node, self._say = name, node, say
        self.is_per_rank = has_file_per_rank(name)
        self._open: dict[int | None, int] = {}
        self._failed = False

    def path(self, rank: int | None) -> str:
        return FILE_PATTERN.sub(lambda match: {"N": self._node, "r": str(rank)}.get(match[1], "%"), self._name)

    def open(self, rank: int | None) -> None:
        """Open the file, or the rank's file if each rank has one. Raise ``Failure`` if that is not possible."""
        try:
            self._descriptor_of(rank)
        except OSError as error:
            self._failed = True
            raise Failure(f"cannot write {self.path(rank)} on {self._node}: {_reason(error)}", 126) from error

    def write(self, rank: int | None, data: bytes) -> None:
        """Append to the file. Lines without a rank are in no rank's file. Report the first error to the user."""
        if self.is_per_rank and rank is None:
            return
        try:
            descriptor = self._descriptor_of(rank)
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._say(f"{self.path(rank)} on {self._node} is incomplete: {_reason(error)}")

    def _descriptor_of(self, rank: int | None) -> int:
        """Return the descriptor of a file, opened if needed. Close the one that was opened first if there are many."""
        key = rank if self.is_per_rank else None
        if key not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[key] = os.open(self.path(rank), _FLAGS, 0o666)
        return self._open[key]


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link; name the file itself"
    if error.errno == errno.ENXIO:
        return "it is a pipe or device that nothing reads"
    return error.strerror or str(error)


READ_SIZE = 65536


class ProgramOutput:
    """The output of the program on this node: one pipe, or one for each of its two streams."""

    def __init__(self, loop: Loop, node: str, keep: Callable[[bytes], None]) -> None:
        """``keep`` is called with all output, as it is sent to the agent. ``node``: name of this node in messages."""
        self._loop, self._node, self._keep = loop, node, keep
        self._is_paused = True
        self._is_separate = False
        self._labels: LineLabels | None = None
        self._files: dict[bool, OutputFile] = {}
        """The user's file for the output, and that for the error stream, by whether it is the latter."""
        self.role: Role | None = None
        reading, self.writing = _make_pipe()
        self.error_writing = self.writing
        self._pipes = {reading: False}
        """The pipes to read, with whether each has the error stream only."""

    def prepare(self, plan: Plan) -> None:
        """Keep streams apart, label lines and write files as the component's part of the plan describes it."""
        context, self._is_separate = plan.context, plan.separates_streams
        if context.get("label"):
            self._labels = LineLabels()
        if self._is_separate:
            reading, self.error_writing = _make_pipe()
            self._pipes[reading] = True
            if not self._is_paused:
                self._watch(reading)
        for is_error, name in ((False, context["output"]), (True, context.get("error"))):
            if name:
                self._files[is_error] = OutputFile(name, self._node, self.say)
        if True not in self._files and False in self._files:
            self._files[True] = self._files[False]

    def open_files(self, rank: int) -> None:
        """Open the user's files, or this rank's files. Raise ``Failure`` if one cannot be opened."""
        for file in self._files.values():
            file.open(rank)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            for reading in self._pipes:
                self._watch(reading)

    def pause(self) -> None:
        """Read nothing more, so that the program waits."""
        if not self._is_paused:
            self._is_paused = True
            for reading in self._pipes:
                self._loop.forget(reading)

    def read_pipes(self) -> None:
        """Read all that is in the pipes."""
        for reading, is_error in self._pipes.items():
            while self._read_pipe(reading, is_error):
                pass

    def read_rest(self, *, stopped: bool) -> None:
        """Read the rest of the pipes after the program's end, and release output that is held back."""
        self.read_pipes()
        if self.role is not None:
            for is_error, rank, output in self.role.rest_of_output(stopped=stopped):
                self.add(rank, output, is_error=is_error)
        if self._labels is not None:
            for is_error, line in self._labels.take_unfinished():
                self._store(None, line, line, is_error)

    def say(self, line: str) -> None:
        """Insert a line for the user into the program's output."""
        self.add(None, f"koala: {line}\n".encode(), is_error=True)

    def add(self, rank: int | None, output: bytes, *, is_error: bool) -> None:
        """Label output of a rank, write it to the user's file, and keep it. ``rank`` is None for koalapy and mpirun."""
        shown = output if self._labels is None else self._labels.add(rank, output, is_error=is_error)
        self._store(rank, output, shown, is_error)

    def _store(self, rank: int | None, output: bytes, shown: bytes, is_error: bool) -> None:
        """Write output as it is to the file of its rank, or as it is ``shown`` to a common file and to the agent."""
        if file := self._files.get(is_error):
            file.write(rank, output if file.is_per_rank else shown)
        if shown:
            self._keep(mark_stream(shown, is_error=is_error) if self._is_separate else shown)

    def _watch(self, reading: int) -> None:
        self._loop.watch(reading, lambda _events: self._read_pipe(reading, self._pipes[reading]))

    def _read_pipe(self, reading: int, is_error: bool) -> bool:
        """Read output of the program once; return False if there is none."""
        try:
            data = os.read(reading, READ_SIZE)
        except BlockingIOError:
            return False
        ranked = [(None, data)] if self.role is None else self.role.rank_output(data, is_error=is_error)
        for rank, output in ranked:
            self.add(rank, output, is_error=is_error)
        return True


def _make_pipe() -> tuple[int, int]:
    """Return the ends of a pipe: one to read that does not block, one to write that does."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(writing, True)
    return reading, writing


CHUNK = 48 * 1024
WINDOW = 256 * 1024
"""Bytes that are sent and not acknowledged."""
MAX_KEPT = 8 * 1024 * 1024
"""Bytes of unacknowledged output, with which the program must wait."""
FILE_SIZE = 1024 * 1024
"""Bytes of a file with output that is left to the agent."""


class Output:
    """The program's output from the first byte that the agent has not acknowledged."""

    def __init__(self, path: str, secret: bytes, file_size: int = FILE_SIZE) -> None:
        """``path``: that of files for output that could not be sent. ``secret`` authenticates them."""
        self._path, self._secret, self._file_size = path, secret, file_size
        self.start = self.sent = 0
        self._kept = bytearray()
        self._saved: list[str] = []

    @property
    def total(self) -> int:
        """Return the number of bytes that the program has written."""
        return self.start + len(self._kept)

    @property
    def full(self) -> bool:
        """Whether the program must wait, since the agent is slow or unreachable."""
        return len(self._kept) > MAX_KEPT

    def append(self, data: bytes) -> None:
        self._kept += data

    def save(self) -> None:
        """Write unacknowledged output to files ``PATH.OFFSET``, as far as the disk has space."""
        for begin in range(0, len(self._kept), self._file_size):
            path = f"{self._path}.{self.start + begin}"
            data = seal_file(self._secret, os.path.basename(path), self._kept[begin : begin + self._file_size])
            try:
                replace_file(path, data, sync=False)
            except OSError:
                return
            self._saved.append(path)

    def acknowledge(self, offset: int) -> None:
        """Discard output before an offset, and the files once nothing is left."""
        if offset <= self.start:
            return
        del self._kept[: offset - self.start]
        self.start, self.sent = offset, max(self.sent, offset)
        while self._saved and not self._kept:
            with contextlib.suppress(OSError):
                os.unlink(self._saved.pop())

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) to send now: up to ``WINDOW`` bytes beyond the acknowledged output."""
        while self.sent < min(self.total, self.start + WINDOW):
            offset, begin = self.sent, self.sent - self.start
            data = bytes(self._kept[begin : begin + CHUNK])
            self.sent += len(data)
            yield offset, data
