"""What an agent does when the record of a component is gone or damaged while its program runs."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.core.reporter import REPORTED_FOR, LostRecords
from koalapy.agent.core.spool import DamagedJournal, Folder, Spool
from koalapy.model.reports import MAX_LOST_RECORDS
from tests.agent.conftest import FakeDaemon, Site, alive
from tests.agent.memory_agent import loop_clock, serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import PlayedRunner, secret_of
from tests.signals import pass_time

T = "7.1.0"
NAME = f"koala-test-{T}"
ENTRIES: list[dict[str, object]] = [
    {"submit": {"size": 2, "walltime": 60.0, "name": "x"}},
    {"lrm": "77"},
    {"open": {"launcher": "processes", "head": T, "nodes": [], "contexts": []}},
    {"end": {"exit_code": 0, "error": "", "infrastructure": False, "hosts": ["127.0.1.1"]}},
]


def written(path: Path) -> Folder:
    folder = Folder(path)
    for entry in ENTRIES:
        folder.write(**entry)
    return folder


@given(st.data())
def test_entries_of_changed_journal_raise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = written(tmp_path_factory.mktemp("component"))
    content = bytearray((folder.path / "journal").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255).filter(lambda value: value != content[at]))
    (folder.path / "journal").write_bytes(content)
    with pytest.raises(DamagedJournal):
        folder.entries()


def test_component_state_without_record_of_its_size_is_not_claimed(tmp_path: Path) -> None:
    component = Component("test", T, Folder(tmp_path))
    component.lrm_job = "7"
    assert component.state() == "waiting"


def empty(journal: Path) -> None:
    journal.write_bytes(b"")


def garble(journal: Path) -> None:
    content = bytearray(journal.read_bytes())
    content[content.index(b'"size"')] = 0xFF
    journal.write_bytes(content)


def remove_folder(journal: Path) -> None:
    shutil.rmtree(journal.parent)


def remove_spool(journal: Path) -> None:
    shutil.rmtree(journal.parent.parent)


def drop_plan(journal: Path) -> None:
    """As a file system does that has lost the end of a file."""
    content = journal.read_bytes()
    journal.write_bytes(content[: content.index(b'{"open"')])


@pytest.mark.processes
@pytest.mark.parametrize("damage", [empty, garble, remove_folder, remove_spool, drop_plan])
async def test_unrecorded_component_is_ended(daemon: FakeDaemon, site: Site, damage: Callable[[Path], None]) -> None:
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "echo $$; exec sleep 300"], T)
    await daemon.until(lambda: len(daemon.output.get(T, b"").split()) == 2)
    assert len(alive(daemon.output[T])) == 2
    await site.stop()
    damage(site.settings.directory / "test" / T / "journal")
    daemon.messages.clear()
    await site.start()
    await daemon.until(
        lambda: daemon.status(T).get("state") == "ended" or (bool(daemon.inventories) and not daemon.inventories[-1])
    )
    if status := daemon.status(T):
        assert status["infrastructure"]
        assert "record" in status["error"]
        assert status["program_exit"] is None
    await daemon.until(lambda: not alive(daemon.output[T]))
    await daemon.until(lambda: daemon.report().get("lost_records") == [T] and daemon.report()["idle"] == 4)


async def test_agent_ends_unrecorded_job_of_the_resource_manager_by_itself(daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm = MemoryLrm()
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: bool(daemon.inventories))
        await daemon.submit(T)
        await daemon.until(lambda: bool(lrm.jobs))
    shutil.rmtree(tmp_path / "test" / T)
    daemon.messages.clear()
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: lrm.cancelled == [("1", False)])
        status = await daemon.reaches(T, "waiting")
        assert status["infrastructure"]
        assert not daemon.said("ack")
        lrm.end("1")
        lrm.changed.set()
        await daemon.reaches(T, "ended")


async def test_runner_of_unrecorded_component_is_refused(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.until(lambda: bool(daemon.inventories))
        stranger = await PlayedRunner.connect(tmp_path)
        await stranger.meet(NAME, secret_of(NAME))
        stranger.session = None
        stranger.send(t="here", life="1", host="a", name="a", phase="running")
        await stranger.is_cut_off()
        assert not daemon.report().get("lost_records")
        runner = await PlayedRunner.connect(tmp_path)
        await runner.greet(NAME, secret_of(NAME), phase="running")
        assert (await runner.read())["t"] == "refused"
        await daemon.until(lambda: daemon.report().get("lost_records") == [T])


async def test_agent_recalls_other_components_when_one_record_is_damaged(daemon: FakeDaemon, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for token in (T, "8.1.0"):
        spool.make("test", token).write(submit={"size": 1}, lrm="1")
    garble(tmp_path / "test" / T / "journal")
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.until(lambda: bool(daemon.inventories))
        assert [each["token"] for each in daemon.inventories[0]] == ["8.1.0"]
    async with serving(MemoryLrm(), daemon, tmp_path):
        await asyncio.sleep(0)
    assert not (tmp_path / "test" / T).exists(), "the next agent removes what cannot be used"


async def test_lost_records_are_reported_once_each_and_for_a_while() -> None:
    records = LostRecords(loop_clock())
    for number in range(MAX_LOST_RECORDS + 5):
        records.add(f"{number}.1.0", "gone")
        records.add(f"{number}.1.0", "gone again")
    assert len(records.tokens()) == MAX_LOST_RECORDS
    assert records.tokens()[-1] == f"{MAX_LOST_RECORDS + 4}.1.0"
    await pass_time(REPORTED_FOR)
    assert records.tokens() == ()
