"""Servers of asyncio's that take one connection in at each turn of the event loop.

As many as their backlog would be tried at each turn. Where there is no file for them, each try logs a traceback and
sets a timer, and each of these timers has the next tries made.
"""

import asyncio
import select
import socket

ONE_A_TURN = 1
"""The backlog with which such a server is made."""
BACKLOG = 1024
"""Connections that may wait to be taken in."""
FIRST_OF_TLS = b"\x16"
"""The byte with which whoever speaks TLS begins."""


def let_wait(server: asyncio.Server) -> None:
    """Let as many wait as may, at a server that was made for one a turn. ``OSError`` closes it."""
    try:
        for each in server.sockets:
            with each.dup() as listening:  # a listener's queue is the same for all its descriptors
                listening.listen(BACKLOG)
    except OSError:
        server.close()
        raise


async def take_in(server: asyncio.Server) -> None:
    """Let all be accepted that wait, as far as there are files for them."""
    waiting = select.poll()
    for each in server.sockets:
        waiting.register(each, select.POLLIN)
    for _ in range(BACKLOG):
        if not waiting.poll(0):
            return
        await asyncio.sleep(0)


async def first_byte(connection: socket.socket) -> bytes:
    """What comes first, which stays to be read; empty when nothing does. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def is_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    descriptor = connection.fileno()
    loop.add_reader(descriptor, is_readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
    return connection.recv(1, socket.MSG_PEEK)
