"""Live views on a terminal: lines drawn in place on standard error, and full-screen pages."""

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple, Self

from koalapy.cli.terminal.width import can_redraw, cut_text, terminal_size

ERASE = "\r\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Control codes that switch to the alternate screen and hide the cursor, and restore the previous content."""
BOLD, REVERSE = "1", "7"
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the command after the terminal is restored."""
KEYS = {
    sent: name
    for name, keys in {
        "enter": ("\r", "\n"),
        "tab": ("\t", "\x1b[Z"),
        "escape": ("\x1b",),
        "erase": ("\x7f", "\x08"),
        "up": ("\x1b[A", "\x1bOA"),
        "down": ("\x1b[B", "\x1bOB"),
        "page up": ("\x1b[5~",),
        "page down": ("\x1b[6~",),
        "home": ("\x1b[H", "\x1bOH", "\x1b[1~"),
        "end": ("\x1b[F", "\x1bOF", "\x1b[4~"),
    }.items()
    for sent in keys
}
"""Names of keys by the codes that terminals send."""
KEY = re.compile("\x1b[\\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


class Block:
    """Lines drawn in place on standard error, below everything printed there, until the ``with`` block ends.

    If the output cannot be redrawn, each new line is printed once. ``leaves_lines``: keep the last lines at the end.
    """

    _lock = threading.RLock()
    _current: "Block | None" = None

    def __init__(self, *, leaves_lines: bool = False) -> None:
        self.is_in_place, self._leaves_lines = can_redraw(sys.stderr), leaves_lines
        self._drawn: list[str] = []
        self._is_over = False

    def __enter__(self) -> Self:
        self._outer, Block._current = Block._current, self
        return self

    def __exit__(self, *_: object) -> None:
        if self._leaves_lines and self.is_in_place and self._drawn:
            print(file=sys.stderr, flush=True)
            self._drawn = []
        self.end()
        Block._current = self._outer

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the drawn lines, cut to the terminal. If the output cannot be redrawn, print only new lines."""
        with Block._lock, suppress(OSError):  # standard error is closed
            if self._is_over:
                return
            if self.is_in_place:
                columns, rows = terminal_size(sys.stderr) or (80, 24)
                lines = fit_lines(lines, columns - 1, rows - 1)
                if lines != self._drawn:
                    self._erase_lines()
                    sys.stderr.write("\n".join(lines))
            else:
                sys.stderr.writelines(f"{line}\n" for line in lines if line not in self._drawn)
            sys.stderr.flush()
            self._drawn = list(lines)

    def end(self) -> None:
        """Erase the lines and ignore later calls of ``draw``."""
        with Block._lock:
            self._is_over = True
            self._erase_lines()

    def _erase_lines(self) -> None:
        """Erase the drawn lines, and move the cursor to where they began."""
        if self.is_in_place and self._drawn:
            with suppress(OSError):
                up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
                sys.stderr.write(f"\r{up}\x1b[J")
                sys.stderr.flush()
            self._drawn = []

    @staticmethod
    def report(line: str) -> None:
        """Print a line on standard error above the drawn lines."""
        with Block._lock:
            if Block._current is not None:
                Block._current._erase_lines()
            print(line, file=sys.stderr, flush=True)

    @staticmethod
    def end_all() -> None:
        """End all blocks of this command, before the output of a program is printed."""
        block = Block._current
        while block is not None:
            block.end()
            block = block._outer


class Line(NamedTuple):
    """A line of a page; ``style``: ``BOLD``, ``REVERSE``, both with a semicolon, or none."""

    text: str
    style: str = ""


