"""A pseudo-terminal, and what somebody types and sees there."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence

FAST_KOALA = [
    sys.executable,
    "-c",
    "from koalapy.cli.main import main; from koalapy.client.timeouts import ClientTimeouts; "
    "main(ClientTimeouts(min_look_pause_s=0.05, min_live_look_pause_s=0.05))",
]
"""The command with short pauses between two looks at the daemon."""
DEADLINE = 60.0
"""Seconds."""


class Terminal:
    """A command in a session of its own on a terminal of that size, until the ``with`` ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 24):
        without = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        self.printed = ""
        """All of it, as it came."""
        self._read = 0
        self._status: int | None = None
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], list(command), {"TERM": "xterm-256color", **without})
        self.resize(columns, rows)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> str:
        """What came since the last that was expected, up to and with what looks like this."""
        end = time.monotonic() + DEADLINE
        while (found := re.search(pattern, self.printed[self._read :])) is None:
            assert time.monotonic() < end, f"waited for {pattern!r} in {self.printed[self._read :]!r}"
            assert self._more(end), f"it ended before {pattern!r}: {self.printed[self._read :]!r}"
        came = self.printed[self._read : self._read + found.end()]
        self._read += found.end()
        return came

    def end(self) -> int:
        """Its exit code, or less than 0 for a signal, once it has ended by itself."""
        end = time.monotonic() + DEADLINE
        while self._more(end):
            assert time.monotonic() < end, f"it goes on: {self.printed[-500:]!r}"
        self._status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self._status)

    def _more(self, until: float) -> bool:
        """Whether it is still there; with what it has printed."""
        with contextlib.suppress(OSError):  # nobody has it open any more
            if not select.select([self._master], [], [], max(0.0, until - time.monotonic()))[0]:
                return True
            if piece := os.read(self._master, 65536):
                self.printed += piece.decode(errors="replace")
                return True
        return False
