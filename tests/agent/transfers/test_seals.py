"""Replicas that programs read in place: verified after every change, and made read-only."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.agent.transfers import replicas
from koalapy.agent.transfers.replicas import Seals
from koalapy.agent.transfers.roots import Content, measure_content
from koalapy.model.replica import StageFile
from tests.agent.transfers.conftest import INSTANCE, FileSite, SetClock, T, measure_path, needs_rsync
from tests.needs import ROOT, needs

U, V = "8.1.0", "9.1.0"
LONG_AGO = 1_700_000_000


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the path of each file read for its checksum is added."""
    paths: list[str] = []

    def measured(descriptor: int, *, checksum: bool, **options: Callable[[], bool]) -> Content:
        if checksum:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return measure_content(descriptor, checksum=checksum, **options)

    monkeypatch.setattr(replicas, "measure_content", measured)
    return paths


@pytest.fixture
async def settled_clock(north: FileSite) -> None:
    """Advance the clock, so that recent changes count as old: the kernel's change time cannot be set."""
    await north.restart(clock=SetClock(time.time() + 1e6))


def make_old(path: Path) -> Path:
    """Set old times on a file or folder."""
    for entry in (path, *path.rglob("*")):
        os.utime(entry, (LONG_AGO, LONG_AGO))
    return path


def change_in_place(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"CONTENT\n")


def change_and_set_old_times(path: Path) -> None:
    change_in_place(path)
    os.utime(path, (LONG_AGO + 1, LONG_AGO + 1))


def change_and_keep_times(path: Path) -> None:
    """Change a file as ``rsync --inplace --times`` and ``touch -r`` do."""
    times = path.stat()
    change_in_place(path)
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # the kernel's clock ticks some hundred times in a second
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_by_file_of_same_age(path: Path) -> None:
    replacement = path.with_name("other")
    replacement.write_bytes(b"CONTENT\n")
    os.utime(replacement, (LONG_AGO, LONG_AGO))
    replacement.rename(path)


CHANGES = [change_in_place, change_and_set_old_times, change_and_keep_times, replace_by_file_of_same_age]


@pytest.mark.usefixtures("settled_clock")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "part"), [("data", None), ("set/a", "a"), ("set/below/a", None)])
async def test_changed_replica_is_rejected(
    north: FileSite, change: Callable[[Path], None], name: str, part: str | None
) -> None:
    changed_file = north.make_replica(name)
    file = north.make_input(make_old(north.replicas / name.split("/")[0]), part=part)
    north.start_stage(file)
    await north.wait_for_state("done")
    change(changed_file)
    north.start_stage(file, token=U)
    failed = await north.wait_for_state("failed", U)
    assert (failed.fault, failed.source, failed.file) == ("file", "north", "/logical")
    assert "it was changed" in failed.error


@pytest.mark.usefixtures("settled_clock")
async def test_unchanged_replica_is_read_once(north: FileSite, read_files: list[str]) -> None:
    path = make_old(north.make_replica("data"))
    file = north.make_input(path)
    for token in (T, U):
        north.start_stage(file, token=token)
        await north.wait_for_state("done", token)
    await north.stop()
    north.start()
    north.start_stage(file, token=V)
    await north.wait_for_state("done", V)
    assert read_files == [str(path)]


@pytest.mark.usefixtures("settled_clock")
async def test_replica_read_for_catalogue_is_not_read_again(north: FileSite, read_files: list[str]) -> None:
    path = make_old(north.make_replica("data"))
    size, checksum = measure_path(path)
    north.start_stage(
        StageFile(name="/logical", source="north", path=str(path), target="input", size=size, checksum=checksum)
    )
    await north.wait_for_state("done")
    answer = await north.stages._means.replicas.stat_replica({"path": str(path)})
    north.start_stage(north.make_input(path), token=U)
    await north.wait_for_state("done", U)
    assert answer["checksum"] == checksum
    assert read_files == [str(path)] * 2, "once for the stage, once for the catalogue"


