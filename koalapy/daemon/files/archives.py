"""Receive archives over HTTP: write them to a file and check them before they are used.

A valid archive is an uncompressed tar of regular files and folders. Their names are relative and stay below the folder
that the archive is unpacked in.
"""

import asyncio
import hashlib
import io
import os
import tarfile
import uuid
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import BinaryIO

import structlog

from koalapy.daemon.jobs.quota import QuotaHold
from koalapy.model.errors import StoreUnavailable, TooLargeError, UsageError
from koalapy.model.wording import escape_surrogates, format_bytes
from koalapy.runner.folders import make_durable_folder, sync_folder

log = structlog.get_logger()

PIECE_TIMEOUT = 120.0
"""Seconds within which the next bytes must arrive."""
PIECE_SIZE = 1024 * 1024
"""Bytes that are read or written at a time."""
INCOMING = ".incoming-"
"""Prefix of the names of files that are still being received."""
MAX_NAMES = 100_000
"""Maximum number of files and folders in an archive."""
MAX_PAX_HEADERS = 100
"""Maximum number of global pax headers of an archive."""
MAX_NAME_LENGTH = 1000
"""Maximum length of a file's path in characters."""
MAX_HEADER_SIZE = 256 * 1024
"""Maximum size of the headers of one member in bytes."""
ARCHIVE_HINT = "send an uncompressed tar of regular files and folders with relative names"


@dataclass(frozen=True, slots=True)
class Archive:
    """A completely received archive: its SHA-256, its size in bytes, and its entries by name, true for folders."""

    digest: str
    size: int
    names: dict[str, bool]

    @property
    def files(self) -> int:
        """Return the number of regular files."""
        return sum(not is_folder for is_folder in self.names.values())


def remove_unregistered(directory: Path, registered: Container[str]) -> None:
    """Remove files that an earlier daemon run received only in part or did not register; log a failure."""
    for path in directory.glob("*"):
        if path.is_file() and path.name not in registered:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.error("not all that is old was removed", action="retention-failed", error=str(error))


@contextmanager
def incoming_file(directory: Path) -> Iterator[Path]:
    """Yield the path of a new file in a folder, and remove the file at the end if it was not moved."""
    make_durable_folder(directory)
    path = directory / f"{INCOMING}{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def move_archive(path: Path, target: Path) -> None:
    """Move a received archive to its path, durably: its entry in the database follows. Raise ``StoreUnavailable``."""
    with converted_errors():
        make_durable_folder(target.parent)
        path.rename(target)
        sync_folder(target.parent)


async def receive_archive(content: AsyncIterator[bytes], path: Path, limit: int, hold: QuotaHold) -> Archive:
    """Write an archive to a file and check it.

    Raise ``TooLargeError`` for more than ``limit`` bytes, ``FullError`` if the quota is exceeded, ``UsageError`` for an
    invalid archive, ``StoreUnavailable`` if it cannot be written, and ``TimeoutError`` if the sender stalls.
    """
    digest, size = hashlib.sha256(), 0
    with converted_errors():
        file = io.FileIO(path, "xb")
    with file:
        async for piece in _join_pieces(content):
            size += len(piece)
            check_size(size, limit)
            await hold.add_bytes(len(piece))
            await asyncio.to_thread(_write_piece, file, digest, piece)
        with converted_errors():
            await asyncio.to_thread(os.fsync, file.fileno())
    return Archive(digest.hexdigest(), size, await asyncio.to_thread(check_archive, path))


def check_size(size: int, limit: int) -> None:
    """Raise ``TooLargeError`` if a size in bytes exceeds the limit of an archive."""
    if size > limit:
        hint = f"send at most {format_bytes(limit)}; files on clusters can be added with koala replicas add"
        raise TooLargeError(f"the archive is larger than {format_bytes(limit)}", field="body", hint=hint)


@contextmanager
def converted_errors() -> Iterator[None]:
    """Convert an ``OSError`` in the context to ``StoreUnavailable``, with a hint for the sender of the archive."""
    try:
        yield
    except OSError as error:
        hint = "try again when the daemon's data directory has room"
        raise StoreUnavailable(f"the archive cannot be stored: {error.strerror or error}", hint=hint) from error


