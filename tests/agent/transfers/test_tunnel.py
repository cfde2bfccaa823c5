"""What passes through a tunnel, piece by piece."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from koalapy.agent.transfers import tunnel


class Clear(socket.socket):
    """In place of TLS."""

    def pending(self) -> int:
        return 0


@pytest.fixture
def ends() -> Iterator[tuple[Clear, socket.socket, socket.socket, socket.socket]]:
    """A tunnel's two connections, and who speaks at their other ends."""
    (one, there), (here, rsync) = socket.socketpair(), socket.socketpair()
    secured = Clear(fileno=one.detach())
    for end in (secured, there, here, rsync):
        end.setblocking(False)
    yield secured, there, here, rsync
    for end in (secured, there, here, rsync):
        end.close()


def read(end: socket.socket) -> bytes:
    found = b""
    try:
        while data := end.recv(1 << 20):
            found += data
    except BlockingIOError:
        pass
    return found


Ends = tuple[Clear, socket.socket, socket.socket, socket.socket]


@pytest.mark.parametrize("outward", [False, True])
def test_tunnel_waits_for_slow_receiver(ends: Ends, outward: bool) -> None:
    secured, there, here, rsync = ends
    speaker, hearer = (rsync, there) if outward else (there, rsync)
    buffers = bytearray(), bytearray()
    content = bytes(range(256)) * 8000
    said, heard = 0, b""
    while said < len(content):
        try:
            said += speaker.send(content[said:])
        except BlockingIOError:
            assert tunnel._step(secured, here, *buffers)
            if any(buffers):  # it is full on both sides: from now on all of it can go at once
                heard += read(hearer)
                assert tunnel._step(secured, here, *buffers), "what goes out in one piece is no end"
    while len(heard) < len(content):
        heard += read(hearer)
        if len(heard) < len(content):
            assert tunnel._step(secured, here, *buffers)
    assert heard == content
    speaker.close()
    assert not tunnel._step(secured, here, *buffers)


def test_tunnel_reads_only_what_receiver_accepts(ends: Ends) -> None:
    secured, there, here, _ = ends
    buffers = bytearray(), bytearray()
    while not buffers[0]:
        with contextlib.suppress(BlockingIOError):
            there.send(bytes(1 << 20))
        tunnel._step(secured, here, *buffers)
    assert 0 < len(buffers[0]) <= 2 * tunnel.CHUNK_SIZE
    assert not buffers[1]
