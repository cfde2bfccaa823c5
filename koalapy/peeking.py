"""What somebody begins to say on a connection, before it is known in which language."""

import asyncio
import socket

FIRST_OF_TLS = b"\x16"
"""The byte with which whoever speaks TLS begins."""


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
