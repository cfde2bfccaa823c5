"""Open, measure and copy replicas and other trees of files. Outside of the replica directories none is ever opened.

Paths of replicas are resolved once and must then lie below a replica directory. Opening starts at that directory and
follows no link, so that a change between check and opening cannot lead outside.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.replica import Part
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


CHUNK_SIZE = 1024 * 1024
MAX_DEPTH = 100
"""Maximum nesting of folders, each of which is open while its content is read."""
POLL_INTERVAL = 0.02
"""Seconds between two reads of a growing file."""


@dataclass(frozen=True, slots=True)
class Content:
    """Size, checksum and parts of a file or folder; ``checksum`` is empty if it was not requested."""

    size: int
    checksum: str
    parts: tuple[Part, ...] | None = None


def measure_content(descriptor: int, *, checksum: bool, given_up: Callable[[], bool] = lambda: False) -> Content:
    """Return size and checksum of an open file or folder.

    Raise ``OSError`` if it cannot be read, ``SiteRejected`` if it contains other types of files, ``SiteUnavailable`` if
    cancelled by ``given_up``. The checksum of a folder is the SHA-256 of its entries sorted by name: kind,
    checksum and name of each, with spaces between and a zero byte at the end.
    """
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        return _measure_folder(descriptor, checksum, MAX_DEPTH, given_up)
    return _measure_file(descriptor, checksum, given_up)


def _measure_file(descriptor: int, checksum: bool, given_up: Callable[[], bool]) -> Content:
    """Return size and SHA-256 of an open file; leave the checksum empty unless ``checksum`` is set."""
    if not checksum:
        return Content(os.fstat(descriptor).st_size, "")
    digest, size = hashlib.sha256(), 0
    while data := os.read(descriptor, CHUNK_SIZE):
        if given_up():
            raise SiteUnavailable("the agent is stopping")
        digest.update(data)
        size += len(data)
    return Content(size, digest.hexdigest())


def _measure_folder(descriptor: int, checksum: bool, depth: int, given_up: Callable[[], bool]) -> Content:
    """Measure an open folder recursively, with its entries in order of their names, down to ``depth`` levels."""
    if depth == 0:
        raise SiteRejected(
            f"the folder contains folders nested more than {MAX_DEPTH} deep: use fewer levels",
            fault=SiteFault.IRREGULAR,
        )
    names = sorted(os.listdir(descriptor))
    if odd := [name for name in names if not is_utf8(name)]:
        raise SiteRejected(
            f"the folder contains {odd[0]!r}, a name that is not valid UTF-8: rename it", fault=SiteFault.IRREGULAR
        )
    parts = tuple(_part(descriptor, name, checksum, depth, given_up) for name in names)
    if not checksum:
        return Content(sum(part.size for _, part in parts), "", tuple(part for _, part in parts))
    digest = hashlib.sha256()
    for kind, part in parts:
        digest.update(f"{kind} {part.checksum} {part.name}\0".encode())
    return Content(sum(part.size for _, part in parts), digest.hexdigest(), tuple(part for _, part in parts))


def _part(folder: int, name: str, checksum: bool, depth: int, given_up: Callable[[], bool]) -> tuple[str, Part]:
    """Measure one entry of an open folder; return its kind, "file" or "folder", and its size and checksum."""
    if given_up():
        raise SiteUnavailable("the agent is stopping")
    if not checksum:
        # Opening it would reveal nothing more.
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return "file", Part(name, status.st_size, "")
    entry = open_entry(folder, name)
    try:
        if stat.S_ISDIR(os.fstat(entry).st_mode):
            content = _measure_folder(entry, checksum, depth - 1, given_up)
            return "folder", Part(name, content.size, content.checksum)
        content = _measure_file(entry, checksum, given_up)
        return "file", Part(name, content.size, content.checksum)
    except OSError as error:
        raise SiteRejected(f"{printable(name)} cannot be read: {error.strerror}", fault=SiteFault.UNREADABLE) from error
    finally:
        os.close(entry)


class GrowingDigest:
    """The checksum of a file that grows, computed in a thread by ``compute_content``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_complete = threading.Event()
        self._given_up = False

    def mark_complete(self) -> None:
        self._is_complete.set()

    def cancel(self) -> None:
        self._given_up = True
        self._is_complete.set()

    def compute_content(self) -> Content:
        """Read the file until it is complete. Raise ``OSError`` if it cannot be read or never existed."""
        while True:
            last = self._is_complete.is_set()  # before opening: the file may be created and completed right after
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if last:
                    raise
                self._is_complete.wait(POLL_INTERVAL)
        try:
            return self._read(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> Content:
        """Read a file that is still growing until ``mark_complete`` is called; stop early if reading is given up."""
        digest, size = hashlib.sha256(), 0
        buffer = memoryview(bytearray(CHUNK_SIZE))
        while not self._given_up:
            last = self._is_complete.is_set()
            while not self._given_up and (count := os.readv(descriptor, [buffer])):
                digest.update(buffer[:count])
                size += count
            if last:
                break
            self._is_complete.wait(POLL_INTERVAL)
        return Content(size, digest.hexdigest())


OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EILSEQ)
"""Error numbers that the archive causes, not the cluster."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
COPY_CHUNK_SIZE = 64 * 1024 * 1024


class BadBundle(Exception):
    """The archive is invalid or contains a forbidden entry."""


def unpack_bundle(archive: Path, into: Path, stop: threading.Event) -> None:
    """Unpack regular files and folders into an empty folder. Raise ``OSError`` if the disk is full.

    Only the owner may read the files, and executable files stay executable.
    """
    try:
        with tarfile.open(archive, "r:") as opened:
            for member in opened:
                if stop.is_set():
                    return
                _unpack(opened, member, into)
    except OSError as error:
        if error.errno not in OF_NAMES:
            raise
        raise BadBundle(f"{printable(member.name)}: {error.strerror}") from error
    except tarfile.TarError as error:
        raise BadBundle(f"the archive cannot be read: {error}") from error


def _unpack(opened: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Unpack one file or folder of a bundle; raise ``BadBundle`` for other kinds and for paths outside ``into``."""
    parts = [part for part in PurePosixPath(member.name).parts if part != "."]
    if not all(part not in ("", "..") and "/" not in part and "\0" not in part for part in parts):
        raise BadBundle(f"the archive's entry {printable(member.name)} would be written outside of its folder")
    path = into.joinpath(*parts)
    if member.isdir():
        _make_folders(into, parts)
    elif member.isreg() and parts:
        _make_folders(into, parts[:-1])
        _write(opened, member, path)
    else:
        raise BadBundle(f"{printable(member.name)} is neither a file nor a folder")


