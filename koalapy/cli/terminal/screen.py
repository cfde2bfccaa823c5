"""Text that fits a terminal, and live views on it.

A ``Block`` draws lines in place on standard error, such as the ``Progress`` of a long operation. A ``Feed`` follows the
daemon's responses for ``--watch``. East Asian characters take two columns, combining accents none.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import IO, TYPE_CHECKING, Generic, NoReturn, Self, TextIO, TypeVar

from koalapy.cli.terminal.text import cut_text, terminal_size
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.wording import format_bytes, format_duration

if TYPE_CHECKING:
    from koalapy.client.client import Client

WITHOUT_CURSOR = ("", "dumb", "unknown")
"""Values of ``TERM`` for terminals without cursor movement."""


def can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with cursor movement, so that text can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "") not in WITHOUT_CURSOR


ERASE = "\r\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Control codes that switch to the alternate screen and hide the cursor, and restore the previous content."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the command after the terminal is restored."""


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


@contextmanager
def full_screen() -> Iterator[None]:
    """Use the alternate screen of the terminal while the block runs. For the main thread only.

    The previous screen is restored at the end, if a signal ends the command, and while Ctrl-Z suspends it.
    """

    def restore_screen(number: int, _frame: FrameType | None) -> None:
        _write_codes(LEAVE)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # The shell has resumed the command.
        signal.signal(number, restore_screen)
        _write_codes(ENTER)

    old_handlers = {number: signal.signal(number, restore_screen) for number in (*ENDING, signal.SIGTSTP)}
    _write_codes(ENTER)
    try:
        yield
    finally:
        _write_codes(LEAVE)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _write_codes(codes: str) -> None:
    """Write control codes without a buffer, which the code that a signal interrupts may be writing to."""
    with suppress(OSError):  # the terminal is gone
        os.write(1, codes.encode())


def draw_page(lines: Sequence[str]) -> None:
    """Draw a page on the full screen, cut to the size of the terminal."""
    columns, rows = terminal_size(sys.stdout) or (80, 24)
    text = "\x1b[K\n".join(fit_lines(lines, columns, rows))
    # Without a buffer: what Ctrl-C leaves in one would be printed after the previous screen is restored.
    os.write(1, f"\x1b[H{text}\x1b[K\x1b[J".encode(sys.stdout.encoding, "replace"))


