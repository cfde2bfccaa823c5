"""Limit the rate of links between clusters of the testbed by token buckets (tbf)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.grid.containers import Container
from tests.grid.testbed import Testbed

GRID_NETWORK = "198.18.0."
WIDE, NARROW = "1:1", "1:2"


@contextmanager
def limited_link(testbed: Testbed, cluster: str, peer: str, rate: str) -> Iterator[None]:
    """Limit the traffic between the hosts of two clusters to ``rate`` (as ``40mbit``) while the block runs."""
    with limited_links(testbed, [(cluster, peer)], rate):
        yield


@contextmanager
def limited_links(testbed: Testbed, pairs: Iterable[tuple[str, str]], rate: str) -> Iterator[None]:
    """Limit the links of several pairs of clusters. The traffic of a host to all its peers shares one limit."""
    peers: dict[str, set[str]] = {}
    for source, peer in pairs:
        peers.setdefault(source, set()).add(peer)
        peers.setdefault(peer, set()).add(source)
    narrow = [
        (host, [_address(peer_host) for cluster in sorted(far) for peer_host in list_hosts(testbed, cluster)])
        for near, far in peers.items()
        for host in list_hosts(testbed, near)
    ]
    try:
        for container, addresses in narrow:
            _narrow(container, addresses, rate)
        yield
    finally:
        for container, _ in narrow:
            container.run("tc", "qdisc", "del", "dev", _interface(container), "root", check=False)


def list_hosts(testbed: Testbed, cluster: str) -> list[Container]:
    """Return the head node and the nodes of a cluster."""
    names = [f"{cluster}-head", *(f"{cluster}-{number}" for number in range(1, testbed.nodes[cluster] + 1))]
    return [testbed.containers[name] for name in names]


def _narrow(container: Container, addresses: list[str], rate: str) -> None:
    """Limit the traffic of a host to some addresses; other traffic has a class that is practically unlimited."""
    device = _interface(container)
    container.run("tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
    for ident in (WIDE, NARROW):
        container.run("tc", "class", "add", "dev", device, "parent", "1:", "classid", ident, "htb", "rate", "40gbit")
    bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
    container.run("tc", "qdisc", "add", "dev", device, "parent", NARROW, "handle", "20:", *bucket)
    for address in addresses:
        match = ("u32", "match", "ip", "dst", f"{address}/32", "flowid", NARROW)
        container.run("tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", *match)


def _interface(container: Container) -> str:
    """Return the address of a host in the network between the clusters."""
    lines = container.run("ip", "-brief", "-4", "address").splitlines()
    return next(line.split()[0].partition("@")[0] for line in lines if f" {GRID_NETWORK}" in line)


def _address(container: Container) -> str:
    lines = container.run("ip", "-brief", "-4", "address").splitlines()
    line = next(line for line in lines if f" {GRID_NETWORK}" in line)
    return next(field for field in line.split() if field.startswith(GRID_NETWORK)).partition("/")[0]
