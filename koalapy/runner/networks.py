"""List the IPv4 addresses and networks of this node, and compare them."""

from __future__ import annotations

import socket

SIOCGIFCONF = 0x8912
SIOCGIFNETMASK = 0x891B
_IFREQ_SIZE = 40
"""Bytes of a ``struct ifreq`` on 64-bit Linux: 16 of the interface's name, then its address."""


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) of all addresses of this node, in the kernel's order."""
    return [_read_entry(entry) for entry in _address_entries()]


def _address_entries() -> list[bytes]:
    """Return the kernel's entry of each address of this node, a ``struct ifreq``."""
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
    return [buffer[i : i + _IFREQ_SIZE].tobytes() for i in range(0, used, _IFREQ_SIZE)]


def _read_entry(entry: bytes) -> tuple[str, str]:
    """Return interface and address of an entry."""
    return entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24])


def own_networks() -> list[tuple[str, str]]:
    """Return (network as CIDR, IPv4 address) of all addresses except loopback, in the kernel's order."""
    import fcntl

    networks = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for entry in _address_entries():
            _, address = _read_entry(entry)
            if not address.startswith("127."):
                # By label and address: other addresses of the interface may have other masks.
                answer = fcntl.ioctl(query, SIOCGIFNETMASK, entry)
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
