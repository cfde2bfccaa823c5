"""What programs print, as it comes to a terminal and to what is none."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.terminal.streams import ProgramOutput, without_control_codes
from tests.cli.conftest import TOKEN, Koala, Server
from tests.cli.terminal import Terminal

HOSTILE = "\x1b]0;title\x07\x1b[2Jred\x9b31m\x7f\u202e\tend\r\n"
SHOWN = "^[]0;title^G^[[2Jred?31m^??\tend\r\n"


@given(st.text())
def test_without_control_codes_leaves_lines_and_nothing_that_moves_a_cursor(text: str) -> None:
    shown = without_control_codes(text)
    assert all(c.isprintable() or c in "\n\t\r" for c in shown)
    assert text.isprintable() <= (shown == text)


class Screen(io.TextIOWrapper):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def shown(self) -> bytes:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@pytest.mark.parametrize(("is_terminal", "raw"), [(True, False), (True, True), (False, False)])
def test_program_output_keeps_control_codes_from_terminals_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, raw: bool
) -> None:
    monkeypatch.setattr("sys.stdout", screen := Screen(is_terminal=is_terminal))
    output, data = ProgramOutput(raw=raw), HOSTILE.encode() + "é".encode()
    for at in range(len(data)):
        output.write_piece(data[at : at + 1])
    output.write_piece(b"\xc3")
    output.finish()
    expected = f"{SHOWN}é\ufffd".encode() if is_terminal and not raw else data + b"\xc3"
    assert screen.shown() == expected


@pytest.mark.evidence("J8")
@pytest.mark.processes
def test_logs_on_a_terminal_show_control_codes_as_text_unless_raw(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "echo", "\x1b[31mred")
    environment = {"PATH": "/usr/bin:/bin", "KOALA_URL": server.url, "KOALA_TOKEN": TOKEN, "LANG": "C.UTF-8"}
    for more, shown in (((), "^[[31mred"), (("-f",), "^[[31mred"), (("--raw",), "\x1b[31mred")):
        command = [sys.executable, "-m", "koalapy.cli.main", "logs", "1", *more]
        with Terminal(command, environment) as terminal:
            terminal.expect("red")
            assert shown in terminal.printed
            assert terminal.end() == 0
