"""The disk that forgets unflushed writes."""

import random
from pathlib import Path

import pytest

from tests.crash.disk import Change, Disk, Loss

ROOT = Path("/root/data")
FOLDER, FILE = 1, 2


def change(kind: str, inode: int, path: str = "", target: str = "", data: bytes = b"", offset: int = 0) -> Change:
    path, target = (f"{ROOT}/{name}" if name else "" for name in (path, target))
    return Change(kind, 0.0, inode, offset, path, target, data)


WRITE = [change("D", FOLDER, "folder"), change("C", FILE, "folder/new"), change("W", FILE, data=b"text")]
SYNC_FILE, SYNC_FOLDER = change("S", FILE), change("S", FOLDER)
RENAME = change("R", FILE, "folder/new", "folder/name")


def read_after_loss(tmp_path: Path, changes: list[Change], loss: Loss) -> dict[str, bytes]:
    """Return the content of files by name after a loss of power; the root itself is flushed at the end."""
    disk = Disk(ROOT)
    disk.apply(Change("D", 0.0, 99, 0, str(ROOT), "", b""))
    for each in [*changes, change("S", 99)]:
        disk.apply(each)
    disk.write_to(tmp_path / "data", lambda _: loss, random.Random(1))
    return {path.name: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "loss", "expected"),
    [
        ([*WRITE], Loss.NOTHING, {"new": b"text"}),
        ([*WRITE], Loss.STRICT, {}),
        ([*WRITE, SYNC_FILE], Loss.STRICT, {}),
        ([*WRITE, SYNC_FOLDER], Loss.STRICT, {"new": b""}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER], Loss.STRICT, {"new": b"text"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, RENAME], Loss.STRICT, {"new": b"text"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, RENAME, SYNC_FOLDER], Loss.STRICT, {"name": b"text"}),
        ([*WRITE, RENAME], Loss.CONTENT, {"name": b""}),
        ([*WRITE, SYNC_FILE, RENAME], Loss.CONTENT, {"name": b"text"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, change("W", FILE, data=b"++", offset=2)], Loss.STRICT, {"new": b"text"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, change("T", FILE, offset=1)], Loss.NOTHING, {"new": b"t"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, change("U", 0, "folder/new")], Loss.STRICT, {"new": b"text"}),
        ([*WRITE, SYNC_FILE, SYNC_FOLDER, change("U", 0, "folder/new"), SYNC_FOLDER], Loss.STRICT, {}),
    ],
)
def test_disk_keeps_flushed_content_and_names(
    tmp_path: Path, changes: list[Change], loss: Loss, expected: dict[str, bytes]
) -> None:
    assert read_after_loss(tmp_path, changes, loss) == expected


def test_torn_disk_keeps_what_was_flushed(tmp_path: Path) -> None:
    assert read_after_loss(tmp_path, [*WRITE, SYNC_FILE, SYNC_FOLDER], Loss.TORN) == {"new": b"text"}
