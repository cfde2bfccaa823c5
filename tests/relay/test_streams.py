"""Streams through node, head, hub, head and node: bytes, ends and errors."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.relay.links import ATTEMPT, Links


@pytest.fixture(params=["plain", "tls", "direct"])
def links(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Links]:
    made = Links(tmp_path, tls=request.param != "plain", direct=request.param == "direct")
    yield made
    made.close()


def test_stream_passes_bytes_in_both_directions(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client:
        client.send(b"ping")
        with links.accept(listener) as server:
            assert links.read(server, 4) == b"ping"
            server.send(b"pong")
            assert links.read(client, 4) == b"pong"
            assert len(links.hub.streams) == (links.heads["south"].peer_server is None)


def test_stream_with_end_of_data_passes_the_answer(links: Links) -> None:
    request, answer = os.urandom(700_000), os.urandom(900_000)
    with links.program(3) as listener, links.dial(1, 3) as client:
        client.setblocking(True)
        server = links.accept(listener)
        received = bytearray()
        for start in range(0, len(request), 100_000):
            client.sendall(request[start : start + 100_000])
            received += links.read(server, 100_000)
        client.shutdown(1)
        assert links.read(server, 1) == b""
        client.setblocking(False)
        server.setblocking(True)
        returned = bytearray()
        for start in range(0, len(answer), 100_000):
            server.sendall(answer[start : start + 100_000])
            returned += links.read(client, 100_000)
        server.close()
        assert links.read(client, 1) == b""
        assert received == request
        assert returned == answer
    links.turn_until(lambda: not links.hub.streams and not any(node.stream_count for node in links.nodes))


def test_stream_to_node_of_own_cluster_passes_through_head_only(links: Links) -> None:
    with links.program(1) as listener, links.dial(0, 1) as client:
        client.send(b"ping")
        with links.accept(listener) as server:
            assert links.read(server, 4) == b"ping"
            assert not links.hub.streams
            assert len(links.heads["north"].streams) == 1


def test_stream_to_closed_port_is_reset(links: Links) -> None:
    with links.dial(0, 2) as client, pytest.raises(ConnectionResetError):
        links.read(client, 1)
    links.turn_until(lambda: not links.heads["north"].streams and not links.heads["south"].streams)


def test_ended_attempt_resets_its_streams(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client:
        client.send(b"ping")
        with links.accept(listener) as server:
            links.heads["south"].remove_attempt(ATTEMPT)
            with pytest.raises(ConnectionResetError):
                links.read(client, 1)
            with pytest.raises(ConnectionResetError):
                links.read(server, 10)
