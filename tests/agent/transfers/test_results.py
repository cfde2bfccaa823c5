"""Patterns of results, and their delivery to the daemon."""

import asyncio
import errno
import io
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import MAX_CONCURRENT, JobFolders
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.transfers import stages
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.stages import Collector
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.runner.result_archive import FoldersTooDeep, Patterns, open_regular, write_archive
from tests.agent.conftest import VIRTUAL_DEADLINE
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.txt", "a.txt", True),
        ("*.txt", "sub/a.txt", False),
        ("*", ".hidden", True),
        ("**/*.txt", "a.txt", True),
        ("**/*.txt", "a/b/c.txt", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b/a", False),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/x/y/c", True),
        ("out", "out", True),
        ("out", "out/a/b", True),
        ("out/", "out/a", True),
        ("o?t", "out", True),
        ("[ab]", "a", True),
        ("[ab]", "[ab]", False),
        ("[[]ab]", "[ab]", True),
        ("./a", "a", True),
        ("", "a", False),
        ("/", "a", False),
        ("../a", "a", False),
        ("**", "a/b", True),
        ("a\nb*", "a\nbc", True),
        ("a*", "a\nb", True),
        ("A", "a", False),
        ("*/c", "a/b/c", False),
    ],
)
def test_patterns_match_expected_paths(pattern: str, path: str, matches: bool) -> None:
    assert Patterns([pattern]).matches(path.split("/")) is matches


def archive_folder(folder: Path, *patterns: str, without: tuple[str, ...] = ()) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|") as opened:
        write_archive(opened, folder, Patterns(patterns), without)
    out.seek(0)
    with tarfile.open(fileobj=out) as opened:
        return {member.name: member for member in opened}


@pytest.mark.evidence("J10")
def test_results_are_regular_files_below_folder(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (folder / "sub" / "a b\nü").write_text("1")
    (folder / "run").write_text("2")
    (folder / "run").chmod(0o750)
    (folder / "input").write_text("3")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "way").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe")
    members = archive_folder(folder, "**", without=("input",))
    assert sorted(members) == ["run", "sub/a b\nü"]
    assert (members["run"].mode, members["sub/a b\nü"].mode) == (0o755, 0o644)
    assert archive_folder(folder, "../elsewhere/*", "way/*", "/etc/*") == {}


