"""Stages: local replicas, bundles of the submitter, names, and removal of folders."""

import asyncio
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core import spool
from koalapy.agent.core.spool import JournalFolder, sync_file_system, sync_tree
from koalapy.agent.transfers import pull, stage
from koalapy.agent.transfers.exports import Route
from koalapy.agent.transfers.pull import Pull, RsyncOutcome, TransferCut
from koalapy.agent.transfers.roots import BadBundle, remove_tree, unpack_bundle
from koalapy.protocol.messages import Stage, StageBundle
from koalapy.system.process import read_boot_id
from tests.agent.transfers.conftest import INSTANCE, FileSite, T
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles


def make_member(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    info.size = len(content) if info.isreg() else 0
    return info, content if info.isreg() else b""


def make_archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        for info, content in members:
            opened.addfile(info, io.BytesIO(content))
    return out.getvalue()


def add_bundle(daemon_files: FakeDaemonFiles, content: bytes) -> StageBundle:
    ident = hashlib.sha256(content).hexdigest()
    daemon_files.bundles[ident] = content
    return StageBundle(id=ident, size=len(content))


async def test_local_replica_is_linked(north: FileSite) -> None:
    path = north.make_replica("data")
    north.make_replica("set/part-0")
    folder = north.start_stage(
        north.make_input(path), north.make_input(north.replicas / "set", part="part-0", target="p")
    )
    status = await north.wait_for_state("done")
    assert status.size == 0
    assert (folder / "input").readlink() == path
    assert (folder / "p").readlink() == north.replicas / "set" / "part-0"


async def test_changed_local_replica_fails_stage(north: FileSite) -> None:
    file = north.make_input(north.make_replica("data", b"1234"))
    north.make_replica("data", b"12")
    north.start_stage(file)
    failed = await north.wait_for_state("failed")
    assert (failed.fault, failed.source, failed.file) == ("file", "north", "/logical")
    assert "2 bytes now and not 4" in failed.error


@pytest.mark.parametrize("target", ["", ".", "..", "a/b", "/etc/passwd", "../x", "x" * 256, "a\0b"])
async def test_input_with_invalid_target_fails_stage(north: FileSite, target: str) -> None:
    north.start_stage(north.make_input(north.make_replica("data"), target=target))
    failed = await north.wait_for_state("failed")
    assert failed.fault == "file"
    assert "not a plain file name" in failed.error


async def test_inputs_with_same_name_fail_stage(north: FileSite) -> None:
    north.start_stage(north.make_input(north.make_replica("a")), north.make_input(north.make_replica("b")))
    assert "two inputs have the name 'input'" in (await north.wait_for_state("failed")).error


@pytest.mark.parametrize("token", ["../7.1.0", "", ".", "a/b", "-x", "a b"])
async def test_invalid_stage_token_is_rejected(north: FileSite, token: str) -> None:
    assert (
        north.stages.start_stage(INSTANCE, Stage(id=1, epoch=1, token=token, files=[]))
        == f"{token!r} is not a valid stage"
    )
    assert not (north.directory / "stages").exists()


async def test_known_stage_is_reported_again(north: FileSite) -> None:
    north.start_stage()
    await north.wait_for_state("done")
    north.statuses.clear()
    north.start_stage()
    assert [status.state for status in north.statuses] == ["done"]


async def test_discarded_stage_may_start_again(north: FileSite) -> None:
    file = north.make_input(north.make_replica("data"))
    folder = north.start_stage(file)
    await north.wait_for_state("done")
    (folder / "left").write_text("by the program")
    north.stages.discard_stage(INSTANCE, T)
    north.statuses.clear()
    restarted = north.start_stage(file)
    await north.wait_for_state("done")
    await north.wait_until(lambda: not folder.exists() or folder == restarted)
    assert os.listdir(restarted) == ["input"]
    assert (north.replicas / "data").exists(), "linked replicas are not removed"
    north.stages.discard_stage(INSTANCE, T)
    north.stages.discard_stage(INSTANCE, "9.9.9")
    await north.wait_until(lambda: not os.listdir(north.directory / "stages"))


async def test_used_stage_is_removed_after_use(north: FileSite) -> None:
    folder = north.start_stage()
    await north.wait_for_state("done")
    north.stages_in_use.add(T)
    north.stages.discard_stage(INSTANCE, T)
    assert north.stages.current_statuses(INSTANCE) == []
    north.stages.release_stage(INSTANCE, T)
    assert folder.exists()
    await north.stop()
    north.start()
    north.stages.load_stages()
    assert folder.exists()
    north.stages_in_use.clear()
    north.stages.release_stage(INSTANCE, T)
    await north.wait_until(lambda: not os.listdir(north.directory / "stages"))


async def test_new_agent_knows_finished_stages(north: FileSite) -> None:
    north.start_stage(north.make_input(north.make_replica("data")))
    await north.wait_for_state("done")
    await north.stop()
    (north.replicas / "data").unlink()
    north.start()
    north.stages.load_stages()
    assert [(s.token, s.state) for s in north.stages.current_statuses(INSTANCE)] == [(T, "done")]
    assert north.stages.current_statuses("other") == []


async def test_stage_without_folder_fails(north: FileSite) -> None:
    (north.directory / "stages").write_text("in the way")
    north.start_stage()
    failed = await north.wait_for_state("failed")
    assert failed.fault == "site"
    assert "Not a directory" in failed.error


# Bundles


async def test_bundle_is_unpacked_into_stage(north: FileSite, daemon_files: FakeDaemonFiles) -> None:
    script = make_member("bin/run.sh", b"#!/bin/sh\n", mode=0o4755)
    content = make_archive(
        make_member("bin", type=tarfile.DIRTYPE), script, make_member("./-a b\nü*", b"odd"), make_member("empty", b"")
    )
    folder = north.start_stage(north.make_input(north.make_replica("data")), bundle=add_bundle(daemon_files, content))
    status = await north.wait_for_state("done")
    assert status.size == status.staged == len(content)
    assert (folder / "bin" / "run.sh").stat().st_mode & 0o7777 == 0o700
    assert (folder / "-a b\nü*").read_bytes() == b"odd"
    assert (folder / "empty").stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(folder)) == sorted(["bin", "-a b\nü*", "empty", "input"])
    assert sorted(os.listdir(north.directory / "stages" / f".{INSTANCE}-{T}")) == ["journal"]


