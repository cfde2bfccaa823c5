"""A page that is drawn again and again in its place on a terminal; the terminal is as it was afterwards."""

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from koalapy.cli.terminal.width import cut, terminal_size

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To a page of the terminal's own without a cursor, and back to what stood there before."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the command, whose terminal must not stay as it is then."""


class _Ended(BaseException):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """A whole terminal for one page. For the main thread only, but for ``wake``.

    Ctrl-Z gives the terminal back for as long as it takes, and so does every end.
    """

    def __init__(self) -> None:
        self._read, self._write = -1, -1
        self._is_to_stop = False

    def show(self, head: str, lines: Sequence[str]) -> None:
        """Draw a page, as much of it as has room."""
        columns, rows = terminal_size(sys.stdout) or (80, 24)
        shown = fitting([head, *lines], columns, rows)
        _print("\x1b[H" + "\x1b[K\n".join(shown) + "\x1b[K\x1b[J")

    def wait(self, seconds: float) -> None:
        """Until somebody wakes it, the terminal has another size or is back, or so much time has passed."""
        with suppress(BlockingIOError):
            if select.select([self._read], [], [], seconds)[0]:
                os.read(self._read, 4096)
        if self._is_to_stop:
            self._is_to_stop = False
            self._stop()

    def wake(self) -> None:
        """There is something new to show; from whatever thread."""
        with suppress(OSError):  # it is awake already, or over
            os.write(self._write, b"\0")

    @contextmanager
    def open(self) -> Iterator["Screen"]:
        """The terminal is this page's meanwhile."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        woken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        before = {number: signal.signal(number, _end) for number in ENDING}
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, _nothing)
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._note_stop)
        ended = 0
        try:
            _print(ENTER)
            yield self
        except _Ended as end:
            ended = end.number
        finally:
            try:
                _print(LEAVE)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(woken)
                os.close(self._read)
                os.close(self._write)
                self._write = -1
        if ended:
            _as_without_us(ended)

    def _note_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._is_to_stop = True

    def _stop(self) -> None:
        _print(LEAVE)
        _as_without_us(signal.SIGTSTP)
        # Here it goes on when the shell says so.
        signal.signal(signal.SIGTSTP, self._note_stop)
        _print(ENTER)


def fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """As much as has room: no line goes on in the next one, and what is left out is counted."""
    most = max(2, rows)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"and {len(lines) - most + 1} more lines"]
    return [cut(line, columns, "~") for line in lines]


def _end(number: int, _frame: FrameType | None) -> None:
    raise _Ended(number)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """The signal is noticed by what it writes to the pipe."""


def _as_without_us(number: int) -> None:
    """Have a signal do what it does to a command that does not know it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
