"""Exchange lines over the connections of a relay, of which some become streams after their first line."""

from __future__ import annotations

import errno

from koalapy.runner.relay_streams import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from koalapy.runner.link import Loop
    from koalapy.runner.relay_streams import Side


class LineTooLong(OSError):
    """A peer has sent more than it may before the end of a line."""


class LineConnection:
    """A connection that exchanges lines, or begins with one."""

    def __init__(
        self,
        loop: Loop,
        side: Side,
        buffer: memoryview,
        on_line: Callable[[LineConnection, bytes], None],
        on_end: Callable[[LineConnection, OSError | None], None],
        max_line: int,
        max_output: int = 1024 * 1024,
    ) -> None:
        """``on_line`` may detach the side. ``on_end`` is called once if the peer or an error ends the connection.

        ``max_line``, ``max_output``: bytes to keep of an incomplete line, and of lines that the peer does not read.
        """
        self._loop, self.side, self._buffer = loop, side, buffer
        self.on_line, self.on_end = on_line, on_end
        self.max_line, self._max_output = max_line, max_output
        self._incoming, self._outgoing = b"", bytearray()
        self._watched = 0
        self.is_open = True
        self._update()

    def start(self) -> None:
        """Read what has arrived already."""
        self._handle(READ)

    def send(self, line: bytes) -> None:
        """Send a line, with its end."""
        if self.is_open:
            self._outgoing += line
            try:
                self._flush()
                if len(self._outgoing) > self._max_output:
                    raise OSError(errno.ENOBUFS, "the peer does not read")
            except OSError as error:
                self._end(error)
                return
            self._update()

    def detach(self) -> bytes:
        """Stop using the side, and return what was received after the last line."""
        self._loop.forget(self.side.fileno())
        self.is_open = False
        return self._incoming

    def close(self, *, reset: bool = False) -> None:
        """Close the connection without calling ``on_end``."""
        if self.is_open:
            self._loop.forget(self.side.fileno())
            self.is_open = False
            self.side.close(reset=reset)

    def _handle(self, events: int) -> None:
        if not self.is_open:
            return
        try:
            self.side.progress()
            self._flush()
            size = self.side.receive(self._buffer) if events & READ else None
            if size == 0:
                self._end(None)
                return
            if size:
                self._receive(bytes(self._buffer[:size]))
        except OSError as error:
            self._end(error)
            return
        self._update()

    def _receive(self, data: bytes) -> None:
        self._incoming += data
        while self.is_open:
            line, end, rest = self._incoming.partition(b"\n")
            if len(line) > self.max_line:
                raise LineTooLong(errno.EMSGSIZE, f"a line has more than {self.max_line} bytes")
            if not end:
                return
            self._incoming = rest
            self.on_line(self, line)

    def _flush(self) -> None:
        if self._outgoing:
            sent = self.side.send(memoryview(bytes(self._outgoing)))
            del self._outgoing[:sent]

    def _update(self) -> None:
        if self.is_open:
            events = READ | self.side.events() | (WRITE if self._outgoing else 0)
            if events != self._watched:
                self._watched = events
                self._loop.watch(self.side.fileno(), self._handle, events)

    def _end(self, error: OSError | None) -> None:
        if self.is_open:
            self.close(reset=error is not None)
            self.on_end(self, error)