@pytest.mark.processes
async def test_cut_bundle_is_resumed(north: FileSite, daemon_files: FakeDaemonFiles) -> None:
    content = make_archive(make_member("big", os.urandom(3_000_000)))
    daemon_files.cut_after = 2_000_000
    north.start_stage(bundle=add_bundle(daemon_files, content))
    await north.wait_for_state("done")
    assert daemon_files.sent == len(content)
    first, second = daemon_files.requests
    assert "/api/v1/agents/north/bundles/" in first
    assert first.endswith("Bearer s3cret")
    assert "bytes=2000000-" in second


async def test_stage_is_flushed_before_it_is_recorded_as_done(
    monkeypatch: pytest.MonkeyPatch, north: FileSite, daemon_files: FakeDaemonFiles
) -> None:
    events: list[object] = []
    write_entry = JournalFolder.write_entry

    def note_entry(folder: JournalFolder, **entry: object) -> None:
        events.extend(entry)
        write_entry(folder, **entry)

    monkeypatch.setattr(JournalFolder, "write_entry", note_entry)
    monkeypatch.setattr(spool, "sync_path", events.append)
    bundle = add_bundle(daemon_files, make_archive(make_member("sub/own")))
    folder = north.start_stage(north.make_input(north.make_replica("data")), bundle=bundle)
    await north.wait_for_state("done")
    flushed = {path for path in events[: events.index("done")] if isinstance(path, Path)}
    assert flushed >= {folder.parent, folder, folder / "sub", folder / "sub" / "own"}
    assert folder / "input" not in flushed, "it is a link"


