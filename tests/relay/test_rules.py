"""Which streams hub, heads and nodes refuse."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from koalapy.relay.attempts import Limits
from koalapy.relay.head import HubAddress, HubLink
from koalapy.relay.tls_side import TLS_HANDSHAKE, connect_head
from koalapy.runner.connections import Credentials, LineConnection, Refused
from koalapy.runner.relay_node import NodeRelay, PortTaken
from koalapy.runner.relay_protocol import derive_direct_key, derive_pair_key, make_ticket, seal_line
from koalapy.system.tls import pinned_context
from tests.certificates import CertificateAuthority
from tests.relay.links import ATTEMPT, ATTEMPT_KEY, Links, RawChild, head_key, node_key

PAIR_KEY = derive_pair_key(ATTEMPT_KEY, "north", "south")


@pytest.fixture
def open_links(tmp_path: Path) -> Iterator[Callable[..., Links]]:
    with ExitStack() as opened:

        def open_(**options: Any) -> Links:
            opened.callback((made := Links(tmp_path, **options)).close)
            return made

        yield open_


@pytest.fixture
def links(open_links: Callable[..., Links]) -> Links:
    return open_links()


def offer(links: Links, *, cluster: str = "north", stream: int = 900, **changes: Any) -> dict[str, Any]:
    """Return the first line of a valid stream from node 0 to node 2, with changes."""
    message = {"t": "open", "cluster": cluster, "attempt": ATTEMPT, "from": 0, "stream": stream, "to": 2}
    message |= {"port": links.port(2), **changes}
    parts = (str(message["attempt"]), message["from"], stream)
    return {"ticket": make_ticket(PAIR_KEY, parts, message["to"], message["port"]), **message}


def expect_refusal(links: Links, relay: Any, reason: str, connection: socket.socket) -> None:
    """Check that a relay refuses the stream of a connection, for this reason only."""
    links.turn_until(lambda: relay.refusals)
    with connection, pytest.raises(ConnectionResetError):
        links.read(connection, 1)
    assert dict(relay.refusals) == {reason: 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": "8.1.other"}, "not-live"),
        ({"port": 22}, "port"),
        ({"from": 2, "to": 3}, "port"),
        ({"from": 3}, "foreign-node"),
        ({"from": 9}, "unknown-node"),
        ({"to": 9}, "unknown-node"),
        ({"ticket": "0" * 32}, "ticket"),
        ({"ticket": "ü"}, "ticket"),
        ({"ticket": 7}, "malformed"),
        ({"cluster": "south"}, "unauthenticated"),
        ({"stream": -1}, "malformed"),
        ({"to": True}, "malformed"),
        ({"port": 2.5}, "malformed"),
        ({"attempt": "x" * 300}, "malformed"),
    ],
)
def test_hub_with_stream_outside_the_attempt_refuses_it(links: Links, changes: dict[str, Any], reason: str) -> None:
    head = links.replace_head("north")
    message = {**offer(links), **changes}
    expect_refusal(links, links.hub, reason, head.send_stream_line(message))
    assert not links.hub.streams


def test_hub_with_stream_within_a_site_refuses_it(links: Links) -> None:
    line = offer(links, to=1, port=links.port(1))
    expect_refusal(links, links.hub, "own-node", links.replace_head("north").send_stream_line(line))


def test_hub_with_used_stream_number_refuses_it(links: Links) -> None:
    head = links.replace_head("north")
    with head.send_stream_line(offer(links)):
        links.turn_until(lambda: links.hub.streams)
        expect_refusal(links, links.hub, "replayed", head.send_stream_line(offer(links)))


@pytest.mark.evidence("P9")
def test_hub_with_head_of_third_cluster_refuses_its_streams(links: Links) -> None:
    keys = {cluster: head_key(cluster).hex() for cluster in ("north", "south", "west")}
    links.hub.set_keys({"heads": keys})
    head = RawChild(links, links.hub.server.port, Credentials(head_key("west"), "west"))
    expect_refusal(links, links.hub, "foreign-node", head.send_stream_line(offer(links, cluster="west")))


def test_hub_with_take_of_foreign_stream_refuses_it(links: Links) -> None:
    links.hub.set_keys({"heads": {cluster: head_key(cluster).hex() for cluster in ("north", "south", "west")}})
    head = RawChild(links, links.hub.server.port, Credentials(head_key("west"), "west"))
    take = {"t": "take", "cluster": "west", "attempt": ATTEMPT, "from": 0, "stream": 1}
    with links.dial(0, 2):
        links.turn_until(lambda: links.hub.streams)
        expect_refusal(links, links.hub, "not-dialled", head.send_stream_line(take))


def test_hub_with_wrong_proof_refuses_the_head_and_keeps_the_former(links: Links) -> None:
    former = links.hub.children["head", "north"]
    hello = b'{"t":"hello","name":"north","node":0,"nonce":"00"}\n'
    with socket.create_connection(("127.0.0.1", links.hub.server.port)) as connection:
        connection.sendall(hello + b"0" * 32 + b'{"t":"here"}\n')
        connection.setblocking(False)
        links.turn_until(lambda: links.hub.refusals)
    assert dict(links.hub.refusals) == {"unauthenticated": 1}
    assert links.hub.children["head", "north"] is former


def test_child_with_challenge_of_another_parent_refuses_it(links: Links) -> None:
    child = RawChild(links, links.hub.server.port, Credentials(b"another key", "north"))
    assert "the parent is not ours" in child.error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ticket": "0" * 32}, "ticket"),
        ({"ticket": "\ud800"}, "malformed"),
        ({"port": 22}, "port"),
        ({"to": 1}, "foreign-node"),
        ({"from": 2}, "foreign-node"),
        ({"attempt": "8.1.other"}, "not-live"),
    ],
)
def test_head_with_wrong_offer_of_the_hub_refuses_it(links: Links, changes: dict[str, Any], reason: str) -> None:
    head = links.heads["south"]
    head.take_from_hub({**offer(links), **changes, "t": "dial"})
    assert dict(head.refusals) == {reason: 1}
    assert not head.streams


def test_head_with_nested_name_of_an_offered_stream_refuses_it(links: Links) -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(Refused, match="as attempt, which must be a short text"):
        links.heads["south"].take_from_hub({**offer(links, ticket=""), "t": "dial", "attempt": nested})


@pytest.mark.parametrize(
    ("key", "stream", "reason"), [(None, 901, "foreign-stream"), (b"a key of the network", 900, "unauthenticated")]
)
def test_head_with_another_line_than_the_hub_has_offered_refuses_it(
    links: Links, key: bytes | None, stream: int, reason: str
) -> None:
    opener = links.replace_head("north")
    line = seal_line(key or derive_direct_key(PAIR_KEY, "north", "south"), offer(links, stream=stream))
    first = seal_line(opener.stream_key, offer(links))
    expect_refusal(links, links.heads["south"], reason, opener.send_first_line(first + line))


@pytest.mark.parametrize("has_other_certificate", [False, True])
def test_head_without_right_certificate_of_the_other_refuses_streams(
    tmp_path: Path, open_links: Callable[..., Links], has_other_certificate: bool
) -> None:
    links = open_links(tls=True)
    links.identities.clear()
    if has_other_certificate:
        certificate = CertificateAuthority(tmp_path / "other").issue().certificate.read_text()
        links.identities["south"] = {"certificate": certificate}
    links.heads["north"].remove_attempt(ATTEMPT)
    links.heads["north"].add_attempt(links.entry("north"))
    node = RawChild(links, links.heads["north"].server.port, Credentials(node_key(0), ATTEMPT, 0))
    message = {"t": "open", "attempt": ATTEMPT, "from": 0, "stream": 900, "to": 2, "port": links.port(2)}
    reason = "tls" if has_other_certificate else "no-certificate"
    expect_refusal(links, links.heads["north"], reason, node.send_stream_line(message))


def test_hub_with_tls_refuses_a_hello_without(open_links: Callable[..., Links]) -> None:
    links = open_links(tls=True)
    hello = b'{"t":"hello","name":"north","node":0,"nonce":"00"}\n'
    with socket.create_connection(("127.0.0.1", links.hub.server.port)) as connection:
        connection.sendall(hello)
        links.turn_until(lambda: links.hub.refusals)
    assert dict(links.hub.refusals) == {"tls": 1}


@pytest.mark.evidence("L8")
def test_stream_with_tls_is_encrypted_at_the_hub(open_links: Callable[..., Links]) -> None:
    links = open_links(tls=True)
    taker = links.replace_head("south")
    with links.dial(0, 2) as client:
        client.send(b"a secret of the program")
        links.turn_until(lambda: [message for message in taker.received if message["t"] == "dial"])
        dial = next(message for message in taker.received if message["t"] == "dial")
        name = {key: dial[key] for key in ("attempt", "from", "stream")}
        with taker.send_stream_line({"t": "take", "cluster": "south", **name}) as stream:
            assert links.read(stream, 100)[:1] == TLS_HANDSHAKE


@pytest.mark.parametrize(
    ("changes", "reason"), [({"from": 0}, "unauthenticated"), ({"port": 22}, "port"), ({"port": 1}, "port")]
)
def test_head_with_wrong_line_of_a_node_refuses_it(links: Links, changes: dict[str, int], reason: str) -> None:
    head = links.heads["north"]
    node = RawChild(links, head.server.port, Credentials(node_key(1), ATTEMPT, 1))
    message = {"t": "open", "attempt": ATTEMPT, "from": 1, "stream": 900, "to": 0, "port": links.port(0), **changes}
    expect_refusal(links, head, reason, node.send_stream_line(message))


def test_node_with_dial_to_foreign_port_refuses_it(links: Links) -> None:
    head = links.heads["south"]
    dial = {"t": "dial", "attempt": ATTEMPT, "from": 0, "stream": 5, "to": 2, "port": 22}
    head.children[("node", ATTEMPT, "2")].channel.send(dial)
    links.turn_until(lambda: head.refusals)
    assert dict(head.refusals) == {"taker": 1}
    assert not links.nodes[2].stream_count


@pytest.mark.evidence("P9")
def test_peer_with_key_of_another_pair_is_refused(open_links: Callable[..., Links]) -> None:
    links = open_links(tls=True, direct=True)
    head = links.heads["south"]
    connection = RawPeer(links, head.peer_server.port)
    key = derive_direct_key(derive_pair_key(ATTEMPT_KEY, "north", "west"), "north", "south")
    connection.send(key, offer(links))
    links.turn_until(lambda: head.refusals)
    assert dict(head.refusals) == {"unauthenticated": 1}


class RawPeer:
    """The head of another cluster, with TLS."""

    def __init__(self, links: Links, port: int) -> None:
        context = pinned_context(links.certificate)
        side, _ = connect_head("127.0.0.1", port, context, b"")
        buffer = memoryview(bytearray(400_000))
        self._connection = LineConnection(links.loop, side, buffer, lambda *_: None, lambda *_: None, 100)

    def send(self, key: bytes, message: dict[str, Any]) -> None:
        self._connection.send(seal_line(key, message))


@pytest.mark.parametrize(("owner", "name"), [(7, "account 7"), (None, "another machine")])
def test_node_with_foreign_connection_resets_it(open_links: Callable[..., Links], owner: int | None, name: str) -> None:
    links = open_links(owner=lambda *_: owner)
    with links.program(2) as listener, links.dial(0, 2) as client:
        assert listener
        with pytest.raises(ConnectionResetError):
            links.read(client, 1)
    links.turn_until(lambda: any(event["t"] == "refused" for event in links.node_events[0]))
    assert f"{name} may not use port" in str(links.node_events[0][-1]["why"])


def test_node_with_many_streams_at_once_delays_and_refuses_none(open_links: Callable[..., Links]) -> None:
    links = open_links(node_options={"accept_burst": 2, "accept_rate": 100})
    with links.program(2) as listener:
        clients = [links.dial(0, 2) for _ in range(6)]
        servers = [links.accept(listener) for _ in clients]
        for connection in (*clients, *servers):
            connection.close()


def test_node_with_taken_port_names_it(tmp_path: Path, links: Links) -> None:
    settings = links.node_settings(0)
    node = NodeRelay(links.loop, settings, lambda _: None, lambda *_: 0, 0)
    with pytest.raises(PortTaken, match=f"{links.port(1)}: Address already in use"):
        node.start()
    node.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(streams=2), "streams"),
        (Limits(attempt_streams=2), "attempt-streams"),
        (Limits(stream_rate=0.001, stream_burst=2), "rate"),
    ],
)
def test_head_at_its_limit_refuses_new_streams_and_keeps_others(
    open_links: Callable[..., Links], limits: Limits, reason: str
) -> None:
    links = open_links(limits=limits)
    with links.program(2) as listener:
        clients = [links.dial(0, 2) for _ in range(2)]
        servers = [links.accept(listener) for _ in clients]
        expect_refusal(links, links.heads["north"], reason, links.dial(1, 2))
        for client in clients:
            client.send(b"still")
        for server in servers:  # streams may arrive in another order
            assert links.read(server, 5) == b"still"
        for connection in (*clients, *servers):
            connection.close()


def test_list_without_attempt_resets_its_streams(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener):
        links.hub.replace_state({**links.keys(), "attempts": []})
        with pytest.raises(ConnectionResetError):
            links.read(client, 1)
    assert [event["t"] for event in links.events if event["relay"] == "hub"] == ["removed"]


@pytest.mark.parametrize("is_changed", [False, True])
def test_state_with_a_known_attempt_keeps_its_streams(links: Links, is_changed: bool) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener) as server:
        for cluster, relay in {"": links.hub, "north": links.heads["north"]}.items():
            entry = links.entry(cluster)
            if is_changed:
                entry["nodes"][0]["ports"] = [[1024, 1025]]
            relay.replace_state({**links.keys(cluster), "attempts": [entry]})
        client.send(b"ping")
        assert links.read(server, 4) == b"ping"


def test_stream_of_slow_reader_delays_no_other(links: Links) -> None:
    with links.program(2) as listener:
        slow_client = links.dial(0, 2)
        slow_server = links.accept(listener)
        stuck = 0
        for _ in range(1000):
            with suppress(BlockingIOError):
                stuck += slow_client.send(bytes(1 << 20))
            links.turn()
            if stuck > 20 << 20:
                break
        client = links.dial(1, 2)
        server = links.accept(listener)
        for _ in range(20):
            client.send(b"x" * 30_000)
            assert len(links.read(server, 30_000)) == 30_000
        assert stuck > 1 << 20
        assert len(links.read(slow_server, stuck)) == stuck
        for connection in (slow_client, slow_server, client, server):
            connection.close()


def test_lost_hub_ends_streams_and_reports_their_attempt(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener) as server:
        links.hub.close()
        for connection in (client, server):
            with pytest.raises(ConnectionResetError):
                links.read(connection, 1)
        links.turn_until(lambda: {"north", "south"} <= {e["relay"] for e in links.events if e["t"] == "lost"})
    assert "the hub at 127.0.0.1" in next(event["why"] for event in links.events if event["t"] == "lost")
    for head in links.heads.values():
        assert head.lost.keys() == {ATTEMPT}
        head.remove_attempt(ATTEMPT)
        assert not head.lost


def test_lost_node_is_reported_by_its_head_and_ends_streams(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener):
        links.nodes[2].close()
        with pytest.raises(ConnectionResetError):
            links.read(client, 1)
        links.turn_until(lambda: [event for event in links.events if event["t"] == "lost"])
    event = next(event for event in links.events if event["t"] == "lost")
    assert (event["relay"], event["attempt"]) == ("south", ATTEMPT)
    assert "the relay of node 2 is lost" in event["why"]


def test_node_ended_by_its_runner_is_no_loss(links: Links) -> None:
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener):
        links.nodes[2].finish()
        with pytest.raises(ConnectionResetError):
            links.read(client, 1)
    assert ("node", ATTEMPT, "2") not in links.heads["south"].children
    assert not [event for event in links.events if event["t"] == "lost"]


def test_silent_head_is_lost_and_its_streams_end(open_links: Callable[..., Links]) -> None:
    links = open_links(limits=Limits(heartbeat=0.1, silence=2.0), node_options={"heartbeat": 0.1})
    head = links.replace_head("south")
    with links.dial(0, 2) as client:
        links.turn_until(lambda: links.hub.streams)
        links.turn_until(lambda: [event for event in links.events if event["t"] == "lost"])
        with pytest.raises(ConnectionResetError):
            links.read(client, 1)
    event = next(event for event in links.events if event["t"] == "lost" and event["relay"] == "hub")
    assert event["why"].startswith("the relay of south is lost: no sign of life for ")
    assert head.is_ended


def test_head_with_name_of_the_hub_resolves_it(open_links: Callable[..., Links]) -> None:
    links = open_links(hub_host="localhost")
    with links.program(2) as listener, links.dial(0, 2) as client, links.accept(listener) as server:
        client.send(b"ping")
        assert links.read(server, 4) == b"ping"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "an-empty..label"])
def test_head_with_unknown_name_of_the_hub_tries_again(open_links: Callable[..., Links], name: str) -> None:
    links = open_links()
    address = HubAddress(name, 1, None)
    link = HubLink(links.heads["north"], address, "north", head_key("north"))
    link.connect()
    alarm = f"hub-connect-{id(link)}"
    links.turn_until(lambda: links.loop.has_alarm(alarm))
    link.close()


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("south.example.org", 1, "does not appear to be an IPv4"),
        ("192.0.2.1", 65536, "65536 is not the port of a head"),
        ("192.0.2.1", float("inf"), "inf is not the port of a head"),
    ],
)
def test_entry_with_invalid_address_of_a_head_is_rejected(links: Links, host: str, port: float, problem: str) -> None:
    entry = {**links.entry("north"), "peers": {"south": {"host": host, "port": port}}}
    with pytest.raises(ValueError, match=problem):
        links.heads["north"].add_attempt(entry)


def test_lost_head_ends_its_nodes_with_a_report(links: Links) -> None:
    links.heads["north"].close()
    links.turn_until(lambda: links.nodes[0].has_ended and links.nodes[1].has_ended)
    assert links.node_events[0][-1]["t"] == "lost"
    assert "is lost" in links.node_events[0][-1]["why"]
