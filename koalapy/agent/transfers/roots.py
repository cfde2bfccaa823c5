"""The replica directories of a cluster: nothing outside of them is ever opened, whatever a path says.

Paths are resolved once, and must lie below a replica directory then. What is opened is found from that directory
downwards, one name after the other and without following a single link, so that nobody can lead us elsewhere between
the look and the opening.
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
"""A pipe that took a file's place must not keep us waiting."""


@dataclass(frozen=True, slots=True)
class OpenedEntry:
    """A regular file or a folder: itself, and the folder that it lies in. Descriptors are the caller's for a while."""

    descriptor: int
    parent: int
    name: str

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.descriptor).st_mode)


class Roots:
    """Finds replicas; everything raises ``SiteRejected`` with one of the faults unconfigured, outside, missing,
    irregular, unreadable, or ``SiteUnavailable`` for what is no fault of the replica's."""

    def __init__(self, cluster: str, folders: Sequence[Path]) -> None:
        self._cluster = cluster
        self._configured = tuple(folders)

    @property
    def folders(self) -> tuple[Path, ...]:
        """As they are now: a configured folder may be a link itself."""
        return tuple(Path(os.path.realpath(folder)) for folder in self._configured)

    def resolve_path(self, path: str) -> Path:
        """The canonical absolute path of what lies below a replica directory; relative ones are below the first."""
        if not self._configured:
            raise SiteRejected(
                f"{self._cluster} has no replica directories",
                hint=f"set clusters.{self._cluster}.replica_directories",
                fault=SiteFault.UNCONFIGURED,
            )
        if not path or "\0" in path or not is_utf8(path):
            raise SiteRejected(f"{path!r} is no path", fault=SiteFault.OUTSIDE)
        if ".." in path.split("/"):
            raise SiteRejected(f"{printable(path)}: a path must not have '..' in it", fault=SiteFault.OUTSIDE)
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
        """Open what ``find`` found, or what the catalogue says was found once."""
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
    """A regular file or folder in an open folder; ``OSError``, or ``SiteRejected`` when it is anything else."""
    kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        kind_name = "a symbolic link" if stat.S_ISLNK(kind) else "neither a file nor a folder"
        raise SiteRejected(f"{printable(name)} is {kind_name}", fault=SiteFault.IRREGULAR)
    return os.open(name, CONTENT, dir_fd=folder)


def is_plain_name(name: str) -> bool:
    """Whether this is the name of one file in a folder, and not a way out of it."""
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return plain and is_utf8(name) and len(name.encode()) <= 255


def printable(path: str) -> str:
    """A path as it may stand in a message: on one line, whatever is in it."""
    return path if path.isprintable() else repr(path)


def _rejected(path: str, error: OSError) -> SiteError:
    if error.errno in TRANSIENT_ERRORS:
        return SiteUnavailable(f"{path} cannot be looked at now: {error.strerror}")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SiteRejected(f"{path} is not there", fault=SiteFault.MISSING)
    return SiteRejected(f"{path} cannot be read: {error.strerror}", fault=SiteFault.UNREADABLE)
