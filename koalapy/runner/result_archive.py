"""Collect the result files of a component's folder into an archive, without following links."""

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
"""Flags to open content with; a pipe instead of a file must not block the reader."""


class Patterns:
    """Patterns of paths as in a shell.

    ``*``, ``?`` and ``[...]`` match within a name, ``**`` matches any number of folders, and a folder matches all its
    content.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        paths = [[part for part in pattern.split("/") if part not in ("", ".")] for pattern in patterns]
        # Repeated ** would only cost time. None matches any number of folders.
        reduced = ([p for p, last in zip(parts, ("", *parts)) if (p, last) != ("**", "**")] for parts in paths)
        self._patterns = [
            [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]
            for parts in reduced
            if parts
        ]

    def matches(self, path: Sequence[str]) -> bool:
        """Return whether a path, given as the names of its folders and its file, matches one of the patterns."""
        return any(len(pattern) in _follow(pattern, path) for pattern in self._patterns)

    def may_match(self, path: Sequence[str]) -> bool:
        """Return whether a path, or a path below it, can match one of the patterns."""
        return any(_follow(pattern, path) for pattern in self._patterns)


def _follow(pattern: Sequence[re.Pattern[str] | None], path: Sequence[str]) -> set[int]:
    """Return the positions in a pattern that the names of a path can lead to; its length if the path matches."""
    positions = _skip_folders(pattern, {0})
    for name in path:
        if len(pattern) in positions:
            return {len(pattern)}  # the folder above matched
        following = {i for i in positions if pattern[i] is None}
        following |= {i + 1 for i in positions if (part := pattern[i]) is not None and part.match(name)}
        positions = _skip_folders(pattern, following)
    return positions


def _skip_folders(pattern: Sequence[re.Pattern[str] | None], positions: set[int]) -> set[int]:
    """Add the positions after each ``**``, which also matches no folder at all."""
    reachable = set(positions)
    for position in sorted(positions):
        while position < len(pattern) and pattern[position] is None:
            position += 1
            reachable.add(position)
    return reachable


class FoldersTooDeep(Exception):
    """Folders are nested deeper than ``MAX_DEPTH``."""


class FileSink(Protocol):
    """An archive, or an object that takes files as an archive does."""

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: IO[bytes] | None = None) -> None: ...


def write_archive(
    archive: FileSink, folder: str | os.PathLike[str], patterns: Patterns, without: Collection[str]
) -> None:
    """Add the regular files below a folder that match the patterns.

    ``without``: entries of the folder itself to leave out, such as the component's inputs. Raise ``OSError``, or
    ``FoldersTooDeep``.
    """
    top = os.fspath(folder)
    for path, folders, files, descriptor in os.fwalk(top, onerror=_raise_failure, follow_symlinks=False):
        above = tuple(part for part in os.path.relpath(path, top).split("/") if part != ".")
        if len(above) > MAX_DEPTH:
            raise FoldersTooDeep(
                f"the results are nested more than {MAX_DEPTH} deep: write them into fewer levels of folders"
            )
        folders[:] = [
            name
            for name in sorted(folders)
            if (above or name not in without)
            and patterns.may_match((*above, name))
            and not os.path.islink(os.path.join(path, name))
        ]
        for name in sorted(files):
            if (above or name not in without) and patterns.matches((*above, name)):
                with open_regular(name, descriptor) as file:
                    if file is not None:
                        status = os.fstat(file.fileno())
                        member = tarfile.TarInfo("/".join((*above, name)))
                        member.size, member.mtime = status.st_size, int(status.st_mtime)
                        member.mode = 0o755 if status.st_mode & 0o100 else 0o644
                        archive.addfile(member, file)


def _raise_failure(error: OSError) -> None:
    """Raise the error of a folder that cannot be read, unless it has just been removed, or its mode forbids it."""
    if not isinstance(error, (FileNotFoundError, PermissionError)):
        raise error


@contextmanager
def open_regular(name: str, folder: int) -> Iterator[io.FileIO | None]:
    """Open a regular file; yield None for anything else, and for a file that has just been removed."""
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
