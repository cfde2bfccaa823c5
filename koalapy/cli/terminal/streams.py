"""Standard streams with distinct errors and replacements for closed streams."""

import codecs
import os
import select
import sys
from collections.abc import Iterable
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class OutputLost(OSError):
    """An error writing to a standard stream."""


def without_control_codes(text: str) -> str:
    """Replace terminal codes: control characters by texts such as ``^[``, other unprintable characters by ``?``."""
    return "".join(c if c.isprintable() or c in "\n\t\r" else _caret_notation(c) for c in text)


def _caret_notation(control: str) -> str:
    code = ord(control)
    return f"^{chr(code ^ 0x40)}" if code < 0x20 or code == 0x7F else "?"


class ProgramOutput:
    """A writer of program and daemon output to a standard stream. On a terminal it replaces control codes."""

    def __init__(self, *, raw: bool = False, is_error: bool = False) -> None:
        """``raw``: keep control codes on a terminal. ``is_error``: write to standard error, not standard output."""
        self._stream = sys.stderr if is_error else sys.stdout
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if self._stream.isatty() and not raw else None

    def write_piece(self, piece: bytes) -> None:
        """Write a piece. An incomplete last character is written with the next piece."""
        from koalapy.cli.terminal.screen import Block  # slow to import, and most commands print no such output

        Block.end_all()
        self._put_piece(piece, is_last=False)

    def write_all(self, pieces: Iterable[bytes]) -> None:
        """Write all pieces and end the output."""
        for piece in pieces:
            self.write_piece(piece)
        self.finish()

    def finish(self) -> None:
        """Write the remaining bytes of an incomplete last character."""
        self._put_piece(b"", is_last=True)

    def _put_piece(self, piece: bytes, *, is_last: bool) -> None:
        """Write bytes at once; on a terminal, decode them and replace control codes."""
        if self._decoder is None:
            self._stream.buffer.write(piece)
            self._stream.buffer.flush()
        else:
            self._stream.write(without_control_codes(self._decoder.decode(piece, is_last)))
            self._stream.flush()


def write_some(file: int, data: Any) -> int:
    """Write bytes to a file, return how many. Wait if another program has made it non-blocking. Raise ``OSError``."""
    while True:
        try:
            return os.write(file, data)
        except BlockingIOError:
            select.select([], [file], [])


class _Stream(FileIO):
    def write(self, data: Any) -> int:
        try:
            return write_some(self.fileno(), data)
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error


def open_standard_streams() -> None:
    """Replace the standard streams, so that failed writes raise ``OutputLost``.

    Open a closed stream on the null device, so that no other file gets its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Keep other objects: they belong to a test or to a program that imports this module.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _open_text_stream(1, sys.stdout, "replace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _open_text_stream(2, sys.stderr, "backslashreplace")


def _open_text_stream(number: int, previous: Any, errors: str) -> TextIOWrapper:
    raw = _Stream(number, "w", closefd=False)
    encoding = previous.encoding if previous is not None else "utf-8"
    # As in Python, a terminal and standard error are line-buffered.
    return TextIOWrapper(BufferedWriter(raw), encoding, errors, line_buffering=number == 2 or raw.isatty())


def give_up_standard_streams() -> None:
    """Flush the standard streams, and discard buffered data that cannot be written.

    Otherwise Python would print an error at exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
