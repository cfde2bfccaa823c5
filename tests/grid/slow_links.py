"""A narrow link between two clusters of the testbed: token buckets (tbf) on the ways between their hosts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.grid.containers import Container
from tests.grid.testbed import Testbed

GRID_NETWORK = "198.18.0."
WIDE, NARROW = "1:1", "1:2"


@contextmanager
def narrowed(testbed: Testbed, one: str, other: str, rate: str) -> Iterator[None]:
    """While this lasts, what goes from any host of a cluster to any of the other is held to ``rate`` (``40mbit``)."""
    with all_narrowed(testbed, [(one, other)], rate):
        yield


@contextmanager
def all_narrowed(testbed: Testbed, pairs: Iterable[tuple[str, str]], rate: str) -> Iterator[None]:
    """The same between the clusters of several pairs: what goes from a host to all those others takes one way."""
    others: dict[str, set[str]] = {}
    for one, other in pairs:
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    narrow = [
        (host, [_address(there) for cluster in sorted(far) for there in hosts(testbed, cluster)])
        for near, far in others.items()
        for host in hosts(testbed, near)
    ]
    try:
        for container, addresses in narrow:
            _narrow(container, addresses, rate)
        yield
    finally:
        for container, _ in narrow:
            container.run("tc", "qdisc", "del", "dev", _interface(container), "root", check=False)


def hosts(testbed: Testbed, cluster: str) -> list[Container]:
    """The head and the nodes of a cluster."""
    names = [f"{cluster}-head", *(f"{cluster}-{number}" for number in range(1, testbed.nodes[cluster] + 1))]
    return [testbed.containers[name] for name in names]


def _narrow(container: Container, addresses: list[str], rate: str) -> None:
    """All other traffic goes by a class that is as good as unlimited."""
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
    """The one on the network by which clusters meet."""
    lines = container.run("ip", "-brief", "-4", "address").splitlines()
    return next(line.split()[0].partition("@")[0] for line in lines if f" {GRID_NETWORK}" in line)


def _address(container: Container) -> str:
    lines = container.run("ip", "-brief", "-4", "address").splitlines()
    line = next(line for line in lines if f" {GRID_NETWORK}" in line)
    return next(word for word in line.split() if word.startswith(GRID_NETWORK)).partition("/")[0]
