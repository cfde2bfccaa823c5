"""What an agent remembers of daemons, and what it removes of those that stay away."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.core.daemons import MAX_KNOWN_DAEMONS, Daemons
from koalapy.agent.core.settings import AgentTimeouts
from koalapy.agent.core.spool import JournalFolder, Spool
from koalapy.protocol.messages import Hello, KnownDaemon, from_agent
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim, run_program
from tests.signals import pass_time


def told(directory: Path) -> list[tuple[str, int, str, int]]:
    """What an agent that is started now would tell."""
    return [(known.instance, known.epoch, known.life, known.job) for known in Daemons(directory).known_daemons()]


def test_next_agent_knows_the_same_daemons(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    assert daemons.known_daemons() == []
    daemons.record_job("one", 3)  # which was never served
    assert daemons.accept_epoch("one", 4, "a")
    daemons.record_job("one", 9)
    daemons.record_job("one", 7)
    assert told(tmp_path) == [("one", 4, "a", 9)]
    again = Daemons(tmp_path)
    assert not again.accept_epoch("one", 3, "a")
    assert not again.accept_epoch("one", 4, "b"), "it is another daemon, though it counts alike"
    assert again.accept_epoch("one", 4, "a")
    assert again.accept_epoch("one", 5, "b")
    assert again.accept_epoch("two", 1, "c")
    assert told(tmp_path) == [("one", 5, "b", 9), ("two", 1, "c", 0)]


def test_hello_names_most_recent_daemons(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    for number in range(MAX_KNOWN_DAEMONS + 3):
        assert daemons.accept_epoch(f"d{number}", 1, "a")
    assert daemons.accept_epoch("d0", 1, "a")
    names = [known.instance for known in daemons.known_daemons()]
    assert len(names) == MAX_KNOWN_DAEMONS
    assert names[-2:] == [f"d{MAX_KNOWN_DAEMONS + 2}", "d0"]


def test_epoch_after_failed_write_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = Daemons(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert daemons.accept_epoch("one", 4, "a"), "it is obeyed: jobs do not wait for that"
    assert told(tmp_path) == []
    assert daemons.accept_epoch("one", 4, "a")
    assert told(tmp_path) == [("one", 4, "a", 0)]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_torn_notes_harm_nobody(tmp_path_factory: pytest.TempPathFactory, epoch: bytes, job: bytes) -> None:
    directory = tmp_path_factory.mktemp("notes")
    assert Daemons(directory).accept_epoch("one", 4, "a")
    (directory / "one" / "daemon").write_bytes(epoch)
    (directory / "one" / "job").write_bytes(job)
    known = Daemons(directory).known_daemons()
    hello = Hello(cluster="north", version="1", lrm="local", host="a", pid=1, known=known)
    assert from_agent.validate_json(from_agent.dump_json([hello])) == [hello]
    assert all(isinstance(each, KnownDaemon) for each in known)


TIMEOUTS = AgentTimeouts(expiry_check_s=60.0)
OLD, WAITING, S = "7.1.0", "7.1.1", "7.1.9"


async def change_daemon(daemon: FakeDaemon, instance: str) -> None:
    """As when the daemon's database was wiped, or restored."""
    before = len(daemon.inventories)
    await daemon.leave()
    daemon.instance = instance
    await daemon.listen()
    await daemon.wait_until(lambda: len(daemon.inventories) > before)


def components_in(folder: Path) -> list[str]:
    """Of one daemon, beside the files that are kept of it."""
    return [entry.name for entry in folder.iterdir() if entry.is_dir()]


async def test_stages_and_components_of_a_daemon_that_is_gone_go_too(daemon: FakeDaemon, tmp_path: Path) -> None:
    old, new, stages = tmp_path / "agent" / "test", tmp_path / "agent" / "other", tmp_path / "agent-stages"
    async with serving(lrm := MemoryLrm(), daemon, tmp_path / "agent", TIMEOUTS):
        await run_program(daemon, lrm, await claim(daemon, tmp_path / "agent", OLD), token=OLD)
        await daemon.reaches(OLD, "ended")
        waiting = await claim(daemon, tmp_path / "agent", WAITING)
        await daemon.stage(S)
        await daemon.staged(S)
        await change_daemon(daemon, "other")
        daemon.messages.clear()
        await daemon.stage(S)
        await daemon.staged(S)
        assert (stages / f"test-{S}").is_dir()
        for instance in (old, new):
            os.utime(instance / "heard", (0, 0))
        await waiting.receive("stop")
        waiting.writer.close()
        lrm.end("2")
        lrm.changed.set()
        await daemon.wait_until(lambda: components_in(old) == [])
        await daemon.wait_until(lambda: not (stages / f"test-{S}").exists())
        await daemon.leave()
        os.utime(new / "heard", (0, 0))
        await pass_time(3 * TIMEOUTS.expiry_check_s)
        assert (stages / f"other-{S}").is_dir(), "the present daemon is never forgotten"
        await daemon.listen()


async def test_results_for_a_daemon_that_is_gone_keep_nothing(tmp_path: Path, daemon: FakeDaemon) -> None:
    """They wait for it, and its stage for them."""
    agent = tmp_path / "agent"
    async with serving(lrm := MemoryLrm(), daemon, agent, TIMEOUTS):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.stage(S)
        await daemon.staged(S)
        runner = await claim(daemon, agent, OLD, stage=S, collect=["*"])
        await daemon.open(["true"], OLD)
        await runner.receive("open")
        (tmp_path / "agent-stages" / f"test-{S}" / "a").touch()
        await change_daemon(daemon, "other")
        os.utime(agent / "test" / "heard", (0, 0))
        await runner.exit()
        runner.writer.close()
        lrm.end("1")
        lrm.changed.set()
        await daemon.wait_until(lambda: components_in(agent / "test") == [])
        await daemon.wait_until(lambda: os.listdir(tmp_path / "agent-stages") == [])


def test_silence_is_counted_from_the_first_look(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.silence_of("never") == 0.0
    os.utime(tmp_path / "spool" / "never" / "heard", (0, 0))
    assert spool.silence_of("never") > 1_000_000
    spool.record_contact("never")
    assert spool.silence_of("never") < 1_000_000


def test_entries_with_unfinished_last_line_returns_the_others_and_cuts_it_off(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    folder.write_entry(order={"a": 1})
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(b'{"ready": [0, ')
    assert folder.load_entries() == {"order": {"a": 1}}
    folder.write_entry(done=True)
    assert folder.load_entries() == {"order": {"a": 1}, "done": True}


def test_record_on_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        JournalFolder(tmp_path).write_entry(done=True)
    monkeypatch.undo()
    JournalFolder(tmp_path).write_entry(done=False)
    assert JournalFolder(tmp_path).load_entries() == {"done": False}
