"""The standard streams: their errors differ from those of other files, and they exist though they were closed."""

import codecs
import os
import sys
from collections.abc import Iterable
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

from koalapy.cli.terminal.screen import Block


class OutputLost(OSError):
    """What a command prints cannot be written."""


def without_control_codes(text: str) -> str:
    """Return text without terminal codes: a control character as ``^[``, another one without a sign as ``?``."""
    return "".join(c if c.isprintable() or c in "\n\t\r" else _visible(c) for c in text)


def _visible(control: str) -> str:
    code = ord(control)
    return f"^{chr(code ^ 0x40)}" if code < 0x20 or code == 0x7F else "?"


class ProgramOutput:
    """Output of programs and of the daemon on standard output; on a terminal without control codes."""

    def __init__(self, *, raw: bool = False) -> None:
        """``raw``: keep control codes on a terminal, too."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if sys.stdout.isatty() and not raw else None

    def write(self, piece: bytes) -> None:
        """Write a piece. An incomplete last character is written with the next piece."""
        Block.end_all()
        self._put(piece, is_last=False)

    def copy(self, pieces: Iterable[bytes]) -> None:
        """Write all pieces, as the whole output."""
        for piece in pieces:
            self.write(piece)
        self.end()

    def end(self) -> None:
        """Write what is left of an incomplete last character."""
        self._put(b"", is_last=True)

    def _put(self, piece: bytes, *, is_last: bool) -> None:
        if self._decoder is None:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        else:
            sys.stdout.write(without_control_codes(self._decoder.decode(piece, is_last)))
            sys.stdout.flush()


class _Stream(FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error


def open_standard_streams() -> None:
    """From here on, failing to write there is an ``OutputLost``.

    Where one was closed, what is written there goes nowhere, and nothing else that is opened gets its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Other objects belong to a test, or to a program that imports this one.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(1, sys.stdout, "replace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(2, sys.stderr, "backslashreplace")


def _text(number: int, before: Any, errors: str) -> TextIOWrapper:
    raw = _Stream(number, "w", closefd=False)
    encoding = before.encoding if before is not None else "utf-8"
    # As Python has them: a terminal and standard error get whole lines at once.
    return TextIOWrapper(BufferedWriter(raw), encoding, errors, line_buffering=number == 2 or raw.isatty())


def give_up_standard_streams() -> None:
    """What is still buffered, where it cannot be written, goes nowhere, so that no complaint follows at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
