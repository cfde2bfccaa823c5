"""Valid and invalid tar archives for tests."""

import io
import tarfile
from collections.abc import AsyncIterator, Mapping

GOOD = {"run.sh": b"#!/bin/sh\necho hello\n", "data/a": b"a" * 5000, "data/b": b""}


def archive_of(files: Mapping[str, bytes | None], **options: object) -> bytes:
    """Return a tar archive of files and, where the content is None, folders."""
    members = []
    for name, content in files.items():
        member = tarfile.TarInfo(name)
        if content is None:
            member.type = tarfile.DIRTYPE
        member.mode = 0o755 if name.endswith(".sh") or content is None else 0o644
        members.append((member, content or b""))
    return make_archive(*members)


def make_archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            member.size = member.size or len(content)
            tar.addfile(member, io.BytesIO(content.ljust(member.size, b"\0")))
    return file.getvalue()


def make_special_member(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


async def yield_pieces(data: bytes, size: int = 700) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def unpack_archive(data: bytes) -> dict[str, bytes | None]:
    """Return the contents of an archive by name; None for folders."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: None if m.isdir() else tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
