"""The head: passes streams between the nodes of its cluster, the hub, and the heads of other clusters."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from koalapy.config.types import is_address
from koalapy.relay.attempts import Attempt, AttemptNode, Limits, Peer
from koalapy.relay.relay import Child, Relay, Stream, StreamId, Via
from koalapy.relay.server import Server
from koalapy.relay.tls_side import TlsSide, connect_head, connect_tls
from koalapy.runner.connections import (
    Credentials,
    LineConnection,
    Loop,
    ParentLink,
    Refused,
    Side,
    connect_side,
    describe_error,
    get_text,
    parse_line,
)
from koalapy.runner.relay_protocol import (
    MAX_NODES,
    check_seal,
    check_ticket,
    derive_direct_key,
    get_number,
    get_stream,
    get_target,
    make_ticket,
    seal_line,
)
from koalapy.runner.relay_streams import resolve_host

log = structlog.get_logger()

HUB: Via = ("hub",)
FIRST_RECONNECT_PAUSE_S = 0.2
MAX_REASON_LENGTH = 500


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of the hub, and how to verify it."""

    host: str
    port: int
    context: Callable[[], ssl.SSLContext] | None
    """Create a TLS context, which may read files; None: no TLS."""


class Offer(NamedTuple):
    """A stream to a node of this cluster."""

    id: StreamId
    attempt: Attempt
    target: int
    port: int


NO_PEER = Peer(None, None)