def _make_folders(into: Path, parts: list[str]) -> None:
    """Create the nested folders of a path, unless they exist."""
    path = into
    for part in parts:
        path = path / part
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            # The tree contains no links: this is a folder, or the next operation fails.
            continue


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write one file of a bundle; raise ``BadBundle`` if it exists or is truncated."""
    try:
        descriptor = os.open(path, NEW, 0o700 if member.mode & 0o100 else 0o600)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadBundle(f"{printable(member.name)} occurs twice") from error
    with open(descriptor, "wb", buffering=0) as file:
        content = opened.extractfile(member)
        remaining = member.size
        while content is not None and remaining:
            data = content.read(min(CHUNK_SIZE, remaining))
            if not data:
                raise BadBundle(f"{printable(member.name)} is truncated")
            remaining -= len(data)
            while data:
                data = data[file.write(data) :]


def copy_tree(source: Path, target: Path, stop: threading.Event) -> Content:
    """Copy a tree without following links, and return the content of the copy.

    Raise ``OSError`` or ``SiteError`` if that fails or is stopped.
    """
    _copy(source, target, MAX_DEPTH, stop)
    descriptor = os.open(target, CONTENT)
    try:
        return measure_content(descriptor, checksum=True, given_up=stop.is_set)
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path, depth: int, stop: threading.Event) -> None:
    """Copy a file or folder recursively, at most ``depth`` levels deep, until ``stop`` is set."""
    if depth == 0:
        raise SiteRejected(
            f"{printable(str(source))} is nested too deep: use fewer levels of folders", fault=SiteFault.IRREGULAR
        )
    if stat.S_ISDIR(os.lstat(source).st_mode):
        target.mkdir(mode=0o700)
        for name in os.listdir(source):
            _copy(source / name, target / name, depth - 1, stop)
    else:
        _copy_file(source, target, stop)


def _copy_file(source: Path, target: Path, stop: threading.Event) -> None:
    """Copy in the kernel, so that file systems can share the blocks."""
    with open(os.open(source, CONTENT), "rb", buffering=0) as source_file:
        status = os.fstat(source_file.fileno())
        mode = 0o700 if status.st_mode & 0o100 else 0o600
        with open(os.open(target, NEW, mode), "wb", buffering=0) as target_file:
            remaining = status.st_size
            while remaining > 0:
                if stop.is_set():
                    raise SiteUnavailable("it is no longer needed")
                count = os.copy_file_range(source_file.fileno(), target_file.fileno(), min(remaining, COPY_CHUNK_SIZE))
                remaining -= count or remaining
            os.utime(target_file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_tree(path: Path) -> None:
    """Remove a folder as far as possible, even if it is read-only or nested too deeply for Python."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            with contextlib.suppress(OSError):
                subprocess.run((*command, "--", path), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
