"""The socket on which the daemon listens."""

import asyncio
import socket

from koalapy.config.settings import Settings
from koalapy.daemon.web_server import bind_listener


async def test_connections_send_small_packets_at_once() -> None:
    """Otherwise each response on a kept connection waits 40 ms for the client's acknowledgement."""
    options: asyncio.Queue[int] = asyncio.Queue()

    async def note_option(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        options.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind_listener("127.0.0.1", 0, Settings())
    async with await asyncio.start_server(note_option, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await options.get() != 0
        writer.close()
