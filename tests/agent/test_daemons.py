"""Daemons that an agent knows, and removal of the data of lost daemons."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.core.daemons import Daemons
from koalapy.agent.core.settings import AgentTimeouts
from koalapy.agent.core.spool import JournalFolder, Spool
from koalapy.model.errors import SiteUnavailable
from koalapy.protocol.messages import Hello, KnownDaemon, from_agent
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import claim_component, run_program
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time


def reload_daemons(directory: Path) -> list[tuple[str, int, str, int]]:
    """Return the daemons that a newly started agent knows."""
    return [(daemon.instance, daemon.epoch, daemon.life, daemon.job) for daemon in Daemons(directory).known_daemons()]


def test_known_daemons_survive_agent_restart(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    assert daemons.known_daemons() == []
    daemons.record_job("one", 3)  # a daemon that never connected
    assert daemons.accept_epoch("one", 4, "a")
    daemons.record_job("one", 9)
    daemons.record_job("one", 7)
    assert reload_daemons(tmp_path) == [("one", 4, "a", 9)]
    reloaded = Daemons(tmp_path)
    assert not reloaded.accept_epoch("one", 3, "a")
    assert not reloaded.accept_epoch("one", 4, "b"), "another daemon with the same epoch is rejected"
    assert reloaded.accept_epoch("one", 4, "a")
    assert reloaded.accept_epoch("one", 5, "b")
    assert reloaded.accept_epoch("two", 1, "c")
    assert reload_daemons(tmp_path) == [("one", 5, "b", 9), ("two", 1, "c", 0)]


def test_epoch_after_failed_write_counts_and_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = Daemons(tmp_path)
    assert daemons.accept_epoch("one", 3, "z")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert daemons.accept_epoch("one", 4, "a"), "jobs do not wait for the disk"
    assert reload_daemons(tmp_path) == [("one", 3, "z", 0)]
    assert not daemons.accept_epoch("one", 3, "z"), "the earlier run stays rejected"
    assert [daemon.epoch for daemon in daemons.known_daemons()] == [4]
    daemons.record_job("one", 9)
    assert reload_daemons(tmp_path) == [("one", 4, "a", 9)]


@pytest.mark.parametrize("file", ["daemon", "job"])
def test_failed_read_does_not_forget_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    daemons, read_bytes = Daemons(tmp_path), Path.read_bytes
    assert daemons.accept_epoch("one", 4, "a")
    daemons.record_job("one", 9)

    def fail_read(path: Path) -> bytes:
        if path.name == file:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "read_bytes", fail_read)
        with pytest.raises(SiteUnavailable, match=rf"one/{file}: .*Stale file handle"):
            Daemons(tmp_path)
    assert reload_daemons(tmp_path) == [("one", 4, "a", 9)]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_torn_daemon_notes_are_ignored(tmp_path_factory: pytest.TempPathFactory, epoch: bytes, job: bytes) -> None:
    directory = tmp_path_factory.mktemp("notes")
    assert Daemons(directory).accept_epoch("one", 4, "a")
    (directory / "one" / "daemon").write_bytes(epoch)
    (directory / "one" / "job").write_bytes(job)
    daemons = Daemons(directory).known_daemons()
    hello = Hello(cluster="north", version="1", lrm="local", host="a", pid=1, known=daemons)
    assert from_agent.validate_json(from_agent.dump_json([hello])) == [hello]
    assert all(isinstance(daemon, KnownDaemon) for daemon in daemons)


TIMEOUTS = AgentTimeouts(expiry_check_s=60.0)
OLD, WAITING, S = "7.1.0", "7.1.1", "7.1.9"


async def change_daemon(daemon: FakeDaemon, instance: str) -> None:
    """Replace the daemon, as after its database was wiped or restored."""
    inventory_count = len(daemon.inventories)
    await daemon.stop_listening()
    daemon.instance = instance
    await daemon.listen()
    await daemon.wait_until(lambda: len(daemon.inventories) > inventory_count)


def list_components(folder: Path) -> list[str]:
    """Return the components of one daemon, without its own files."""
    return [entry.name for entry in folder.iterdir() if entry.is_dir()]


async def test_stages_and_components_of_lost_daemon_are_removed(daemon: FakeDaemon, tmp_path: Path) -> None:
    old, new, stages = tmp_path / "agent" / "test", tmp_path / "agent" / "other", tmp_path / "agent-stages"
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path / "agent", TIMEOUTS):
        await run_program(daemon, lrm, await claim_component(daemon, tmp_path / "agent", OLD), token=OLD)
        await daemon.wait_for_state(OLD, "ended")
        waiting = await claim_component(daemon, tmp_path / "agent", WAITING)
        await daemon.request_stage(S)
        await daemon.wait_for_stage(S)
        await change_daemon(daemon, "other")
        daemon.messages.clear()
        await daemon.request_stage(S)
        await daemon.wait_for_stage(S)
        assert (stages / f"test-{S}").is_dir()
        for instance in (old, new):
            os.utime(instance / "heard", (0, 0))
        await waiting.receive("stop")
        waiting.writer.close()
        lrm.end_job("2")
        lrm.changed.set()
        await daemon.wait_until(lambda: list_components(old) == [])
        await daemon.wait_until(lambda: not (stages / f"test-{S}").exists())
        await daemon.stop_listening()
        os.utime(new / "heard", (0, 0))
        await pass_time(3 * TIMEOUTS.expiry_check_s)
        assert (stages / f"other-{S}").is_dir(), "the present daemon is never forgotten"
        await daemon.listen()


async def test_results_for_lost_daemon_are_removed(tmp_path: Path, daemon: FakeDaemon) -> None:
    """The results wait for the daemon, and the stage waits for the results."""
    agent = tmp_path / "agent"
    async with running_agent(lrm := MemoryLrm(), daemon, agent, TIMEOUTS):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.request_stage(S)
        await daemon.wait_for_stage(S)
        runner = await claim_component(daemon, agent, OLD, stage=S, collect=["*"])
        await daemon.open_barrier(["true"], OLD)
        await runner.receive("open")
        (tmp_path / "agent-stages" / f"test-{S}" / "a").touch()
        await change_daemon(daemon, "other")
        os.utime(agent / "test" / "heard", (0, 0))
        await runner.report_exit()
        runner.writer.close()
        lrm.end_job("1")
        lrm.changed.set()
        await daemon.wait_until(lambda: list_components(agent / "test") == [])
        await daemon.wait_until(lambda: os.listdir(tmp_path / "agent-stages") == [])


def test_silence_is_counted_from_first_check(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.silence_of("never") == 0.0
    os.utime(tmp_path / "spool" / "never" / "heard", (0, 0))
    assert spool.silence_of("never") > 1_000_000
    spool.record_contact("never")
    assert spool.silence_of("never") < 1_000_000


def test_write_entry_on_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        JournalFolder(tmp_path).write_entry(done=True)
    monkeypatch.undo()
    JournalFolder(tmp_path).write_entry(done=False)
    assert JournalFolder(tmp_path).load_entries() == {"done": False}


def test_entry_that_failed_at_close_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server may report only then that the disk is full, and has stored a part of the line."""
    folder, close = JournalFolder(tmp_path), os.close
    folder.write_entry(lrm="77")

    def close_full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as disk:
        disk.setattr(os, "close", close_full)
        folder.note_entry(stop="enough")
    assert folder.write_late_entries()
    assert JournalFolder(tmp_path).load_entries() == {"lrm": "77", "stop": "enough"}


def test_job_number_is_saved_in_place_over_any_content(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    assert daemons.accept_epoch("one", 1, "a")
    (tmp_path / "one" / "job").write_text("damaged " * 20)
    for job in (1, 2**63 - 1):
        daemons.record_job("one", job)
        assert reload_daemons(tmp_path) == [("one", 1, "a", job)]
    (tmp_path / "one" / "job").unlink()
    (tmp_path / "one" / "job").symlink_to(tmp_path / "elsewhere")
    Daemons(tmp_path).record_job("one", 5)
    assert not (tmp_path / "elsewhere").exists()