@pytest.mark.usefixtures("settled_clock")
@pytest.mark.parametrize("name", ["data", "set/below/data"])
async def test_making_replica_read_only_is_no_change(north: FileSite, read_files: list[str], name: str) -> None:
    north.make_replica(name).chmod(0o664)
    path = north.replicas / name.split("/")[0]
    await north.stages._means.replicas.stat_replica({"path": str(path)})
    for token in (T, U):
        north.start_stage(north.make_input(path), token=token)
        await north.wait_for_state("done", token)
        assert list_writable(path) == []
    assert read_files == [str(path)], "only for the catalogue"


@pytest.mark.usefixtures("settled_clock")
async def test_replica_with_changed_links_is_read_again(north: FileSite, read_files: list[str]) -> None:
    path = north.make_replica("data")
    file = north.make_input(path)
    for token, elsewhere in ((T, False), (U, True), (V, True), ("10.1.0", False), ("11.1.0", False)):
        link = north.directory / "elsewhere"
        if elsewhere and not link.exists():
            link.hardlink_to(path)
        elif not elsewhere:
            link.unlink(missing_ok=True)
        north.start_stage(file, token=token)
        await north.wait_for_state("done", token)
    assert read_files == [str(path)] * 3, "first, with the link, and without it"


async def test_recently_changed_replica_is_read_again(north: FileSite, read_files: list[str]) -> None:
    """A further change within the same clock tick would change nothing but the content."""
    path = north.make_replica("data")
    for token in (T, U):
        north.start_stage(north.make_input(path), token=token)
        await north.wait_for_state("done", token)
    assert read_files == [str(path)] * 2


def list_writable(path: Path) -> list[str]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [str(file) for file in files if file.stat().st_mode & 0o222]


def give_to_other_account(path: Path) -> None:
    os.chown(path, 65534, -1)


def link_elsewhere(path: Path) -> None:
    (path.parents[1] / "elsewhere").hardlink_to(path)


@pytest.mark.parametrize("name", ["data", "set/data"])
@pytest.mark.parametrize("share_file", [pytest.param(give_to_other_account, marks=needs(ROOT)), link_elsewhere])
async def test_rights_of_shared_files_are_kept(north: FileSite, name: str, share_file: Callable[[Path], None]) -> None:
    """Files of other accounts and files with links elsewhere stay writable, and their changes are noticed."""
    file = north.make_replica(name)
    file.chmod(0o664)
    share_file(file)
    path = north.replicas / name.split("/")[0]
    staged_input = north.make_input(make_old(path))
    north.start_stage(staged_input)
    await north.wait_for_state("done")
    assert file.stat().st_mode & 0o777 == 0o664
    file.write_bytes(b"CONTENT\n")
    north.start_stage(staged_input, token=U)
    assert "it was changed" in (await north.wait_for_state("failed", U)).error


@pytest.mark.processes
@needs_rsync
@pytest.mark.parametrize("name", ["data", "set/below/data"])
async def test_brought_input_is_read_only_and_removable(north: FileSite, south: FileSite, name: str) -> None:
    south.make_replica(name).chmod(0o664)
    path = south.replicas / name.split("/")[0]
    folder = north.start_stage(south.make_input(path))
    await north.wait_for_state("done")
    assert list_writable(folder / "input") == []
    assert list_writable(path) != [], "replicas of other sites are not changed"
    north.stages.discard_stage(INSTANCE, T)
    await north.wait_until(lambda: not folder.exists())


def test_invalid_seals_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    for text in ("", "[]", '{"a": 1}', '{"a": [1]}', "\0"):
        path.write_text(text)
        assert not Seals(path).is_unchanged(Path("a"), "1", "2")


def test_seals_are_limited(tmp_path: Path) -> None:
    book = Seals(tmp_path / "replicas.json", max_retained=3)
    for number in range(5):
        book.record_seal(Path(f"/{number}"), "seal", "checksum", LONG_AGO)
    again = Seals(tmp_path / "replicas.json")
    assert [again.is_unchanged(Path(f"/{number}"), "seal", "checksum") for number in range(5)] == [False] * 2 + [
        True
    ] * 3
