"""List the IPv4 addresses and networks of this node, compare them, and choose routes between the nodes of a job."""

from __future__ import annotations

import socket
from itertools import islice, product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from koalapy.runner.plan import Plan

SIOCGIFCONF = 0x8912
SIOCGIFNETMASK = 0x891B
_IFREQ_SIZE = 40
"""Bytes of a ``struct ifreq`` on 64-bit Linux: 16 of the interface's name, then its address."""
MAX_ROUTES = 6
"""Routes to try if nodes do not reach each other; each takes seconds to fail."""


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) of all addresses of this node, in the kernel's order."""
    import array
    import fcntl
    import struct

    size = 64 * _IFREQ_SIZE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        while True:
            buffer = array.array("B", bytes(size))
            request = struct.pack("iP", size, buffer.buffer_info()[0])
            used: int = struct.unpack("iP", fcntl.ioctl(query, SIOCGIFCONF, request))[0]
            if used < size:
                break
            size *= 4
    entries = [buffer[i : i + _IFREQ_SIZE].tobytes() for i in range(0, used, _IFREQ_SIZE)]
    return [
        (entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24])) for entry in entries
    ]


def own_networks() -> list[tuple[str, str]]:
    """Return (network as CIDR, IPv4 address) of all addresses except loopback, in the kernel's order."""
    import fcntl
    import struct

    networks = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for interface, address in own_addresses():
            if not address.startswith("127."):
                answer = fcntl.ioctl(query, SIOCGIFNETMASK, struct.pack("40s", interface.encode()))
                mask = int.from_bytes(answer[20:24], "big")
                base = socket.inet_ntoa((_as_number(address) & mask).to_bytes(4, "big"))
                networks.append((f"{base}/{bin(mask).count('1')}", address))
    return networks


def find_address(networks: str, addresses: list[tuple[str, str]]) -> str | None:
    """Return the first of (interface, address) pairs in one of some networks; None if there is none.

    ``networks``: CIDRs or names of interfaces with commas between; the first that matches counts.
    """
    for network in networks.split(","):
        for interface, address in addresses:
            if is_inside(address, network) if "/" in network else interface == network:
                return address
    return None


def is_inside(address: str, cidr: str) -> bool:
    """Return whether an IPv4 address is in a network; False if the network is not one of IPv4."""
    base, _, length = cidr.partition("/")
    try:
        shift = 32 - int(length)
        return 0 <= shift <= 32 and _as_number(address) >> shift == _as_number(base) >> shift
    except (OSError, ValueError):
        return False


def is_ipv4(text: str) -> bool:
    """Return whether a text is an IPv4 address of four decimal numbers without leading zeros."""
    try:
        return socket.inet_ntoa(socket.inet_aton(text)) == text
    except (OSError, ValueError):
        return False


def _as_number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def own_choices(plan: Plan, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (network, address) of all addresses that this node may use for the job.

    There is no choice if the cluster configures an interface, in a job of one cluster, and on loopback.
    """
    host = plan.me["host"]
    if environment.get("KOALA_MPI_INTERFACE") or host.startswith("127.") or not plan.spans_clusters:
        return []
    return own_networks()


def other_routes(plan: Plan, choices: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[list[str], list[str]]]:
    """Return routes other than the plan's, as (networks, addresses of all nodes), at most ``MAX_ROUTES``.

    All nodes of a cluster use one network. ``choices``: (network, address) pairs of each node. Routes by a network that
    all clusters have come first.
    """
    clusters: dict[str, list[int]] = {}
    for index, node in enumerate(plan.nodes):
        clusters.setdefault(node["cluster"], []).append(index)
    by_node = {index: {pair[0]: pair[1] for pair in pairs} for index, pairs in choices.items()}
    common = {
        cluster: [n for n in by_node[nodes[0]] if all(n in by_node[index] for index in nodes)] or [""]
        for cluster, nodes in clusters.items()
    }
    routes = sorted(product(*common.values()), key=lambda networks: len({*networks}))
    candidates = (_route(plan, dict(zip(clusters, networks)), by_node) for networks in routes)
    current = [node["host"] for node in plan.nodes]
    return list(islice((route for route in candidates if route[1] != current), MAX_ROUTES))


def _route(
    plan: Plan, networks: Mapping[str, str], by_node: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the networks of a route and its hosts: nodes of clusters without a choice keep their addresses."""
    hosts = [by_node[index].get(networks[node["cluster"]], node["host"]) for index, node in enumerate(plan.nodes)]
    return sorted({*networks.values()} - {""}), hosts
