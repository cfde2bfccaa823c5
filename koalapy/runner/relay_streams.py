"""Pass the bytes of streams between pairs of sockets, in one thread.

A stream of a program has its own connection on each hop. A relay pairs two connections, and passes bytes from one to
the other. It reads only as much as the other takes, so a slow reader delays its own stream only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket

from koalapy.runner.connections import READ, WRITE, reset_socket, tune_stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from koalapy.runner.connections import Loop, Side

COPY_SIZE = 16 * 1024
"""Bytes up to which copying is faster than a pipe."""
TLS_COPY_SIZE = 256 * 1024
PIPE_SIZE = 1024 * 1024
"""Bytes, which the kernel may refuse an account that has many pipes."""
MAX_PIPES = 16
"""Pipes of one relay. A stream has one only while its bytes are under way."""
BULK_MOVES = 4
"""Times to move bytes before other streams get their turn."""
MAX_PENDING = 64 * 1024
"""Bytes that a stream copies at once when no pipe is free."""
F_SETPIPE_SZ = 1031
SPLICE_FLAGS = 3
"""SPLICE_F_MOVE and SPLICE_F_NONBLOCK."""
ACCEPTS_PER_TURN = 64
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
DRAINED = (errno.EAGAIN, errno.EINTR)

_libc = ctypes.CDLL(None, use_errno=True)
_splice = _libc.splice
_splice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
_splice.restype = ctypes.c_ssize_t


def splice(source: int, target: int, size: int) -> int | None:
    """Move bytes between a pipe and a socket; None if that would block, 0 at the end. Raise ``OSError``."""
    moved: int = _splice(source, None, target, None, size, SPLICE_FLAGS)
    if moved >= 0:
        return moved
    number = ctypes.get_errno()
    if number in DRAINED:
        return None
    raise OSError(number, os.strerror(number))


def resolve_host(host: str, port: int) -> tuple[str, int]:
    """Return the address of a host, which may take long. Raise ``OSError``."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except UnicodeError as error:  # a label of the name is empty or too long
        raise OSError(errno.EINVAL, f"{host!r} is not the name of a host") from error
    return str(address[0]), port


class SpareFile:
    """An open file that a process closes for a moment when it has no other left."""

    def __init__(self) -> None:
        self._number = -1

    def open(self) -> None:
        """Open the file, unless it is open or there is no file left."""
        if self._number < 0:
            with contextlib.suppress(OSError):
                self._number = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
            self._number = -1


_spare_file = SpareFile()


