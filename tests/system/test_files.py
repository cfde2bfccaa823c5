"""Directories and files that no other account may read, whatever was there before."""

import os
import stat
from pathlib import Path

import pytest

from koalapy.model.errors import UsageError
from koalapy.runner.atomic_files import replace_file
from koalapy.store.engine import make_engine
from koalapy.system.files import make_private_directory
from tests.needs import ROOT, needs

CONTENTS = ("koala.db", "token")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def folder(path: Path, bits: int, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    path.chmod(bits)
    return path


def test_one_that_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert mode(make_private_directory(tmp_path / "a" / "b", CONTENTS, "--data-dir")) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("names", [(), ("koala.db",), ("token", "other"), ("lost+found",)])
def test_one_that_exists_is_tightened(tmp_path: Path, names: tuple[str, ...]) -> None:
    there = folder(tmp_path / "data", 0o755, *names)
    (tmp_path / "link").symlink_to(there)
    assert make_private_directory(tmp_path / "link", CONTENTS, "--data-dir") == there
    assert mode(there) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o757, 0o1755])
def test_one_for_everybody_is_refused_and_left_as_it_is(tmp_path: Path, bits: int) -> None:
    there = folder(tmp_path / "tmp", bits, "token")
    with pytest.raises(UsageError, match="is writable by all accounts") as refusal:
        make_private_directory(there, CONTENTS, "--data-dir")
    assert (refusal.value.field, mode(there)) == ("--data-dir", bits)


def test_one_with_other_things_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    there = folder(tmp_path / "etc", 0o755, "passwd")
    with pytest.raises(UsageError, match="contains other files"):
        make_private_directory(there, CONTENTS, "--data-dir")
    assert mode(there) == 0o755


def test_what_is_private_already_may_hold_anything(tmp_path: Path) -> None:
    assert make_private_directory(folder(tmp_path / "own", 0o700, "notes"), CONTENTS, "--data-dir") == tmp_path / "own"


@pytest.mark.evidence("A3")
@needs(ROOT)
def test_one_of_another_account_is_refused(tmp_path: Path) -> None:
    there = folder(tmp_path / "data", 0o755, "koala.db")
    os.chown(there, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to another account \(uid 65534\)"):
        make_private_directory(there, CONTENTS, "--data-dir")
    assert mode(there) == 0o755


def test_a_file_in_its_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(UsageError, match="cannot use"):
        make_private_directory(tmp_path / "data", CONTENTS, "--data-dir")


@pytest.mark.evidence("A5")
def test_a_database_and_what_lies_beside_it_are_tightened(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = [tmp_path / name for name in ("koala.db", "koala.db-wal", "koala.db-shm")]
        with make_engine(f"sqlite:///{files[0]}").connect() as database:
            database.exec_driver_sql("create table t (x)")
            database.commit()
            assert [mode(file) for file in files] == [0o600] * 3
            for file in files:
                file.chmod(0o644)
            with make_engine(f"sqlite:///{files[0]}").connect() as again:
                assert again.exec_driver_sql("select * from t").all() == []
            assert [mode(file) for file in files] == [0o600] * 3
    finally:
        os.umask(before)


def test_replace_file_writes_whole_content_with_mode_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    assert (path.read_bytes(), mode(path)) == (b"one", 0o600)
    replace_file(path, b"two", 0o644, sync=False)
    assert (path.read_bytes(), mode(path)) == (b"two", 0o644)
    assert os.listdir(tmp_path) == ["file"]


def test_replace_file_where_the_disk_is_full_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
