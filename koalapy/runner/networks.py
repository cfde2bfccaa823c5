"""The IPv4 addresses of this node, and the networks they are in."""

from __future__ import annotations

import socket

SIOCGIFCONF = 0x8912
SIOCGIFNETMASK = 0x891B
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
