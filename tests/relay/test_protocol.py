"""Keys, tickets, stream numbers, rates and heartbeats of relayed links."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner import relay_node
from koalapy.runner.connections import ControlChannel, Credentials, Refused
from koalapy.runner.relay_node import SocketOwners
from koalapy.runner.relay_protocol import (
    Ranges,
    TokenBucket,
    UsedNumbers,
    check_seal,
    check_ticket,
    derive_direct_key,
    derive_node_key,
    derive_pair_key,
    make_ticket,
    seal_line,
)

KEY = b"key of the attempt"
STREAM = ("7.1.k3", 0, 5)


def test_keys_depend_on_pair_direction_and_attempt() -> None:
    assert derive_pair_key(KEY, "north", "south") == derive_pair_key(KEY, "south", "north")
    pairs = [("north", "south"), ("north", "west"), ("south", "west")]
    assert len({derive_pair_key(KEY, *pair) for pair in pairs}) == 3
    assert derive_direct_key(KEY, "north", "south") != derive_direct_key(KEY, "south", "north")
    assert derive_node_key(b"secret", "7.1.k3") != derive_node_key(b"secret", "7.2.k3")


@pytest.mark.parametrize(
    ("stream", "target", "port"),
    [(("7.2.k3", 0, 5), 2, 21000), (("7.1.k3", 1, 5), 2, 21000), (("7.1.k3", 0, 6), 2, 21000), (STREAM, 3, 21000)],
)
def test_ticket_of_another_stream_is_refused(stream: tuple[str, int, int], target: int, port: int) -> None:
    ticket = make_ticket(KEY, STREAM, 2, 21000)
    check_ticket(ticket, KEY, STREAM, 2, 21000)
    with pytest.raises(Refused, match="ticket"):
        check_ticket(ticket, KEY, stream, target, port)


@given(st.integers(0, 60), st.binary(min_size=1, max_size=1))
def test_sealed_line_with_any_changed_byte_is_refused(position: int, byte: bytes) -> None:
    line = seal_line(KEY, {"t": "open", "stream": 5}).rstrip(b"\n")
    check_seal(KEY, line)
    position %= len(line)
    changed = line[:position] + byte + line[position + 1 :]
    if changed != line:
        with pytest.raises(Refused, match="wrong tag"):
            check_seal(KEY, changed)


@given(st.lists(st.integers(0, 40)), st.integers(1, 10))
def test_stream_number_is_accepted_once(numbers: list[int], window: int) -> None:
    used = UsedNumbers(window)
    accepted = [number for number in numbers if used.use(number)]
    assert len(accepted) == len(set(accepted))
    if numbers:
        assert numbers[0] in accepted
        assert max(numbers) in accepted


def test_token_bucket_allows_burst_then_rate_and_ignores_a_clock_that_goes_back() -> None:
    bucket = TokenBucket(rate=2.0, burst=3.0, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_time() == pytest.approx(0.5)
    assert not bucket.take(5.0)
    assert [bucket.take(6.0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("pair", [(0, 5), (5, 4), (1, 65536), ("1", 2), (True, 2)])
def test_ranges_with_invalid_pair_are_rejected(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no range"):
        Ranges([pair])


def test_ranges_contain_their_first_and_last_port_only() -> None:
    ranges = Ranges([(10, 12), (20, 20)])
    assert [port for port in range(30) if port in ranges] == [10, 11, 12, 20]
    assert "10" not in ranges


class Channels:
    """Both ends of a control connection on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[bytes] = []
        nonces = ("a", "b")
        credentials = Credentials(KEY, "north")
        self.parent = ControlChannel(
            credentials.open_session(nonces, is_parent=True)[0], self.sent.append, lambda: self.now
        )
        self.child = ControlChannel(
            credentials.open_session(nonces, is_parent=False)[0], self.sent.append, lambda: self.now
        )


def test_channel_sends_heartbeats_and_counts_silence() -> None:
    channels = Channels()
    assert channels.parent.check() == ""
    channels.now = 4.9
    assert channels.parent.check() == ""
    channels.now = 5.0
    assert channels.parent.check() == ""
    assert len(channels.sent) == 2
    channels.now = 15.1
    assert channels.parent.check() == "no sign of life for 15 s"
    assert channels.child.receive(channels.sent[0].rstrip(b"\n")) == {"t": "alive"}
    assert channels.child.check() == ""


def test_channel_with_repeated_or_reflected_line_refuses_it() -> None:
    channels = Channels()
    channels.parent.send({"t": "dial"})
    line = channels.sent[0].rstrip(b"\n")
    assert channels.child.receive(line) == {"t": "dial"}
    for receiver in (channels.child, channels.parent):
        with pytest.raises(Refused, match="repeated"):
            receiver.receive(line)


@pytest.mark.parametrize("has_netlink", [True, False])
def test_owner_of_connected_socket_is_its_account_and_none_without_a_socket(has_netlink: bool) -> None:
    owners = SocketOwners()
    if not has_netlink:
        owners.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        local = listener.getsockname()
        client = socket.create_connection(local)
        server, peer = listener.accept()
        with server:
            assert owners.find_owner(peer, local) == os.getuid()
            assert owners.find_owner(("127.0.0.2", peer[1]), local) is None
            assert owners.find_owner(local, ("127.0.0.1", 1)) is None
            client.close()
            assert owners.find_owner(peer, local) in (None, 0)
    owners.close()


def test_owner_is_searched_in_table_when_netlink_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such interface")

    monkeypatch.setattr(relay_node, "_ask_netlink", fail)
    owners = SocketOwners()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert owners.find_owner(client.getsockname(), listener.getsockname()) == os.getuid()
