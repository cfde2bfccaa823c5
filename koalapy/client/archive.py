"""Pack the user's files into an archive for the daemon (``--stage``)."""

import errno
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from koalapy.client.errors import Exit, GridError
from koalapy.model.wording import is_utf8

if TYPE_CHECKING:
    from koalapy.client.client import Client

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors caused by the written archive, not by the files that are read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder for the archive, with links resolved."""

    name: str
    path: str
    mode: int
    size: int
    mtime: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive in a temporary file; ``id`` is its SHA-256."""

    file: BinaryIO
    id: str
    size: int
    files: int


def upload_files(client: "Client", paths: Sequence[str]) -> str:
    """Upload files and folders unless the daemon stores them already; return the id of their archive."""
    with pack_archive(paths) as archive:
        if not client.has_bundle(archive.id):
            client.upload_archive(archive.file, archive.size)
        return archive.id


@contextmanager
def pack_archive(paths: Sequence[str]) -> Iterator[Packed]:
    """Yield the archive of files and folders. Equal files give equal archives. Raise ``GridError``."""
    entries = sorted(list_entries(paths), key=lambda entry: entry.name.split("/"))
    with _write_archive(entries) as file:
        size = file.tell()
        file.seek(0)
        ident = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        yield Packed(file, ident, size, sum(not entry.is_folder for entry in entries))


def _write_archive(entries: Sequence[Entry]) -> BufferedRandom:
    """Write the archive to an unnamed temporary file. Raise ``GridError`` if the disk is full."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            _write_members(entries, file)
            file.flush()
        except BaseException:
            with suppress(OSError):
                file.close()
            raise
    except OSError as error:
        message = f"--stage: the archive cannot be written: {(error.strerror or str(error)).lower()}"
        raise GridError(message, Exit.FAILED, "set TMPDIR to a folder with enough space") from error
    return file


def list_entries(paths: Sequence[str]) -> list[Entry]:
    """Return all files and folders at and below the paths. For the folder ``.`` return only its contents."""
    entries: dict[str, Entry] = {}
    for path in paths:
        name = "" if os.path.normpath(path) == "." else os.path.basename(os.path.abspath(path))
        if not name and os.path.normpath(path) != ".":
            raise GridError(
                f"--stage {path} is the root folder, which cannot be staged as a whole",
                Exit.USAGE,
                "name files or folders below it",
            )
        for entry in _walk_entries(path, name, path, ()):
            earlier = entries.setdefault(entry.name, entry)
            if earlier is not entry and not (entry.is_folder and earlier.is_folder):
                raise GridError(
                    f"--stage: {earlier.path} and {entry.path} would both be {entry.name}",
                    Exit.USAGE,
                    "rename one of them",
                )
    if not any(not entry.is_folder for entry in entries.values()):
        raise GridError("--stage: there are no files", Exit.USAGE, "name files, or folders with files in them")
    return list(entries.values())


def _walk_entries(path: str, name: str, argument: str, parents: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    """Yield a file, or a folder and everything below it. ``parents``: devices and inodes, for loop detection."""
    try:
        status = os.stat(path)
        entries = sorted(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else []
        if stat.S_ISREG(status.st_mode):
            os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        location = "" if path == argument else f" {path}:"
        hint = "name files and folders that you can read"
        raise GridError(
            f"--stage {argument}:{location} {(error.strerror or str(error)).lower()}", Exit.USAGE, hint
        ) from error
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        raise GridError(f"--stage {argument}: {path} is not a file or folder", Exit.USAGE, "leave it out")
    if not is_utf8(name):
        raise GridError(
            f"--stage {argument}: the name {os.path.basename(path)!r} is not valid UTF-8", Exit.USAGE, "rename it"
        )
    is_folder = stat.S_ISDIR(status.st_mode)
    if name:
        mode = 0o755 if is_folder or status.st_mode & 0o111 else 0o644
        yield Entry(name, path, mode, 0 if is_folder else status.st_size, int(status.st_mtime), is_folder)
    here = (status.st_dev, status.st_ino)
    if here in parents:
        raise GridError(f"--stage {argument}: {path} is a link to one of its parents", Exit.USAGE, "remove the link")
    for entry in entries:
        yield from _walk_entries(
            os.path.join(path, entry), f"{name}/{entry}" if name else entry, argument, (*parents, here)
        )


def _write_members(entries: Sequence[Entry], file: BinaryIO) -> None:
    """Write the files and folders to ``file`` as a tar archive.

    Raise ``GridError`` for an unreadable file, and ``OSError`` if the disk is full.
    """
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.name)
            member.mode, member.size, member.mtime = entry.mode, entry.size, entry.mtime
            if entry.is_folder:
                # Omit folder times: temporary files of editors change them, and so would change the archive.
                member.type, member.mtime = tarfile.DIRTYPE, 0
                archive.addfile(member)
                continue
            try:
                with Path(entry.path).open("rb") as content:
                    archive.addfile(member, content)
            except OSError as error:
                if error.errno in FULL:
                    raise
                hint = "try again when no program writes to it"
                raise GridError(f"--stage: {entry.path} cannot be read: {error}", Exit.USAGE, hint) from error
