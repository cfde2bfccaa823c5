"""A hub, heads and nodes in one process and on one event loop, connected by real sockets on loopback."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from koalapy.relay.attempts import AttemptPlan, Limits, add_node_keys
from koalapy.relay.head import Head, HubAddress
from koalapy.relay.hub import Hub
from koalapy.relay.tls_side import connect_tls
from koalapy.runner.connections import ControlChannel, Credentials, Loop, ParentLink, connect_side
from koalapy.runner.relay_node import NodeRelay, NodeSettings
from koalapy.runner.relay_protocol import seal_line
from koalapy.system.certificate_files import load_certificate
from koalapy.system.tls import Trust
from tests.certificates import CertificateAuthority

ATTEMPT = "7.1.k3"
ATTEMPT_KEY = b"key of the attempt".ljust(32, b".")
CLUSTERS = ("north", "north", "south", "south")
"""The cluster of each node."""
PORTS_PER_NODE = 4
MAX_TURNS = 1000


def head_key(cluster: str) -> bytes:
    return f"key of the head of {cluster}".encode()


def node_key(node: int) -> bytes:
    return f"key of node {node}".encode()


def address_of_programs(node: int) -> str:
    """Return the address at which programs of a node listen: all nodes share one host."""
    return f"127.0.2.{node + 1}"


def address_of_listeners(node: int) -> str:
    return f"127.0.1.{node + 1}"


def free_port_base() -> int:
    """Return a port from which those of all nodes are free on every address, below the ports of clients."""
    for base in range(20_000 + os.getpid() % 300 * 40, 32_000, 40):
        try:
            for port in range(base, base + len(CLUSTERS) * PORTS_PER_NODE):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", port))
        except OSError:
            continue
        return base
    raise RuntimeError("no free range of ports")


class Links:
    """Relays of two clusters with two nodes each."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: bool = False,
        direct: bool = False,
        hub_host: str = "127.0.0.1",
        limits: Limits | None = None,
        node_options: dict[str, Any] | None = None,
        owner: Callable[..., int | None] = lambda *_: os.getuid(),
    ) -> None:
        """``direct``: heads reach each other. ``node_options``: further settings of nodes."""
        self.loop = Loop()
        self.events: list[dict[str, Any]] = []
        self.base = free_port_base()
        self.tls = tls
        files = CertificateAuthority(folder / "ca").issue()
        server_context = load_certificate(files.certificate, files.key).context
        self.client_context = client_context = Trust(folder / "ca" / "ca.pem").create_context()
        limits = limits or Limits()
        self.hub = Hub(self.loop, ("127.0.0.1", 0), (lambda: server_context) if tls else None, limits)
        hub_address = HubAddress(hub_host, self.hub.server.port, (lambda: client_context) if tls else None)
        self.heads: dict[str, Head] = {}
        for cluster in dict.fromkeys(CLUSTERS):
            peer = (("127.0.0.1", 0) if direct else None, (lambda: server_context) if tls else None)
            self.heads[cluster] = Head(self.loop, cluster, ("127.0.0.1", 0), hub_address, *peer, limits=limits)
        self.certificate = files.certificate.read_text() if tls else None
        self.identities: dict[str, dict[str, Any]] = {
            cluster: {
                **({} if self.certificate is None else {"certificate": self.certificate}),
                **({} if head.peer_server is None else {"host": "127.0.0.1", "port": head.peer_server.port}),
            }
            for cluster, head in self.heads.items()
        }
        self.install(ATTEMPT)
        for cluster, relay in {"": self.hub, **self.heads}.items():
            relay.on_event = lambda event, cluster=cluster: self.events.append({"relay": cluster or "hub", **event})
        self.hub.set_keys(self.keys())
        for cluster, head in self.heads.items():
            head.set_keys(self.keys(cluster))
        self.turn_until(lambda: all(head.hub and head.hub.is_welcome for head in self.heads.values()))
        self.node_events: list[list[dict[str, Any]]] = [[] for _ in CLUSTERS]
        self.nodes = [
            NodeRelay(
                self.loop, self.node_settings(i, **(node_options or {})), self.node_events[i].append, owner, os.getuid()
            )
            for i in range(len(CLUSTERS))
        ]
        for node in self.nodes:
            node.start()
        self.turn_until(lambda: all({"t": "ready"} in events for events in self.node_events))

    def port(self, node: int, number: int = 0) -> int:
        return self.base + node * PORTS_PER_NODE + number

    def keys(self, cluster: str = "") -> dict[str, Any]:
        """Return the keys in the state of the hub, or of a cluster's head."""
        if cluster:
            return {"key": head_key(cluster).hex()}
        return {"heads": {name: head_key(name).hex() for name in self.heads}}

    def entry(self, cluster: str = "", token: str = ATTEMPT) -> dict[str, Any]:
        """Return the entry of an attempt for the hub, or for a cluster's head."""
        nodes = [(name, [(self.port(i), self.port(i) + PORTS_PER_NODE - 1)]) for i, name in enumerate(CLUSTERS)]
        plan = AttemptPlan(token, ATTEMPT_KEY, nodes, self.identities)
        if not cluster:
            return plan.hub_entry()
        keys = {i: node_key(i) for i, name in enumerate(CLUSTERS) if name == cluster}
        return add_node_keys(plan.head_entry(cluster), keys)

    def install(self, token: str) -> None:
        """Add an attempt to all relays."""
        self.hub.add_attempt(self.entry(token=token))
        for cluster, head in self.heads.items():
            head.add_attempt(self.entry(cluster, token))

    def node_settings(self, index: int, **options: Any) -> NodeSettings:
        listen = address_of_listeners(index)
        message = {
            "attempt": ATTEMPT,
            "node": index,
            "key": node_key(index).hex(),
            "head": ["127.0.0.1", self.heads[CLUSTERS[index]].server.port],
            "listeners": [
                [listen, self.port(i), self.port(i) + PORTS_PER_NODE - 1, i] for i in range(len(CLUSTERS)) if i != index
            ],
            "targets": [
                [self.port(index), self.port(index) + PORTS_PER_NODE - 1, address_of_programs(index), "127.0.0.1"]
            ],
        }
        return NodeSettings({**message, **options})

    def turn(self) -> None:
        """Handle the sockets that are ready now."""
        self.loop.set_alarm("test", 0.02, lambda: None)
        self.loop.turn()

    def turn_until(self, condition: Callable[[], object]) -> None:
        for _ in range(MAX_TURNS):
            if condition():
                return
            self.turn()
        raise AssertionError("the expected state did not occur")

    def replace_head(self, cluster: str) -> "RawChild":
        """Return a hostile head of a cluster in place of the genuine one, which does not connect again."""
        hub_link = self.heads[cluster].hub
        assert hub_link is not None
        hub_link.close()
        return RawChild(self, self.hub.server.port, Credentials(head_key(cluster), cluster))

    @contextlib.contextmanager
    def program(self, node: int, number: int = 0) -> Iterator[socket.socket]:
        """Listen at a port of a node, as a rank does."""
        with socket.create_server((address_of_programs(node), self.port(node, number)), backlog=1024) as listener:
            listener.setblocking(False)
            yield listener

    def dial(self, source: int, target: int, number: int = 0) -> socket.socket:
        """Connect from a program on one node to a port of another."""
        connection = socket.create_connection((address_of_listeners(source), self.port(target, number)))
        connection.setblocking(False)
        return connection

    def accept(self, listener: socket.socket) -> socket.socket:
        accepted: list[socket.socket] = []

        def try_to_accept() -> bool:
            with contextlib.suppress(BlockingIOError):
                accepted.append(listener.accept()[0])
            return bool(accepted)

        self.turn_until(try_to_accept)
        accepted[0].setblocking(False)
        return accepted[0]

    def read(self, connection: socket.socket, size: int) -> bytes:
        """Read so many bytes, or up to the end. Raise ``ConnectionResetError``."""
        data = bytearray()
        is_ended = False

        def read_more() -> bool:
            nonlocal is_ended
            with contextlib.suppress(BlockingIOError):
                while len(data) < size and not is_ended:
                    piece = connection.recv(min(size - len(data), 1 << 20))
                    is_ended = not piece
                    data.extend(piece)
            return is_ended or len(data) >= size

        self.turn_until(read_more)
        return bytes(data)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for relay in (*self.heads.values(), self.hub):
            relay.close()
        self.loop.close()


