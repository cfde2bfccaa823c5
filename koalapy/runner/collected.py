"""What of a component's folder its job wants to have back, as an archive; whoever wrote there, nothing is followed."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from contextlib import contextmanager
from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import IO

    from koalapy.runner.patterns import Patterns

MAX_DEPTH = 100
"""Folders within folders."""
CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe that took a file's place must not keep us waiting."""


class TooDeep(Exception):
    """Folders lie too deep within each other."""


class Taker(Protocol):
    """An archive, or what stands for one: it is given files with what is to be known of them."""

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: IO[bytes] | None = None) -> None: ...


def write_archive(archive: Taker, folder: str | os.PathLike[str], patterns: Patterns, without: Collection[str]) -> None:
    """All regular files below a folder that are wanted; no link is followed. ``without``: names right in the folder.

    What the component was given is no result of its. ``OSError``, ``TooDeep``.
    """
    top = os.fspath(folder)
    for path, folders, files, descriptor in os.fwalk(top, follow_symlinks=False):
        above = tuple(part for part in os.path.relpath(path, top).split("/") if part != ".")
        if len(above) > MAX_DEPTH:
            raise TooDeep(f"there are more than {MAX_DEPTH} folders within each other")
        folders.sort()
        if not above:
            folders[:] = [name for name in folders if name not in without]
        for name in sorted(files):
            if (above or name not in without) and patterns.matches((*above, name)):
                with regular(name, descriptor) as file:
                    if file is not None:
                        archive.addfile(_member("/".join((*above, name)), file), file)


@contextmanager
def regular(name: str, folder: int) -> Iterator[io.FileIO | None]:
    """A file, opened; None for anything else, also for what somebody has just removed."""
    try:
        is_file = stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        descriptor = os.open(name, CONTENT, dir_fd=folder) if is_file else -1
    except FileNotFoundError:
        descriptor = -1
    if descriptor < 0:
        yield None
        return
    with io.FileIO(descriptor) as file:
        yield file if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def _member(name: str, file: io.FileIO) -> tarfile.TarInfo:
    found = os.fstat(file.fileno())
    member = tarfile.TarInfo(name)
    member.size, member.mtime = found.st_size, int(found.st_mtime)
    member.mode = 0o755 if found.st_mode & 0o100 else 0o644
    return member
