"""What may run out: the files that this process may have open, and the room on the disks where we write."""

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from koalapy.model.disk import Disk

RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing of the file or program that was asked for: the same may work in a moment."""


def raise_limit(wanted: int) -> int:
    """Allow this process so many open files, or as many as the system lets it; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft


def open_files() -> tuple[int, int]:
    """How many are open, and how many may be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/proc/self/fd")), soft
    except OSError:  # not even one more to look
        return soft, soft


def identity_of(path: Path) -> tuple[int, int]:
    """Return device and inode, by which a file or folder is known from another of its name. ``OSError``."""
    found = path.stat()
    return found.st_dev, found.st_ino


def disks_of(folders: Mapping[str, Path]) -> list[Disk]:
    """The disks of some folders, each by the first that lies on it. ``OSError``."""
    found: dict[int, Disk] = {}
    for what, folder in folders.items():
        path = folder.absolute()
        while not path.exists():
            path = path.parent
        device = path.stat().st_dev
        if device not in found:
            room = os.statvfs(path)
            size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
            found[device] = Disk(what, str(folder), free, size, room.f_favail if room.f_files else None)
    return list(found.values())
