"""A line on standard error that says how far something long has come."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO

from koalapy.cli.errors import printable
from koalapy.cli.terminal.streams import DRAWN
from koalapy.cli.terminal.width import can_redraw, cut, terminal_size
from koalapy.cli.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.model.quantities import bytes_text
from koalapy.model.wording import duration

ERASE = "\r\x1b[K"


class Progress:
    """Says, as long as the block runs, what ``tell`` gives; nothing where that is empty.

    ``plain``: also where nothing can be drawn in place.
    """

    def __init__(
        self, tell: Callable[[], str], *, plain: bool = True, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS
    ) -> None:
        self._tell, self._in_place = tell, can_redraw(sys.stderr)
        self._delay = timeouts.progress_delay_s if self._in_place else timeouts.plain_interval_s
        self._interval = timeouts.redraw_interval_s if self._in_place else timeouts.plain_interval_s
        self._is_shown, self._over = False, threading.Event()
        self._is_used = self._in_place or plain

    def __enter__(self) -> "Progress":
        if self._is_used:
            DRAWN.erase, DRAWN.end = self._erase, self.end
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Say nothing more, and leave nothing behind."""
        self._over.set()
        with DRAWN.lock:
            self._erase()
            if self._is_used:
                DRAWN.erase = DRAWN.end = None

    def _run(self) -> None:
        pause = self._delay
        with suppress(OSError):  # who has closed it wants to know no more
            while not self._over.wait(pause):
                pause, text = self._interval, printable(self._tell())
                with DRAWN.lock:
                    if not self._over.is_set():
                        self._say(text)

    def _say(self, text: str) -> None:
        self._erase()
        if not text:
            return
        if self._in_place:
            columns = (terminal_size(sys.stderr) or (80, 24))[0]
            sys.stderr.write(cut(text, columns - 1, "~"))
            self._is_shown = True
        else:
            sys.stderr.write(f"koala: {text}\n")
        sys.stderr.flush()

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            with suppress(OSError):
                sys.stderr.write(ERASE)
                sys.stderr.flush()


def waiting_for(what: str) -> Progress:
    """How long something takes of which no more is known."""
    began = time.monotonic()
    return Progress(lambda: f"{what}, {duration(time.monotonic() - began)}")


class Transfer:
    """Bytes that come or go: how many of how many, if that is known, and how fast."""

    def __init__(self, what: str, size: int | None = None) -> None:
        self._what, self._size = what, size
        self._began, self.done = time.monotonic(), 0

    def __str__(self) -> str:
        passed = time.monotonic() - self._began
        speed = f", {bytes_text(int(self.done / passed))}/s" if self.done and passed > 0 else ""
        if self._size is None:
            return f"{self._what}: {bytes_text(self.done)}{speed}"
        percent = f" ({min(1.0, self.done / self._size):.0%})" if self._size else ""
        return f"{self._what}: {bytes_text(self.done)} of {bytes_text(self._size)}{percent}{speed}"

    def counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The same pieces."""
        for piece in pieces:
            self.done += len(piece)
            yield piece


class Counted:
    """A file that is read once, or again from its beginning."""

    def __init__(self, file: IO[bytes], transfer: Transfer) -> None:
        self._file, self._transfer = file, transfer

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._transfer.done += len(piece)
        return piece

    def seek(self, where: int) -> int:
        self._transfer.done = where
        return self._file.seek(where)
