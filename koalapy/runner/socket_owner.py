"""Find the account that owns the other end of a local TCP connection."""

from __future__ import annotations

import errno
import os
import socket
import struct

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
ALL_STATES = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_UID_OFFSET = 4 + 48 + 12
"""Bytes of ``struct inet_diag_msg`` before the number of the account."""
_TABLE = "/proc/net/tcp"


class SocketOwners:
    """Answers which account owns a socket, by the kernel's netlink interface, or else by its table of sockets.

    Netlink takes 11 µs, the table 1 to 20 ms.
    """

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        try:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
            self._netlink.settimeout(1.0)
        except OSError:
            pass

    def find_owner(self, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
        """Return the number of the account that owns the IPv4 socket with these addresses; None without a socket."""
        if self._netlink is not None:
            try:
                return _ask_netlink(self._netlink, local, remote)
            except OSError:
                self.close()
        try:
            return _search_table(local, remote)
        except OSError:
            return None

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def _ask_netlink(netlink: socket.socket, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    ports = struct.pack(">HH", local[1], remote[1])
    addresses = b"".join(socket.inet_aton(host) + bytes(12) for host, _ in (local, remote))
    identity = ports + addresses + bytes(4) + NO_COOKIE
    request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, ALL_STATES) + identity
    netlink.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request)
    answer = netlink.recv(8192)
    kind, body = _HEADER.unpack_from(answer)[1], answer[_HEADER.size :]
    if kind == NLMSG_ERROR:
        number = -struct.unpack_from("=i", body)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    # A listening socket also answers where no connected one exists.
    found_ports = struct.unpack_from(">HH", body, 4)
    if found_ports != (local[1], remote[1]):
        return None
    (owner, inode) = struct.unpack_from("=II", body, _UID_OFFSET)
    return int(owner) if inode else None


def _search_table(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    wanted = f" {_hex_address(local)} {_hex_address(remote)} ".encode()
    with open(_TABLE, "rb") as table:
        content = table.read()
    start = content.find(wanted)
    if start < 0:
        return None
    # The columns: local, remote, state, queues, timer, retransmissions, account, timeout, inode.
    fields = content[start : content.index(b"\n", start)].split()
    return int(fields[6]) if fields[8] != b"0" else None


def _hex_address(address: tuple[str, int]) -> str:
    number = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{number:08X}:{address[1]:04X}"
