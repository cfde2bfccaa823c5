"""Read what a program writes, label it, write it to the user's files, and hand it over to be kept for the agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from koalapy.runner.output_streams import LineLabels, mark_stream
from koalapy.runner.user_files import OutputFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runner.link import Loop
    from koalapy.runner.plan import Plan, Role

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
        """Open the user's files, those of this rank if each has its own. Raise ``Failure`` if one cannot be opened."""
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

    def read_rest(self, *, stopped: bool) -> None:
        """Read what is left in the pipes after the program's end, and release what is held back."""
        for reading, is_error in self._pipes.items():
            while self._read_pipe(reading, is_error):
                pass
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
        self._loop.watch(reading, partial(self._on_readable, reading))

    def _on_readable(self, reading: int, _events: int) -> None:
        self._read_pipe(reading, self._pipes[reading])

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
