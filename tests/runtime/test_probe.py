"""The port at which a node is probed by the others of its gang, and by anybody."""

import socket

import pytest

from koalapy.runtime import probe
from koalapy.runtime.link import Loop


def test_who_stays_at_the_door_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_PEERS", 3)
    loop = Loop()
    listener = probe.ProbeListener(loop, "node-1", "127.0.0.1", None)
    peers = []
    try:
        for _ in range(8):
            peers.append(socket.create_connection(("127.0.0.1", listener.port), timeout=30))
            loop.turn()
            assert peers[-1].recv(100).decode() == f"{listener.nonce} 127.0.0.1\n"
        assert [peer.recv(100) for peer in peers[:5]] == [b""] * 5, "the oldest had to leave"
    finally:
        for peer in peers:
            peer.close()
        listener.close()
