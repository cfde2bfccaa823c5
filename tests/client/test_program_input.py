"""Input of ``koala run`` over connections that break."""

import os
import queue
import threading
from typing import Any, cast

import pytest

from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.node_stream import NodeStream
from koalapy.client.program_input import ProgramInput
from koalapy.runner.streams import STREAM_WINDOW

DEADLINE_S = 60.0


class Program:
    """A daemon with one program, which keeps the bytes read from all connections."""

    def __init__(self, *connections: int) -> None:
        """``connections``: the number of bytes after which each connection breaks; the last one does not."""
        self.read = bytearray()
        self.ended = threading.Event()
        self.rejects = False
        self._connections = list(connections)

    def clone_for_thread(self) -> Client:
        return cast(Client, self)

    def open_stream(self, job: int, kind: str) -> NodeStream:
        if self.ended.is_set() or self.rejects:
            raise GridError("job 7 is already succeeded", Exit.NOT_ALLOWED)
        return cast(NodeStream, FakeStream(self, self._connections.pop(0) if self._connections else None))


class FakeStream:
    """A connection of which the program reads all received bytes at once, until it breaks."""

    def __init__(self, program: Program, breaks_after: int | None) -> None:
        self._program, self._left = program, breaks_after
        self.opened = {"opened": "n1", "cluster": "north", "used": len(program.read)}
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._offset = len(program.read)

    def send_input(self, data: bytes) -> None:
        assert len(data) <= STREAM_WINDOW
        taken = data if self._left is None else data[: self._left]
        self._program.read += taken
        if self._left is not None:
            self._left -= len(taken)
        if self._left == 0:  # its credit for the last bytes is lost, too
            self._messages.put(None)
            raise ConnectionError("it broke")
        self._messages.put({"credit": len(self._program.read)})

    def send_message(self, **fields: object) -> None:
        assert fields == {"end_of_input": True}
        self._program.ended.set()

    def receive(self) -> dict[str, Any]:
        if (message := self._messages.get(timeout=DEADLINE_S)) is None:
            raise ConnectionError("it broke")
        return message

    def close(self) -> None:
        self._messages.put(None)


def start_input(program: Program, file: int | None, problems: list[str]) -> ProgramInput:
    sender = ProgramInput(program.clone_for_thread(), 7, file, problems.append, retry_delay_s=0.0)
    sender.start()
    return sender


@pytest.mark.parametrize("connections", [(), (1,), (10_000, 1, 70_000, 300_000)])
def test_input_over_broken_connections_is_read_once(connections: tuple[int, ...]) -> None:
    text = os.urandom(600_000)
    reading, writing = os.pipe()
    program, problems = Program(*connections), list[str]()
    sender = start_input(program, reading, problems)
    with open(writing, "wb") as file:
        file.write(text)
    assert program.ended.wait(DEADLINE_S)
    sender.close()
    assert (bytes(program.read), problems) == (text, [])
    os.close(reading)


def test_input_of_non_blocking_file_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pieces, read = [b"first", b"second"], os.read

    def read_before_written(file: int, size: int) -> bytes:
        try:
            return read(file, size)
        except BlockingIOError:
            os.write(writing, pieces.pop(0)) if pieces else os.close(writing)
            raise

    monkeypatch.setattr(os, "read", read_before_written)
    program, problems = Program(), list[str]()
    sender = start_input(program, reading, problems)
    assert program.ended.wait(DEADLINE_S)
    sender.close()
    assert (bytes(program.read), problems) == (b"firstsecond", [])
    os.close(reading)


def test_input_of_a_program_that_was_started_again_is_reported() -> None:
    reading, writing = os.pipe()
    program, lost = Program(5), threading.Event()
    problems: list[str] = []

    def fail(problem: str) -> None:
        problems.append(problem)
        lost.set()

    sender = ProgramInput(program.clone_for_thread(), 7, reading, fail, retry_delay_s=0.0)
    program.read += b"abc"  # the first connection goes on after these, which are of another client
    sender.start()
    assert lost.wait(DEADLINE_S)
    assert problems == ["the program was started again, and its first input is lost"]
    sender.close()
    os.close(reading)
    os.close(writing)