def test_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the results of other folders would count as all. Those that match no pattern do not matter."""
    for name in ("good", "lost", "gone", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result").write_text("1")
    (tmp_path / "link").symlink_to("lost")
    open_file = os.open
    numbers = {"lost": errno.EIO, "link": errno.EIO, "gone": errno.ENOENT, "closed": errno.EACCES}

    def open_on_failing_disk(path: str, *arguments: Any, **options: Any) -> int:
        if path in numbers:
            raise OSError(numbers[path], os.strerror(numbers[path]), path)
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_on_failing_disk)
    assert list(archive_folder(tmp_path, "good", "link", "gone", "closed")) == ["good/result"]
    with pytest.raises(OSError, match=r"Input/output error: 'lost'"):
        archive_folder(tmp_path, "**")


def test_put_results_raises_errors_of_daemon() -> None:
    fake, stop = FakeDaemonFiles(), threading.Event()
    daemon_files = DaemonFiles(fake.url, "nörth/1", "s3cret")
    try:
        daemon_files.put_results("7.1.0", lambda archive: archive.addfile(tarfile.TarInfo("empty")), stop)
        assert list(fake.results) == ["7.1.0"]
        assert fake.requests == ["PUT /api/v1/agents/n%C3%B6rth%2F1/results/7.1.0 Bearer s3cret"]
        fake.refuse = (413, "more than 1 GB")
        with pytest.raises(SiteRejected, match="more than 1 GB"):
            daemon_files.put_results("7.1.0", lambda archive: None, stop)
        fake.refuse = (503, "later")
        with pytest.raises(SiteUnavailable, match="later"):
            daemon_files.put_results("7.1.0", lambda archive: None, stop)
    finally:
        fake.close()
    with pytest.raises(SiteUnavailable):
        daemon_files.put_results("7.1.0", lambda archive: None, stop)
    with pytest.raises(SiteUnavailable):
        daemon_files.fetch_archive("bundles", "0" * 64, Path(os.devnull), threading.Event(), lambda there: None)


@pytest.mark.parametrize(
    ("detail", "error"), [("", SiteUnavailable), ("there is no job 7", SiteRejected)], ids=["proxy", "daemon"]
)
def test_not_found_of_a_proxy_is_tried_again(tmp_path: Path, detail: str, error: type[Exception]) -> None:
    """A proxy may answer 404 by itself while the daemon restarts."""
    fake = FakeDaemonFiles()
    fake.missing = detail
    try:
        with pytest.raises(error, match=detail or "404 Not Found"):
            DaemonFiles(fake.url, "north", "s3cret").fetch_archive(
                "inputs", "7.1.0", tmp_path / "results", threading.Event(), lambda size: None
            )
    finally:
        fake.close()


def test_stopping_agent_sends_no_results() -> None:
    fake, ends = FakeDaemonFiles(), threading.Event()
    ends.set()
    try:
        with pytest.raises(SiteUnavailable, match="the agent is stopping"):
            DaemonFiles(fake.url, "north", "s3cret").put_results("7.1.0", lambda archive: None, ends)
        assert fake.results == {}
    finally:
        fake.close()


def test_removed_file_spares_other_results(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with open_regular("gone", descriptor) as file:
            assert file is None
    finally:
        os.close(descriptor)


class Collecting:
    """A collector with one ended component, for a daemon that may be unreachable."""

    def __init__(self, path: Path, daemon_files: DaemonFiles) -> None:
        (path / "stage").mkdir()
        (path / "stage" / "a").write_text("1")
        (path / "spool").mkdir()
        self.component = Component("test", "7.1.0", JournalFolder(path / "spool"), stage="7.1.9", collect=("*",))
        self.component.plan, self.component.ended = {}, True
        self.stage = path / "stage"
        self.reached = False
        self.looks = 0
        self.looked = asyncio.Event()
        self.over = asyncio.Event()
        self.collector = Collector(
            daemon_files, self, lambda _: self.over.set(), self.in_reach, JobFolders.for_own_account()
        )  # type: ignore[arg-type]

    def in_reach(self, instance: str) -> bool:
        self.looks += 1
        if self.looks > 2:
            self.looked.set()
        return self.reached

    def folder_path(self, instance: str, token: str) -> Path:
        return self.stage

    def input_names(self, instance: str, token: str) -> frozenset[str]:
        return frozenset()

    async def collect(self) -> Component:
        self.collector.collect_results(self.component)
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            await self.over.wait()
        assert self.component.collected
        return self.component


async def test_results_wait_for_reachable_daemon(tmp_path: Path) -> None:
    fake = FakeDaemonFiles()
    collecting = Collecting(tmp_path, DaemonFiles(fake.url, "north", "s3cret"))
    task = asyncio.create_task(collecting.collect())
    try:
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            await collecting.looked.wait()
        assert fake.requests == []
        collecting.reached = True
        assert (await task).error == ""
        assert list(fake.results) == ["7.1.9"]
    finally:
        fake.close()


async def test_results_of_cancelled_collection_are_not_sent(tmp_path: Path) -> None:
    collecting = Collecting(tmp_path, DaemonFiles("http://127.0.0.1:1", "north", "s3cret"))
    collecting.collector.collect_results(collecting.component)
    async with asyncio.timeout(VIRTUAL_DEADLINE):
        await collecting.looked.wait()
    task = collecting.collector._tasks[collecting.component.name]
    collecting.collector.cancel_collection(collecting.component)
    await asyncio.wait((task,), timeout=VIRTUAL_DEADLINE)
    assert task.cancelled()
    assert collecting.collector._tasks == {}
    assert not collecting.over.is_set()


async def test_results_for_unreachable_daemon_time_out(tmp_path: Path) -> None:
    collecting = Collecting(tmp_path, DaemonFiles("http://127.0.0.1:1", "north", "s3cret"))
    collecting.reached = True
    assert "the daemon cannot be reached" in (await collecting.collect()).error


async def test_error_of_collector_ends_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(stages, "write_archive", broken)
    fake = FakeDaemonFiles()
    collecting = Collecting(tmp_path, DaemonFiles(fake.url, "north", "s3cret"))
    collecting.reached = True
    try:
        await collecting.collect()
    finally:
        fake.close()


async def test_unreadable_result_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "a")

    monkeypatch.setattr(stages, "write_archive", refusing)
    fake = FakeDaemonFiles()
    collecting = Collecting(tmp_path, DaemonFiles(fake.url, "north", "s3cret"))
    collecting.reached = True
    try:
        assert (await collecting.collect()).error == "its results could not be collected: a: Permission denied"
    finally:
        fake.close()


async def test_hanging_collection_delays_no_other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection runs as an account that may stop it; its thread then hangs, even after a cancellation."""
    proceed, sent = threading.Event(), []

    def send(_: Collector, component: Component, *__: object) -> None:
        sent.append(component.user)
        assert component.user != "mallory" or proceed.wait(60)

    monkeypatch.setattr(Collector, "_send", send)
    collecting = Collecting(tmp_path, DaemonFiles("http://127.0.0.1:1", "north", "s3cret"))
    collecting.reached = True
    stubborn = [
        Component(
            "test", f"{job}.1.0", JournalFolder(tmp_path / "spool"), stage=f"{job}.1.9", collect=("*",), user="mallory"
        )
        for job in range(100, 100 + 3 * stages.MAX_SENDERS)
    ]
    try:
        for component in stubborn:
            component.plan, component.ended = {}, True
            collecting.collector.collect_results(component)
        await asyncio.sleep(0)
        for component in stubborn[: stages.MAX_SENDERS]:
            collecting.collector.cancel_collection(component)
        collecting.component.user = "alice"
        await collecting.collect()
        assert sent.count("mallory") <= MAX_CONCURRENT
    finally:
        proceed.set()
        await collecting.collector.close()


@pytest.mark.processes
def test_folders_nested_too_deep_are_rejected(deep: Path) -> None:
    with pytest.raises(FoldersTooDeep, match="nested more than 100 deep"):
        archive_folder(deep, "**")
