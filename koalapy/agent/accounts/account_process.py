"""A program that runs as another account and is talked to by pipes, from a thread: it may stop, lie, or say for ever.

Its account can do with it what it likes, for it is the account's own. So all that is waited for has an end, all that is
read has a bound, and who takes or says nothing for a while is given up.
"""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

EXIT_TIMEOUT = 10.0
MAX_HEADER = 16 * 1024
"""Bytes of the line that says what comes."""
MAX_ERROR = 2000
CHUNK = 1 << 16


class AccountProcess(io.RawIOBase):
    """Writable, and readable frame by frame. ``SiteUnavailable`` when it does not go on, ``SiteRejected`` in its own
    words."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], who: str, stall_s: float) -> None:
        """``who`` it runs as, for people; ``stall_s``: seconds without a byte after which it is given up."""
        self._who, self._stall_s = who, stall_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._errors.close()
            raise SiteUnavailable(f"cannot run {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._buffer = b""

    def __enter__(self) -> "AccountProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """All of it; what is not taken because it has ended is told by ``finish``."""
        left = memoryview(data).cast("B")
        size = len(left)
        with contextlib.suppress(BrokenPipeError):
            while left:
                self._wait(self._in, writing=True)
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(self._in, left[:CHUNK]) :]
        return size

    def send_request(self, request: object = None) -> None:
        """Write a request, if there is one, and say that no more comes."""
        if request is not None:
            self.write(json.dumps(request).encode())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def read_frame(self) -> dict[str, Any] | None:
        """What it says comes next, to be checked by the caller; None at the end of all."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_HEADER:
                raise self._odd()
            if not (data := self._read()):
                if self._buffer:
                    raise self._odd()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            known = json.loads(line) if len(line) <= MAX_HEADER else None
        except (ValueError, RecursionError):
            known = None
        if not isinstance(known, dict) or not isinstance(known.get("name"), str):
            raise self._odd()
        if type(known.get("size")) is not int or known["size"] < 0:
            raise self._odd()
        return known

    def open_content(self, size: int) -> "Content":
        return Content(self, size)

    def read_some(self, most: int) -> bytes:
        if not self._buffer:
            self._buffer = self._read()
        data, self._buffer = self._buffer[:most], self._buffer[most:]
        if not data:
            raise self._odd()
        return data

    def finish(self) -> None:
        self.send_request()
        while self._read():
            pass
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise self._stuck() from error
        if code:
            self._errors.seek(0)
            words = " ".join(self._errors.read(MAX_ERROR).decode(errors="replace").split()) or f"exit code {code}"
            raise SiteRejected(f"as {self._who}: {words}", fault=SiteFault.UNKNOWN)

    def kill(self) -> None:
        """It is not waited for any more; one that may not be killed sees that nobody reads."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(EXIT_TIMEOUT)
        self._errors.close()

    def _read(self) -> bytes:
        while True:
            self._wait(self._out, writing=False)
            with contextlib.suppress(BlockingIOError):
                return os.read(self._out, CHUNK)

    def _wait(self, descriptor: int, *, writing: bool) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        if not poll.poll(self._stall_s * 1000):
            raise self._stuck()

    def _stuck(self) -> SiteUnavailable:
        return SiteUnavailable(f"what runs as {self._who} has said nothing for {self._stall_s:g} s")

    def _odd(self) -> SiteRejected:
        return SiteRejected(f"what runs as {self._who} says what is not understood", fault=SiteFault.UNKNOWN)


class Content(io.RawIOBase):
    """The bytes of one frame, no more and no fewer."""

    def __init__(self, process: AccountProcess, size: int) -> None:
        self._process, self._left = process, size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        pieces = []
        while wanted:
            pieces.append(self._process.read_some(wanted))
            wanted -= len(pieces[-1])
            self._left -= len(pieces[-1])
        return b"".join(pieces)
