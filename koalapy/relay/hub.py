"""The hub: pairs streams between heads that cannot reach each other."""

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from koalapy.relay.attempts import Limits
from koalapy.relay.relay import Child, Relay, Stream, Via
from koalapy.relay.server import Server
from koalapy.relay.tls_side import DetectedSide
from koalapy.runner.connections import Credentials, LineConnection, Loop, Refused, Side, get_text, is_sealed
from koalapy.runner.relay_protocol import check_seal, check_ticket, get_stream, get_target


class Hub(Relay):
    """The relay of the daemon."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        context: Callable[[], ssl.SSLContext] | None,
        limits: Limits | None = None,
    ) -> None:
        """Listen at an address; ``context`` returns the TLS context, None: no TLS. Raise ``OSError``.

        Control connections have TLS with the hub. Streams have it between the heads, so the hub cannot read them.
        """
        super().__init__(loop, limits or Limits())
        self._has_tls = context is not None
        self._keys: dict[str, bytes] = {}
        make_side = Side if context is None else partial(DetectedSide, context=context)
        self.server = Server(loop, self.pool, address, make_side, self.limits, self.handle_first_line, self.refuse)
        self.servers = [self.server]

    def handle_first_line(self, connection: LineConnection, line: bytes) -> None:
        if self._has_tls and not is_sealed(line) and connection.side.settle().is_plain:
            raise Refused("tls", "a head has sent its hello without TLS")
        super().handle_first_line(connection, line)

    def set_keys(self, message: Mapping[str, Any]) -> None:
        """Replace the heads' keys, by cluster, by those in ``heads`` of a state. Raise ``ValueError``."""
        try:
            keys = {str(cluster): bytes.fromhex(key) for cluster, key in message["heads"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the keys of the heads are missing: {error!r}") from error
        for cluster in [name for name, key in self._keys.items() if keys.get(name) != key]:
            if ("head", cluster) in self.children:
                self.lose_child(("head", cluster), "its key was withdrawn")
        self._keys = keys

    def find_credentials(self, hello: dict[str, Any]) -> tuple[Via, Credentials]:
        cluster = get_text(hello, "name")
        if cluster not in self._keys:
            raise Refused("unknown-cluster", f"there is no cluster {ascii(cluster)[:80]}")
        return ("head", cluster), Credentials(self._keys[cluster], cluster)

    def authenticate_child(self, line: bytes, message: dict[str, Any]) -> Child:
        child = self.child_at(("head", get_text(message, "cluster")))
        check_seal(child.stream_key, line)
        return child

    def open_stream(self, connection: LineConnection, line: bytes, message: dict[str, Any]) -> None:
        child = self.authenticate_child(line, message)
        stream_id = get_stream(message)
        target, port = get_target(message)
        attempt = self.get_attempt(stream_id[0])
        source_node, target_node = attempt.node(stream_id[1]), self.check_port(attempt, target, port)
        if source_node.cluster != child.via[1]:
            raise Refused("foreign-node", f"node {stream_id[1]} is not one of {child.via[1]}")
        if target_node.cluster == child.via[1]:
            raise Refused("own-node", f"node {target} is at {child.via[1]} itself")
        ticket = get_text(message, "ticket")
        pair_key = attempt.pair_key(source_node.cluster, target_node.cluster)
        check_ticket(ticket, pair_key, stream_id, target, port)
        taker: Via = ("head", target_node.cluster)
        stream = Stream(stream_id, attempt, source_node, target_node, (child.via, taker), taker)
        self.dial(stream, connection, port, target, ticket)
