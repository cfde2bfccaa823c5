"""Stale folders of killed runners."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.runner.folders import MARK, make_durable_folder, make_folder, remove_stale_folders, remove_tree
from tests.deep_folders import deep_folder
from tests.needs import ROOT, needs

HOLDER = """
import os, sys, time
from koalapy.runner.folders import make_folder
path, mark = make_folder(sys.argv[1], "7.1.0.0f", 0)
os.makedirs(f"{path}/a/b")
open(f"{path}/a/b/file", "w").close()
os.symlink(sys.argv[2], f"{path}/a/link")
os.symlink(sys.argv[2], f"{path}/link")
os.mkfifo(f"{path}/fifo")
print(path, flush=True)
time.sleep(1000)
"""


@pytest.mark.processes
def test_stale_folders_of_killed_runner_are_removed(tmp_path: Path) -> None:
    base, other_base = tmp_path / "tmp", tmp_path / "other"
    for folder in (base, other_base):
        folder.mkdir()
        (folder / "precious").write_text("stays")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base), str(other_base)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder.stdout:
        path = Path(holder.stdout.readline().strip())
        assert remove_stale_folders(str(base)) == [], "it lives"
        holder.send_signal(signal.SIGSTOP)
        assert remove_stale_folders(str(base)) == [], "it lives, though it does nothing"
        holder.kill()
        holder.wait()
    assert remove_stale_folders(str(base)) == [path.name]
    assert [entry.name for entry in base.iterdir()] == ["precious"]
    assert (other_base / "precious").read_text() == "stays"


def test_stale_folder_removal_keeps_foreign_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale_folder, mark = make_folder(str(tmp_path), "7.1.0.0f", 0)
    os.close(mark)
    name = Path(stale_folder).name
    for like in ("koala-mine", f"{name}0", name[:-1]):
        (tmp_path / like).mkdir()
        (tmp_path / like / MARK).write_bytes((Path(stale_folder) / MARK).read_bytes())
    unmarked = tmp_path / name.replace("koala-7", "koala-8")
    unmarked.mkdir()
    linked = tmp_path / name.replace("koala-7", "koala-9")
    linked.symlink_to(stale_folder)
    markless = tmp_path / name.replace("koala-7", "koala-6")
    markless.mkdir()
    (markless / MARK).symlink_to(Path(stale_folder) / MARK)
    first_entries = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_stale_folders(str(tmp_path)) == [], "another user's"
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert remove_stale_folders(str(tmp_path)) == [], "of another machine that shares the folder"
    assert remove_stale_folders(str(tmp_path)) == [name]
    assert sorted(tmp_path.iterdir()) == [path for path in first_entries if path.name != name]


def run_as_unprivileged(folder: Path, act: Callable[[], object]) -> None:
    """Call a function in a process of an unprivileged account, to which file modes apply."""
    child = os.fork()
    if child == 0:
        try:
            os.chown(folder, 65534, 65534)
            os.chdir(folder)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def stale_folder(tmp_path: Path) -> Path:
    """A folder below ``base`` with read-only folders, as in Go's module cache, and other odd entries."""
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o555)

    def make() -> None:
        path, _ = make_folder(".", "7.1.0.0f", 0)
        os.makedirs(f"{path}/pkg/mod")
        open(f"{path}/pkg/mod/go.sum", "w").close()
        os.symlink(tmp_path / "elsewhere", f"{path}/pkg/mod/link")
        os.mkdir(f"{path}/dark")
        for name, mode in (("dark", 0), ("pkg/mod", 0o555), ("pkg", 0o500), ("", 0o500)):
            os.chmod(f"{path}/{name}", mode)

    run_as_unprivileged(base, make)
    return base


@pytest.mark.processes
@needs(ROOT)
@pytest.mark.parametrize("remove", [lambda: remove_stale_folders("."), lambda: remove_tree(os.listdir(".")[0])])
def test_read_only_folders_are_removed(stale_folder: Path, remove: Callable[[], object]) -> None:
    run_as_unprivileged(stale_folder, remove)
    assert os.listdir(stale_folder) == []
    assert (stale_folder.parent / "elsewhere").stat().st_mode & 0o777 == 0o555


@pytest.mark.processes
@needs(ROOT)
def test_stale_folder_with_file_of_other_user_is_kept(stale_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (path,) = stale_folder.iterdir()
    theirs = path / "pkg" / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "file").touch()
    run_as_unprivileged(stale_folder, lambda: remove_tree(path.name))
    assert sorted(os.path.relpath(entry, path) for entry in path.rglob("*")) == [
        MARK,
        "pkg",
        "pkg/theirs",
        "pkg/theirs/file",
    ]
    assert capfd.readouterr().err == f"koala runner: cannot remove pkg in {path.name}\n"
    shutil.rmtree(theirs)
    run_as_unprivileged(stale_folder, lambda: remove_stale_folders("."))
    assert os.listdir(stale_folder) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "remove", [lambda path: remove_tree(str(path)), lambda path: remove_stale_folders(str(path.parent))]
)
def test_remove_of_very_deep_folders_succeeds(tmp_path: Path, remove: Callable[[Path], object]) -> None:
    path, mark = make_folder(str(tmp_path), "7.1.0.0f", 0)
    os.close(mark)
    with deep_folder(Path(path)) as folder:
        remove(folder)
        assert os.listdir(tmp_path) == []


def test_folder_without_mark_is_kept(tmp_path: Path) -> None:
    """Its runner may be about to write the mark."""
    path, mark = make_folder(str(tmp_path), "7.1.0.0f", 0)
    os.ftruncate(mark, 0)
    os.close(mark)
    assert remove_stale_folders(str(tmp_path)) == []
    assert os.path.isdir(path)


def test_unlistable_base_folder_removes_nothing(tmp_path: Path) -> None:
    assert remove_stale_folders(str(tmp_path / "nowhere")) == []


def test_make_durable_folder_flushes_its_name_and_those_of_new_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    make_durable_folder(tmp_path / "new" / "folder")
    assert synced == [str(tmp_path), str(tmp_path / "new")]
    make_durable_folder(tmp_path / "new" / "folder")
    assert synced[2:] == [str(tmp_path / "new")], "its maker may have been killed before it flushed the name"
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700


def test_make_durable_folder_over_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_durable_folder(tmp_path / "file")
