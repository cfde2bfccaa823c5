"""What of a component's folder its job wants to have back, as an archive; no link is followed."""

from __future__ import annotations

import fnmatch
import io
import os
import re
import stat
import tarfile
from contextlib import contextmanager
from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from typing import IO

MAX_DEPTH = 100
CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe that took a file's place must not keep the reader waiting."""


class Patterns:
    """As in a shell: ``*``, ``?`` and ``[...]`` stay within a name, ``**`` is any number of folders, and a folder
    stands for all that is in it."""

    def __init__(self, patterns: Iterable[str]) -> None:
        found = [[part for part in pattern.split("/") if part not in ("", ".")] for pattern in patterns]
        # One ** after another adds nothing but time. None stands for any number of folders.
        plain = ([p for p, before in zip(parts, ("", *parts)) if (p, before) != ("**", "**")] for parts in found)
        self._patterns = [
            [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]
            for parts in plain
            if parts
        ]

    def matches(self, path: Sequence[str]) -> bool:
        """``path`` as the names of folders and, at last, the file."""
        return any(_matches(pattern, path) for pattern in self._patterns)


def _matches(pattern: Sequence[re.Pattern[str] | None], path: Sequence[str]) -> bool:
    """Step by step through the names, with all places in the pattern where we may be."""
    places = _past_any(pattern, {0})
    for name in path:
        if len(pattern) in places:
            return True  # the folder above matched
        after = {place for place in places if pattern[place] is None}
        after |= {place + 1 for place in places if (part := pattern[place]) is not None and part.match(name)}
        places = _past_any(pattern, after)
    return len(pattern) in places


def _past_any(pattern: Sequence[re.Pattern[str] | None], places: set[int]) -> set[int]:
    """``**`` may also stand for no folder at all."""
    found = set(places)
    for place in sorted(places):
        while place < len(pattern) and pattern[place] is None:
            place += 1
            found.add(place)
    return found


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
