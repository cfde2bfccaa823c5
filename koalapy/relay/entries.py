"""Build what the daemon tells the hub, and each agent its head: keys, and entries of live attempts.

The daemon makes an ``AttemptPlan`` with a random key for each attempt that needs relayed links. The hub gets
``hub_entry()``. An agent gets ``head_entry()`` of its cluster from the daemon and adds the keys of its nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koalapy.runner.relay_protocol import derive_pair_key
from koalapy.system.token_keys import derive_token_key


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node of an attempt, and the ports that streams of other nodes may reach, as ranges."""

    cluster: str
    ports: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """How heads of other clusters know a head, and where they reach it directly."""

    certificate: str | None = None
    """PEM; None: streams to it have no TLS."""
    address: tuple[str, int] | None = None
    """IP address and port; None: by the hub."""


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """The relayed links of one attempt."""

    attempt: str
    key: bytes
    nodes: Sequence[NodePlan]
    """In order of the plan's nodes."""
    heads: Mapping[str, HeadIdentity]
    """By cluster. An address of a cluster counts for all others: leave it out where not all reach it."""
    streams: int | None = None
    """Maximum streams; None: as the relays are configured."""

    def hub_entry(self) -> dict[str, Any]:
        return {**self._common(), "key": self.key.hex()}

    def head_entry(self, cluster: str) -> dict[str, Any]:
        """Return the entry for a cluster's head, without the keys of its nodes."""
        others = sorted({node.cluster for node in self.nodes} - {cluster})
        return {
            **self._common(),
            "keys": {other: derive_pair_key(self.key, cluster, other).hex() for other in others},
            "peers": {other: _format_identity(self.heads.get(other, HeadIdentity())) for other in others},
        }

    def _common(self) -> dict[str, Any]:
        nodes = [
            {"index": index, "cluster": node.cluster, "ports": [list(ports) for ports in node.ports]}
            for index, node in enumerate(self.nodes)
        ]
        limit = {} if self.streams is None else {"streams": self.streams}
        return {"attempt": self.attempt, "nodes": nodes, **limit}


def _format_identity(head: HeadIdentity) -> dict[str, Any]:
    certificate = {} if head.certificate is None else {"certificate": head.certificate}
    return certificate if head.address is None else {**certificate, "host": head.address[0], "port": head.address[1]}


def add_node_keys(entry: Mapping[str, Any], keys: Mapping[int, bytes]) -> dict[str, Any]:
    """Return a head's entry with the keys of its nodes, by index (``derive_node_key``)."""
    nodes = [{**node, "key": keys[node["index"]].hex()} if node["index"] in keys else node for node in entry["nodes"]]
    return {**entry, "nodes": nodes}


def derive_head_key(token: str, cluster: str) -> bytes:
    """Derive the key of a cluster's head from the token of its agent. It takes long by design."""
    return derive_token_key(token, f"relay of {cluster}")
