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


def _sparse_member() -> bytes:
    member = tarfile.TarInfo("huge")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**40)}
    return make_archive((member, b"0\n".ljust(512, b"\0")))


BAD_ARCHIVES = {
    "nothing": b"",
    "zeros": bytes(3000),
    "no file": archive_of({"a": None}),
    "no archive": b"#!/bin/sh\necho hello\n" * 100,
    "compressed": b"\x1f\x8b" + b"x" * 2000,
    "cut off": archive_of(GOOD)[:4000],
    "broken within": archive_of({"a": b"a"})[:1024] + b"x" * 1024,
    "absolute": archive_of({"/etc/passwd": b""}),
    "upwards": archive_of({"../x": b""}),
    "upwards within": archive_of({"a/../../x": b""}),
    "no name": archive_of({"./": b"x"}),
    "twice": archive_of({"a": b"1", "./a": b"2"}),
    "file and folder": archive_of({"a": b"1", "a/b": b"2"}),
    "folder and file": archive_of({"a/b": b"1", "a": b"2"}),
    "long": archive_of({"x" * 256: b""}),
    "symbolic link": make_archive(make_special_member("a", tarfile.SYMTYPE, "/etc")),
    "hard link": make_archive(make_special_member("a", tarfile.LNKTYPE, "/etc/passwd")),
    "device": make_archive(make_special_member("a", tarfile.CHRTYPE)),
    "pipe": make_archive(make_special_member("a", tarfile.FIFOTYPE)),
    "sparse": _sparse_member(),
}
"""Bundles that are rejected, by their problem."""
