"""Decide which clusters of a job are joined by relayed links.

See docs/adr/0034-relayed-links.md. A job that may use relayed links has an offer of the daemon in its plan. Daemon and
runners compute the same layout of ports: every node's relay listens on loopback at the ports of the other nodes, so a
port belongs to one node of the job.
"""

from __future__ import annotations

import re
from itertools import combinations

from koalapy.runner.networks import is_inside
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    Pair = tuple[str, str]

FIRST_PORT, LAST_PORT = 15_000, 32_767
"""The ports of all layouts, below those that Linux gives to connections."""
RELAY_CONTROL_PORTS = 8
"""Ports of each node at which mpirun listens for its daemons, if it runs there: two for each program at a time."""
SPARE_PORTS = 4
"""Ports of each node besides one for each rank: for the probe, and for ports that other programs use."""


def count_ports(slots: Sequence[int]) -> int:
    """Return how many ports a job needs; ``slots``: the ranks of each node."""
    return sum(slots) + len(slots) * (RELAY_CONTROL_PORTS + SPARE_PORTS)


def node_ports(base: int, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last port of each node, from the port ``base`` on. ``slots``: the ranks of each node."""
    ranges = []
    for count in slots:
        width = count + RELAY_CONTROL_PORTS + SPARE_PORTS
        ranges.append((base, base + width - 1))
        base += width
    return ranges


def split_ports(ports: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two parts of a node's range: the ports of mpirun, and those of ranks and the probe."""
    first, last = ports
    return (first, first + RELAY_CONTROL_PORTS - 1), (first + RELAY_CONTROL_PORTS, last)


NETWORK = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}/(?:[12]?\d|3[01])", re.ASCII)
"""Pattern of a network that Open MPI recognizes: never one of a single address."""
MAX_NETWORKS = 4096
LOOPBACK_SERIES = 4
"""The series of Open MPI that cannot use loopback between sites and another interface within them."""


