"""Progress lines on standard error for long operations."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Self

from koalapy.cli.terminal.screen import Block
from koalapy.client.errors import printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.wording import format_bytes, format_duration


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
