"""Single steps of a tunnel."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from koalapy.agent.transfers import tunnel


class Clear(socket.socket):
    """A plain socket that replaces TLS."""

    def pending(self) -> int:
        return 0


@pytest.fixture
def ends() -> Iterator[tuple[Clear, socket.socket, socket.socket, socket.socket]]:
    """Yield the two connections of a tunnel and their other ends."""
    (outer, peer), (here, rsync) = socket.socketpair(), socket.socketpair()
    secured = Clear(fileno=outer.detach())
    for end in (secured, peer, here, rsync):
        end.setblocking(False)
    yield secured, peer, here, rsync
    for end in (secured, peer, here, rsync):
        end.close()


def read_available(end: socket.socket) -> bytes:
    received = b""
    try:
        while data := end.recv(1 << 20):
            received += data
    except BlockingIOError:
        pass
    return received


Ends = tuple[Clear, socket.socket, socket.socket, socket.socket]


@pytest.mark.parametrize("outward", [False, True])
def test_tunnel_waits_for_slow_receiver(ends: Ends, outward: bool) -> None:
    secured, peer, here, rsync = ends
    sender, receiver = (rsync, peer) if outward else (peer, rsync)
    buffers = bytearray(), bytearray()
    content = bytes(range(256)) * 8000
    sent_bytes, received = 0, b""
    while sent_bytes < len(content):
        try:
            sent_bytes += sender.send(content[sent_bytes:])
        except BlockingIOError:
            assert tunnel._step(secured, here, *buffers)
            if any(buffers):  # both sides are full: the next step can send everything
                received += read_available(receiver)
                assert tunnel._step(secured, here, *buffers), "sending everything at once does not end the tunnel"
    while len(received) < len(content):
        received += read_available(receiver)
        if len(received) < len(content):
            assert tunnel._step(secured, here, *buffers)
    assert received == content
    sender.close()
    assert not tunnel._step(secured, here, *buffers)


def test_tunnel_reads_only_what_receiver_accepts(ends: Ends) -> None:
    secured, peer, here, _ = ends
    buffers = bytearray(), bytearray()
    while not buffers[0]:
        with contextlib.suppress(BlockingIOError):
            peer.send(bytes(1 << 20))
        tunnel._step(secured, here, *buffers)
    assert 0 < len(buffers[0]) <= 2 * tunnel.CHUNK_SIZE
    assert not buffers[1]
