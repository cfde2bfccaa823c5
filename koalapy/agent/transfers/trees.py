"""Files and folders of stages as a whole: copied to another stage, and removed."""

import contextlib
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

from koalapy.agent.transfers.bundle import NEW
from koalapy.agent.transfers.digest import MAX_DEPTH, Content, measure
from koalapy.agent.transfers.roots import CONTENT
from koalapy.model.errors import SiteRejected, SiteUnavailable

CHUNK_SIZE = 64 * 1024 * 1024


def copy_tree(source: Path, target: Path, stop: threading.Event) -> Content:
    """What has been copied, as it reads now; ``OSError`` or ``SiteError`` when there is nothing that can be, or when it
    was stopped. No link is followed."""
    _copy(source, target, MAX_DEPTH, stop)
    descriptor = os.open(target, CONTENT)
    try:
        return measure(descriptor, checksum=True, given_up=stop.is_set)
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path, depth: int, stop: threading.Event) -> None:
    if depth == 0:
        raise SiteRejected("too many folders within each other", fault="irregular")
    if stat.S_ISDIR(os.lstat(source).st_mode):
        target.mkdir(mode=0o700)
        for name in os.listdir(source):
            _copy(source / name, target / name, depth - 1, stop)
    else:
        _copy_file(source, target, stop)


def _copy_file(source: Path, target: Path, stop: threading.Event) -> None:
    """Within the kernel: file systems that can share the blocks do."""
    with open(os.open(source, CONTENT), "rb", buffering=0) as there:
        found = os.fstat(there.fileno())
        mode = 0o700 if found.st_mode & 0o100 else 0o600
        with open(os.open(target, NEW, mode), "wb", buffering=0) as here:
            left = found.st_size
            while left > 0:
                if stop.is_set():
                    raise SiteUnavailable("nobody wants it any more")
                count = os.copy_file_range(there.fileno(), here.fileno(), min(left, CHUNK_SIZE))
                left -= count or left
            os.utime(here.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, as far as that can be, also what a program has made read-only, or
    deeper than Python can go."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            with contextlib.suppress(OSError):
                subprocess.run((*command, "--", path), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
