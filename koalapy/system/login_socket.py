"""Find and check the Unix socket at which a head node's agent gives logins to users of that host.

Each side learns the other's account from the kernel (``SO_PEERCRED``). So no secret is sent to an agent, and no process
can claim to be another account. Standard library only, since the command line imports it.
"""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/run/koala")
"""Created by root, or by systemd for the agents' account; no other account can create anything in ``/run``."""
SOCKET_NAME = "login.sock"
"""In the directory of an agent that may not listen in ``DIRECTORY``."""
MAX_LINE_BYTES = 256 * 1024
"""Limit of one message, which is a line of JSON."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
WRITABLE_BY_OTHERS = 0o022
_CREDENTIALS = struct.Struct("3i")


def well_known_path(cluster: str) -> Path:
    """Return the socket at which the command line looks for a cluster's agent without any configuration."""
    return DIRECTORY / f"{cluster}.sock"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel recorded it at ``connect`` or ``listen``."""

    pid: int
    uid: int


def get_peer(connected: socket.socket) -> Peer:
    """Ask the kernel for the process at the other end. Raise ``OSError``."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def open_socket_folder(path: Path) -> tuple[int, int]:
    """Open the folder of a socket; return its descriptor and the uid of its owner.

    Raise ``OSError``, or ``ValueError`` if other accounts could put their own socket there.
    """
    folder = os.open(path, FOLDER_FLAGS)
    status = os.fstat(folder)
    if status.st_mode & WRITABLE_BY_OTHERS:
        os.close(folder)
        raise ValueError(f"{path} may be written by others than its owner")
    return folder, status.st_uid


def socket_address(folder: int, name: str) -> str:
    """Return the address of a socket in an open folder. It is short, whatever the length of the folder's path."""
    return f"/proc/self/fd/{folder}/{name}"
