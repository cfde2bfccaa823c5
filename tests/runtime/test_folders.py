"""Folders of runners that were killed, found by others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.runtime import folders
from koalapy.runtime.folders import MARK, make_folder, sweep

HOLDER = """
import os, sys, time
from koalapy.runtime.folders import make_folder
path, mark = make_folder(sys.argv[1], "7.1.0.0f", 0)
os.makedirs(f"{path}/a/b")
open(f"{path}/a/b/file", "w").close()
os.symlink(sys.argv[2], f"{path}/a/link")
os.symlink(sys.argv[2], f"{path}/link")
os.mkfifo(f"{path}/fifo")
print(path, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_one_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    base, other = tmp_path / "tmp", tmp_path / "other"
    for folder in (base, other):
        folder.mkdir()
        (folder / "precious").write_text("stays")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(base), str(other)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        path = Path(holder.stdout.readline().strip())
        assert sweep(str(base)) == [], "it lives"
        holder.send_signal(signal.SIGSTOP)
        assert sweep(str(base)) == [], "it lives, though it does nothing"
        holder.kill()
        holder.wait()
    assert sweep(str(base)) == [path.name]
    assert [entry.name for entry in base.iterdir()] == ["precious"]
    assert (other / "precious").read_text() == "stays"


def test_folders_that_are_not_ours_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, mark = make_folder(str(tmp_path), "7.1.0.0f", 0)
    os.close(mark)
    name = Path(left).name
    for like in ("koala-mine", f"{name}0", name[:-1]):
        (tmp_path / like).mkdir()
        (tmp_path / like / MARK).write_bytes((Path(left) / MARK).read_bytes())
    unmarked = tmp_path / name.replace("koala-7", "koala-8")
    unmarked.mkdir()
    linked = tmp_path / name.replace("koala-7", "koala-9")
    linked.symlink_to(left)
    markless = tmp_path / name.replace("koala-7", "koala-6")
    markless.mkdir()
    (markless / MARK).symlink_to(Path(left) / MARK)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "geteuid", lambda: os.getuid() + 1)
        assert sweep(str(tmp_path)) == [], "another user's"
    with monkeypatch.context() as patch:
        patch.setattr(folders.socket, "gethostname", lambda: "elsewhere")
        assert sweep(str(tmp_path)) == [], "of another machine that shares the folder"
    assert sweep(str(tmp_path)) == [name]
    assert sorted(tmp_path.iterdir()) == [path for path in before if path.name != name]


def test_one_that_was_killed_before_it_had_its_mark_is_left_alone(tmp_path: Path) -> None:
    """It may be about to write it."""
    path, mark = make_folder(str(tmp_path), "7.1.0.0f", 0)
    os.ftruncate(mark, 0)
    os.close(mark)
    assert sweep(str(tmp_path)) == []
    assert os.path.isdir(path)


def test_where_nothing_can_be_listed_nothing_is_removed(tmp_path: Path) -> None:
    assert sweep(str(tmp_path / "nowhere")) == []