class Listener:
    """A socket that accepts connections. Without file descriptors it refuses new connections."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        on_accept: Callable[[socket.socket, tuple[str, int]], None],
        on_refuse: Callable[[str], None],
        may_accept: Callable[[], bool] = lambda: True,
    ) -> None:
        """``on_accept`` gets each connection and the address of its peer. ``on_refuse`` gets the reason of a refusal.

        ``may_accept`` is called before each connection; if it returns False, call ``resume`` later.
        """
        self._loop, self._listener = loop, listener
        self._on_accept, self._on_refuse, self._may_accept = on_accept, on_refuse, may_accept
        _spare_file.open()
        listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def resume(self) -> None:
        """Accept connections from now on. Raise ``OSError``."""
        self._loop.watch(self._listener.fileno(), self._accept)

    def pause(self) -> None:
        self._loop.forget(self._listener.fileno())

    def close(self) -> None:
        self.pause()
        self._listener.close()

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if not self._may_accept():
                return
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self._refuse(error)
                elif error.errno == errno.ECONNABORTED:
                    continue
                return
            try:
                tune_stream(connection)
            except OSError:
                connection.close()
                continue
            self._on_accept(connection, peer)

    def _refuse(self, error: OSError) -> None:
        """Refuse one connection by means of the spare file, so that it does not wait without an answer."""
        _spare_file.close()
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            reset_socket(connection)
        _spare_file.open()
        self._on_refuse(error.strerror or str(error))


class PipePool:
    """Empty pipes for the bytes of streams between two plain connections, and buffers for all others."""

    def __init__(self, max_pipes: int = MAX_PIPES) -> None:
        self._free: list[tuple[int, int]] = []
        self._max_pipes = max_pipes
        self.open_pipes = 0
        self.small = memoryview(bytearray(COPY_SIZE))
        self.pending = memoryview(bytearray(MAX_PENDING))
        self.large = memoryview(bytearray(TLS_COPY_SIZE + 32 * 1024))

    def take(self) -> tuple[int, int] | None:
        """Return the ends of an empty pipe to read from and to write to; None if there is none."""
        if self._free:
            return self._free.pop()
        if self.open_pipes >= self._max_pipes:
            return None
        import fcntl

        try:
            pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe[1], F_SETPIPE_SZ, PIPE_SIZE)
        self.open_pipes += 1
        return pipe

    def give_back(self, pipe: tuple[int, int], *, is_empty: bool) -> None:
        if is_empty:
            self._free.append(pipe)
            return
        os.close(pipe[0])
        os.close(pipe[1])
        self.open_pipes -= 1

    def close(self) -> None:
        while self._free:
            self.give_back(self._free.pop(), is_empty=False)


class Pump:
    """One direction of a stream."""

    __slots__ = ("_in_pipe", "_is_bulk", "_pending", "_pipe", "_pool", "_source", "_target", "counter", "is_done")

    def __init__(self, pool: PipePool, source: Side, target: Side, pending: bytes, counter: list[int]) -> None:
        """``pending``: bytes to send first. ``counter``: its first number counts the bytes sent."""
        self._pool, self._source, self._target, self.counter = pool, source, target, counter
        self._pending = memoryview(pending) if pending else None
        self._pipe: tuple[int, int] | None = None
        self._in_pipe = 0
        self._is_bulk = False
        """Whether the last bytes were many."""
        self.is_done = False

    @property
    def has_output(self) -> bool:
        return self._pending is not None or self._in_pipe > 0

    def move(self) -> None:
        """Pass bytes until the source has none or the target takes none. Raise ``OSError``."""
        if self.is_done or ((self._pending is not None or self._in_pipe) and not self._flush()):
            return
        if not self._source.is_plain or not self._target.is_plain:
            if not self._target.events() & WRITE:
                self._copy(self._pool.large)
        elif not self._is_bulk:
            self._is_bulk = self._copy(self._pool.small) == COPY_SIZE
        else:
            for _ in range(BULK_MOVES):
                pipe = self._pool.take()
                if pipe is None:
                    self._copy(self._pool.pending)
                else:
                    self._pipe = pipe
                    self._splice(pipe)
                if self.has_output or not self._is_bulk or self.is_done:
                    return

    def _copy(self, buffer: memoryview) -> int:
        """Copy one buffer, and return the number of bytes read."""
        size = self._source.receive(buffer)
        if size is None:
            return 0
        if size == 0:
            self._finish()
            return 0
        sent = self._target.send(buffer[:size])
        self.counter[0] += sent
        if sent < size:
            self._pending = memoryview(bytes(buffer[sent:size]))
        elif self._source.at_end:
            self._finish()
        return size

    def _splice(self, pipe: tuple[int, int]) -> None:
        """Move bytes through an empty pipe, and give it back unless bytes are left in it."""
        size = splice(self._source.fileno(), pipe[1], PIPE_SIZE)
        if size:
            self._in_pipe = size
            self._is_bulk = size >= COPY_SIZE
            self._flush()
            return
        self._is_bulk = False
        self._release_pipe()
        if size == 0:
            self._finish()

    def _flush(self) -> bool:
        """Send the bytes read before. Return whether all are sent."""
        if self._pending is not None:
            sent = self._target.send(self._pending)
            self.counter[0] += sent
            if sent < len(self._pending):
                self._pending = self._pending[sent:]
                return False
            self._pending = None
        while self._in_pipe and self._pipe is not None:
            moved = splice(self._pipe[0], self._target.fileno(), self._in_pipe)
            if not moved:
                return False
            self.counter[0] += moved
            self._in_pipe -= moved
        self._release_pipe()
        return True

    def _release_pipe(self) -> None:
        if self._pipe is not None:
            self._pool.give_back(self._pipe, is_empty=not self._in_pipe)
            self._pipe = None

    def _finish(self) -> None:
        self.is_done = True
        self._target.end()

    def close(self) -> None:
        self._release_pipe()


class Pair:
    """Two connections of a stream and the pumps between them. It closes itself at the end or an error."""

    def __init__(
        self,
        loop: Loop,
        pool: PipePool,
        sides: tuple[Side, Side],
        pending: tuple[bytes, bytes] = (b"", b""),
        counters: tuple[list[int], list[int]] | None = None,
        on_end: Callable[[OSError | None], None] = lambda _: None,
    ) -> None:
        """``pending``: bytes to send first, for the second side and for the first.

        ``counters``: count the bytes to the second side and to the first. ``on_end`` is called once, with the error of
        a stream that did not end by itself. Neither side may be watched. Call ``start`` next.
        """
        first, second = sides
        self._loop, self._sides, self._on_end = loop, sides, on_end
        counts = counters or ([0], [0])
        self._pumps = (
            Pump(pool, first, second, pending[0], counts[0]),
            Pump(pool, second, first, pending[1], counts[1]),
        )
        self._is_plain = first.is_plain and second.is_plain
        self._watched = [0, 0]
        self._callbacks = (lambda events: self._handle(0, events), lambda events: self._handle(1, events))
        self.is_closed = False

    def start(self) -> None:
        """Send pending bytes, and begin to wait for more."""
        try:
            for pump in self._pumps:
                pump.move()
            self._update()
        except OSError as error:
            self.close(error)

    def _handle(self, number: int, events: int) -> None:
        """Handle the events of one side."""
        side, pump = self._sides[number], self._pumps[number]
        try:
            needs_progress = side.events()
            if needs_progress:
                side.progress()
            if events & WRITE or needs_progress:
                self._pumps[1 - number].move()
            if events & READ or needs_progress:
                pump.move()
            if self._is_plain and events == READ == self._watched[number] and not (pump.has_output or pump.is_done):
                return  # nothing has changed: a short message was passed
            self._update()
        except OSError as error:
            self.close(error)

    def _update(self) -> None:
        """Wait for the events that the pumps need, or close a stream without any. Raise ``OSError``."""
        ended = True
        for number in (0, 1):
            side, pump_from, pump_to = self._sides[number], self._pumps[number], self._pumps[1 - number]
            events = side.events()
            if pump_to.has_output and not side.is_handshaking:
                events |= WRITE
            ended = ended and pump_from.is_done and not events
            if not pump_from.is_done and not pump_from.has_output and not self._sides[1 - number].events() & WRITE:
                events |= READ
            if events != self._watched[number]:
                self._watched[number] = events
                if events:
                    self._loop.watch(side.fileno(), self._callbacks[number], events)
                else:
                    self._loop.forget(side.fileno())
        if ended:
            self.close(None)

    def close(self, error: OSError | None = None) -> None:
        """Close both connections; with an error, reset them."""
        if self.is_closed:
            return
        self.is_closed = True
        for side in self._sides:
            self._loop.forget(side.fileno())
            side.close(reset=error is not None)
        for pump in self._pumps:
            pump.close()
        self._on_end(error)
