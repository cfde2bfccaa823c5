"""Single steps of a tunnel."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from koalapy.agent.transfers import tunnel
from koalapy.system.certificate_files import load_certificate
from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority


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


@pytest.mark.parametrize("is_cut", [False, True])
def test_tunnel_with_cut_connection_fails(tmp_path: Path, is_cut: bool) -> None:
    authority = CertificateAuthority(tmp_path)
    files = authority.issue()
    (outer, peer), (here, rsync) = socket.socketpair(), socket.socketpair()
    exit_codes: list[int] = []

    def serve() -> None:
        context = load_certificate(files.certificate, files.key).context
        exit_codes.append(tunnel.pump(tunnel.wrap_connection(context, outer, is_server=True), here))
        signal.alarm(0)  # set for a separate program

    with outer, here, rsync, peer:
        thread = threading.Thread(target=serve)
        thread.start()
        connection = Trust(authority.file).create_context().wrap_socket(peer, server_hostname="127.0.0.1")
        connection.sendall(b"half")
        assert rsync.recv(10) == b"half"
        if is_cut:
            connection.shutdown(socket.SHUT_RDWR)
        else:
            connection.unwrap()
        thread.join()
    assert exit_codes == [int(is_cut)]
