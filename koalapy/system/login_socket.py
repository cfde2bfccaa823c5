"""Where a head node's agent listens for its users, and how each side sees who the other one is.

The kernel says who is at the other end (``SO_PEERCRED``): no secret goes to an agent, and nobody can claim to be
another account. Standard library only, as the command line needs it, too.
"""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/run/koala")
"""Made by root, or by systemd for the agents' account: nobody else can make anything in ``/run``."""
NAME = "login.sock"
"""In the directory of an agent that may not listen there."""
MAX_LINE = 256 * 1024
"""Bytes of anything that is said there, which is JSON, one message a line."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
WRITABLE_BY_OTHERS = 0o022
_CREDENTIALS = struct.Struct("3i")


def well_known(cluster: str) -> Path:
    """Where users of a head node find the agent of a cluster without being told."""
    return DIRECTORY / f"{cluster}.sock"


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a Unix socket, as the kernel saw it when it connected, or began to listen."""

    pid: int
    uid: int


def peer_of(connected: socket.socket) -> Peer:
    """Who is there. Raises ``OSError``."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def open_folder(path: Path) -> tuple[int, int]:
    """The folder of a socket, open, and the uid of its owner, who alone may write there.

    ``OSError``; ``ValueError`` where others than its owner could put a socket of theirs.
    """
    folder = os.open(path, FOLDER)
    seen = os.fstat(folder)
    if seen.st_mode & WRITABLE_BY_OTHERS:
        os.close(folder)
        raise ValueError(f"{path} may be written by others than its owner")
    return folder, seen.st_uid


def address(folder: int, name: str) -> str:
    """The address of a socket in an open folder, which may have a longer path than an address takes."""
    return f"/proc/self/fd/{folder}/{name}"