class _Ended(BaseException):
    """Raised when a signal ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """A full-screen page. For the main thread only, except ``end_wait``.

    The terminal is restored at the end, and while the command is suspended by Ctrl-Z.
    """

    def __init__(self, *, reads_keys: bool = False) -> None:
        self._read, self._write = -1, -1
        self._reads_keys = reads_keys
        self._old_mode: list[Any] = []
        self._is_to_stop = False

    @property
    def size(self) -> tuple[int, int]:
        """Return the columns and rows of the terminal."""
        return terminal_size(sys.stdout) or (80, 24)

    def draw_page(self, lines: Sequence[Line]) -> None:
        """Draw a page, cut to the size of the terminal."""
        columns, rows = self.size
        texts = fit_lines([line.text for line in lines], columns, rows)
        styles = [line.style for line in lines]
        styled = [f"\x1b[{style}m{text}\x1b[0m" if style else text for text, style in zip(texts, styles, strict=False)]
        _write_output("\x1b[H" + "\x1b[K\n".join(styled) + "\x1b[K\x1b[J")

    def wait_for_input(self, seconds: float) -> list[str]:
        """Wait for ``end_wait``, a key, a resize or the timeout in seconds; return the pressed keys."""
        sources = [self._read, *([0] if self._reads_keys else [])]
        ready = select.select(sources, [], [], seconds)[0]
        with suppress(BlockingIOError):
            if self._read in ready:
                os.read(self._read, 4096)
        if self._is_to_stop:
            self._is_to_stop = False
            self._suspend()
            return []
        return _read_keys() if 0 in ready else []

    def end_wait(self) -> None:
        """End ``wait_for_input``. Called from any thread."""
        with suppress(OSError):  # the pipe is full, or closed
            os.write(self._write, b"\0")

    @contextmanager
    def open_screen(self) -> Iterator["Screen"]:
        """Control the terminal while the block runs."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        woken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        old_handlers = {number: signal.signal(number, _raise_ended) for number in ENDING}
        old_handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, _ignore_signal)
        old_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._note_stop)
        ended = 0
        try:
            self._take_terminal()
            yield self
        except _Ended as end:
            ended = end.number
        finally:
            try:
                self._restore_terminal()
            finally:
                for number, handler in old_handlers.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(woken)
                os.close(self._read)
                os.close(self._write)
                self._write = -1
        if ended:
            _default_action(ended)

    def _take_terminal(self) -> None:
        """Switch to the full-screen page, and read single keys if requested."""
        if self._reads_keys:
            self._old_mode = termios.tcgetattr(0)
            tty.setcbreak(0)
        _write_output(ENTER)

    def _restore_terminal(self) -> None:
        if self._old_mode:
            termios.tcsetattr(0, termios.TCSADRAIN, self._old_mode)
        _write_output(LEAVE)

    def _note_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._is_to_stop = True

    def _suspend(self) -> None:
        """Restore the terminal, stop the process as Ctrl-Z does, and show the page when it is resumed."""
        self._restore_terminal()
        _default_action(signal.SIGTSTP)
        # The shell has resumed the command.
        signal.signal(signal.SIGTSTP, self._note_stop)
        self._take_terminal()


def fit_lines(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """Cut lines to the size of the terminal. If lines are omitted, the last line gives their number."""
    max_lines = max(2, rows)
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more lines"]
    return [cut_text(line, columns, "~") for line in lines]


def _read_keys() -> list[str]:
    """Read the names of keys, and printable characters, from the terminal."""
    try:
        data = os.read(0, 1024)
    except OSError:  # the terminal is gone
        data = b""
    if not data:
        return ["q"]
    if data.endswith(b"\x1b") and select.select([0], [], [], 0.05)[0]:
        data += os.read(0, 1024)  # further bytes of an arrow key
    return [
        KEYS.get(key, key) for key in KEY.findall(data.decode(errors="replace")) if key in KEYS or key.isprintable()
    ]


def _raise_ended(number: int, _frame: FrameType | None) -> None:
    raise _Ended(number)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal; the wakeup pipe ends ``wait_for_input``."""


def _default_action(number: int) -> None:
    """Apply the default action of a signal to this process."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _write_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
