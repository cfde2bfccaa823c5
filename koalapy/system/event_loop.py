"""Accept connections, keep background tasks and divide long loops on the event loop of asyncio.

A server of asyncio tries to accept as many connections in each turn of the loop as its backlog. When the process has no
file left, each of these attempts logs a traceback and sets a timer, and each timer starts the next attempts. So our
servers are created with a backlog of one, and ``raise_backlog`` then lets more connections wait in the kernel.
"""

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TypeVar

T = TypeVar("T")

ACCEPTS_PER_TURN = 1
"""The backlog to create a server with: it accepts that many connections in a turn of the loop."""
BACKLOG = 1024
"""Connections that may wait in the kernel to be accepted."""
TLS_FIRST_BYTE = b"\x16"
"""The first byte of a TLS handshake."""

SLICE_SIZE = 500
"""Items of one slice of a long loop, if handling an item takes about a microsecond."""


async def iterate_in_slices(items: Sequence[T], size: int = SLICE_SIZE) -> AsyncIterator[Sequence[T]]:
    """Yield ``size`` items at a time, and let other tasks run in between."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]


def raise_backlog(server: asyncio.Server) -> None:
    """Let ``BACKLOG`` connections wait at a server. Close it and raise ``OSError`` if that fails."""
    try:
        for listener in server.sockets:
            with listener.dup() as duplicate:  # all descriptors of a listener share its queue
                duplicate.listen(BACKLOG)
    except OSError:
        server.close()
        raise


async def accept_waiting(server: asyncio.Server) -> None:
    """Return when no connection waits to be accepted, or after ``BACKLOG`` turns of the loop."""
    poll = select.poll()
    for listener in server.sockets:
        poll.register(listener, select.POLLIN)
    for _ in range(BACKLOG):
        if not poll.poll(0):
            return
        await asyncio.sleep(0)


async def peek_first_byte(connection: socket.socket) -> bytes:
    """Return the first byte of a connection without consuming it, or nothing at its end. Raise ``OSError``."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def set_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    descriptor = connection.fileno()
    loop.add_reader(descriptor, set_readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
    return connection.recv(1, socket.MSG_PEEK)


class BackgroundTasks:
    """Tasks of one object, kept until they end; the event loop itself holds no strong reference to them."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a coroutine as a task, and return it."""
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    def cancel(self) -> None:
        for task in self.running:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, whatever their outcome."""
        await asyncio.gather(*self.running, return_exceptions=True)
