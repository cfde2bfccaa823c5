"""Input of clients on its way to a file of a node, in order and each byte once, and the hangup of terminals."""

import base64
import os
import re
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.connections import Loop
from koalapy.runner.exec_guard import INPUT_NAME, LAUNCHER, write_rank_script
from koalapy.runner.processes import Processes
from koalapy.runner.streams import STREAM_WINDOW, Inlet, ProgramInput, Streams, Terminal
from tests.signals import MAX_WAIT_S


@contextmanager
def make_inlet(credits: list[int]) -> Iterator[tuple[Inlet, int]]:
    """Yield an inlet to a pipe, and the end of the pipe to read from."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield Inlet(Loop(), writing, credits.append, lambda: None), reading
    finally:
        os.close(reading)
        os.close(writing)


def read_all(file: int) -> bytes:
    data = b""
    while True:
        try:
            piece = os.read(file, 65536)
        except BlockingIOError:
            return data
        if not piece:
            return data
        data += piece


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 30_000)), max_size=12))
def test_inlet_with_any_pieces_and_repetitions_passes_each_byte_once(pieces: list[tuple[int, int]]) -> None:
    """Each piece begins some bytes before the end of the last one, as after a lost connection."""
    text = os.urandom(400_000)
    credits: list[int] = []
    with make_inlet(credits) as (inlet, reading):
        passed = b""
        for size, repeated in pieces:
            offset = max(0, inlet.received - repeated)
            inlet.receive(offset, text[offset : offset + size], is_last=False)
            assert len(passed) + STREAM_WINDOW >= inlet.received
            passed += read_all(reading)
            inlet.write()
        passed += read_all(reading)
        inlet.write()
        passed += read_all(reading)
        assert passed == text[: inlet.received]
        assert credits == sorted(set(credits))
        assert (credits or [0])[-1] == inlet.received


@pytest.mark.parametrize(("offset", "size"), [(1, 1), (0, STREAM_WINDOW + 1)])
def test_inlet_with_gap_or_excess_rejects_the_piece(offset: int, size: int) -> None:
    with make_inlet([]) as (inlet, _), pytest.raises(ValueError, match="more than it was allowed to"):
        inlet.receive(offset, bytes(size), is_last=False)


def test_inlet_of_a_closed_file_discards_and_credits_input() -> None:
    credits: list[int] = []
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(reading)
    ends: list[int] = []
    inlet = Inlet(Loop(), writing, credits.append, lambda: ends.append(len(credits)))
    for start in range(0, 4 * STREAM_WINDOW, STREAM_WINDOW):
        inlet.receive(start, bytes(STREAM_WINDOW), is_last=start == 3 * STREAM_WINDOW)
    os.close(writing)
    assert credits[-1] == 4 * STREAM_WINDOW
    assert ends == [len(credits)]


@pytest.mark.processes
@pytest.mark.parametrize("size", [0, 100_000])
def test_rank_script_gives_input_to_rank_0_that_opens_it_late(tmp_path: Path, size: int) -> None:
    """The input is complete before rank 0 has opened it."""
    loop, fifo = Loop(), f"{tmp_path}/{INPUT_NAME}"
    program_input = ProgramInput(loop, lambda *_, **__: None, fifo)
    script = write_rank_script(str(tmp_path), ["wc", "-c"], {"PATH": os.environ["PATH"]}, "", str(tmp_path), fifo)
    program_input.close_reading()
    program_input.attach("s", "n1")
    program_input.receive(0, bytes(size), is_last=True)
    counts = []
    for rank in ("1", "0"):
        command, environment = ["sh", script, *LAUNCHER], {"OMPI_COMM_WORLD_RANK": rank}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                loop.set_alarm("look", 0.02, lambda: None)
                loop.turn()
            assert process.stdout is not None
            counts.append(int(process.stdout.read()))
    assert counts == [0, size]
    assert program_input.reading < 0, "the end of the program would be noticed"


class AlarmLoop(Loop):
    """A loop with alarms that the test calls."""

    def __init__(self) -> None:
        super().__init__()
        self.due: dict[str, Callable[[], None]] = {}

    def set_alarm(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        self.due[name] = callback

    def cancel_alarm(self, name: str) -> None:
        self.due.pop(name, None)


def test_terminal_repeats_end_of_input_that_a_starting_shell_discards() -> None:
    loop = AlarmLoop()
    terminal = Terminal(loop, lambda kind, **fields: None, {"stream": "s", "rows": 0, "columns": 0})
    terminal.receive(0, b"", is_last=True)
    termios.tcflush(terminal.slave, termios.TCIFLUSH)
    os.set_blocking(terminal.slave, False)
    with pytest.raises(BlockingIOError):
        os.read(terminal.slave, 1)
    for _ in range(2):
        loop.due.pop("end-s")()
        assert os.read(terminal.slave, 1) == b""
    for _ in range(10_000):  # a program that reads nothing
        loop.due.pop("end-s")()
    terminal.close()
    assert loop.due == {}


def test_terminal_of_ended_shell_whose_output_fills_the_window_ends_with_the_next_credit() -> None:
    loop, output, ends = Loop(), bytearray(), list[int]()

    def send(kind: str, **fields: Any) -> None:
        output.extend(base64.b64decode(fields.get("data", "")))
        ends.extend([fields["code"]] if kind == "stream_end" else [])

    terminal = Terminal(loop, send, {"stream": "s", "rows": 0, "columns": 0})
    terminal.grant(0)
    for size in range(1024, STREAM_WINDOW + 1, 1024):
        os.write(terminal.slave, bytes(1024))
        while len(output) < size:
            loop.turn()
    terminal.child_ended(3)
    assert ends == []
    terminal.grant(STREAM_WINDOW // 4)
    assert ends == [3]


@pytest.mark.processes
@pytest.mark.parametrize("shell_command", [["/bin/bash", "--norc"], ["/bin/dash", "-i"]])
def test_hangup_of_a_shell_ends_its_background_processes(shell_command: list[str]) -> None:
    """Also right after its prompt has appeared: two signals in a row would leave them running."""
    loop, processes = Loop(), Processes()
    received = bytearray()

    def receive(message: dict[str, Any]) -> None:
        received.extend(base64.b64decode(message["message"].get("data", "")))

    streams = Streams(loop, processes, receive, "n1", grace=MAX_WAIT_S)
    environment = {"PATH": os.defpath, "PS1": ""}
    for name in map(str, range(30)):
        order = {"type": "stream_open", "stream": name, "kind": "terminal", "rows": 0, "columns": 0, "term": ""}
        streams.receive({**order, "command": shell_command}, environment)
        typed = base64.b64encode(b"sleep 600 & PS1=pro''mpt=$!.\n").decode()
        streams.receive({"type": "stream_data", "stream": name, "offset": 0, "data": typed, "is_last": False}, None)
        received.clear()
        while not (prompt := re.search(rb"prompt=(\d+)\.", received)):
            loop.turn()
        sleep = psutil.Process(int(prompt[1]))
        streams.receive({"type": "stream_end", "stream": name}, None)
        (shell,) = streams.shells
        assert streams.child_ended(shell, os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]))
        sleep.wait(MAX_WAIT_S)
