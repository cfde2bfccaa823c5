"""Where a node is reached by the others of its gang: IPv4 addresses, the networks they are in, and which of these the
nodes of several clusters may try, where the clusters' profiles do not say it."""

from __future__ import annotations

import socket
from itertools import islice, product

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from koalapy.runner.plan import Plan

SIOCGIFCONF = 0x8912
SIOCGIFNETMASK = 0x891B
MAX_ROUTES = 6
"""That are tried when nodes do not reach each other: each takes seconds when it fails."""
_ENTRY = 40
"""Bytes of a ``struct ifreq`` on 64-bit Linux: the interface's name in 16, then its address."""


def own_addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of everything this node has, in the kernel's order."""
    import array
    import fcntl
    import struct

    size = 64 * _ENTRY
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        while True:
            entries = array.array("B", bytes(size))
            place = struct.pack("iP", size, entries.buffer_info()[0])
            used: int = struct.unpack("iP", fcntl.ioctl(asking, SIOCGIFCONF, place))[0]
            if used < size:
                break
            size *= 4
    found = entries.tobytes()
    return [
        (found[at : at + 16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(found[at + 20 : at + 24]))
        for at in range(0, used, _ENTRY)
    ]


def own_networks() -> list[tuple[str, str]]:
    """(network as CIDR, IPv4 address) of all that this node has beside loopback, in the kernel's order."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for interface, address in own_addresses():
            if not address.startswith("127."):
                answer = fcntl.ioctl(asking, SIOCGIFNETMASK, struct.pack("40s", interface.encode()))
                mask = int.from_bytes(answer[20:24], "big")
                base = socket.inet_ntoa((_number(address) & mask).to_bytes(4, "big"))
                found.append((f"{base}/{bin(mask).count('1')}", address))
    return found


def address_in(network: str, addresses: list[tuple[str, str]]) -> str | None:
    """The first address in a network given as CIDR or interface name; several may be given with commas between."""
    for each in network.split(","):
        for interface, address in addresses:
            if is_inside(address, each) if "/" in each else interface == each:
                return address
    return None


def is_inside(address: str, cidr: str) -> bool:
    """Whether an IPv4 address is in a network; never when the network is none of IPv4."""
    base, _, length = cidr.partition("/")
    try:
        shift = 32 - int(length)
        return 0 <= shift <= 32 and _number(address) >> shift == _number(base) >> shift
    except (OSError, ValueError):
        return False


def is_ipv4(text: str) -> bool:
    """Return whether a text is an IPv4 address in its usual form."""
    try:
        return socket.inet_ntoa(socket.inet_aton(text)) == text
    except (OSError, ValueError):
        return False


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def own_choices(plan: Plan, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(network, address) of all this node may be known by; empty when there is nothing to choose.

    That is so where the profile says it, within one cluster, and on loopback.
    """
    host = plan.me["host"]
    several = len({node["cluster"] for node in plan.nodes}) > 1
    if environment.get("KOALA_MPI_INTERFACE") or host.startswith("127.") or not several:
        return []
    return own_networks()


def other_routes(plan: Plan, choices: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[list[str], list[str]]]:
    """Other routes, as (networks, addresses of the plan's nodes): all nodes of a cluster by one network.

    ``choices`` are those of each node. Routes by one network that all have come first.
    """
    clusters: dict[str, list[int]] = {}
    for index, node in enumerate(plan.nodes):
        clusters.setdefault(node["cluster"], []).append(index)
    by_node = {index: {known[0]: known[1] for known in found} for index, found in choices.items()}
    common = {
        cluster: [n for n in by_node[nodes[0]] if all(n in by_node[index] for index in nodes)] or [""]
        for cluster, nodes in clusters.items()
    }
    routes = sorted(product(*common.values()), key=lambda networks: len({*networks}))
    found = (_hosts(plan, dict(zip(clusters, networks)), by_node) for networks in routes)
    current = [node["host"] for node in plan.nodes]
    return list(islice((route for route in found if route[1] != current), MAX_ROUTES))


def _hosts(
    plan: Plan, networks: Mapping[str, str], by_node: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Where a cluster has no choice its nodes keep their addresses."""
    hosts = [by_node[index].get(networks[node["cluster"]], node["host"]) for index, node in enumerate(plan.nodes)]
    return sorted({*networks.values()} - {""}), hosts
