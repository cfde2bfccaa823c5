"""The output of programs on a terminal and in a pipe."""

import io
import os
import select
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.terminal.remote_terminal import write_all
from koalapy.cli.terminal.streams import ProgramOutput, _open_text_stream, without_control_codes
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import Terminal

HOSTILE = "\x1b]0;title\x07\x1b[2Jred\x9b31m\x7f\u202e\tend\r\n"
SHOWN = "^[]0;title^G^[[2Jred?31m^??\tend\r\n"


@given(st.text())
def test_without_control_codes_keeps_lines_and_tabs(text: str) -> None:
    cleaned = without_control_codes(text)
    assert all(c.isprintable() or c in "\n\t\r" for c in cleaned)
    assert text.isprintable() <= (cleaned == text)


class Screen(io.TextIOWrapper):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def written_bytes(self) -> bytes:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@pytest.mark.parametrize(("is_terminal", "raw"), [(True, False), (True, True), (False, False)])
def test_program_output_keeps_control_codes_from_terminals_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, raw: bool
) -> None:
    monkeypatch.setattr("sys.stdout", screen := Screen(is_terminal=is_terminal))
    output, data = ProgramOutput(raw=raw), HOSTILE.encode() + "é".encode()
    for start in range(len(data)):
        output.write_piece(data[start : start + 1])
    output.write_piece(b"\xc3")
    output.finish()
    expected = f"{SHOWN}é\ufffd".encode() if is_terminal and not raw else data + b"\xc3"
    assert screen.written_bytes() == expected


def write_program_output(file: int, data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", _open_text_stream(file, sys.stdout, "replace"))
        ProgramOutput().write_all([data])


@pytest.mark.parametrize("write", [write_program_output, write_all])
def test_output_to_full_non_blocking_pipe_waits_for_reader(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], None]
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received = bytearray()
    # The reader reads only while the writer waits.
    monkeypatch.setattr(select, "select", lambda *_: received.extend(os.read(reading, 65536)))
    write(writing, data := os.urandom(300_000))
    os.close(writing)
    with open(reading, "rb") as file:
        received += file.read()
    assert received == data


@pytest.mark.evidence("J8")
@pytest.mark.processes
def test_logs_on_terminal_show_control_codes_as_text(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "echo", "\x1b[31mred")
    environment = {"PATH": "/usr/bin:/bin", "KOALA_URL": server.url, "KOALA_TOKEN": TOKEN, "LANG": "C.UTF-8"}
    for options, text in (((), "^[[31mred"), (("-f",), "^[[31mred"), (("--raw",), "\x1b[31mred")):
        command = [sys.executable, "-m", "koalapy.cli.main", "logs", "1", *options]
        with Terminal(command, environment) as terminal:
            terminal.expect("red")
            assert text in terminal.output
            assert terminal.wait_for_exit() == 0
