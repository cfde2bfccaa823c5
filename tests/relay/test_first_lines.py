"""Connections of strangers to hub and heads: anything but an authenticated line ends them."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.relay.attempts import Limits
from koalapy.relay.server import Server
from koalapy.runner.connections import MAX_FIRST_LINE, LineConnection, Loop, Refused, Side, get_text, parse_line
from koalapy.runner.relay_streams import PipePool
from tests.relay.links import ATTEMPT, Links

HELLO = {"t": "hello", "name": "north", "node": 0, "nonce": "00"}


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Links]:
    made = Links(tmp_path_factory.mktemp("links"), limits=Limits(strangers=3, first_line_timeout=0.05))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x" * (MAX_FIRST_LINE + 1), "malformed"),
        (b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", "malformed"),
        (bytes(range(256)) + b"\n", "malformed"),
        (b"\n", "malformed"),
        (b"{}\n", "malformed"),
        (b"[1]\n", "malformed"),
        (b"{" * MAX_FIRST_LINE + b"\n", "malformed"),
        (b'{"t":7}\n', "malformed"),
        (b'{"t":"alive"}\n', "malformed"),
        (b'{"t":"hello"}\n', "malformed"),
        (json.dumps({**HELLO, "name": "x" * 256}).encode() + b"\n", "malformed"),
        (json.dumps({**HELLO, "name": "unknown"}).encode() + b"\n", "unknown-cluster"),
        (b"0" * 32 + b'{"t":"open","cluster":"north"}\n', "unauthenticated"),
        (b"0" * 32 + b'{"t":"open","cluster":"unknown"}\n', "absent"),
        (b"\xff" * 32 + b'{"t":"open","cluster":"north"}\n', "unauthenticated"),
        (json.dumps({**HELLO, "nonce": "\ud800"}).encode() + b"\n", "malformed"),
        (json.dumps({**HELLO, "name": "\udc80"}).encode() + b"\n", "malformed"),
        (b"0" * 32 + b'{"t":"take","cluster":"\\ud800\\nwarning"}\n', "malformed"),
        (b"{", "slow"),
        (b"", "slow"),
        (json.dumps(HELLO).encode() + b"\n", "slow"),
    ],
    ids=repr,
)
def test_hub_with_hostile_first_line_closes_the_connection(links: Links, line: bytes, reason: str) -> None:
    before = links.hub.refusals[reason]
    with socket.create_connection(("127.0.0.1", links.hub.server.port)) as connection:
        connection.sendall(line)
        links.turn_until(lambda: links.hub.refusals[reason] == before + 1)
        connection.settimeout(5)
        with pytest.raises(ConnectionResetError):
            [*iter(lambda: connection.recv(1000), b"")]
    assert links.hub.server.stranger_count == 0


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"name": "unknown"}, "not-live"),
        ({"name": ATTEMPT, "node": 2}, "foreign-node"),
        ({"name": ATTEMPT, "node": 9}, "unknown-node"),
        ({"name": ATTEMPT, "node": -1}, "malformed"),
        ({"name": ATTEMPT, "node": 0, "nonce": 1}, "malformed"),
    ],
    ids=str,
)
def test_head_with_hello_of_unknown_node_closes_the_connection(
    links: Links, hello: dict[str, object], reason: str
) -> None:
    head = links.heads["north"]
    before = head.refusals[reason]
    with socket.create_connection(("127.0.0.1", head.server.port)) as connection:
        connection.sendall(json.dumps({**HELLO, **hello}).encode() + b"\n")
        links.turn_until(lambda: head.refusals[reason] == before + 1)


def test_hub_with_too_many_strangers_closes_the_oldest_and_serves_its_heads(tmp_path: Path) -> None:
    links = Links(tmp_path, limits=Limits(strangers=3))
    with ExitStack() as stack:
        address = ("127.0.0.1", links.hub.server.port)
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        links.turn_until(lambda: links.hub.refusals["strangers"] == 2)
        assert links.hub.server.stranger_count == 3
        for stranger in strangers[:2]:
            with pytest.raises(ConnectionResetError):
                stranger.recv(1)
        listener, client = stack.enter_context(links.program(2)), stack.enter_context(links.dial(0, 2))
        client.send(b"ping")
        with links.accept(listener) as server:
            assert links.read(server, 4) == b"ping"
    links.close()


@pytest.mark.parametrize(
    "error", [UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"), RecursionError()], ids=repr
)
def test_server_with_failing_handler_closes_the_connection(error: Exception) -> None:
    loop, pool, refused = Loop(), PipePool(), list[Refused]()

    def handle(connection: LineConnection, line: bytes) -> None:
        raise error

    server = Server(loop, pool, ("127.0.0.1", 0), Side, Limits(), handle, refused.append)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"{}\n")
        while not refused:
            loop.turn()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert [reason.reason for reason in refused] == ["malformed"]
    assert server.stranger_count == 0
    server.close()
    pool.close()
    loop.close()


@given(st.binary(max_size=200) | st.text(st.characters()).map(lambda text: json.dumps({"t": text}).encode()))
def test_line_of_any_bytes_is_parsed_or_refused(line: bytes) -> None:
    with suppress(Refused):
        assert get_text(parse_line(line), "t").encode() is not None
