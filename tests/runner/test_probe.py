"""Probes of nodes, and the ports that answer them."""

import socket

import pytest

from koalapy.runner import preflight
from koalapy.runner.connections import Loop
from koalapy.runner.settings import Failure


def test_probe_listener_with_too_many_peers_disconnects_the_oldest() -> None:
    loop = Loop()
    listener = preflight.ProbeListener(loop, "node-1", "127.0.0.1", None, max_peers=3)
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


def test_probe_listener_whose_port_another_listener_takes_uses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two listeners may bind one port with SO_REUSEADDR. The first that listens has it."""
    loop, listen = Loop(), socket.socket.listen
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.9", 0))
        first = other.getsockname()[1]

        def listen_later(listener: socket.socket, backlog: int) -> None:
            listen(other)
            listen(listener, backlog)

        monkeypatch.setattr(socket.socket, "listen", listen_later)
        listener = preflight.ProbeListener(loop, "node-1", "127.0.0.9", (first, first + 9))
        listener.close()
        with pytest.raises(Failure, match=f"a port of {first}-{first} of 127.0.0.9: Address already in use"):
            preflight.ProbeListener(loop, "node-1", "127.0.0.9", (first, first))
    assert listener.port > first


class Clock(Loop):
    """A loop with a time that the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


def turn_after(loop: Clock, seconds: float) -> None:
    loop.now += seconds
    loop.turn()


@pytest.mark.parametrize("answers", [True, False])
def test_probe_of_reached_node_waits_for_reply(answers: bool) -> None:
    """A connected runner may get no processor time for some seconds."""
    loop, results = Clock(), list[dict[int, str]]()
    with socket.create_server(("127.0.0.1", 0)) as slow:
        listeners = {1: ("127.0.0.1", slow.getsockname()[1], "word")}
        tried = preflight.ProbeRound(loop, "127.0.0.1", listeners, results.append)
        tried.start()
        loop.turn()
        peer, _ = slow.accept()
        with peer:
            turn_after(loop, preflight.CONNECT_TIMEOUT)
            turn_after(loop, preflight.REPLY_TIMEOUT - preflight.CONNECT_TIMEOUT - 1)
            assert results == []
            if answers:
                peer.sendall(b"word 127.0.0.1\n")
            turn_after(loop, 2)
    assert results == [{} if answers else {1: "no reply"}]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"word 127.0.0.1\n", ""),
        (b"word 192.0.2.7\n", "its address is translated to 192.0.2.7, which Open MPI does not support"),
        (b"sword 127.0.0.1\n", "another program answers there"),
        (b"w" * preflight.MAX_REPLY_SIZE, "another program answers there"),
        (b"", "another program answers there"),
    ],
)
def test_probe_checks_who_answers_and_the_address_that_it_saw(reply: bytes, reason: str) -> None:
    loop, results = Clock(), list[dict[int, str]]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listeners = {1: ("127.0.0.1", listener.getsockname()[1], "word")}
        preflight.ProbeRound(loop, "127.0.0.1", listeners, results.append).start()
        loop.turn()
        peer, _ = listener.accept()
        with peer:
            peer.sendall(reply)
        while not results:
            loop.turn()
    assert results == [{1: reason} if reason else {}]
