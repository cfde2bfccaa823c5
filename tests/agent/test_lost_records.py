"""Records, keys and files that are lost, damaged or of the wrong kind."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components import outputlog
from koalapy.agent.components.component import Component
from koalapy.agent.components.outputlog import OutputLog
from koalapy.agent.core import spool
from koalapy.agent.core.agent import run_agent
from koalapy.agent.core.reporter import REPORTED_FOR, LostRecords
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.core.spool import DamagedJournal, JournalFolder, Spool, read_regular
from koalapy.agent.lrm.port import Lrm, LrmJob, LrmJobState
from koalapy.agent.runners.runners import lrm_name
from koalapy.model.errors import SiteUnavailable
from koalapy.model.reports import MAX_LOST_RECORDS
from koalapy.runner.program_output import Output
from koalapy.runner.session import seal_file
from koalapy.system.clock import Clock
from koalapy.system.process import read_boot_id
from tests.agent.conftest import DEADLINE, FakeDaemon, Site, running_pids
from tests.agent.fake_runner import FakeRunner, claim_component, runner_secret
from tests.agent.memory_agent import find_no_open_mpi, loop_clock, running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.needs import ROOT, needs
from tests.runner.test_folders import run_as_unprivileged
from tests.signals import pass_time

T = "7.1.0"
NAME = f"koala-test-{T}"
ENTRIES: list[dict[str, object]] = [
    {"submit": {"size": 2, "walltime": 60.0, "name": "x"}},
    {"lrm": "77"},
    {"open": {"launcher": "processes", "head": T, "nodes": [], "contexts": []}},
    {"end": {"exit_code": 0, "error": "", "infrastructure": False, "hosts": ["127.0.1.1"]}},
]


def write_journal(path: Path) -> JournalFolder:
    folder = JournalFolder(path)
    for entry in ENTRIES:
        folder.write_entry(**entry)
    return folder


@given(st.data())
def test_changed_journal_raises_on_load(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_journal(tmp_path_factory.mktemp("component"))
    content = bytearray((folder.path / "journal").read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255).filter(lambda value: value != content[position]))
    (folder.path / "journal").write_bytes(content)
    with pytest.raises(DamagedJournal):
        folder.load_entries()


def empty_journal(journal: Path) -> None:
    journal.write_bytes(b"")


def garble_journal(journal: Path) -> None:
    content = bytearray(journal.read_bytes())
    content[content.index(b'"size"')] = 0xFF
    journal.write_bytes(content)


def remove_folder(journal: Path) -> None:
    shutil.rmtree(journal.parent)


def remove_spool(journal: Path) -> None:
    shutil.rmtree(journal.parent.parent)


def drop_plan(journal: Path) -> None:
    """Cut the journal as a file system that lost the end of a file."""
    content = journal.read_bytes()
    journal.write_bytes(content[: content.index(b'{"open"')])


@pytest.mark.processes
@pytest.mark.parametrize("damage", [empty_journal, garble_journal, remove_folder, remove_spool, drop_plan])
async def test_unrecorded_component_is_ended(daemon: FakeDaemon, site: Site, damage: Callable[[Path], None]) -> None:
    await daemon.submit_component(T, 2)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", "echo $$; exec sleep 300"], T)
    await daemon.wait_until(lambda: len(daemon.output.get(T, b"").split()) == 2)
    assert len(running_pids(daemon.output[T])) == 2
    await site.stop()
    damage(site.settings.directory / "test" / T / "journal")
    daemon.messages.clear()
    await site.start()
    await daemon.wait_until(
        lambda: daemon.status(T).get("state") == "ended" or (bool(daemon.inventories) and not daemon.inventories[-1])
    )
    if status := daemon.status(T):
        assert status["infrastructure"]
        assert "record" in status["error"]
        assert status["program_exit"] is None
    await daemon.wait_until(lambda: not running_pids(daemon.output[T]))
    await daemon.wait_until(lambda: daemon.report().get("lost_records") == [T] and daemon.report()["idle"] == 4)


@pytest.mark.parametrize("user", ["", "alice"])
async def test_unrecorded_job_is_cancelled(daemon: FakeDaemon, tmp_path: Path, user: str) -> None:
    """Also by the next agent, if this one ends before the job does."""
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit_component(T)
        await daemon.wait_until(lambda: bool(lrm.jobs))
    shutil.rmtree(tmp_path / "test" / T)
    lrm.jobs["1"] = replace(lrm.jobs["1"], user=user)
    daemon.messages.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: lrm.cancelled == [("1", False)])
        status = await daemon.wait_for_state(T, "waiting")
        assert status["infrastructure"]
        assert not daemon.received("ack")
    daemon.messages.clear()
    lrm.cancelled.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: len(lrm.cancelled) > 1)
        assert daemon.status(T)["state"] == "waiting"
        lrm.end_job("1")
        lrm.changed.set()
        await daemon.wait_for_state(T, "ended")


@pytest.mark.parametrize(("module", "name"), [(spool, "journal"), (outputlog, "stream.0")])
async def test_failed_read_at_start_keeps_record(
    monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon, tmp_path: Path, module: ModuleType, name: str
) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path)
        await runner.send_output(0, b"hello\n")

    def fail_read(path: Path, max_size: int, *, end: bool = False) -> bytes:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return read_regular(path, max_size, end=end)

    settings = AgentSettings("north", f"http://127.0.0.1:{daemon.port}", "s3cret", tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(module, "read_regular", fail_read)
        with pytest.raises(SiteUnavailable, match=rf"test/{T}: .*Input/output error"):
            await run_agent(settings, cast(Lrm, lrm), clock=loop_clock(), find_open_mpi=find_no_open_mpi)
    daemon.messages.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: daemon.status(T).get("lrm_job") == "1")
        assert not daemon.status(T)["error"]
    assert not lrm.cancelled
    assert [path.read_bytes()[-6:] for path in (tmp_path / "test" / T).glob("stream.*")] == [b"hello\n"]


async def test_unrecorded_job_whose_end_is_not_known_yet_is_no_lost_record(daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm = MemoryLrm()
    lrm.jobs["1"] = LrmJob("1", NAME, LrmJobState.RUNNING, ("a",), gone=True)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: daemon.report().get("idle") is not None)
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert not any(daemon.inventories)
        assert not daemon.report().get("lost_records")
        assert not lrm.cancelled


async def test_runner_of_unrecorded_component_is_rejected(daemon: FakeDaemon, agent: Path) -> None:
    stranger = await FakeRunner.connect(agent)
    await stranger.authenticate(NAME, runner_secret(NAME))
    stranger.session = None
    stranger.send(t="here", life="1", host="a", name="a", phase="running")
    await stranger.wait_for_disconnect()
    assert not daemon.report().get("lost_records")
    runner = await FakeRunner.connect(agent)
    await runner.introduce(NAME, runner_secret(NAME), phase="running")
    assert (await runner.read())["t"] == "refused"
    await daemon.wait_until(lambda: daemon.report().get("lost_records") == [T])


async def test_damaged_record_does_not_affect_other_components(daemon: FakeDaemon, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for token in (T, "8.1.0"):
        spool.make_folder("test", token).write_entry(submit={"size": 1}, lrm="1")
    garble_journal(tmp_path / "test" / T / "journal")
    async with running_agent(MemoryLrm(), daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert [component["token"] for component in daemon.inventories[0]] == ["8.1.0"]
    async with running_agent(MemoryLrm(), daemon, tmp_path):
        await asyncio.sleep(0)
    assert not (tmp_path / "test" / T).exists(), "the next agent removes unusable records"


async def test_lost_records_are_reported_once_for_limited_time() -> None:
    records = LostRecords(loop_clock())
    for number in range(MAX_LOST_RECORDS + 5):
        records.record_loss(f"{number}.1.0", "gone")
        records.record_loss(f"{number}.1.0", "gone again")
    assert len(records.recent_tokens()) == MAX_LOST_RECORDS
    assert records.recent_tokens()[-1] == f"{MAX_LOST_RECORDS + 4}.1.0"
    await pass_time(REPORTED_FOR)
    assert records.recent_tokens() == ()


PLAN = {"launcher": "processes", "head": T}
SUCCESS_RESULT = {"code": 0, "error": "", "infrastructure": False, "stopped": False, "warned": False}
RUNNER_HOST = {"host": "10.0.0.1", "name": "n1"}


def recall_component(path: Path, key: bytes) -> Component:
    """Load the component with a key of the resource manager."""
    return Component.load_journal("test", T, JournalFolder(path, secret_of=lambda node: key))


def read_output(component: Component) -> bytes:
    pieces = []
    while (piece := component.output.next_piece()) is not None:
        component.output.acknowledge_to(component.output.sent)
        pieces.append(piece.data)
    return b"".join(pieces)


def leave_result(path: Path, node: int, output: Output, key: bytes) -> None:
    """End a runner: save its unsent output and its result."""
    output.save()
    name = f"result.{node}.json"
    result = json.dumps(SUCCESS_RESULT | RUNNER_HOST | {"output": output.total}).encode()
    (path / name).write_bytes(seal_file(key, name, result))


@pytest.fixture
def start_runners(tmp_path: Path) -> Callable[[int], list[Output]]:
    """Start a component of several nodes and return the output buffers of its runners."""

    def start_runners(nodes: int) -> list[Output]:
        JournalFolder(tmp_path).write_entry(submit={"size": nodes, "lease": None}, lrm="1", open=PLAN)
        return [Output(str(tmp_path / f"output.{node}"), b"old", file_size=8) for node in range(nodes)]

    return start_runners


@pytest.mark.parametrize("nodes", [1, 2])
def test_result_after_lost_key_has_complete_output(
    tmp_path: Path, start_runners: Callable[[int], list[Output]], nodes: int
) -> None:
    for node, output in enumerate(start_runners(nodes)):
        for line in range(5):
            output.append(f"node {node} line {line}\n".encode())
        output.append(b"no end")
        leave_result(tmp_path, node, output, b"old")
    assert recall_component(tmp_path, b"old").exit_code == 0
    component = recall_component(tmp_path, b"new")
    component.on_job_ended(None)
    assert (component.exit_code, component.error, component.output.missing) == (0, "", "")
    output_text = read_output(component)
    for node in range(nodes):
        assert output_text.count(f"node {node} line ".encode()) == 5
    assert output_text.count(b"no end") == nodes


def test_reported_result_is_recalled_after_lost_key(
    tmp_path: Path, start_runners: Callable[[int], list[Output]]
) -> None:
    start_runners(1)
    first = recall_component(tmp_path, b"old")
    first.output.add_bytes(0, 0, b"all\n")
    first.record_result(0, SUCCESS_RESULT | RUNNER_HOST)
    component = recall_component(tmp_path, b"new")
    component.on_job_ended(None)
    assert (component.exit_code, component.error, component.output.missing) == (0, "", "")
    assert component.current_status().hosts == ("10.0.0.1",)


def test_unverified_output_is_reported_missing(tmp_path: Path, start_runners: Callable[[int], list[Output]]) -> None:
    (output,) = start_runners(1)
    output.append(b"some line\n" * 5)
    leave_result(tmp_path, 0, output, b"old")
    component = recall_component(tmp_path, b"new")
    component.on_job_ended(None)
    assert component.exit_code is None
    assert "no longer knows it" in component.error
    assert "node 0" in component.output.missing


def test_result_without_complete_output_names_missing_bytes(
    tmp_path: Path, start_runners: Callable[[int], list[Output]]
) -> None:
    """The disk was full for the rest, and the runner has not reconnected."""
    (output,) = start_runners(1)
    for line in range(3):
        output.append(f"line {line}\n".encode())
    leave_result(tmp_path, 0, output, b"old")
    (tmp_path / "output.0.16").unlink()
    first = recall_component(tmp_path, b"old")
    assert first.output.missing == "", "its runner may still reconnect"
    component = recall_component(tmp_path, b"new")
    component.on_job_ended(None)
    assert component.exit_code == 0
    assert component.output.missing.startswith("5 bytes of node 0")


def test_gap_of_ended_component_is_reported_after_restart(tmp_path: Path) -> None:
    component = Component.load_journal("test", T, folder := write_journal(tmp_path))
    component.output.note_killed_runner(0)
    component.mark_ended()
    restarted = Component.load_journal("test", T, folder)
    assert restarted.current_status().missing == component.output.missing != ""


@pytest.mark.parametrize("lost", [0, 8, 16])
def test_reconnected_runner_resends_output_not_copied(tmp_path: Path, lost: int) -> None:
    """A missing file is still in the memory of the runner."""
    spool = tmp_path / "spool"
    spool.mkdir()
    output = Output(str(spool / "output.0"), b"old", file_size=8)
    for line in range(3):
        output.append(f"line {line}\n"[:8].ljust(8).encode())
    output.save()
    folder, log = JournalFolder(spool, secret_of=lambda node: b"old"), OutputLog(spool, 1)
    unsent = [(start, path) for start, path in folder.unsent_files()[0] if start != lost]
    log.copy_unsent(0, unsent, output.total, folder.read_runner_file)
    assert log.kept_bytes(0) == lost
    output.acknowledge(log.accept_stream(0, output.start))
    for offset, data in output.chunks():
        log.add_bytes(0, offset, data)
    assert log.kept_bytes(0) == output.total
    assert log.missing == ""


async def test_saved_output_of_lost_runner_is_sent(daemon: FakeDaemon, agent: Path) -> None:
    """The daemon receives success and complete output before the resource manager ends the job."""
    runner = await claim_component(daemon, agent)
    await daemon.open_barrier(["true"], T)
    await runner.receive("open")
    await runner.send_output(0, b"first\n")
    name = lrm_name(daemon.instance, T)
    spool = agent / daemon.instance / T
    output = Output(str(spool / "output.0"), runner_secret(name))
    output.append(b"first\nlast\n")
    leave_result(spool, 0, output, runner_secret(name))
    runner.writer.transport.abort()
    await daemon.wait_until(lambda: daemon.output.get(T) == b"first\nlast\n")
    assert daemon.status(T)["state"] == "claimed"
    await daemon.wait_until(lambda: daemon.status(T).get("program_exit") == 0)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def raise_blocked(*_: object) -> None:
        raise AssertionError("the agent blocks on a pipe")

    previous_handler = signal.signal(signal.SIGALRM, raise_blocked)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous_handler)


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    folder = JournalFolder(tmp_path)
    folder.write_entry(submit={"size": 1})
    return folder


def make_endless_file(path: Path) -> None:
    """Make a sparse file that is larger than the memory."""
    path.touch()
    os.truncate(path, 1 << 43)


SPECIAL_FILES = pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_endless_file])


@SPECIAL_FILES
@pytest.mark.parametrize("name", ["stream.0", "stream.50", "result.0.json", "output.0.0"])
def test_restarted_agent_ignores_special_files(folder: JournalFolder, make: Callable[[Path], None], name: str) -> None:
    make(folder.path / name)
    component = Component.load_journal("test", T, folder)
    assert component.size == 1
    component.on_job_ended(None)
    assert component.error == "the local resource manager no longer knows it"
    assert Component.load_journal("test", T, folder).ended


@SPECIAL_FILES
def test_special_file_as_journal_raises(folder: JournalFolder, make: Callable[[Path], None]) -> None:
    (folder.path / "journal").unlink()
    make(folder.path / "journal")
    with pytest.raises(OSError, match="not a file of the agent or a runner"):
        Component.load_journal("test", T, folder)


def test_pipe_as_journal_is_not_written(folder: JournalFolder) -> None:
    (folder.path / "journal").unlink()
    os.mkfifo(folder.path / "journal")
    with pytest.raises(OSError, match="No such device"):
        folder.write_entry(stop="enough")
    folder.note_entry(lrm="7")
    assert not folder.write_late_entries()


def test_output_replaces_special_files(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    link_target = tmp_path / "elsewhere"
    link_target.write_text("precious")
    for offset, make in ((0, os.mkfifo), (3, lambda path: path.symlink_to(link_target))):
        make(tmp_path / f"stream.{offset}")
        log = OutputLog(tmp_path, 1, segment=1) if offset == 0 else log
        assert log.add_bytes(0, offset, b"hi\n") == offset + 3
    piece = log.next_piece()
    assert piece is not None
    assert piece.data == b"hi\n"
    assert link_target.read_text() == "precious"


def raise_permission_error(path: Path, missing_ok: bool = False) -> None:
    """Fail as in a folder that a program has made read-only."""
    raise PermissionError(13, "Permission denied", str(path))


def test_output_file_that_cannot_be_removed_counts_once(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.secret_of = None
    component = Component.load_journal("test", T, folder)
    (folder.path / "output.0.0").write_bytes(b"hi\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", raise_permission_error)
        component.on_job_ended(None)
    assert component.ended
    assert component.output.total == 3
    assert Component.load_journal("test", T, folder).output.total == 3


@pytest.mark.processes
@needs(ROOT)
def test_folder_with_read_only_files_is_removed(tmp_path: Path) -> None:
    def make_and_remove(remove: Callable[[Path], object]) -> None:
        path = Path("test", T)
        (path / "pkg" / "mod").mkdir(parents=True)
        (path / "pkg" / "mod" / "go.sum").touch()
        (path / "pkg" / "mod").chmod(0o555)
        remove(path)

    run_as_unprivileged(tmp_path, lambda: make_and_remove(lambda path: JournalFolder(path).remove_folder()))
    assert list((tmp_path / "test").iterdir()) == []
    run_as_unprivileged(tmp_path, lambda: make_and_remove(lambda _: Spool(Path()).remove_leftovers()))
    assert list((tmp_path / "test").iterdir()) == [tmp_path / "test" / T], "folders of unknown daemons stay"
    (tmp_path / "test" / "heard").touch()
    run_as_unprivileged(tmp_path, lambda: Spool(Path()).remove_leftovers())
    assert [path.name for path in (tmp_path / "test").iterdir()] == ["heard"]


def test_folder_closed_by_its_program_is_loaded(tmp_path: Path) -> None:
    """Else no agent could start any more."""
    spool = Spool(tmp_path)
    folder = spool.make_folder("test", T)
    folder.write_entry(submit={"size": 1})
    spool.record_contact("test")
    folder.path.chmod(0)
    assert spool.remove_leftovers() == []
    assert [loaded.load_entries() for *_, loaded in spool.load_folders()] == [{"submit": {"size": 1}}]
    assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.processes
def test_secret_file_of_killed_agent_is_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    folder = spool.make_folder("test", T)
    folder.write_entry(submit={"size": 1})
    code = (
        "import os; from pathlib import Path; from koalapy.agent.runners.runners import write_secrets\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        f"write_secrets(Path({str(folder.path)!r}), ['5ec7e7'])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [path.read_text() for path in folder.path.glob(".secret.0.*")] == ["5ec7e7"]
    assert spool.remove_leftovers() == []
    assert os.listdir(folder.path) == ["journal"]


class BootClock(Clock):
    """The clock of a machine that was started an hour ago."""

    def since_boot(self) -> float:
        return 3600.0


BEFORE_BOOT, AFTER_BOOT = 3550.0, 3530.0
"""Ages of files from before that boot, as far as a clock that is ahead can tell, and from after it."""


def save_result(folder: Path, node: int, result: dict[str, Any] = SUCCESS_RESULT, *, age: float) -> None:
    """Save the result of a node's runner so many seconds ago."""
    path = folder / f"result.{node}.json"
    path.write_text(json.dumps(result | RUNNER_HOST))
    os.utime(path, (time.time() - age,) * 2)


