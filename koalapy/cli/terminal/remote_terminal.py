"""Connect the terminal of this process with one on a node: raw mode, window size, flow control and detaching."""

import errno
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from koalapy.cli.terminal.streams import write_some
from koalapy.client.errors import Exit
from koalapy.client.node_stream import NodeStream
from koalapy.runner.streams import STREAM_PIECE, STREAM_WINDOW

CREDIT_INTERVAL = STREAM_WINDOW // 4
"""Bytes of output after which the node gets new credit."""
JOIN_TIMEOUT_S = 2.0
ESCAPE, DETACH = b"~", b"."
LINE_ENDS = b"\r\n"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """How a stream ended: the exit code of its program, or an error; neither if the user has detached."""

    code: int | None = None
    error: str = ""
    is_lost: bool = False
    """Whether the connection to the daemon broke."""


class EscapeFilter:
    """Recognizes ``~.`` at the beginning of a line, by which the user detaches; ``~~`` is one tilde."""

    def __init__(self) -> None:
        self._is_line_start, self._has_tilde = True, False
        self.is_detached = False

    def filter_input(self, data: bytes) -> bytes:
        """Return the typed bytes without escapes. Set ``is_detached`` and drop the rest when the user detaches."""
        forwarded = bytearray()
        for byte in (data[index : index + 1] for index in range(len(data))):
            if self._has_tilde:
                self._has_tilde = False
                if byte == DETACH:
                    self.is_detached = True
                    return bytes(forwarded)
                forwarded += ESCAPE if byte == ESCAPE else ESCAPE + byte
            elif self._is_line_start and byte == ESCAPE:
                self._has_tilde = True
                continue
            else:
                forwarded += byte
            self._is_line_start = byte in LINE_ENDS
        return bytes(forwarded)


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this process's terminal; 0 if it has none."""
    for file in (0, 1, 2):
        with suppress(OSError):
            columns, rows = os.get_terminal_size(file)
            return rows, columns
    return 0, 0


@contextmanager
def raw_mode(file: int) -> Iterator[None]:
    """Pass every key on unchanged while the block runs, if the file is a terminal."""
    if not os.isatty(file):
        yield
        return
    previous_attributes = termios.tcgetattr(file)
    try:
        tty.setraw(file, termios.TCSADRAIN)  # input that is already typed is kept
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(file, termios.TCSADRAIN, previous_attributes)


class RemoteTerminal:
    """Passes bytes between this process and a stream until one side ends it."""

    def __init__(self, stream: NodeStream) -> None:
        self._stream = stream
        self._result: StreamResult | None = None
        self._wake_reading, self._wake_writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sent, self._sendable = 0, STREAM_WINDOW
        self._is_resized, self._ending_signal = False, 0

    def run(self) -> StreamResult:
        """Pass bytes until the stream ends, the user detaches, or a signal ends this command."""
        receiver = threading.Thread(target=self._receive, daemon=True)
        handlers = {signal.SIGWINCH: self._on_resize, signal.SIGTERM: self._on_end, signal.SIGHUP: self._on_end}
        previous_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        if os.isatty(0):
            self._on_resize(signal.SIGWINCH, None)  # the size may have changed before the handler was there
        try:
            with raw_mode(0):
                receiver.start()
                self._send_until_end()
                code = 128 + self._ending_signal if self._ending_signal else None
                self._result = self._result or StreamResult(code)
        except OSError as error:
            receiver.join(JOIN_TIMEOUT_S)  # the end of the stream may have arrived
            self._result = self._result or StreamResult(error=str(error), is_lost=True)
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            self._stream.close()
            receiver.join(JOIN_TIMEOUT_S)  # it may be writing to a terminal that takes nothing
        return self._result or StreamResult()

    def _send_until_end(self) -> None:
        """Send typed input and the size of the window, until the stream ends or the user detaches."""
        escapes, has_input = EscapeFilter() if os.isatty(0) else None, True
        while self._result is None and not self._ending_signal:
            space = min(STREAM_PIECE, self._sendable - self._sent)
            files = [self._wake_reading, *([0] if has_input and space > 1 else [])]
            ready, _, _ = select.select(files, [], [])
            if self._wake_reading in ready:
                os.read(self._wake_reading, 4096)
            if self._is_resized:
                self._is_resized = False
                rows, columns = terminal_size()
                self._stream.send_message(rows=rows, columns=columns)
            if 0 not in ready:
                continue
            try:
                typed = os.read(0, space - 1)  # a tilde that waited for this key is sent with it
            except OSError:  # its terminal is gone
                self._ending_signal = self._ending_signal or signal.SIGHUP
                return
            has_input = bool(typed)
            data = typed if escapes is None else escapes.filter_input(typed)
            if data:
                self._stream.send_input(data)
                self._sent += len(data)
            if escapes is not None and escapes.is_detached:
                return
            if not has_input:
                self._stream.send_message(end_of_input=True)

    def _receive(self) -> None:
        """Write output to standard output and give credit for it, until the stream ends. Runs in its own thread."""
        used = confirmed = 0
        try:
            while self._result is None:
                message = self._stream.receive()
                if isinstance(message, bytes):
                    try:
                        write_all(1, message)
                    except OSError as error:  # its reader or terminal is gone, which needs no message
                        is_hung_up = error.errno == errno.EIO
                        self._result = StreamResult(128 + signal.SIGHUP if is_hung_up else Exit.FAILED)
                        break
                    used += len(message)
                    if used - confirmed >= CREDIT_INTERVAL:
                        confirmed = used
                        with suppress(OSError):  # the daemon may have closed it after the last output
                            self._stream.send_message(credit=used)
                elif "credit" in message:
                    self._sendable = message["credit"] + STREAM_WINDOW
                    self._wake()
                elif "end" in message:
                    self._result = StreamResult(message["end"]["code"], message["end"]["error"])
        except OSError as error:
            self._result = self._result or StreamResult(error=str(error), is_lost=True)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full, or closed since this command ends
            os.write(self._wake_writing, b"\0")

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._is_resized = True
        self._wake()

    def _on_end(self, number: int, _frame: FrameType | None) -> None:
        self._ending_signal = number
        self._wake()


def write_all(file: int, data: bytes) -> None:
    """Write all bytes to a file. Raise ``OSError``."""
    sys.stdout.flush()
    while data:
        data = data[write_some(file, data) :]
