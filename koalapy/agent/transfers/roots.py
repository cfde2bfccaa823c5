"""The replica directories of a cluster; nothing outside of them is ever opened.

Paths are resolved once and must then lie below a replica directory. Opening starts at that directory and follows no
link, so that a change between check and opening cannot lead outside.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.wording import is_utf8
from koalapy.system.process import TRANSIENT_ERRORS

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags that do not block if a pipe has replaced a file."""


@dataclass(frozen=True, slots=True)
class OpenedEntry:
    """Open descriptors of a file or folder and of its parent folder. The context manager closes them."""

    descriptor: int
    parent: int
    name: str

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.descriptor).st_mode)


class Roots:
    """Finds and opens replicas.

    All methods raise ``SiteRejected`` with one of the faults unconfigured, outside, missing, irregular, unreadable, or
    ``SiteUnavailable`` if the replica is not to blame.
    """

    def __init__(self, cluster: str, folders: Sequence[Path]) -> None:
        self._cluster = cluster
        self._configured = tuple(folders)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The resolved directories; a configured folder may be a link."""
        return tuple(Path(os.path.realpath(folder)) for folder in self._configured)

    def resolve_path(self, path: str) -> Path:
        """Return the canonical path below a replica directory; relative paths start at the first one."""
        if not self._configured:
            raise SiteRejected(
                f"{self._cluster} has no replica directories",
                hint=f"set clusters.{self._cluster}.replica_directories",
                fault=SiteFault.UNCONFIGURED,
            )
        if not path or "\0" in path or not is_utf8(path):
            raise SiteRejected(
                f"{path!r} is not a valid path: it must be UTF-8, not empty, and without NUL characters",
                fault=SiteFault.OUTSIDE,
            )
        if ".." in path.split("/"):
            raise SiteRejected(f"{printable(path)}: a path must not contain '..'", fault=SiteFault.OUTSIDE)
        folders = self.folders
        canonical = Path(os.path.realpath(folders[0] / path))
        if not any(canonical != folder and canonical.is_relative_to(folder) for folder in folders):
            configured = ", ".join(map(str, self._configured))
            raise SiteRejected(
                f"{printable(path)} is not below a replica directory of {self._cluster} ({configured})",
                fault=SiteFault.OUTSIDE,
            )
        return canonical

    @contextmanager
    def open_path(self, path: Path) -> Iterator[OpenedEntry]:
        """Open a path that was resolved by ``resolve_path``, now or when it was registered."""
        folders = self.folders
        root = next((f for f in folders if path != f and path.is_relative_to(f)), None)
        if root is None or ".." in path.parts:
            raise SiteRejected(f"{printable(str(path))} is not below a replica directory", fault=SiteFault.OUTSIDE)
        *above, name = path.relative_to(root).parts
        opened: list[int] = []
        try:
            opened.append(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in above:
                opened.append(os.open(part, FOLDER, dir_fd=opened[-1]))
            opened.append(open_entry(opened[-1], name))
            yield OpenedEntry(opened[-1], opened[-2], name)
        except OSError as error:
            raise _rejected(printable(str(path)), error) from error
        finally:
            for descriptor in opened:
                os.close(descriptor)


def open_entry(folder: int, name: str) -> int:
    """Open a regular file or folder in an open folder. Raise ``OSError``, or ``SiteRejected`` for other types."""
    kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        kind_name = "a symbolic link, which is not followed" if stat.S_ISLNK(kind) else "neither a file nor a folder"
        raise SiteRejected(f"{printable(name)} is {kind_name}", fault=SiteFault.IRREGULAR)
    return os.open(name, CONTENT, dir_fd=folder)


def is_plain_name(name: str) -> bool:
    """Return whether a name denotes one entry of a folder, and no path."""
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return plain and is_utf8(name) and len(name.encode()) <= 255


def printable(path: str) -> str:
    """Return a path for messages: on one line, with special characters escaped."""
    return path if path.isprintable() else repr(path)


def _rejected(path: str, error: OSError) -> SiteError:
    """Return the error for a replica that cannot be opened; ``SiteUnavailable`` if the cause may pass."""
    if error.errno in TRANSIENT_ERRORS:
        return SiteUnavailable(f"{path} cannot be checked now: {error.strerror}")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SiteRejected(f"{path} is not there", fault=SiteFault.MISSING)
    return SiteRejected(f"{path} cannot be read: {error.strerror}", fault=SiteFault.UNREADABLE)
