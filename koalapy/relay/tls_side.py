"""One TLS connection of a stream, over memory buffers."""

import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from koalapy.runner.connections import READ, WRITE, Side, begin_connecting, finish_connecting
from koalapy.runner.relay_streams import COPY_SIZE, TLS_COPY_SIZE

RECEIVE_SIZE = TLS_COPY_SIZE
TLS_HANDSHAKE = b"\x16"
"""First byte of a connection with TLS."""
HEAD_NAME = "head"
"""Name sent in the handshake between heads, which know each other by their certificates."""
_encrypted = memoryview(bytearray(RECEIVE_SIZE))
"""Bytes just received, of any connection: a relay has one thread."""


class TlsSide(Side):
    """A connection with TLS, also one that is not established yet.

    The buffers hold no complete record between two calls, so the end of the data can be sent without reading.
    """

    is_plain = False

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        server_name: str | None = None,
        *,
        is_connecting: bool = False,
        prefix: bytes = b"",
    ) -> None:
        """``server_name``: the name to verify the server's certificate by; None: this is the server.

        ``prefix``: bytes to send without TLS before all others.
        """
        super().__init__(connection, is_connecting=is_connecting)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._unsent = prefix
        self.is_handshaking = True
        self.at_end = False
        if not is_connecting:
            self._shake_hands()

    def events(self) -> int:
        if self._is_connecting or self._unsent:
            return WRITE | (READ if self.is_handshaking and not self._is_connecting else 0)
        return READ if self.is_handshaking else 0

    def progress(self) -> None:
        if self._is_connecting:
            if not finish_connecting(self._socket):
                return
            self._is_connecting = False
            self._shake_hands()
            if self._unsent:
                self._send_encrypted()
        elif self.is_handshaking:
            if self._receive_encrypted() == 0:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection in the TLS handshake")
            self._shake_hands()
        if self._unsent or self._outgoing.pending:
            self._send_encrypted()

    def receive(self, buffer: memoryview) -> int | None:
        """Read into a buffer of ``TLS_COPY_SIZE`` and two records; None if there is nothing now, 0 at the end.

        Raise ``OSError``, also if the connection ended without TLS's end of the data.
        """
        if self.is_handshaking:
            return None
        if self.at_end:
            return 0
        # Bytes after the last message of the handshake are still in the buffer, and must fit into the caller's.
        received = None if self._incoming.pending else self._receive_encrypted()
        if received == 0:
            self._incoming.write_eof()
        elif not self._incoming.pending:
            return None
        size = 0
        try:
            while size < len(buffer) and (self._incoming.pending or received == 0):
                count: int = self._tls.read(len(buffer) - size, buffer[size:])  # type: ignore[assignment]
                if not count:
                    self.at_end = True
                    return size
                size += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.at_end = True
            return size
        except ssl.SSLError as error:  # of several kinds where the peer ended the connection only, by Python's version
            if received == 0:
                raise ConnectionResetError(errno.ECONNRESET, "its connection was cut") from error
            raise
        if self._outgoing.pending:
            self._send_encrypted()
        return size or None

    def send(self, data: memoryview) -> int:
        """Return the number of bytes that were taken: all, unless earlier ones are still unsent. Raise ``OSError``."""
        if self.is_handshaking or self._unsent:
            return 0
        size = len(data)
        sent = self._tls.write(data)
        while sent < size:
            sent += self._tls.write(data[sent:])
        self._send_encrypted()
        return size

    def end(self) -> None:
        self._must_end = True
        if not self.is_handshaking:
            self._send_end()

    def _send_end(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):  # it would wait for the end of the peer's data
            self._tls.unwrap()
        self._send_encrypted()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
            self.is_handshaking = False
            if self._must_end:
                self._send_end()
        except ssl.SSLWantReadError:
            pass
        finally:
            if self._outgoing.pending:
                self._send_encrypted()  # also an alert that explains a failure

    def _receive_encrypted(self) -> int | None:
        """Read from the socket; return None if there is nothing now, 0 at the end."""
        try:
            size = self._socket.recv_into(_encrypted)
        except BlockingIOError:
            return None
        if size:
            self._incoming.write(_encrypted[:size])
        return size

    def _send_encrypted(self) -> None:
        data = self._unsent + self._outgoing.read() if self._unsent else self._outgoing.read()
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        self._unsent = data[sent:] if sent < len(data) else b""


class DetectedSide(Side):
    """An accepted connection whose first byte shows whether the peer speaks TLS."""

    is_plain = False

    def __init__(self, connection: socket.socket, context: Callable[[], ssl.SSLContext]) -> None:
        super().__init__(connection)
        self._context = context
        self._inner: Side | None = None

    def settle(self) -> Side:
        return self._inner or self

    def events(self) -> int:
        return 0 if self._inner is None else self._inner.events()

    def progress(self) -> None:
        if self._inner is not None:
            self._inner.progress()
            return
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        is_tls = first == TLS_HANDSHAKE
        self._inner = TlsSide(self._socket, self._context()) if is_tls else Side(self._socket)

    def receive(self, buffer: memoryview) -> int | None:
        if self._inner is None:
            return None
        return self._inner.receive(buffer[:COPY_SIZE] if self._inner.is_plain else buffer)

    def send(self, data: memoryview) -> int:
        return 0 if self._inner is None else self._inner.send(data)


def connect_head(
    host: str, port: int, context: ssl.SSLContext | None, prefix: bytes, *, is_server: bool = False
) -> tuple[Side, bytes]:
    """Begin to connect to another head, directly or by the hub, to which ``prefix`` is sent first without TLS.

    ``context``: of the TLS between the heads; None: no TLS. Return the side and the bytes of the prefix that the caller
    must send. Raise ``OSError``.
    """
    connection, is_connecting = begin_connecting(host, port)
    if context is None:
        return Side(connection, is_connecting=is_connecting), prefix
    name = None if is_server else HEAD_NAME
    try:
        return TlsSide(connection, context, name, is_connecting=is_connecting, prefix=prefix), b""
    except BaseException:
        connection.close()
        raise


def connect_tls(host: str, port: int, context: ssl.SSLContext, name: str) -> TlsSide:
    """Begin to connect to the hub; its certificate must be for ``name``. Raise ``OSError``."""
    connection, is_connecting = begin_connecting(host, port)
    try:
        return TlsSide(connection, context, name, is_connecting=is_connecting)
    except BaseException:
        connection.close()
        raise
