"""A command on a pseudo-terminal, with its input and output."""

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
"""The command with short pauses between two requests to the daemon."""
DEADLINE_S = 60.0
PATIENCE_S = 8.0


class Terminal:
    """A command in a new session on a terminal of the given size. It is killed at the end of the ``with`` block."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 24):
        without = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        self.output = ""
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

    def hang_up(self) -> int:
        """Close the terminal, as a lost connection does; return the exit code of the command."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDONLY)
        self._status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self._status)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send_text(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, again: str = "") -> str:
        """Wait for output that matches ``pattern``; return the output from the previous match to its end.

        ``again``: what a person types once more after some seconds without any output.
        """
        end = time.monotonic() + DEADLINE_S
        while (match := re.search(pattern, self.output[self._read :])) is None:
            assert time.monotonic() < end, f"waited for {pattern!r} in {self.output[self._read :]!r}"
            until, before = (time.monotonic() + PATIENCE_S if again else end), len(self.output)
            assert self._read_output(until), f"it ended before {pattern!r}: {self.output[self._read :]!r}"
            if again and len(self.output) == before:
                self.send_text(again)
        text = self.output[self._read : self._read + match.end()]
        self._read += match.end()
        return text

    def wait_for_exit(self) -> int:
        """Wait until the command has ended; return its exit code, or a negative signal number."""
        end = time.monotonic() + DEADLINE_S
        while self._read_output(end):
            assert time.monotonic() < end, f"it goes on: {self.output[-500:]!r}"
        self._status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self._status)

    def _read_output(self, until: float) -> bool:
        """Read output until the monotonic time ``until``; return whether the command still runs."""
        with contextlib.suppress(OSError):  # no process has the terminal open
            if not select.select([self._master], [], [], max(0.0, until - time.monotonic()))[0]:
                return True
            if piece := os.read(self._master, 65536):
                self.output += piece.decode(errors="replace")
                return True
        return False
