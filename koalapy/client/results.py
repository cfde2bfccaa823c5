"""Unpack the collected results of a job."""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json

CHUNK_SIZE = 1024 * 1024


@dataclass(slots=True)
class FileCount:
    """The number and size in bytes of the files unpacked for one component."""

    files: int = 0
    size: int = 0


class _Pieces(RawIOBase):
    """A readable file object over an iterator of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the current or next piece; return the number of bytes, 0 at the end."""
        while not self._pending:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._pending = piece
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise ``GridError`` if the folder has entries that results could overwrite, unless forced."""
    if force:
        return
    try:
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise GridError(f"cannot read {folder}: {error.strerror}", Exit.USAGE, "give another --to") from error
    if is_taken:
        hint = "--force overwrites its files; --to takes another folder"
        raise GridError(f"{folder} exists already", Exit.USAGE, hint)


def missing_results(job: Json, received: Container[str]) -> list[str]:
    """Return the names of the components without results, as their folders are called."""
    names = (f"{rank}-{component['cluster']}" for rank, component in enumerate(job["components"]))
    return sorted(name for name in names if name not in received)


def unpack_results(pieces: Iterator[bytes], to: Path, *, force: bool) -> dict[str, FileCount]:
    """Unpack an archive into a folder; return number and size of the files by top-level folder.

    Raise ``GridError`` for members other than files and folders, and for existing files unless forced.
    """
    counts: dict[str, FileCount] = {}
    root = -1
    try:
        with tarfile.open(fileobj=BufferedReader(_Pieces(pieces), CHUNK_SIZE), mode="r|") as archive:
            to.mkdir(parents=True, exist_ok=True)
            root = os.open(to, os.O_RDONLY | os.O_DIRECTORY)
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined] # it would store every member
                parts = _split_name(member)
                count = counts.setdefault(parts[0], FileCount())
                if member.isdir():
                    os.close(_open_folder(root, parts, to))
                    continue
                _write_member(archive, member, parts, root, to, force=force)
                count.files += 1
                count.size += member.size
    except tarfile.TarError as error:
        raise GridError(f"the archive is truncated: {error}", Exit.FAILED, "try again with --force") from error
    except (ValueError, OverflowError) as error:
        message = f"the archive is invalid: {error}"
        raise GridError(message, Exit.FAILED, "use the koala command of the daemon's version") from error
    except OSError as error:
        raise GridError(f"cannot write to {to}: {error.strerror or error}", Exit.FAILED, "give another --to") from error
    finally:
        if root >= 0:
            os.close(root)
    return counts


def _split_name(member: tarfile.TarInfo) -> list[str]:
    """Split a member's name into folders and a file name. Raise ``GridError`` if it leads outside the target folder."""
    parts = member.name.rstrip("/").split("/")
    if not (member.isreg() or member.isdir()) or member.issparse() or any(p in ("", ".", "..") for p in parts):
        raise GridError(
            f"the archive has {member.name!r} in it", Exit.FAILED, "use the koala command of the daemon's version"
        )
    return parts


def _open_folder(root: int, parts: list[str], to: Path) -> int:
    """Open a folder without following links, and create it if it is missing; return its descriptor."""
    descriptor = os.dup(root)
    for depth, part in enumerate(parts):
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o755, dir_fd=descriptor)
        try:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        except OSError as error:
            path = to.joinpath(*parts[: depth + 1])
            raise GridError(f"{path} is not a folder", Exit.FAILED, "remove it, or give another --to") from error
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def _write_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str], root: int, to: Path, *, force: bool
) -> None:
    """Write a file of the archive below the folder ``to``, with the open descriptor ``root``.

    Raise ``GridError`` if the file exists, unless ``force`` is set: then replace it.
    """
    content = archive.extractfile(member)
    assert content is not None, "it is a regular file"
    folder = _open_folder(root, parts[:-1], to)
    try:
        if force:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=folder)
        mode = 0o755 if member.mode & 0o100 else 0o644
        handle = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
        try:
            with open(handle, "wb") as file:
                shutil.copyfileobj(content, file, CHUNK_SIZE)
                os.utime(file.fileno(), (member.mtime, member.mtime))
        except BaseException:
            # Remove an incomplete file, so that it is not taken for the complete one.
            os.unlink(parts[-1], dir_fd=folder)
            raise
    except FileExistsError as error:
        raise GridError(f"{to.joinpath(*parts)} exists already", Exit.USAGE, "--force overwrites it") from error
    finally:
        os.close(folder)
