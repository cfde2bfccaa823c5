"""Protect this process from others of its account, raise its limits, and measure the disks it writes to. Linux only."""

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from koalapy.model.disk import Disk

TRANSIENT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a system that is short of files or memory: the same call may succeed a moment later."""
PR_SET_DUMPABLE = 4
VARIABLE_PREFIX = "KOALA_"
"""Prefix of the environment variables that our processes read and no child inherits."""


def forbid_dumps() -> None:
    """Let only root read the memory of this process and of those it forks, from now on."""
    import ctypes  # slow to import, and most commands do not need it

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def scrub_environment() -> None:
    """Overwrite the environment that this process was started with, and forbid dumps.

    ``/proc`` shows the original bytes for as long as the process lives, whatever happens to its variables. The
    variables themselves are copied first and keep their values.
    """
    import ctypes

    for name, value in os.environb.items():
        os.putenv(name, value)
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    forbid_dumps()


def drop_own_variables() -> None:
    """Remove our variables from the environment that children inherit."""
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIX)]:
        del os.environ[name]


def raise_file_limit(count: int) -> int:
    """Allow this process ``count`` open files, or as many as the hard limit permits; return the number allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return count if soft == resource.RLIM_INFINITY else soft


def count_open_files() -> tuple[int, int]:
    """Return the number of open files of this process and its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/proc/self/fd")), soft
    except OSError:  # there is no file left to list them with
        return soft, soft


def file_identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file or folder, which differ once it is replaced. Raise ``OSError``."""
    status = path.stat()
    return status.st_dev, status.st_ino


def measure_disks(folders: Mapping[str, Path]) -> list[Disk]:
    """Measure the disks of some folders, each disk once and under the first folder on it. Raise ``OSError``."""
    disks: dict[int, Disk] = {}
    for purpose, folder in folders.items():
        path = folder.absolute()
        while not path.exists():
            path = path.parent
        device = path.stat().st_dev
        if device not in disks:
            status = os.statvfs(path)
            size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            disks[device] = Disk(purpose, str(folder), free, size, status.f_favail if status.f_files else None)
    return list(disks.values())
