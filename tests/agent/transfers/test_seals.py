"""Replicas that programs read where they lie: verified whenever anything about them has changed, and read-only."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.agent.transfers import replicas, seals
from koalapy.agent.transfers.digest import Content, measure_content
from koalapy.agent.transfers.seals import Seals
from koalapy.protocol.messages import StageFile
from tests.agent.transfers.conftest import INSTANCE, FileSite, SetClock, T, content_of, needs_rsync

U, V = "8.1.0", "9.1.0"
LONG_AGO = 1_700_000_000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that is read for its checksum from now on."""
    found: list[str] = []

    def measured(descriptor: int, *, checksum: bool, **more: Callable[[], bool]) -> Content:
        if checksum:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return measure_content(descriptor, checksum=checksum, **more)

    monkeypatch.setattr(replicas, "measure_content", measured)
    return found


@pytest.fixture
async def settled(north: FileSite) -> None:
    """What was changed just now counts as changed long ago: the kernel's time of change cannot be set."""
    await north.restart(clock=SetClock(time.time() + 1e6))


def old(path: Path) -> Path:
    """As if it had been there for long, to all that can be set."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (LONG_AGO, LONG_AGO))
    return path


def in_place(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"CONTENT\n")


def in_place_and_made_look_old(path: Path) -> None:
    in_place(path)
    os.utime(path, (LONG_AGO + 1, LONG_AGO + 1))


def in_place_with_its_times_kept(path: Path) -> None:
    """As ``rsync --inplace --times`` and ``touch -r`` do."""
    before = path.stat()
    in_place(path)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock ticks some hundred times in a second
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_of_its_age(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"CONTENT\n")
    os.utime(other, (LONG_AGO, LONG_AGO))
    other.rename(path)


CHANGES = [in_place, in_place_and_made_look_old, in_place_with_its_times_kept, by_another_of_its_age]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [None, "a"])
async def test_changed_replica_is_refused(north: FileSite, change: Callable[[Path], None], part: str | None) -> None:
    path = old(north.make("set/a").parent) if part else old(north.make("data"))
    wanted = north.input(path, part=part)
    north.stage(wanted)
    await north.wait_for_state("done")
    change(path / part if part else path)
    north.stage(wanted, token=U)
    failed = await north.wait_for_state("failed", U)
    assert (failed.fault, failed.source, failed.file) == ("file", "north", "/logical")
    assert "it was changed" in failed.error


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES)
async def test_folder_with_changed_file_is_refused(north: FileSite, change: Callable[[Path], None]) -> None:
    north.make("set/below/a")
    path = old(north.replicas / "set")
    wanted = north.input(path)
    north.stage(wanted)
    await north.wait_for_state("done")
    change(path / "below" / "a")
    north.stage(wanted, token=U)
    assert "it was changed" in (await north.wait_for_state("failed", U)).error


@pytest.mark.usefixtures("settled")
async def test_unchanged_replica_is_read_once(north: FileSite, read: list[str]) -> None:
    path = old(north.make("data"))
    wanted = north.input(path)
    for token in (T, U):
        north.stage(wanted, token=token)
        await north.wait_for_state("done", token)
    await north.stop()
    north.start()
    north.stage(wanted, token=V)
    await north.wait_for_state("done", V)
    assert read == [str(path)]


@pytest.mark.usefixtures("settled")
async def test_replica_read_for_catalogue_is_not_read_again(north: FileSite, read: list[str]) -> None:
    path = old(north.make("data"))
    size, checksum = content_of(path)
    north.stage(
        StageFile(name="/logical", source="north", path=str(path), target="input", size=size, checksum=checksum)
    )
    await north.wait_for_state("done")
    found = await north.stages._means.replicas.stat_replica({"path": str(path)})
    north.stage(north.input(path), token=U)
    await north.wait_for_state("done", U)
    assert found["checksum"] == checksum
    assert read == [str(path)] * 2, "once for the stage, once because somebody asked"


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", ["data", "set/below/data"])
async def test_that_we_make_it_read_only_is_no_change(north: FileSite, read: list[str], name: str) -> None:
    north.make(name).chmod(0o664)
    path = north.replicas / name.split("/")[0]
    await north.stages._means.replicas.stat_replica({"path": str(path)})
    for token in (T, U):
        north.stage(north.input(path), token=token)
        await north.wait_for_state("done", token)
        assert writable(path) == []
    assert read == [str(path)], "for the catalogue"


async def test_that_we_make_it_read_only_is_not_what_was_changed_just_now(north: FileSite, read: list[str]) -> None:
    path = north.make("data")
    path.chmod(0o664)
    await north.restart(clock=SetClock(path.stat().st_ctime + seals.SETTLED + 1e-5))
    for token in (T, U):
        north.stage(north.input(path), token=token)
        await north.wait_for_state("done", token)
    assert read == [str(path)]


@pytest.mark.usefixtures("settled")
async def test_replica_with_changed_names_or_rights_is_read_again(north: FileSite, read: list[str]) -> None:
    path = north.make("data")
    wanted = north.input(path)
    for token, elsewhere in ((T, False), (U, True), (V, True), ("10.1.0", False), ("11.1.0", False)):
        link = north.directory / "elsewhere"
        if elsewhere and not link.exists():
            link.hardlink_to(path)
        elif not elsewhere:
            link.unlink(missing_ok=True)
        north.stage(wanted, token=token)
        await north.wait_for_state("done", token)
    assert read == [str(path)] * 3, "first, with the link, and without it"


async def test_recently_changed_replica_is_read_again(north: FileSite, read: list[str]) -> None:
    """A further change in the same moment would show in nothing but its content."""
    path = north.make("data")
    for token in (T, U):
        north.stage(north.input(path), token=token)
        await north.wait_for_state("done", token)
    assert read == [str(path)] * 2


def writable(path: Path) -> list[str]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return [str(each) for each in files if each.stat().st_mode & 0o222]


@pytest.mark.parametrize("name", ["data", "set/below/data"])
async def test_programs_find_replicas_read_only(north: FileSite, name: str) -> None:
    north.make(name).chmod(0o664)
    path = north.replicas / name.split("/")[0]
    folder = north.stage(north.input(path))
    await north.wait_for_state("done")
    assert (folder / "input").readlink() == path
    assert writable(path) == []
    assert path.stat().st_mode & 0o400


def of_another_account(path: Path) -> None:
    try:
        os.chown(path, 65534, -1)
    except OSError:
        pytest.skip("only root can give files away")


def with_a_name_elsewhere(path: Path) -> None:
    (path.parents[1] / "elsewhere").hardlink_to(path)


@pytest.mark.parametrize("name", ["data", "set/data"])
@pytest.mark.parametrize("others", [of_another_account, with_a_name_elsewhere])
async def test_rights_of_shared_files_stay(north: FileSite, name: str, others: Callable[[Path], None]) -> None:
    """Root's agent took the right to write from other accounts' files, and from files that had a name elsewhere; what
    is done to them meanwhile shows all the same."""
    file = north.make(name)
    file.chmod(0o664)
    others(file)
    path = north.replicas / name.split("/")[0]
    wanted = north.input(old(path))
    north.stage(wanted)
    await north.wait_for_state("done")
    assert file.stat().st_mode & 0o777 == 0o664
    file.write_bytes(b"CONTENT\n")
    north.stage(wanted, token=U)
    assert "it was changed" in (await north.wait_for_state("failed", U)).error


@pytest.mark.processes
@needs_rsync
@pytest.mark.parametrize("name", ["data", "set/below/data"])
async def test_brought_input_is_read_only_and_removable(north: FileSite, south: FileSite, name: str) -> None:
    south.make(name).chmod(0o664)
    path = south.replicas / name.split("/")[0]
    folder = north.stage(south.input(path))
    await north.wait_for_state("done")
    assert writable(folder / "input") == []
    assert writable(path) != [], "that of another site is not ours"
    north.stages.discard_stage(INSTANCE, T)
    await north.wait_until(lambda: not folder.exists())


def test_invalid_seals_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "seals.json"
    for text in ("", "[]", '{"a": 1}', '{"a": [1]}', "\0"):
        path.write_text(text)
        assert not Seals(path).is_unchanged(Path("a"), "1", "2")


def test_seals_are_limited(tmp_path: Path) -> None:
    book = Seals(tmp_path / "seals.json", max_retained=3)
    for number in range(5):
        book.record_seal(Path(f"/{number}"), "seal", "checksum", LONG_AGO)
    again = Seals(tmp_path / "seals.json")
    assert [again.is_unchanged(Path(f"/{number}"), "seal", "checksum") for number in range(5)] == [False] * 2 + [
        True
    ] * 3