def make_unsent_component(folder: JournalFolder, boot: str, plan: dict[str, Any], **order: object) -> None:
    """Write the journal of a component that opened its program in a boot of the machine, and has files to send."""
    submit = {"size": 1, "stage": T, "collect": ["out/*"]} | order
    folder.write_entry(submit=submit, lrm="77", open=plan, boot=boot)


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("stop", [None, ""])
@pytest.mark.parametrize(
    ("boot", "sent", "code"), [("another", False, None), ("another", True, 0), (read_boot_id(), False, 0)]
)
def test_success_without_sent_files_fails_after_restart_of_machine(
    tmp_path: Path, boot: str, sent: bool, code: int | None, stop: str | None, has_ended: bool
) -> None:
    folder = JournalFolder(tmp_path)
    make_unsent_component(folder, boot, PLAN)
    save_result(tmp_path, 0, age=BEFORE_BOOT)
    folder.write_entry(**({"collected": True} if sent else {}), **({} if stop is None else {"stop": stop}))
    if has_ended:
        folder.write_entry(end={"exit_code": 0, "error": "", "infrastructure": False, "hosts": ["10.0.0.1"]})
    component = Component.load_journal("test", T, folder, BootClock())
    second = Component.load_journal("test", T, folder, BootClock())
    if not has_ended:
        component.on_job_ended(None)
    component.mark_collected("")
    for each in (component, second, Component.load_journal("test", T, folder, BootClock())):
        status = each.current_status()
        assert (status.program_exit, status.infrastructure, status.results_lost) == (code, code is None, code is None)
        assert ("was restarted" in status.error) is (code is None)


