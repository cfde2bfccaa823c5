"""What is left of a daemon that is never heard of again."""

import asyncio
import os
from pathlib import Path

import pytest

from koalapy.agents import expired_daemons
from koalapy.agents.spool import Folder, Spool
from tests.agents.conftest import FakeDaemon, Site

OLD, WAITING, S = "7.1.0", "7.1.1", "7.1.9"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expired_daemons, "CHECK_INTERVAL", 0.05)


async def change_daemon(daemon: FakeDaemon, instance: str) -> None:
    """As when the daemon's database was wiped, or restored."""
    before = len(daemon.inventories)
    await daemon.leave()
    daemon.instance = instance
    await daemon.listen()
    await daemon.until(lambda: len(daemon.inventories) > before)


def components_in(folder: Path) -> list[str]:
    """Of one daemon, beside the files that are kept of it."""
    return [entry.name for entry in folder.iterdir() if entry.is_dir()]


async def test_stages_and_components_of_a_daemon_that_is_gone_go_too(daemon: FakeDaemon, site: Site) -> None:
    await site.finish(OLD, ["true"])
    await daemon.submit(WAITING)
    await daemon.reaches(WAITING, "claimed")
    await daemon.stage(S)
    await daemon.staged(S)
    await change_daemon(daemon, "other")
    daemon.messages.clear()
    await daemon.stage(S)
    await daemon.staged(S)
    old, new = site.settings.directory / "test", site.settings.directory / "other"
    assert (site.settings.stages / f"test-{S}").is_dir()
    for instance in (old, new):
        os.utime(instance / "heard", (0, 0))
    await daemon.until(lambda: components_in(old) == [], poll=0.05)
    await daemon.until(lambda: not (site.settings.stages / f"test-{S}").exists(), poll=0.05)
    await daemon.until(lambda: daemon.report()["idle"] == 4)
    assert (site.settings.stages / f"other-{S}").is_dir(), "the present daemon is never forgotten"


async def test_results_for_a_daemon_that_is_gone_keep_nothing(tmp_path: Path, daemon: FakeDaemon, site: Site) -> None:
    """They wait for it, and its stage for them."""
    await daemon.stage(S)
    await daemon.staged(S)
    await daemon.submit(OLD, stage=S, collect=["*"])
    await daemon.reaches(OLD, "claimed")
    go = tmp_path / "go"
    os.mkfifo(go)
    await daemon.open(["sh", "-c", f"read line < {go}; touch a"], OLD)
    await daemon.reaches(OLD, "running")
    await change_daemon(daemon, "other")
    os.utime(site.settings.directory / "test" / "heard", (0, 0))
    await asyncio.to_thread(go.write_text, "go on\n")
    await daemon.until(lambda: components_in(site.settings.directory / "test") == [], poll=0.05)
    await daemon.until(lambda: os.listdir(site.settings.stages) == [], poll=0.05)


def test_silence_is_counted_from_the_first_look(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.silence("never") == 0.0
    os.utime(tmp_path / "spool" / "never" / "heard", (0, 0))
    assert spool.silence("never") > 1_000_000
    spool.heard("never")
    assert spool.silence("never") < 1_000_000


def test_entries_with_unfinished_last_line_returns_the_others_and_cuts_it_off(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(order={"a": 1})
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(b'{"ready": [0, ')
    assert folder.entries() == {"order": {"a": 1}}
    folder.write(done=True)
    assert folder.entries() == {"order": {"a": 1}, "done": True}


def test_a_record_for_which_there_is_no_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        Folder(tmp_path).write(done=True)
    monkeypatch.undo()
    Folder(tmp_path).write(done=False)
    assert Folder(tmp_path).entries() == {"done": False}
