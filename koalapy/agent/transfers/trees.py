"""Trees of files in stages: unpacked from a user's archive, copied to another stage, removed."""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from pathlib import Path, PurePosixPath

from koalapy.agent.transfers.digest import MAX_DEPTH, Content, measure_content
from koalapy.agent.transfers.roots import CONTENT, printable
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable

CHUNK_SIZE = 1024 * 1024
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
