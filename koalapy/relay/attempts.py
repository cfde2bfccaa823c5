"""The attempts of relays: entries that the daemon makes of them, and what a relay keeps of the live ones.

The daemon makes an ``AttemptPlan`` with a random key for each attempt that needs relayed links. The hub gets
``hub_entry()``. An agent gets ``head_entry()`` of its cluster from the daemon and adds the keys of its nodes. A relay
parses an entry as an ``Attempt``, and counts its streams against the ``Limits``.
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from koalapy.runner.connections import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, Refused
from koalapy.runner.relay_protocol import Ranges, TokenBucket, UsedNumbers, derive_pair_key
from koalapy.runner.session import derive_token_key
from koalapy.system.tls import pinned_context

RESERVED_FILES = 128
"""Files of a relay besides those of streams."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of streams and connections, and durations in seconds."""

    streams: int = 4096
    """Streams of the relay."""
    attempt_streams: int = 4096
    """Streams of one attempt."""
    stream_rate: float = 2000.0
    stream_burst: float = 4096.0
    """New streams of an attempt per second, and at once."""
    strangers: int = 1024
    """Connections without a first line. The oldest one of the address with most of them is closed."""
    first_line_timeout: float = 30.0
    dial_timeout: float = 60.0
    """Time in which a dialled stream must be taken."""
    heartbeat: float = HEARTBEAT_INTERVAL_S
    silence: float = SILENCE_LIMIT_S
    """Time without a line of the peer, after which a control connection counts as dead."""
    reconnect: float = 5.0
    """Maximum pause before a head connects to the hub again."""


def files_needed(limits: Limits) -> int:
    """Return the open files that a relay needs for its maximum number of streams."""
    return 2 * limits.streams + RESERVED_FILES


MAX_NAME_LENGTH = 255