class HubLink:
    """The control connection to the hub, which is established again whenever it breaks."""

    def __init__(self, head: "Head", address: HubAddress, cluster: str, key: bytes) -> None:
        self._head, self.address = head, address
        self._credentials = Credentials(key, cluster)
        self.parent: ParentLink | None = None
        self._pause = FIRST_RECONNECT_PAUSE_S
        self._is_closed = False
        self.location = address.host, address.port
        """The address of the hub on the last connection."""
        self.is_welcome = False

    def connect(self) -> None:
        """Find the hub's address, connect and send a hello. Retry later if that fails."""
        host, port = self.address.host, self.address.port
        if is_address(host):
            self._connect_to((host, port))
            return
        # The resolver may take long, and streams must not wait for it.
        reading, writing = socket.socketpair()
        results: list[tuple[str, int] | OSError] = []

        def resolve() -> None:
            try:
                results.append(resolve_host(host, port))
            except OSError as error:
                results.append(error)
            writing.close()

        def finish(_events: int) -> None:
            self._head.loop.forget(reading.fileno())
            reading.close()
            if not self._is_closed:
                self._connect_to(results[0])

        self._head.loop.watch(reading.fileno(), finish)
        threading.Thread(target=resolve, daemon=True).start()

    def _connect_to(self, location: tuple[str, int] | OSError) -> None:
        loop, limits = self._head.loop, self._head.limits
        try:
            if isinstance(location, OSError):
                raise location
            self.location = location
            if self.address.context is None:
                side: Side = connect_side(*location)
            else:
                side = connect_tls(*location, self.address.context(), self.address.host)
        except OSError as error:
            self._retry(describe_error(error))
            return
        self.parent = ParentLink(
            loop,
            side,
            self._head.pool.large,
            self._credentials,
            self._receive,
            self._lose,
            interval=limits.heartbeat,
            silence_limit=limits.silence,
        )
        self.parent.start()

    @property
    def stream_key(self) -> bytes:
        return b"" if self.parent is None else self.parent.stream_key

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it without a connection."""
        if self.parent is not None:
            self.parent.send(message)

    def check(self) -> None:
        """End a dead connection."""
        if self.parent is not None:
            self.parent.check()

    def close(self) -> None:
        """Close the connection and plan no other."""
        self._is_closed = True
        self._head.loop.cancel_alarm(f"hub-connect-{id(self)}")
        if self.parent is not None:
            self.parent.close()
        self.parent, self.is_welcome = None, False

    def _receive(self, message: dict[str, Any]) -> None:
        if message["t"] == "welcome":
            self.is_welcome, self._pause = True, FIRST_RECONNECT_PAUSE_S
            log.info(
                "connected to the hub", action="relay-hub-connected", host=self.address.host, port=self.address.port
            )
            self._head.on_event({"t": "hub", "connected": True})
        elif message["t"] == "dial":
            self._head.take_from_hub(message)

    def _lose(self, error: Exception) -> None:
        reason, was_welcome = describe_error(error), self.is_welcome
        self.parent, self.is_welcome = None, False
        if was_welcome:
            self._head.on_event({"t": "hub", "connected": False, "why": reason})
        self._head.lose_streams(HUB, f"the hub at {self.address.host}:{self.address.port} is lost: {reason}")
        self._retry(reason)

    def _retry(self, reason: str) -> None:
        log.warning("cannot reach the hub", action="relay-hub-away", host=self.address.host, reason=reason)
        self._head.loop.set_alarm(f"hub-connect-{id(self)}", self._pause, self.connect)
        self._pause = min(self._head.limits.reconnect, self._pause * 2)


class Head(Relay):
    """The relay of a cluster's agent."""

    def __init__(
        self,
        loop: Loop,
        cluster: str,
        address: tuple[str, int],
        hub: HubAddress,
        peer_address: tuple[str, int] | None = None,
        peer_context: Callable[[], ssl.SSLContext] | None = None,
        limits: Limits | None = None,
        certificate: Callable[[], str] = lambda: "",
    ) -> None:
        """Listen for nodes at ``address``, and for other heads at ``peer_address``. Raise ``OSError``.

        ``peer_context`` returns the TLS context for streams of other heads; None: streams have no TLS. ``certificate``
        returns the certificate by which the other heads know this one (PEM).
        """
        super().__init__(loop, limits or Limits())
        self.cluster, self._hub_address, self._certificate = cluster, hub, certificate
        self._addresses = address, peer_address
        self.hub: HubLink | None = None
        self._key = b""
        self.server = Server(loop, self.pool, address, Side, self.limits, self.handle_first_line, self.refuse)
        self.peer_server, self._peer_context = None, peer_context
        if peer_address is not None and peer_context is not None:
            self.peer_server = Server(
                loop,
                self.pool,
                peer_address,
                lambda connection: TlsSide(connection, peer_context()),
                self.limits,
                self._open_from_peer,
                self.refuse,
            )
        self.servers = [server for server in (self.server, self.peer_server) if server is not None]

    def set_keys(self, message: Mapping[str, Any]) -> None:
        """Connect to the hub with the ``key`` of a state, unless it is in use already. Raise ``ValueError``."""
        try:
            key = bytes.fromhex(message["key"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the key of the head is missing: {error!r}") from error
        if key != self._key:
            self._key = key
            if self.hub is not None:
                self.hub.close()
                self.lose_streams(HUB, "the key of the head was replaced")
            self.hub = HubLink(self, self._hub_address, self.cluster, key)
            self.hub.connect()

    def describe(self) -> dict[str, Any]:
        return {
            "hub_connected": self.hub is not None and self.hub.is_welcome,
            "certificate": self._certificate(),
            "has_key": self.hub is not None,
            "listen": self._addresses[0],
            "listen_for_heads": self._addresses[1],
        }

    def find_credentials(self, hello: dict[str, Any]) -> tuple[Via, Credentials]:
        attempt = self.get_attempt(get_text(hello, "name"))
        index = get_number(hello, "node", 0, MAX_NODES)
        key = self._own_node(attempt, index).key
        if key is None:
            raise Refused("unknown-node", f"the key of node {index} in attempt {attempt.token} is not known")
        return ("node", attempt.token, str(index)), Credentials(key, attempt.token, index)

    def authenticate_child(self, line: bytes, message: dict[str, Any]) -> Child:
        # The opening node names itself in ``from``, the taking node in ``node``.
        index = get_number(message, "from" if message["t"] == "open" else "node", 0, MAX_NODES)
        child = self.child_at(("node", get_text(message, "attempt"), str(index)))
        check_seal(child.stream_key, line)
        return child

    def attempts_of(self, via: Via) -> Iterable[str]:
        return via[1:2]

    def open_stream(self, connection: LineConnection, line: bytes, message: dict[str, Any]) -> None:
        child = self.authenticate_child(line, message)
        stream_id = get_stream(message)
        target, port = get_target(message)
        attempt = self.get_attempt(stream_id[0])
        source_node, target_node = attempt.node(stream_id[1]), self.check_port(attempt, target, port)
        if target_node.cluster == self.cluster:
            self._dial_node(connection, Offer(stream_id, attempt, target, port), (child.via,))
            return
        pair_key = attempt.pair_key(self.cluster, target_node.cluster, self.cluster)
        ticket = make_ticket(pair_key, stream_id, target, port)
        body = {**message, "cluster": self.cluster, "ticket": ticket}
        peer = self._find_peer(attempt, target_node.cluster)
        if peer.address is None:
            hub = self._connected_hub()
            address, prefix = hub.location, seal_line(hub.stream_key, body)
            vias: tuple[Via, ...] = (child.via, HUB)
        else:
            address, prefix, vias = peer.address, b"", (child.via,)
        line = seal_line(derive_direct_key(pair_key, self.cluster, target_node.cluster), body)
        self.admit_stream(stream_id, attempt)
        try:
            up, unsent = connect_head(*address, peer.context, prefix)
        except OSError as error:
            raise Refused("files", f"cannot connect a stream: {error.strerror or error}") from error
        stream = Stream(stream_id, attempt, source_node, target_node, vias)
        self.add_stream(stream)
        self.join(stream, connection.side, up, (unsent + line + connection.detach(), b""))

    def take_from_hub(self, message: dict[str, Any]) -> None:
        """Fetch a stream that the hub offers, or tell the hub why not. Its opener sends a separate line.

        Raise ``Refused`` if the offer names no stream.
        """
        name = dict(zip(("attempt", "from", "stream"), get_stream(message), strict=True))
        try:
            offer = self._check_offer(message, None)
            hub = self._connected_hub()
            source = offer.attempt.node(offer.id[1]).cluster
            has_tls = self._find_peer(offer.attempt, source).context is not None
            take = {"t": "take", **name, "cluster": self.cluster}
            context = self._peer_context() if has_tls and self._peer_context is not None else None
            side, unsent = connect_head(*hub.location, context, seal_line(hub.stream_key, take), is_server=True)
            self.server.adopt(side, source, unsent, lambda lines, line: self._open_from_peer(lines, line, offer))
        except (Refused, OSError) as error:
            reason = error if isinstance(error, Refused) else Refused("files", f"cannot connect a stream: {error}")
            self.refuse(reason)
            if self.hub is not None:
                self.hub.send({"t": "refused", **name, "why": str(reason)[:MAX_REASON_LENGTH]})

    def _find_peer(self, attempt: Attempt, cluster: str) -> Peer:
        """Return the head of another cluster. Raise ``Refused`` if this head needs TLS and cannot verify it."""
        peer = attempt.peers.get(cluster, NO_PEER)
        if peer.context is None and self._peer_context is not None:
            raise Refused("no-certificate", f"the certificate of the head of {cluster} is not known")
        return peer

    def _open_from_peer(self, connection: LineConnection, line: bytes, offered: Offer | None = None) -> None:
        """Act on the first line of a stream that another head opens, directly or by the hub. Raise ``Refused``."""
        message = parse_line(line)
        cluster = get_text(message, "cluster")
        attempt = self.get_attempt(get_text(message, "attempt"))
        if message["t"] != "open" or cluster == self.cluster:
            raise Refused("malformed", "another head may only open streams")
        key = derive_direct_key(attempt.pair_key(cluster, self.cluster, self.cluster), cluster, self.cluster)
        check_seal(key, line)
        offer = self._check_offer(message, cluster)
        if offered not in (None, offer):
            raise Refused("foreign-stream", f"the head of {cluster} opens another stream than the hub has offered")
        vias = () if offered is None else (HUB,)
        self._dial_node(connection, offer, vias)

    def _check_offer(self, message: dict[str, Any], cluster: str | None) -> Offer:
        """Return a stream from another cluster to a node of this one. Raise ``Refused``.

        ``cluster``: the only permitted origin; None: any other cluster.
        """
        stream_id = get_stream(message)
        target, port = get_target(message)
        attempt = self.get_attempt(stream_id[0])
        source = attempt.node(stream_id[1]).cluster
        self._own_node(attempt, target)
        self.check_port(attempt, target, port)
        if source == self.cluster or cluster not in (None, source):
            raise Refused("foreign-node", f"node {stream_id[1]} is not one of {cluster or 'another cluster'}")
        pair_key = attempt.pair_key(source, self.cluster, self.cluster)
        check_ticket(get_text(message, "ticket"), pair_key, stream_id, target, port)
        return Offer(stream_id, attempt, target, port)

    def _dial_node(self, connection: LineConnection, offer: Offer, vias: tuple[Via, ...]) -> None:
        """Let a node take the stream of a connection. Raise ``Refused``."""
        attempt, taker = offer.attempt, ("node", offer.attempt.token, str(offer.target))
        nodes = attempt.node(offer.id[1]), attempt.node(offer.target)
        self.dial(Stream(offer.id, attempt, *nodes, (*vias, taker), taker), connection, offer.port, offer.target)

    def _own_node(self, attempt: Attempt, index: int) -> AttemptNode:
        """Return a node of this cluster. Raise ``Refused`` if it is another's."""
        node = attempt.node(index)
        if node.cluster != self.cluster:
            raise Refused("foreign-node", f"node {index} of attempt {attempt.token} is at {node.cluster}")
        return node

    def _connected_hub(self) -> HubLink:
        if self.hub is None or not self.hub.is_welcome:
            raise Refused("absent", "the hub is not connected")
        return self.hub

    def check(self) -> None:
        super().check()
        if self.hub is not None:
            self.hub.check()

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()
        super().close()