def test_stage_of_many_files_is_flushed_by_its_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To flush 100,000 files one by one takes minutes."""
    flushed: list[Path] = []
    monkeypatch.setattr(spool, "sync_path", flushed.append)
    monkeypatch.setattr(spool, "sync_file_system", flushed.append)
    (tmp_path / "sub").mkdir()
    for name in ("own", "sub/a", "sub/b"):
        (tmp_path / name).touch()
    sync_tree(tmp_path, threading.Event(), max_single=3)
    assert flushed == [tmp_path]


async def test_stage_of_other_account_is_flushed_before_it_is_recorded_as_done(
    monkeypatch: pytest.MonkeyPatch, north: FileSite
) -> None:
    events: list[object] = []
    base = north.directory / "accounts"

    async def copy_to_account(user: str, tree: Path, folder: Path) -> None:
        events.append("copied")

    accounts = SimpleNamespace(account_for=lambda user: "alice", admit=lambda user: None)
    folders = SimpleNamespace(
        run_as=SimpleNamespace(accounts=accounts),
        is_mapped=True,
        stage_path=lambda user, instance, token: base / user / f"stage-{instance}-{token}",
        copy_to_account=copy_to_account,
    )
    north.stages._folders = cast(JobFolders, folders)
    monkeypatch.setattr(stage, "sync_file_system", events.append)
    north.start_stage()
    await north.wait_for_state("done")
    assert events == ["copied", base]
    sync_file_system(north.directory)


@pytest.mark.parametrize(("boot", "content"), [(read_boot_id(), b""), ("another", b"own")])
async def test_unfinished_stage_begins_again_after_restart_of_machine(
    monkeypatch: pytest.MonkeyPatch, north: FileSite, daemon_files: FakeDaemonFiles, boot: str, content: bytes
) -> None:
    bundle = add_bundle(daemon_files, make_archive(make_member("own", b"own")))
    folder = north.start_stage(north.make_input(north.make_replica("data")), bundle=bundle)
    await north.wait_for_state("done")
    await north.stop()
    JournalFolder(folder.with_name(f".{folder.name}")).write_entry(done=False)
    (folder / "own").write_bytes(b"")  # as if it had not been flushed
    monkeypatch.setattr(stage, "read_boot_id", lambda: boot)
    north.statuses.clear()
    north.start()
    north.stages.load_stages()
    await north.wait_for_state("done")
    assert (folder / "own").read_bytes() == content
    assert (folder / "input").is_symlink()


async def test_file_that_its_source_makes_a_folder_is_not_right(
    monkeypatch: pytest.MonkeyPatch, north: FileSite, south: FileSite
) -> None:
    """The checksum of the file says nothing about other entries of the folder."""
    kinds = iter(("file", "folder"))
    route = Route(host="h", port=1, module="a", user="koala", password="", kind="file", certificate="c")

    async def export_replica(payload: Mapping[str, object]) -> Mapping[str, object]:
        return route.model_dump() | {"kind": next(kinds)}

    async def run_rsync(route: Route, name: str, folder: Path, *_: object) -> RsyncOutcome:
        (folder / name).write_bytes(b"content\n")
        if route.kind == "folder":
            (folder / "other").touch()
        return RsyncOutcome(int(route.kind == "file"), "it was cut")

    south.handlers["export"] = export_replica
    monkeypatch.setattr(pull, "run_rsync", run_rsync)
    file = south.make_input(south.make_replica("data"))
    folder = north.directory / "pulled"
    folder.mkdir()
    running_pull = Pull(file, folder, lambda: None, north.means)
    with pytest.raises(TransferCut):
        await running_pull._pull_once()
    await running_pull._pull_once()
    assert not await running_pull._is_right()


async def test_missing_bundle_fails_stage(north: FileSite) -> None:
    north.start_stage(bundle=StageBundle(id="0" * 64, size=1))
    failed = await north.wait_for_state("failed")
    assert (failed.fault, failed.source) == ("source", "")
    assert failed.error == "the submitter's own files: there is no such bundle"


async def test_results_of_other_jobs_are_unpacked_beside_bundle_and_inputs(
    north: FileSite, daemon_files: FakeDaemonFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, write = set[int](), JournalFolder.write_entry

    def write_entry(folder: JournalFolder, **entry: Any) -> None:
        writers.add(threading.get_ident())
        write(folder, **entry)

    monkeypatch.setattr(JournalFolder, "write_entry", write_entry)
    daemon_files.bundles[T] = make_archive(make_member("out", b"1"), make_member("res/a", b"2"))
    folder = north.start_stage(
        north.make_input(north.make_replica("data")),
        bundle=add_bundle(daemon_files, make_archive(make_member("mine"))),
        results=["out", "res"],
    )
    status = await north.wait_for_state("done")
    assert sorted(os.listdir(folder)) == ["input", "mine", "out", "res"]
    assert (folder / "res" / "a").read_bytes() == b"2"
    assert status.staged == status.size == daemon_files.sent
    assert north.stages.input_names(INSTANCE, T) == {"input", "out", "res"}, "inputs are not results"
    assert writers == {threading.get_ident()}, "two threads that write the journal may cut off each other's entry"


async def test_results_that_do_not_exist_are_the_fault_of_the_job(north: FileSite) -> None:
    north.start_stage(results=["out"])
    failed = await north.wait_for_state("failed")
    assert (failed.fault, failed.error) == ("job", "its inputs from other jobs: there is no such bundle")


@pytest.mark.parametrize(("names", "problem"), [(["../x"], "cannot be named"), (["mine"], "also contain 'mine'")])
async def test_results_with_a_used_or_invalid_name_fail_stage(
    north: FileSite, daemon_files: FakeDaemonFiles, names: list[str], problem: str
) -> None:
    daemon_files.bundles[T] = make_archive(make_member("mine", b"1"))
    north.start_stage(bundle=add_bundle(daemon_files, make_archive(make_member("mine"))), results=names)
    failed = await north.wait_for_state("failed")
    assert failed.fault == "job"
    assert problem in failed.error


async def test_results_are_fetched_again_after_a_cut_and_by_the_next_agent(
    north: FileSite, daemon_files: FakeDaemonFiles
) -> None:
    content = make_archive(make_member("out", b"x" * 5000))
    daemon_files.away = True
    folder = north.start_stage(results=["out"])
    await north.wait_until(lambda: daemon_files.requests)
    await north.restart()
    (folder / "out").mkdir(parents=True)  # an interrupted agent had begun to unpack
    journal = next(path.parent for path in folder.parent.glob(".*/journal"))
    JournalFolder(journal).write_entry(results="unpacking")
    daemon_files.bundles[T], daemon_files.cut_after, daemon_files.away = content, 1000, False
    north.stages.load_stages()
    await north.wait_for_state("done")
    assert (folder / "out").read_bytes() == b"x" * 5000


async def test_bundle_with_wrong_checksum_fails_stage(north: FileSite, daemon_files: FakeDaemonFiles) -> None:
    bundle = add_bundle(daemon_files, make_archive(make_member("a")))
    daemon_files.bundles[bundle.id] = make_archive(make_member("b"))
    folder = north.start_stage(bundle=bundle)
    assert "wrong checksum" in (await north.wait_for_state("failed")).error
    assert len(daemon_files.requests) == 2
    assert os.listdir(folder) == []


async def test_input_named_like_bundled_file_is_rejected(north: FileSite, daemon_files: FakeDaemonFiles) -> None:
    folder = north.start_stage(
        north.make_input(north.make_replica("data")),
        bundle=add_bundle(daemon_files, make_archive(make_member("input", b"mine"))),
    )
    assert "own files also contain 'input'" in (await north.wait_for_state("failed")).error
    assert (folder / "input").read_bytes() == b"mine"


@pytest.mark.evidence("U5")
@pytest.mark.parametrize(
    "members",
    [
        [make_member("../x")],
        [make_member("/x")],
        [make_member("a/../../x")],
        [make_member("..")],
        [make_member("a", type=tarfile.SYMTYPE, linkname="/etc"), make_member("a/x")],
        [make_member("a", type=tarfile.SYMTYPE)],
        [make_member("b"), make_member("a", type=tarfile.LNKTYPE, linkname="b")],
        [make_member("a", type=tarfile.FIFOTYPE)],
        [make_member("a", type=tarfile.CHRTYPE)],
        [make_member("a"), make_member("a")],
        [make_member("a"), make_member("a/b")],
        [make_member("a", type=tarfile.DIRTYPE), make_member("a")],
        [make_member("a"), make_member("a/b/c")],
        [make_member("a"), make_member("a/b", type=tarfile.DIRTYPE)],
        [make_member("/".join(["x" * 250] * 20))],
    ],
)
def test_archive_with_unsafe_members_is_rejected(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    folder = tmp_path / "above" / "into"
    folder.mkdir(parents=True)
    path = tmp_path / "archive"
    path.write_bytes(make_archive(*members))
    with pytest.raises(BadBundle):
        unpack_bundle(path, folder, threading.Event())
    assert os.listdir(folder.parent) == ["into"]
    assert sorted(os.listdir(tmp_path)) == ["above", "archive"]
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "content", [b"", b"no archive at all" * 100, make_archive(make_member("a", b"x" * 5000))[:2000]]
)
def test_damaged_archive_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "archive").write_bytes(content)
    (tmp_path / "into").mkdir()
    with pytest.raises(BadBundle):
        unpack_bundle(tmp_path / "archive", tmp_path / "into", threading.Event())


async def test_repeated_stage_replaces_one_in_use(north: FileSite) -> None:
    folder = north.start_stage()
    await north.wait_for_state("done")
    north.stages_in_use.add(T)
    north.stages.discard_stage(INSTANCE, T)
    repeated = north.start_stage()
    assert repeated != folder
    await north.wait_until(lambda: not folder.exists())
    assert [status.token for status in north.stages.current_statuses(INSTANCE)] == [T]
    await north.wait_until(lambda: sorted(os.listdir(repeated.parent)) == sorted([repeated.name, f".{repeated.name}"]))


async def test_folder_is_removed_after_unpacking_has_ended(
    north: FileSite, daemon_files: FakeDaemonFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, events, loop = threading.Event(), [], asyncio.get_running_loop()

    async def let_others_run() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def unpacking(path: Path, into: Path, stop: threading.Event) -> None:
        entered.set()
        stop.wait(30)
        asyncio.run_coroutine_threadsafe(let_others_run(), loop).result(30)
        events.append("unpacked")

    def removing(path: Path) -> None:
        events.append("removed")
        remove_tree(path)

    monkeypatch.setattr(stage, "unpack_bundle", unpacking)
    monkeypatch.setattr(stage, "remove_tree", removing)
    north.start_stage(bundle=add_bundle(daemon_files, make_archive(make_member("a"))))
    assert await asyncio.to_thread(entered.wait, 30)
    north.stages.discard_stage(INSTANCE, T)
    await north.wait_until(lambda: len(events) == 3)
    assert events == ["unpacked", "removed", "removed"]
    await north.wait_until(lambda: not os.listdir(north.directory / "stages"))


async def test_bundle_with_names_of_any_bytes_is_unpacked(north: FileSite, daemon_files: FakeDaemonFiles) -> None:
    folder = north.start_stage(
        bundle=add_bundle(daemon_files, make_archive(make_member(os.fsdecode(b"caf\xe9"), b"x")))
    )
    await north.wait_for_state("done")
    assert os.listdir(os.fsencode(folder)) == [b"caf\xe9"]


@pytest.mark.parametrize("wrong", [{"path": "/"}, {"path": "/data/.."}, {"path": ""}, {"checksum": ""}])
async def test_replica_without_name_or_checksum_fails_stage(north: FileSite, wrong: dict[str, str]) -> None:
    file = north.make_input(north.make_replica("data"))
    north.start_stage(replace(file, source="south", **wrong))
    assert "the catalogue has no such replica" in (await north.wait_for_state("failed")).error


@pytest.mark.processes
def test_deeply_nested_stage_is_removed(deep: Path) -> None:
    remove_tree(deep)
    assert os.listdir(deep.parent) == []
