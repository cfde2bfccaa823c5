"""The standard streams: told apart from other files where they cannot be written, and there though they were closed."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class OutputLost(OSError):
    """What a command prints cannot be written."""


@dataclass(slots=True)
class Drawn:
    """What is drawn in place on standard error, where anything is."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    erase: Callable[[], None] | None = None
    end: Callable[[], None] | None = None
    """Draws no more."""


DRAWN = Drawn()


def report(line: str) -> None:
    """Print a line on standard error, above what is drawn there."""
    with DRAWN.lock:
        if DRAWN.erase is not None:
            DRAWN.erase()
        print(line, file=sys.stderr, flush=True)


def end_drawing() -> None:
    """Something of another's is printed, over which nothing may be drawn from here on."""
    if DRAWN.end is not None:
        DRAWN.end()


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
    # Others are somebody's who looks at what is printed.
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
