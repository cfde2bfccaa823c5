"""Unpacking the submitter's own files, whatever somebody put in the archive."""

import errno
import os
import tarfile
import threading
from pathlib import Path, PurePosixPath

from koalapy.agent.transfers.roots import shown

CHUNK_SIZE = 1024 * 1024
OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EILSEQ)
"""Errors of which the archive is the cause, and not the cluster."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BadBundle(Exception):
    """The archive is none, or holds what must not be in it."""


def unpack(archive: Path, into: Path, stop: threading.Event) -> None:
    """Regular files and folders only, all of them new, below a folder that is empty; ``OSError`` when there is no room.

    Nobody but its owner may read what was unpacked; only what was executable can be executed.
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
        raise BadBundle(f"{shown(member.name)}: {error.strerror}") from error
    except tarfile.TarError as error:
        raise BadBundle(f"the archive cannot be read: {error}") from error


def _unpack(opened: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    parts = [part for part in PurePosixPath(member.name).parts if part != "."]
    if not all(_is_below(part) for part in parts):
        raise BadBundle(f"{shown(member.name)} leads out of the folder")
    path = into.joinpath(*parts)
    if member.isdir():
        _make_folders(into, parts)
    elif member.isreg() and parts:
        _make_folders(into, parts[:-1])
        _write(opened, member, path)
    else:
        raise BadBundle(f"{shown(member.name)} is neither a file nor a folder")


def _is_below(part: str) -> bool:
    """Whether this is one name, in whatever bytes."""
    return part not in ("", ".", "..") and "/" not in part and "\0" not in part


def _make_folders(into: Path, parts: list[str]) -> None:
    path = into
    for part in parts:
        path = path / part
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            # Nothing here is a link: it is a folder, or what comes next fails.
            continue


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    try:
        descriptor = os.open(path, NEW, 0o700 if member.mode & 0o100 else 0o600)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadBundle(f"{shown(member.name)} is there twice") from error
    with open(descriptor, "wb", buffering=0) as file:
        content = opened.extractfile(member)
        left = member.size
        while content is not None and left:
            data = content.read(min(CHUNK_SIZE, left))
            if not data:
                raise BadBundle(f"{shown(member.name)} is cut off")
            left -= len(data)
            while data:
                data = data[file.write(data) :]