@dataclass(frozen=True, slots=True)
class AttemptNode:
    """A node of an attempt; ``key`` is known to the head of its cluster only."""

    cluster: str
    ports: Ranges
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The head of another cluster."""

    address: tuple[str, int] | None
    """Where it can be reached directly; None: by the hub."""
    context: ssl.SSLContext | None
    """Accepts the certificate of this head only; None: no TLS between the heads."""


class Attempt:
    """A live attempt and the use of its streams."""

    def __init__(self, entry: dict[str, Any], limits: Limits, now: float) -> None:
        """Parse an entry of the list. Raise ``ValueError``."""
        try:
            self.token = str(entry["attempt"])
            if not 0 < len(self.token) <= MAX_NAME_LENGTH:
                raise ValueError("the token of an attempt has 1 to 255 characters")
            self._key = bytes.fromhex(entry["key"]) if "key" in entry else None
            self._pair_keys = {str(name): bytes.fromhex(key) for name, key in entry.get("keys", {}).items()}
            self.nodes = {
                int(node["index"]): AttemptNode(
                    str(node["cluster"]), Ranges(node["ports"]), bytes.fromhex(node["key"]) if "key" in node else None
                )
                for node in entry["nodes"]
            }
            self.peers = {str(name): _parse_peer(peer) for name, peer in entry.get("peers", {}).items()}
            self.max_streams = int(entry.get("streams", limits.attempt_streams))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the entry of an attempt is incomplete: {error!r}") from error
        self.content = entry
        self.stream_count = 0
        self.total_streams = 0
        self.bytes_moved: dict[tuple[str, str], list[int]] = {}
        """Bytes sent, by the clusters of the sending and the receiving node."""
        self.broken_at: dict[tuple[str, ...], float] = {}
        """Time at which a stream over a control connection last ended with an error."""
        self._bucket = TokenBucket(limits.stream_rate, limits.stream_burst, now)
        self._used: dict[int, UsedNumbers] = {}

    def node(self, index: int) -> AttemptNode:
        """Return a node. Raise ``Refused`` if the attempt has none with this index."""
        if index not in self.nodes:
            raise Refused("unknown-node", f"attempt {self.token} has no node {index}")
        return self.nodes[index]

    def pair_key(self, first: str, second: str, own_cluster: str | None = None) -> bytes:
        """Return the key that the heads of two clusters share. Raise ``Refused`` if it is not known.

        ``own_cluster``: the cluster of this head; None: this is the hub.
        """
        if self._key is not None:
            return derive_pair_key(self._key, first, second)
        key = self._pair_keys.get(first if second == own_cluster else second)
        if key is None:
            raise Refused("unknown-cluster", f"attempt {self.token} has no link from {first} to {second}")
        return key

    def counter(self, source: str, target: str) -> list[int]:
        """Return the counter of bytes from one cluster to another."""
        return self.bytes_moved.setdefault((source, target), [0])

    def admit(self, source: int, stream: int, now: float) -> None:
        """Record a stream of a node. Raise ``Refused`` if its number was used before, or the attempt is at a limit."""
        if not self._used.setdefault(source, UsedNumbers()).use(stream):
            raise Refused("replayed", f"stream {stream} of node {source} in attempt {self.token} was opened before")
        if self.stream_count >= self.max_streams:
            raise Refused("attempt-streams", f"attempt {self.token} has {self.stream_count} streams, its limit")
        if not self._bucket.take(now):
            raise Refused("rate", f"attempt {self.token} opens streams too fast")


def _parse_peer(peer: dict[str, Any]) -> Peer:
    try:
        context = pinned_context(peer["certificate"]) if "certificate" in peer else None
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"the certificate of a head cannot be read: {error}") from error
    if "host" not in peer:
        return Peer(None, context)
    if type(port := peer["port"]) is not int or not 0 < port < 65536:
        raise ValueError(f"{port!r:.50} is not the port of a head")
    # A host name would have to be resolved, which blocks all streams.
    return Peer((str(ip_address(peer["host"])), port), context)


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """The relayed links of one attempt."""

    attempt: str
    key: bytes
    nodes: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    """In order of the plan's nodes: cluster, and ranges of the ports that streams of other nodes may reach."""
    heads: Mapping[str, Mapping[str, Any]]
    """By cluster: the ``certificate`` (PEM) by which other heads know its head, if streams to it have TLS, and the
    ``host`` (an IP address) and ``port`` where all of them reach it; else they use the hub."""
    streams: int | None = None
    """Maximum streams; None: as the relays are configured."""

    def hub_entry(self) -> dict[str, Any]:
        return {**self._common(), "key": self.key.hex()}

    def head_entry(self, cluster: str) -> dict[str, Any]:
        """Return the entry for a cluster's head, without the keys of its nodes."""
        peers = sorted({name for name, _ in self.nodes} - {cluster})
        return {
            **self._common(),
            "keys": {peer: derive_pair_key(self.key, cluster, peer).hex() for peer in peers},
            "peers": {peer: dict(self.heads.get(peer, {})) for peer in peers},
        }

    def _common(self) -> dict[str, Any]:
        nodes = [
            {"index": index, "cluster": cluster, "ports": [list(ports) for ports in ranges]}
            for index, (cluster, ranges) in enumerate(self.nodes)
        ]
        limit = {} if self.streams is None else {"streams": self.streams}
        return {"attempt": self.attempt, "nodes": nodes, **limit}


def add_node_keys(entry: Mapping[str, Any], keys: Mapping[int, bytes]) -> dict[str, Any]:
    """Return a head's entry with the keys of its nodes, by index (``derive_node_key``)."""
    nodes = [{**node, "key": keys[node["index"]].hex()} if node["index"] in keys else node for node in entry["nodes"]]
    return {**entry, "nodes": nodes}


def derive_head_key(token: str, cluster: str) -> bytes:
    """Derive the key of a cluster's head from the token of its agent. It takes long by design."""
    return derive_token_key(token, f"relay of {cluster}")