async def _join_pieces(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in larger pieces, since writing each costs a change of threads."""
    buffer = bytearray()
    while True:
        # A client that vanished without closing the connection must not occupy the quota indefinitely.
        async with asyncio.timeout(PIECE_TIMEOUT):
            piece = await anext(content, None)
        if piece is None:
            break
        buffer += piece
        if len(buffer) >= PIECE_SIZE:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def _write_piece(file: io.FileIO, digest: "hashlib._Hash", piece: bytes) -> None:
    digest.update(piece)
    with converted_errors():
        remaining = memoryview(piece)
        while remaining:
            remaining = remaining[file.write(remaining) or 0 :]


def check_archive(path: Path) -> dict[str, bool]:
    """Check an archive; return the names of its entries and whether each is a folder.

    Raise ``UsageError`` if the archive is invalid, and ``TooLargeError`` if it has too many entries.
    """
    kinds: dict[str, bool] = {}
    try:
        with path.open("rb") as file, tarfile.TarFile(fileobj=(headers := _Headers(file))) as archive:
            for member in archive:
                _check_member(member, kinds)
                headers.allow_more()
                archive.members.clear()  # type: ignore[attr-defined] # tarfile keeps all members otherwise
                if len(kinds) > MAX_NAMES or len(archive.pax_headers) > MAX_PAX_HEADERS:
                    raise TooLargeError(
                        f"the archive has more than {MAX_NAMES:,} files and folders",
                        field="body",
                        hint="put many small files into one archive of their own",
                    )
            file.seek(archive.offset)
            if any(file.read(tarfile.BLOCKSIZE)):
                raise UsageError(
                    f"the tar archive has data where its end should be, at byte {archive.offset}",
                    field="body",
                    hint=ARCHIVE_HINT,
                )
    except (tarfile.TarError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise UsageError(f"the body is not a whole tar archive: {error}", field="body", hint=ARCHIVE_HINT) from error
    return kinds


class _Headers(io.RawIOBase):
    """A file object of an archive that bounds the bytes read for the headers of each member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_HEADER_SIZE

    def allow_more(self) -> None:
        """Reset the limit for the next member."""
        self._left = MAX_HEADER_SIZE

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:
            raise tarfile.ReadError(f"the headers of one entry have more than {MAX_HEADER_SIZE} bytes")
        return self._file.read(size)


def _check_member(member: tarfile.TarInfo, kinds: dict[str, bool]) -> None:
    """Reject an archive member that could leave the folder or replace another member.

    ``kinds`` gets its name, with True for a folder.
    """
    name = plain_name(member.name)
    if name is None:
        _reject_member(member, "is not a name of a file below a folder")
    if not (member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.isdir()) or member.issparse():
        _reject_member(member, "is neither a regular file nor a folder")
    if not name:
        if not member.isdir():
            _reject_member(member, "is not a name of a file below a folder")
        return
    if len(name) > MAX_NAME_LENGTH:
        _reject_member(member, f"has a name of more than {MAX_NAME_LENGTH} characters")
    parts = name.split("/")
    for depth in range(1, len(parts)):
        if not kinds.setdefault("/".join(parts[:depth]), True):
            _reject_member(member, "is below a file")
    if name in kinds and not (kinds[name] and member.isdir()):
        _reject_member(member, "comes twice")
    kinds[name] = member.isdir()


def _reject_member(member: tarfile.TarInfo, problem: str) -> None:
    name = escape_surrogates(member.name[:100])
    raise UsageError(f"{name!r} in the archive {problem}", field="body", value=name, hint=ARCHIVE_HINT)


def plain_name(name: str) -> str | None:
    """Return a member's name without leading ``./``.

    Return an empty text for the folder itself, and None for a name that is invalid or leads outside of the folder.
    """
    while name.startswith("./"):
        name = name[2:]
    if name in ("", "."):
        return ""
    parts = name.removesuffix("/").split("/")
    if "\0" in name or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        return None
    return "/".join(parts)


MAX_MTIME = 2**33
"""Latest modification time of a file in seconds since the epoch, since file systems support no later one."""


@dataclass(frozen=True, slots=True)
class ArchivePart:
    """The entries of an archive that are sent below the name ``target``."""

    path: Path
    target: str
    selected: str = ""
    """The file or folder to send in place of all entries."""

    def target_of(self, name: str) -> str | None:
        """Return the name with which an entry is sent; None if it is not selected."""
        if not self.selected:
            return f"{self.target}/{name}"
        if name == self.selected:
            return self.target
        return f"{self.target}/{name[len(self.selected) + 1 :]}" if name.startswith(f"{self.selected}/") else None


def join_archives(parts: Sequence[ArchivePart], offset: int = 0) -> Iterator[bytes]:
    """Yield one archive of the entries of several from a byte on, in pieces that are large enough for sending."""
    buffer = bytearray()
    for piece in _join_entries(parts):
        buffer += piece[offset:]
        offset = max(0, offset - len(piece))
        if len(buffer) >= PIECE_SIZE:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


def list_names(path: Path) -> Iterator[str]:
    """Yield the names of the entries of an archive."""
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for _, name in _read_entries(archive):
            yield name


def _join_entries(parts: Sequence[ArchivePart]) -> Iterator[bytes]:
    for part in parts:
        if not part.selected:
            yield _build_header(tarfile.TarInfo(part.target), tarfile.DIRTYPE, 0o755)
        with part.path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member, name in _read_entries(archive):
                if (target := part.target_of(name)) is not None:
                    member.name = target
                    kind = tarfile.DIRTYPE if member.isdir() else tarfile.REGTYPE
                    yield _build_header(member, kind, member.mode & 0o755)
                    yield from _read_content(archive, member)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _read_entries(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Yield the entries of an archive with their names, without the folder itself."""
    for member in archive:
        archive.members.clear()  # type: ignore[attr-defined] # tarfile keeps all members otherwise
        if name := plain_name(member.name):
            yield member, name


def _build_header(member: tarfile.TarInfo, kind: bytes, mode: int) -> bytes:
    """Return the tar header of an archive member with only its name, kind, mode, size and time."""
    plain = tarfile.TarInfo(member.name)
    plain.type, plain.mode, plain.size = kind, mode, member.size if kind == tarfile.REGTYPE else 0
    plain.mtime = int(min(max(member.mtime, 0), MAX_MTIME)) if isfinite(member.mtime) else 0
    return plain.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _read_content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield a member's content in pieces, padded to whole tar blocks; nothing if it is not a regular file."""
    content = archive.extractfile(member) if member.isreg() else None
    while content is not None and (piece := content.read(PIECE_SIZE)):
        yield piece
    if content is not None and (remainder := member.size % tarfile.BLOCKSIZE):
        yield bytes(tarfile.BLOCKSIZE - remainder)
