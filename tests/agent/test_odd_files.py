"""What a program may make in its working folder, which is the agent's for the component, too."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.components.component import Component
from koalapy.agent.components.outputlog import OutputLog
from koalapy.agent.core.spool import Folder, Spool
from tests.agent.conftest import DEADLINE, FakeDaemon
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.needs import ROOT, needs
from tests.runner.test_folders import as_somebody

T = "7.1.0"
RESULT = {"code": 3, "error": "", "infrastructure": False, "stopped": False, "output": 0, "host": "h", "name": "n"}


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    def waits(*_: object) -> None:
        raise AssertionError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, waits)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.write(submit={"size": 1})
    return made


def endless(path: Path) -> None:
    """A file that has room for more than there is memory."""
    path.touch()
    os.truncate(path, 1 << 43)


ODD = pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, endless])


@ODD
@pytest.mark.parametrize("name", ["stream.0", "stream.50", "result.0.json", "output.0.0"])
def test_an_agent_that_begins_anew_does_without_it(folder: Folder, make: Callable[[Path], None], name: str) -> None:
    make(folder.path / name)
    component = Component.recall("test", T, folder)
    assert component.size == 1
    component.lrm_ended(None)
    assert component.error == "the local resource manager no longer knows it"
    assert Component.recall("test", T, folder).ended


@ODD
def test_in_the_journals_place_it_is_no_record(folder: Folder, make: Callable[[Path], None]) -> None:
    (folder.path / "journal").unlink()
    make(folder.path / "journal")
    with pytest.raises(OSError, match="nothing that we or a runner leave"):
        Component.recall("test", T, folder)


def test_a_pipe_in_the_journals_place_is_not_written_to(folder: Folder) -> None:
    (folder.path / "journal").unlink()
    os.mkfifo(folder.path / "journal")
    with pytest.raises(OSError, match="No such device"):
        folder.write(stop="enough")
    folder.note(lrm="7")
    assert not folder.catch_up()


def test_output_is_written_where_something_else_was(tmp_path: Path) -> None:
    log = OutputLog(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    for offset, make in ((0, os.mkfifo), (3, lambda path: path.symlink_to(elsewhere))):
        make(tmp_path / f"stream.{offset}")
        log = OutputLog(tmp_path, 1, segment=1) if offset == 0 else log
        assert log.take(0, offset, b"hi\n") == offset + 3
    piece = log.next_piece()
    assert piece is not None
    assert piece.data == b"hi\n"
    assert elsewhere.read_text() == "precious"


def refused(path: Path, missing_ok: bool = False) -> None:
    """As in a folder that a program has made read-only."""
    raise PermissionError(13, "Permission denied", str(path))


def test_output_that_stays_where_it_was_left_is_taken_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.secret_of = None
    component = Component.recall("test", T, folder)
    (folder.path / "output.0.0").write_bytes(b"hi\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        component.lrm_ended(None)
    assert component.ended
    assert component.output.total == 3
    assert Component.recall("test", T, folder).output.total == 3


def test_what_is_not_from_a_runner_may_stay(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.secret_of = lambda node: b"s" * 32
    component = Component.recall("test", T, folder)
    (folder.path / "output.0.0").write_bytes(b"hi\n")
    monkeypatch.setattr(Path, "unlink", refused)
    component.lrm_ended(None)
    assert component.ended
    assert component.output.total == 0


async def test_a_record_that_a_program_wrote_keeps_no_agent_from_the_others(daemon: FakeDaemon, tmp_path: Path) -> None:
    records: list[tuple[str, dict[str, Any]]]
    records = [("7.1.0", {"submit": 5}), ("8.1.0", {"submit": {"size": 1}, "lrm": "1"})]
    for token, record in records:
        (tmp_path / "test" / token).mkdir(parents=True)
        Folder(tmp_path / "test" / token).write(**record)
    async with serving(MemoryLrm(), daemon, tmp_path):
        await daemon.until(lambda: bool(daemon.inventories))
        assert [each["token"] for each in daemon.inventories[0]] == ["8.1.0"]


@pytest.mark.processes
@needs(ROOT)
def test_a_folder_goes_also_where_a_program_has_made_what_is_in_it_read_only(tmp_path: Path) -> None:
    def left_by(remove: Callable[[Path], object]) -> None:
        path = Path("test", T)
        (path / "pkg" / "mod").mkdir(parents=True)
        (path / "pkg" / "mod" / "go.sum").touch()
        (path / "pkg" / "mod").chmod(0o555)
        remove(path)

    as_somebody(tmp_path, lambda: left_by(lambda path: Folder(path).remove()))
    assert list((tmp_path / "test").iterdir()) == []
    as_somebody(tmp_path, lambda: left_by(lambda _: Spool(Path()).sweep()))
    assert list((tmp_path / "test").iterdir()) == [tmp_path / "test" / T], "it was never heard of"
    (tmp_path / "test" / "heard").touch()
    as_somebody(tmp_path, lambda: Spool(Path()).sweep())
    assert [path.name for path in (tmp_path / "test").iterdir()] == ["heard"]