class RawChild:
    """A head at the hub, or a node at a head, that sends any given line."""

    def __init__(self, links: Links, port: int, credentials: Credentials) -> None:
        """Connect and authenticate."""
        self._links, self._port = links, port
        self.received: list[dict[str, Any]] = []
        self.is_ended, self.error = False, ""
        context = links.client_context if links.tls and port == links.hub.server.port else None
        side = (
            connect_side("127.0.0.1", port) if context is None else connect_tls("127.0.0.1", port, context, "localhost")
        )
        buffer = memoryview(bytearray(400_000))
        self.parent = ParentLink(links.loop, side, buffer, credentials, self.received.append, self._end, max_line=65536)
        self.parent.start()
        links.turn_until(lambda: self.received or self.is_ended)

    @property
    def channel(self) -> ControlChannel:
        assert self.parent.channel is not None
        return self.parent.channel

    def send_first_line(self, line: bytes) -> socket.socket:
        """Return a new connection that begins with a line."""
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(line)
        connection.setblocking(False)
        return connection

    def send_stream_line(self, message: dict[str, Any], key: bytes | None = None) -> socket.socket:
        return self.send_first_line(seal_line(key or self.stream_key, message))

    @property
    def stream_key(self) -> bytes:
        return self.parent.stream_key

    def _end(self, error: Exception) -> None:
        self.is_ended, self.error = True, str(error)