@pytest.mark.parametrize(("result", "is_lost"), [(SUCCESS_RESULT, True), (SUCCESS_RESULT | {"code": 1}, False)])
def test_unsent_files_beside_head_are_lost_after_restart_of_machine(
    tmp_path: Path, result: dict[str, Any], is_lost: bool
) -> None:
    folder = JournalFolder(tmp_path)
    make_unsent_component(folder, "another", PLAN | {"launcher": "openmpi", "head": "another"})
    save_result(tmp_path, 0, result, age=BEFORE_BOOT)
    status = Component.load_journal("test", T, folder, BootClock()).current_status()
    assert (status.program_exit, status.infrastructure, status.results_lost) == (None, is_lost, is_lost)


@pytest.mark.parametrize(
    ("age", "user", "is_lost"),
    [(BEFORE_BOOT, "", True), (AFTER_BOOT, "", False), (-BEFORE_BOOT, "", True), (AFTER_BOOT, "alice", False)],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_only_runner_that_outlived_restart_of_machine_shows_that_files_are_kept(
    tmp_path: Path, age: float, user: str, is_lost: bool, is_late: bool
) -> None:
    """A restart of the agent's machine alone loses nothing."""
    folder = JournalFolder(tmp_path)
    make_unsent_component(folder, "another", PLAN, user=user)
    if not is_late:
        save_result(tmp_path, 0, age=age)
    component = Component.load_journal("test", T, folder, BootClock())
    save_result(tmp_path, 0, age=age)
    component.on_job_ended(None)
    for each in (component, Component.load_journal("test", T, folder, BootClock())):
        status = each.current_status()
        assert (status.program_exit, status.results_lost) == (None if is_lost else 0, is_lost)


@pytest.mark.parametrize("how", ["infrastructure", "stopped"])
def test_runner_started_again_after_restart_of_machine_does_not_hide_lost_files(tmp_path: Path, how: str) -> None:
    folder = JournalFolder(tmp_path)
    make_unsent_component(folder, "another", PLAN | {"launcher": "openmpi"}, size=2)
    save_result(tmp_path, 0, age=BEFORE_BOOT)
    save_result(tmp_path, 1, SUCCESS_RESULT | {"code": None, how: True}, age=AFTER_BOOT)
    assert Component.load_journal("test", T, folder, BootClock()).current_status().results_lost


def test_lost_files_stay_lost_when_a_later_result_arrives(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    make_unsent_component(folder, "another", PLAN | {"launcher": "openmpi"}, size=2)
    save_result(tmp_path, 0, age=BEFORE_BOOT)
    for _ in range(2):
        assert Component.load_journal("test", T, folder, BootClock()).current_status().results_lost
        save_result(tmp_path, 1, age=AFTER_BOOT)


async def test_program_that_outlives_restart_of_machine_succeeds(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    async with running_agent(lrm, daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path, T, "a", stage=T, collect=["out/*"])
        await daemon.open_barrier(["true"], T)
        await runner.receive("open")
    folder = JournalFolder(tmp_path / daemon.instance / T)
    folder.write_entry(boot="another")
    daemon.inventories.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME), life="a", phase="running")
        await runner.report_exit()
    status = Component.load_journal(daemon.instance, T, folder).current_status()
    assert (status.program_exit, status.results_lost) == (0, False)