def fit_lines(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """Cut lines to the size of the terminal. If lines are omitted, the last line gives their number."""
    max_lines = max(2, rows)
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more lines"]
    return [cut_text(line, columns, "~") for line in lines]


T = TypeVar("T")
TICK_S = 1.0
"""Interval for redrawing a page, since it may contain the current time."""
MAX_PAUSE_S = 15.0
"""Maximum time between two requests."""
MAX_LOAD = 0.1
"""Maximum fraction of the time that the daemon spends on requests of this command."""
SILENCE_S = 30.0
"""Time without data after which a stream of events is dead. The daemon sends data every ten seconds."""
STALE_AFTER_S = 20.0
"""Age from which a page shows its age, even without an error."""


class Feed(Generic[T]):
    """The latest response of the daemon to a request, with its age and the reason why there is no newer one.

    A thread repeats the request when the daemon announces a change, or every few seconds if the daemon announces none.
    It waits for an unreachable daemon without limit.
    """

    def __init__(self, client: "Client", look: "Callable[[Client], T]", wake: Callable[[], None]) -> None:
        """Send the first request and raise its ``GridError``. ``wake`` is called after each later response or error."""
        self._client, self._look, self._wake = client.clone_for_thread(), look, wake
        self._timeouts = client.timeouts
        self._requested_at = time.monotonic()
        self.latest = look(self._client)
        self.received_at = time.monotonic()
        self.trouble: GridError | None = None
        """The error of the last request; None if it succeeded."""
        self.ended: GridError | None = None
        """The error that ended the feed; None while it runs."""
        self.is_live = False
        """Whether the daemon announces changes."""
        self._now, self._over = threading.Event(), threading.Event()
        for thread in (self._repeat_request, self._listen_for_changes):
            threading.Thread(target=thread, daemon=True).start()

    @property
    def staleness(self) -> str:
        """Return why the latest response is outdated; empty if it is current."""
        age = time.monotonic() - self.received_at
        if self.trouble is None and age <= STALE_AFTER_S:
            return ""
        reason = self.trouble.message if self.trouble is not None else "the daemon takes long to answer"
        return printable(f"as it was {format_duration(age)} ago: {reason}")

    def close(self) -> None:
        self._over.set()
        self._now.set()

    def _repeat_request(self) -> None:
        """Send the request after each announced change, or periodically, until the feed ends. Runs in a thread."""
        while not self._over.wait(self._min_pause()):
            self._now.wait(MAX_PAUSE_S if self.is_live and self.trouble is None else 0)
            self._now.clear()
            if self._over.is_set():
                return
            self._requested_at = time.monotonic()
            try:
                self.latest, self.trouble = self._look(self._client), None
                self.received_at = time.monotonic()
            except GridError as error:
                self.trouble = error
                if not error.may_recover:
                    self.ended = error
            except (KeyError, TypeError, ValueError) as error:
                message = f"the answer of the daemon at {self._client.url} is not understood ({error!r})"
                self.ended = GridError(message, Exit.FAILED, "use the koala command of the daemon's version")
            self._wake()
            if self.ended is not None:
                self.close()

    def _min_pause(self) -> float:
        """Return the minimum time until the next request in seconds."""
        if self.trouble is not None:
            return max(self._timeouts.min_look_pause_s, self.trouble.retry_after)
        took = max(0.0, self.received_at - self._requested_at)
        min_pause = self._timeouts.min_live_look_pause_s if self.is_live else self._timeouts.min_look_pause_s
        return min(MAX_PAUSE_S, max(min_pause, took / MAX_LOAD - took))

    def _listen_for_changes(self) -> None:
        """Wake ``_repeat_request`` when the daemon announces a change."""
        from koalapy.client.client import read_events  # loaded by then; commands without a daemon do without

        client, last = self._client.clone_for_thread(), ""
        while not self._over.is_set():
            try:
                for event in read_events(client.grid_events(last, SILENCE_S)):
                    self.is_live, last = True, event.get("id", last)
                    if event.get("event") == "changed" and json.loads(event["data"])["topics"]:
                        self._now.set()
            except GridError as error:
                if not error.may_recover:
                    break  # no stream, or no access to it: the next request reports the reason
            except (KeyError, TypeError, ValueError):
                break
            self.is_live = False
            self._now.set()
            self._over.wait(self._timeouts.min_look_pause_s)
        self.is_live = False
        self._now.set()


def watch_page(client: "Client", look: "Callable[[Client], T]", page: Callable[[T], str]) -> NoReturn:
    """Show the result of ``look``, formatted by ``page``, until Ctrl-C. Without a terminal, print each changed page."""
    if not can_redraw(sys.stdout):
        show_changes(client, look, lambda _, answer: print(f"{_heading()}\n{page(answer)}\n", flush=True))
    news = threading.Event()
    feed = Feed(client, look, news.set)
    try:
        with full_screen():
            while feed.ended is None:
                stale = feed.staleness
                head = f"A{stale[1:]}; still watching." if stale else f"{_heading()}, live; Ctrl-C ends."
                draw_page([head, *page(feed.latest).splitlines()])
                news.wait(TICK_S)
                news.clear()
        raise feed.ended
    finally:
        feed.close()
        print(f"{_heading()}\n{page(feed.latest)}")


def show_changes(client: "Client", look: "Callable[[Client], T]", show: Callable[[T | None, T], None]) -> NoReturn:
    """Call ``show`` with the previous and the current response whenever they differ, until Ctrl-C."""
    news = threading.Event()
    feed = Feed(client, look, news.set)
    previous: T | None = None
    is_away = False
    while True:
        news.clear()
        latest, trouble = feed.latest, feed.trouble
        if latest != previous:
            try:
                show(previous, latest)
                previous = latest
            except GridError as error:  # it is shown after the next response
                if not error.may_recover:
                    raise
                trouble = error
        if feed.ended is not None:
            raise feed.ended
        if (trouble is not None) != is_away:
            is_away = trouble is not None
            message = f"{printable(trouble.message)}; still watching" if trouble is not None else "the daemon is back"
            Block.report(f"koala: {message}")
        news.wait()


def _heading() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Progress(Block):
    """A line with the text returned by ``describe``, redrawn periodically while the ``with`` block runs.

    If the output cannot be redrawn and ``plain`` is set, print the text as a line at longer intervals.
    """

    def __init__(
        self, describe: Callable[[], str], *, plain: bool = True, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        super().__init__()
        in_place = self.is_in_place
        self._describe, self._prefix = describe, "" if in_place else "koala: "
        self._delay = timeouts.progress_delay_s if in_place else timeouts.plain_interval_s
        self._interval = timeouts.redraw_interval_s if in_place else timeouts.plain_interval_s
        self._is_used, self._stopped = in_place or plain, threading.Event()

    def __enter__(self) -> Self:
        super().__enter__()
        if self._is_used:
            threading.Thread(target=self._redraw, daemon=True).start()
        return self

    def end(self) -> None:
        self._stopped.set()
        super().end()

    def _redraw(self) -> None:
        """Draw the line after a delay and then periodically, until the block ends. Runs in a thread."""
        pause = self._delay
        while not self._stopped.wait(pause):
            pause, text = self._interval, printable(self._describe())
            self.draw([f"{self._prefix}{text}"] if text else [])


def waiting_for(activity: str) -> Progress:
    """Return a progress line with the text ``activity`` and the elapsed time."""
    began = time.monotonic()
    return Progress(lambda: f"{activity}, {format_duration(time.monotonic() - began)}")


class Transfer:
    """The progress of a transfer as text: bytes so far, total size if known, and speed."""

    def __init__(self, activity: str, size: int | None = None) -> None:
        self._activity, self._size = activity, size
        self._began, self.transferred = time.monotonic(), 0

    def __str__(self) -> str:
        passed = time.monotonic() - self._began
        speed = f", {format_bytes(int(self.transferred / passed))}/s" if self.transferred and passed > 0 else ""
        if self._size is None:
            return f"{self._activity}: {format_bytes(self.transferred)}{speed}"
        percent = f" ({min(1.0, self.transferred / self._size):.0%})" if self._size else ""
        return f"{self._activity}: {format_bytes(self.transferred)} of {format_bytes(self._size)}{percent}{speed}"

    def count_bytes(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces and count their bytes."""
        for piece in pieces:
            self.transferred += len(piece)
            yield piece


class CountingReader:
    """A readable file that counts the bytes read from it."""

    def __init__(self, file: IO[bytes], transfer: Transfer) -> None:
        self._file, self._transfer = file, transfer

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._transfer.transferred += len(piece)
        return piece

    def seek(self, position: int) -> int:
        self._transfer.transferred = position
        return self._file.seek(position)
