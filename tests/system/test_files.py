"""Private directories and files."""

import os
import stat
from pathlib import Path

import pytest

from koalapy.model.errors import UsageError
from koalapy.runner.folders import replace_file
from koalapy.store.engine import make_engine
from koalapy.system.files import make_private_directory
from tests.needs import ROOT, needs

CONTENTS = ("koala.db", "token")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_folder(path: Path, bits: int, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    path.chmod(bits)
    return path


@pytest.mark.parametrize("names", [(), ("koala.db",), ("token", "other"), ("lost+found",)])
def test_existing_directory_becomes_private(tmp_path: Path, names: tuple[str, ...]) -> None:
    directory = make_folder(tmp_path / "data", 0o755, *names)
    (tmp_path / "link").symlink_to(directory)
    assert make_private_directory(tmp_path / "link", CONTENTS, "--data-dir") == directory
    assert mode_of(directory) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o757, 0o1755])
def test_writable_directory_is_rejected_unchanged(tmp_path: Path, bits: int) -> None:
    directory = make_folder(tmp_path / "tmp", bits, "token")
    with pytest.raises(UsageError, match="is writable by all accounts") as refusal:
        make_private_directory(directory, CONTENTS, "--data-dir")
    assert (refusal.value.field, mode_of(directory)) == ("--data-dir", bits)


def test_directory_with_other_files_is_rejected_unchanged(tmp_path: Path) -> None:
    directory = make_folder(tmp_path / "etc", 0o755, "passwd")
    with pytest.raises(UsageError, match="contains other files"):
        make_private_directory(directory, CONTENTS, "--data-dir")
    assert mode_of(directory) == 0o755


def test_private_directory_with_other_files_is_accepted(tmp_path: Path) -> None:
    assert (
        make_private_directory(make_folder(tmp_path / "own", 0o700, "notes"), CONTENTS, "--data-dir")
        == tmp_path / "own"
    )


@pytest.mark.evidence("A3")
@needs(ROOT)
def test_directory_of_other_account_is_rejected(tmp_path: Path) -> None:
    directory = make_folder(tmp_path / "data", 0o755, "koala.db")
    os.chown(directory, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to another account \(uid 65534\)"):
        make_private_directory(directory, CONTENTS, "--data-dir")
    assert mode_of(directory) == 0o755


def test_file_instead_of_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(UsageError, match="cannot use"):
        make_private_directory(tmp_path / "data", CONTENTS, "--data-dir")


@pytest.mark.evidence("A5")
def test_sqlite_files_become_private(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        files = [tmp_path / name for name in ("koala.db", "koala.db-wal", "koala.db-shm")]
        with make_engine(f"sqlite:///{files[0]}").connect() as database:
            database.exec_driver_sql("create table t (x)")
            database.commit()
            assert [mode_of(file) for file in files] == [0o600] * 3
            for file in files:
                file.chmod(0o644)
            with make_engine(f"sqlite:///{files[0]}").connect() as again:
                assert again.exec_driver_sql("select * from t").all() == []
            assert [mode_of(file) for file in files] == [0o600] * 3
    finally:
        os.umask(old_umask)


def test_replace_file_writes_content_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    assert (path.read_bytes(), mode_of(path)) == (b"one", 0o600)
    replace_file(path, b"two", 0o644, sync=False)
    assert (path.read_bytes(), mode_of(path)) == (b"two", 0o644)
    assert os.listdir(tmp_path) == ["file"]


def test_replace_file_with_full_disk_keeps_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
