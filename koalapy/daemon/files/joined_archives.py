"""Join stored archives, or parts of them, into one archive while it is sent."""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from koalapy.daemon.files.archives import PIECE_SIZE, plain_name

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


def join_archives(parts: Sequence[ArchivePart]) -> Iterator[bytes]:
    """Yield one archive of the entries of several, in pieces that are large enough for sending."""
    buffer = bytearray()
    for piece in _join_entries(parts):
        buffer += piece
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