def sort_pair(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


class RelayOffer:
    """The pairs of clusters that may use relayed links, and the ports for them, as the daemon says."""

    def __init__(self, relay: Mapping[str, Any], slots: Sequence[int]) -> None:
        """``slots``: the ranks of each node of the job."""
        self.attempt = str(relay["attempt"])
        self.pairs = {sort_pair(one, other): str(how) for one, other, how in relay["pairs"]}
        """By pair: ``any`` to try direct connections first, or ``relayed``."""
        self.layouts = [node_ports(base, slots) for base in relay["bases"]]
        """The ports of each node of the job, in alternative layouts; none if relayed links cannot be used."""

    @property
    def required(self) -> set[Pair]:
        """Return the pairs that are relayed without a direct try."""
        return {pair for pair, how in self.pairs.items() if how == "relayed"}


class RelayedLinks:
    """The decision of a job's head node: which pairs of clusters are relayed, and how."""

    def __init__(
        self, pairs: Collection[Pair], layout: int, networks: Mapping[str, Sequence[str]], *, on_loopback: bool
    ) -> None:
        """``layout``: the index of the offer's layout of ports. ``networks``: those of each cluster's nodes.

        ``on_loopback``: all streams of ranks are relayed, also within a cluster.
        """
        self.pairs, self.layout, self.networks, self.on_loopback = frozenset(pairs), layout, networks, on_loopback

    def joins(self, one: str, other: str) -> bool:
        """Return whether nodes of two clusters reach each other only by relays."""
        return self.on_loopback or sort_pair(one, other) in self.pairs

    def has_relay(self, cluster: str) -> bool:
        """Return whether nodes of a cluster have a relay."""
        return self.on_loopback or any(cluster in pair for pair in self.pairs)

    def reachable_networks(self, cluster: str) -> list[str]:
        """Return the networks that nodes of a cluster reach without relays, with their own."""
        visible = [nets for other, nets in self.networks.items() if sort_pair(cluster, other) not in self.pairs]
        return sorted({network for networks in visible for network in networks})

    def to_message(self) -> dict[str, Any]:
        return {
            "pairs": sorted(self.pairs),
            "layout": self.layout,
            "networks": self.networks,
            "on_loopback": self.on_loopback,
        }


def read_links(message: Mapping[str, Any], offer: RelayOffer | None) -> RelayedLinks:
    """Return the head node's decision. Raise ``ValueError`` if the daemon does not allow it, or it is malformed."""
    pairs = {sort_pair(str(one), str(other)) for one, other in message["pairs"]}
    networks = {str(cluster): list(values) for cluster, values in message["networks"].items()}
    if offer is None or not pairs <= offer.pairs.keys() or message["layout"] not in range(len(offer.layouts)):
        raise ValueError("the head node decides on relayed links that the job may not use")
    texts = [network for values in networks.values() for network in values]
    if len(texts) > MAX_NETWORKS or not all(isinstance(text, str) and NETWORK.fullmatch(text) for text in texts):
        raise ValueError("the head node names networks of nodes that cannot be")
    links = RelayedLinks(pairs, message["layout"], networks, on_loopback=bool(message["on_loopback"]))
    is_complete = all(cluster in networks for pair in pairs for cluster in pair)
    if not links.on_loopback and (not is_complete or any(_collide(links, *pair) for pair in pairs)):
        raise ValueError("the head node names no or the same networks for clusters that do not reach each other")
    return links


def check_networks(links: RelayedLinks, cluster: str, clusters: Collection[str], own: str) -> None:
    """Raise ``ValueError`` if the head node of another site describes this node's cluster wrongly.

    Else ranks could connect directly where links are to be relayed. ``clusters``: those of the job.
    ``own``: the network of this node.
    """
    if links.on_loopback:
        return
    if links.networks.keys() != {*clusters} or own not in links.networks[cluster]:
        raise ValueError(f"the head node names networks of {cluster} without {own or 'any'}, that of this node")


def decide_links(
    offer: RelayOffer,
    pairs: Collection[Pair],
    layout: int,
    series: int,
    hosts: Mapping[str, Sequence[tuple[str, Sequence[Sequence[str]]]]],
) -> RelayedLinks:
    """Return which pairs of clusters are relayed: ``pairs`` or all. Raise ``Failure`` if the daemon forbids it.

    ``series``: Open MPI's major version. ``hosts``: by cluster, the address of each node and its (network, address)
    pairs. Ranks can use loopback between sites and another interface within a site only under Open MPI 5, if networks
    do not overlap and the network of each node is known. Otherwise they use loopback alone, so that all is relayed.
    """
    if not offer.layouts:
        one, other = min(pairs)
        raise Failure(
            f"relayed links cannot be used between clusters {one} and {other}, which the job needs: its nodes need too "
            "many ports, or the relay of the daemon or of a site is away; see koala network"
        )
    found = {
        cluster: sorted({next((n for n, address in networks if address == host), "") for host, networks in nodes})
        for cluster, nodes in hosts.items()
    }
    networks = {cluster: [n for n in values if NETWORK.fullmatch(n)] for cluster, values in found.items()}
    if sum(map(len, networks.values())) > MAX_NETWORKS:
        raise Failure(f"relayed links allow nodes of at most {MAX_NETWORKS} networks: use fewer nodes")
    links = RelayedLinks(pairs, layout, networks, on_loopback=False)
    unknown = next((cluster for cluster, values in found.items() if values != networks[cluster]), "")
    if series <= LOOPBACK_SERIES:
        cause = f"Open MPI {series}"
    elif any(_collide(links, *pair) for pair in links.pairs):
        cause = "networks with the same addresses"
    elif unknown:
        cause = f"nodes of {unknown} without a known network"
    else:
        return links
    every = {sort_pair(*pair) for pair in combinations(hosts, 2)}
    if forbidden := sorted(every - offer.pairs.keys()):
        raise Failure(
            f"a job with {cause} sends all data by relays if it needs one, but the clusters {forbidden[0][0]} and "
            f"{forbidden[0][1]} may not use relayed links: name fewer clusters, or allow it in the section links"
        )
    return RelayedLinks(every, layout, networks, on_loopback=True)


def _collide(links: RelayedLinks, one: str, other: str) -> bool:
    """Return whether addresses of one cluster mean other nodes to a cluster that reaches it only by relays."""
    return any(
        overlap(near, far)
        for cluster, remote in ((one, other), (other, one))
        for near in links.reachable_networks(cluster)
        for far in links.networks[remote]
    )


def overlap(one: str, other: str) -> bool:
    """Return whether two networks have an address in common."""
    return is_inside(one.partition("/")[0], other) or is_inside(other.partition("/")[0], one)
