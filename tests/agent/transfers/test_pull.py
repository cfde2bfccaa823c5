"""Pulling files from another site: unusual names, interruptions, changed replicas and rejected pullers."""

import asyncio
import os
import random
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from koalapy.agent.runners.uplink import ASKER, RECONNECT_ALLOWANCE
from koalapy.agent.transfers import exports, pull
from koalapy.agent.transfers.exports import Route, tunnel_environment
from koalapy.agent.transfers.pull import MAX_TRIES, RsyncOutcome
from koalapy.agent.transfers.roots import Roots
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.system.event_loop import TLS_FIRST_BYTE
from tests.agent.transfers.conftest import (
    INSTANCE,
    FileSite,
    Gate,
    Logins,
    SetClock,
    T,
    Wire,
    find_rsyncs,
    measure_path,
    needs_rsync,
)
from tests.deep_folders import deep_folder

pytestmark = [needs_rsync, pytest.mark.processes]
UNUSUAL_NAMES = ["a b", " lead", "trail ", "[ab]*?", "ünï €", "new\nline", "tab\t", "+ x", "- y", "'q\"", "\x01ctl"]
UNUSUAL_NAMES += ["plain", "-rf", "--delete", "#x", ";y", "%HOME%", "\\back\\slash"]
UNUSUAL_NAMES += ["!", "a:b", "$(x)", "~", "*", "...", ".hidden"]
GREETING = b"@RSYNCD: 31.0\n"
BIG = random.Random(1).randbytes(6_000_000)


async def test_pulled_file_arrives_and_is_reported(north: FileSite, south: FileSite) -> None:
    path = south.make_replica("data/set.bin", BIG)
    folder = north.start_stage(south.make_input(path, target="set.bin"))
    status = await north.wait_for_state("done")
    assert (folder / "set.bin").read_bytes() == BIG
    assert (status.size, status.staged, status.error) == (len(BIG), len(BIG), "")
    assert [(m.source, m.size, m.seconds > 0) for m in status.moved] == [("south", len(BIG), True)]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(folder)) == ["set.bin"]


async def test_speed_excludes_time_to_set_up_a_transfer(north: FileSite, south: FileSite, gate: Gate) -> None:
    """The gate passes half of the bytes and holds back the others until it is opened."""
    north.start_stage(south.make_input(south.make_replica("set", BIG)))
    await gate.reached.wait()
    run = north.stages._stages[INSTANCE, T]
    await north.wait_until(lambda: run._pull is not None and run._pull._first is not None)
    gate.open.set()
    (moved,) = (await north.wait_for_state("done")).moved
    assert moved.size == len(BIG)
    assert 0 < moved.flowed < len(BIG)
    assert 0 < moved.flowing < moved.seconds


async def test_speed_excludes_interruption(north: FileSite, south: FileSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync notices the interruption after half a minute."""
    clock = SetClock()
    await north.restart(clock=clock)
    tries = iter(
        [
            ([(1.0, 2_000_000), (1.5, 4_000_000)], RsyncOutcome(30, "rsync error: timeout in data send/receive")),
            ([(40.0, 5_000_000)], RsyncOutcome(0, "")),
        ]
    )

    async def run_recorded(route: Route, name: str, folder: Path, tick: Callable[[], bool], _: str) -> RsyncOutcome:
        came, outcome = next(tries)
        for seconds, size in came:
            clock.steady = seconds
            (folder / name).write_bytes(BIG[:size])
            tick()
            await asyncio.wait((run._pull._looking,))  # type: ignore[union-attr, type-var]
        if outcome.code:
            clock.steady += 30.0
        else:
            clock.steady += 0.25
            (folder / name).write_bytes(BIG)  # noticed by the last measurement only
        return outcome

    monkeypatch.setattr(pull, "run_rsync", run_recorded)
    north.start_stage(south.make_input(south.make_replica("set", BIG)))
    run = north.stages._stages[INSTANCE, T]
    (moved,) = (await north.wait_for_state("done")).moved
    assert (moved.size, moved.flowed) == (len(BIG), 3_000_000)
    assert moved.flowing == 0.5 + 0.25


@pytest.mark.parametrize("daemon_came", [True, False])
async def test_source_has_time_to_reconnect(
    north: FileSite, south: FileSite, wire: Wire, daemon_came: bool, gate: Gate
) -> None:
    """A restart of the daemon breaks all connections, and agents reconnect one by one; transfers must resume."""
    north.start_stage(south.make_input(south.make_replica("set", BIG)))
    await gate.reached.wait()

    def arriving_files() -> list[Path]:
        return [path for path in (north.directory / "stages").rglob("set") if path.is_file() and path.stat().st_size]

    await north.wait_until(lambda: bool(arriving_files()))  # passed bytes may not be on the disk yet
    (arriving,) = arriving_files()
    inode = arriving.stat().st_ino
    await north.stop()
    await south.stop()
    gate.break_connections()
    wire.online_since = time.monotonic() if daemon_came else time.monotonic() - 2 * RECONNECT_ALLOWANCE
    wire.questions.clear()
    north.start()
    north.stages.load_stages()
    if not daemon_came:
        assert "gave up" in (await north.wait_for_state("failed")).error
        return
    await north.wait_until(lambda: wire.questions.count("export") > 3 * (MAX_TRIES + 1))
    south.start()
    await north.wait_for_state("done")
    file = north.stages.folder_path(INSTANCE, T) / "input"
    assert (file.stat().st_ino, file.read_bytes()) == (inode, BIG)


@pytest.mark.parametrize("name", UNUSUAL_NAMES)
async def test_unusual_file_names_are_pulled(north: FileSite, south: FileSite, name: str) -> None:
    path = south.make_replica(f"odd/{name}", name.encode())
    south.make_replica("odd/other")
    folder = north.start_stage(south.make_input(path, target=name))
    await north.wait_for_state("done")
    assert os.listdir(folder) == [name]
    assert (folder / name).read_bytes() == name.encode()


async def test_pulled_folder_arrives_complete(north: FileSite, south: FileSite) -> None:
    for name in UNUSUAL_NAMES:
        south.make_replica(f"set/{name}/{name}", name.encode())
    script = south.make_replica("set/run.sh", b"#!/bin/sh\n")
    script.chmod(0o555)
    (south.replicas / "set/empty").mkdir()
    folder = north.start_stage(south.make_input(south.replicas / "set", target="all"))
    await north.wait_for_state("done")
    assert sorted(os.listdir(folder / "all")) == sorted([*UNUSUAL_NAMES, "run.sh", "empty"])
    assert all((folder / "all" / n / n).read_bytes() == n.encode() for n in UNUSUAL_NAMES)
    assert (folder / "all/run.sh").stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("name", ["-part 0", "[x]", "ünï"])
async def test_pulled_entry_arrives_without_others(north: FileSite, south: FileSite, name: str) -> None:
    south.make_replica(f"set/{name}", BIG)
    south.make_replica("set/1/a", b"a")
    south.make_replica("set/1/b", b"b")
    folder_path = south.replicas / "set"
    folder = north.start_stage(
        south.make_input(folder_path, part=name, target="x"), south.make_input(folder_path, part="1", target="y")
    )
    status = await north.wait_for_state("done")
    assert (folder / "x").read_bytes() == BIG
    assert sorted(os.listdir(folder / "y")) == ["a", "b"]
    assert status.size == len(BIG) + 2


async def test_empty_files_and_folders_are_pulled(north: FileSite, south: FileSite) -> None:
    (south.replicas / "nothing").mkdir()
    folder = north.start_stage(
        south.make_input(south.make_replica("void", b""), target="a"), south.make_input(south.replicas / "nothing")
    )
    await north.wait_for_state("done")
    assert (folder / "a").read_bytes() == b""
    assert os.listdir(folder / "input") == []


# Interruptions


async def test_progress_is_reported_and_never_decreases(north: FileSite, south: FileSite, gate: Gate) -> None:
    north.start_stage(south.make_input(south.make_replica("big", BIG)))
    await north.wait_until(lambda: any(0 < s.staged < s.size for s in north.statuses))
    gate.open.set()
    await north.wait_for_state("done")
    staged = [s.staged for s in north.statuses]
    assert staged == sorted(staged)


# Replicas that differ from the catalogue


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, "data is not there"),
        (lambda path: path.write_bytes(b"123"), "has 3 bytes now and not 8"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "is a symbolic link"),
    ],
    ids=["missing", "truncated", "link"],
)
async def test_differing_replica_fails_stage(
    north: FileSite, south: FileSite, change: Callable[[Path], object], reason: str
) -> None:
    path = south.make_replica("data")
    file = south.make_input(path)
    change(path)
    await check_failure(north, file, reason)


@pytest.mark.parametrize("path", ["data", "set"])
async def test_changed_replica_of_same_size_fails_stage(north: FileSite, south: FileSite, path: str) -> None:
    data_path = south.make_replica("set/data" if path == "set" else path, b"123456")
    file = south.make_input(south.replicas / path)
    data_path.write_bytes(b"654321")
    await check_failure(north, file, "its checksum differs from the catalogue's")
    assert not list(north.directory.glob("stages/test-*/*")), "a wrong file must not reach the stage of a program"


async def check_failure(north: FileSite, file: object, reason: str) -> None:
    north.start_stage(file)  # type: ignore[arg-type]
    failed = await north.wait_for_state("failed")
    assert (failed.fault, failed.source, failed.file) == ("file", "south", "/logical")
    assert reason in failed.error


async def test_wrong_bytes_of_correct_replica_are_fault_of_site(north: FileSite, south: FileSite) -> None:
    file = south.make_input(south.make_replica("data"))
    export_replica = south.exports.export_replica

    async def export_other(payload: dict[str, object]) -> dict[str, object]:
        south.make_replica("other/data", b"CONTENT\n")
        return await export_replica({**payload, "path": str(south.replicas / "other/data")})

    south.handlers["export"] = export_other  # type: ignore[arg-type]
    north.start_stage(file)
    failed = await north.wait_for_state("failed")
    assert failed.fault == "site"
    assert "though its own is right" in failed.error


@pytest.mark.parametrize("path", ["data", "set"])
async def test_surplus_bytes_are_not_awaited(north: FileSite, south: FileSite, gate: Gate, path: str) -> None:
    data_path = south.make_replica("set/data" if path == "set" else path)
    file = south.make_input(south.replicas / path)
    export_replica = south.exports.export_replica

    async def export_grown(payload: dict[str, object]) -> dict[str, object]:
        data_path.write_bytes(BIG)
        gate.close_again(len(BIG) // 2)
        return await export_replica({**payload, "size": len(BIG)})

    south.handlers["export"] = export_grown  # type: ignore[arg-type]
    north.start_stage(file)
    failed = await north.wait_for_state("failed")
    assert not gate.open.is_set()
    assert failed.fault == "file"
    assert "it was changed" in failed.error


# The execution site


async def test_full_disk_fails_stage(north: FileSite, south: FileSite) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = south.make_replica("big", BIG)
    file = south.make_input(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        north.start_stage(file)
        failed = await north.wait_for_state("failed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.fault == "site"
    assert "the disk of north is full" in failed.error
    assert "File too large" in failed.error


async def test_missing_rsync_fails_pulls_only(
    north: FileSite, south: FileSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_file, local_file = south.make_input(south.make_replica("data")), north.make_input(north.make_replica("data"))
    monkeypatch.setenv("PATH", "/nowhere")
    folder = north.start_stage(local_file, token="7.1.1")
    await north.wait_for_state("done", "7.1.1")
    assert (folder / "input").read_bytes() == b"content\n"
    north.start_stage(remote_file)
    failed = await north.wait_for_state("failed")
    assert failed.fault == "source"
    assert "south: rsync is missing on its head node" in failed.error


async def test_missing_rsync_fails_stage(north: FileSite, south: FileSite) -> None:
    await north.restart(rsync_program="no-such-rsync")
    north.start_stage(south.make_input(south.make_replica("data")))
    failed = await north.wait_for_state("failed")
    assert failed.fault == "site"
    assert "rsync is missing on its head node" in failed.error


async def test_cancelled_pull_leaves_no_process(north: FileSite, south: FileSite, gate: Gate) -> None:
    folder = north.start_stage(south.make_input(south.make_replica("big", BIG)))
    await gate.reached.wait()
    north.stages.discard_stage(INSTANCE, T)
    await north.wait_until(lambda: not any((north.directory / "stages").iterdir()))
    assert not folder.exists()
    assert not find_rsyncs(north.directory)


async def test_ticket_allows_one_module_and_password(south: FileSite, tmp_path: Path) -> None:
    south.make_replica("set/mine", b"mine")
    south.make_replica("set/other", b"other")
    route = await export_path(south, south.replicas / "set/mine")
    url, good = rsync_access(route)
    got = tmp_path / "got"
    got.mkdir()

    async def copy(source: str, environment: dict[str, str], *options: str) -> int:
        process = await asyncio.create_subprocess_exec("rsync", *options, source, f"{got}/", env=environment, cwd="/")
        return await process.wait()

    assert await copy(url, {**good, "RSYNC_PASSWORD": "guess"}, "-r") != 0
    assert await copy(f"{url}other", good) != 0
    assert await copy(f"{url}../", good, "-r") == 0
    assert os.listdir(got) == ["mine"]
    upload = await asyncio.create_subprocess_exec("rsync", f"{got}/mine", f"{url}new", env=good, cwd="/")
    assert await upload.wait() != 0
    await south.exports.revoke_ticket({"module": route.module})
    assert await copy(url, good, "-r") != 0
    assert sorted(os.listdir(south.replicas / "set")) == ["mine", "other"]


# Sources


async def export_path(site: FileSite, path: Path, asker: str = "") -> Route:
    """Export a replica and return its route."""
    size, checksum = measure_path(path)
    question = {"path": str(path), "size": size, "checksum": checksum, ASKER: asker}
    return Route.model_validate(await site.exports.export_replica(question))


def rsync_access(route: Route) -> tuple[str, dict[str, str]]:
    """Return the URL of a route, and the environment in which rsync may use it."""
    return f"rsync://{route.user}@{route.host}:{route.port}/{route.module}/", {
        "PATH": os.environ["PATH"],
        "RSYNC_PASSWORD": route.password,
        **tunnel_environment(route.host, route.port, route.certificate, 2),
    }


@pytest.mark.parametrize("option", ["--copy-links", "--copy-unsafe-links", "--copy-dirlinks"])
async def test_puller_cannot_follow_links(south: FileSite, tmp_path: Path, option: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s").write_text("secret")
    south.make_replica("set/a")
    route = await export_path(south, south.replicas / "set")
    (south.replicas / "set" / "link").symlink_to(tmp_path / "secret" / "s")
    (south.replicas / "set" / "route").symlink_to(tmp_path / "secret")
    url, environment = rsync_access(route)
    pulling = await asyncio.create_subprocess_exec(
        "rsync",
        "--recursive",
        "--links",
        option,
        url,
        f"{tmp_path}/came/",
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await pulling.communicate()
    assert b"refused" in errors or b"configured to refuse" in errors
    assert not (tmp_path / "came" / "route" / "s").exists()


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02", GREETING])
async def test_silent_puller_is_disconnected(south: FileSite, first: bytes) -> None:
    await south.restart(timeouts={"transfer_login_s": 0.2})
    route = await export_path(south, south.make_replica("data"))
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port)
    writer.write(first)
    async with asyncio.timeout(20):
        with suppress(ConnectionResetError):  # the server may not have read all sent bytes
            assert await reader.read() == b""
    writer.close()


async def test_accepted_puller_has_no_time_limit(
    north: FileSite, south: FileSite, wire: Wire, monkeypatch: pytest.MonkeyPatch, logins: Logins, gate: Gate
) -> None:
    judged: list[bool] = []
    real = exports._has_begun

    def judging(pid: int) -> bool:
        judged.append(real(pid))
        return judged[-1]

    monkeypatch.setattr(exports, "_has_begun", judging)
    folder = north.start_stage(south.make_input(south.make_replica("big", BIG)))
    await gate.reached.wait()
    await south.wait_until(lambda: logins.rsync_runs)
    logins.are_over()
    await north.wait_until(lambda: bool(judged))
    assert judged == [True]  # called once more when the ticket is returned
    gate.open.set()
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == BIG
    assert wire.questions.count("export") == 1


@pytest.mark.evidence("G13")
async def test_tickets_of_one_site_revoke_none_of_another(south: FileSite) -> None:
    await south.restart(max_tickets=5)
    path = south.make_replica("data")
    east = [await export_path(south, path, "east") for _ in range(2)]
    west = [await export_path(south, path, "west") for _ in range(10)]
    assert list(south.exports._tickets) == [route.module for route in (*east, *west[-3:])]
    await south.exports.revoke_ticket({"module": east[0].module, ASKER: "west"})
    north = await export_path(south, path, "north")
    kept = [*east, *west[-2:], north]
    assert list(south.exports._tickets) == [route.module for route in kept], "the site with most tickets loses one"


async def test_silent_connections_block_no_pull(
    north: FileSite, south: FileSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "MAX_SILENT", 70)
    path = south.make_replica("data")
    route = await export_path(south, path)
    with ExitStack() as stack:
        address = ("127.0.0.1", route.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(75)]
        north.start_stage(south.make_input(path))
        await north.wait_for_state("done")
        for connection in silent[:5]:
            assert connection.recv(1) == b"", "the oldest make room"
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


async def test_connections_that_wait_for_a_place_are_closed(south: FileSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MAX_SILENT", 5)
    route = await export_path(south, south.make_replica("data"))
    south.exports._places = asyncio.Semaphore(0)
    waiting = []
    for _ in range(20):
        waiting.append(await asyncio.open_connection("127.0.0.1", route.port))
        waiting[-1][1].write(TLS_FIRST_BYTE)
    for reader, _ in waiting[:15]:
        with suppress(ConnectionResetError):
            assert await reader.read(1) == b""
    assert len(south.exports._serving.running) == 5
    for _, writer in waiting:
        writer.close()


async def test_ticket_folder_stays_open_for_pending_login(south: FileSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder that gets the same descriptor number would be served in its place."""
    route = await export_path(south, south.make_replica("data"))
    folder = south.exports._tickets[route.module].folder
    trusting = ssl.create_default_context(cadata=route.certificate)
    trusting.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port, ssl=trusting)
    writer.write(GREETING)
    assert b"@RSYNCD" in await reader.readline()
    later: list[tuple[object, ...]] = []
    with monkeypatch.context() as watched:
        watched.setattr(asyncio.get_running_loop(), "call_later", lambda *arguments: later.append(arguments))
        await south.exports.revoke_ticket({"module": route.module})
    assert (south.timeouts.transfer_login_s, os.close, folder) in later
    os.close(folder)
    writer.close()


async def test_ticket_without_saved_secret_is_withdrawn(south: FileSite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = south.make_replica("data")
    await export_path(south, path)
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", refuse_to_write)
        with pytest.raises(OSError, match="No space left"):
            await export_path(south, path)
        assert len(south.exports._tickets) == 1
        assert len(os.listdir("/proc/self/fd")) == open_files
        await south.exports.close()
    assert south.exports._tickets == {}


def refuse_to_write(*_: object) -> int:
    raise OSError(28, "No space left on device")


async def test_rsync_log_is_limited(south: FileSite) -> None:
    path = south.make_replica("data")
    await south.restart(max_log_size=100)
    await export_path(south, path)
    log = south.directory / "exports" / "rsync.log"
    log.write_text("x" * 100)
    await export_path(south, path)
    assert log.exists()
    log.write_text("x" * 101)
    await export_path(south, path)
    assert not log.exists()


# Requests between sites


@pytest.mark.parametrize(
    ("error", "expected"), [(OSError(28, "No space left on device"), SiteUnavailable), (KeyError("odd"), SiteRejected)]
)
async def test_question_with_any_error_is_answered(
    north: FileSite, south: FileSite, error: Exception, expected: type[SiteError]
) -> None:
    async def broken(payload: object) -> dict[str, object]:
        raise error

    south.handlers["odd"] = broken
    with pytest.raises(expected, match=r"No space left|KeyError"):
        await north.questions.ask_cluster("south", "odd", {})
    assert south.questions._answering == {}


async def test_lack_of_descriptors_is_no_fault_of_replica(south: FileSite, monkeypatch: pytest.MonkeyPatch) -> None:
    path = south.make_replica("data")

    def refusing(*_: object, **options: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(os, "open", refusing)
        with (
            pytest.raises(SiteUnavailable, match="Too many open files"),
            Roots("south", [south.replicas]).open_path(path),
        ):
            pass


# rsync itself


@pytest.fixture
def fake_rsync(tmp_path: Path) -> Callable[[str], str]:
    def make(script: str) -> str:
        path = tmp_path / "rsync"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


ROUTE = Route(host="127.0.0.1", port=1, module="0", user="koala", password="", kind="folder", certificate="-")


@pytest.mark.parametrize(
    "change",
    [
        {"host": "h/../x"},
        {"host": "h\n"},
        {"module": "../etc"},
        {"module": "0\n"},
        {"user": "a b"},
        {"password": "a\0b"},
        {"password": "a\nb"},
        {"certificate": "a\0b"},
        {"certificate": ""},
    ],
)
def test_route_with_invalid_characters_is_rejected(change: dict[str, str]) -> None:
    """A route comes from another site and becomes part of the command line and environment of rsync."""
    with pytest.raises(ValidationError):
        Route.model_validate(ROUTE.model_dump() | change)


async def test_long_rsync_errors_are_cut_at_lines(tmp_path: Path, fake_rsync: Callable[[str], str]) -> None:
    complain = "i=0; while [ $i -lt 5000 ]; do echo rsync: [sender] opening file number $i; i=$((i+1)); done >&2"
    program = fake_rsync(
        f"{complain}; echo 'rsync: [receiver] write failed: No space left on device (28)' >&2; exit 11"
    )
    outcome = await pull.run_rsync(ROUTE, "x", tmp_path, lambda: False, program)
    assert outcome.code == 11
    assert outcome.reason.startswith("[sender] opening file number ")
    assert outcome.local_error == "[receiver] write failed: No space left on device (28)"
    assert len(outcome.errors) <= pull.MAX_ERROR_LENGTH


async def test_pull_passes_names_on_standard_input(tmp_path: Path, fake_rsync: Callable[[str], str]) -> None:
    program = fake_rsync(f"cat > {tmp_path}/heard")
    assert (await pull.run_rsync(ROUTE, "a b", tmp_path, lambda: False, program)).code == 0
    assert (tmp_path / "heard").read_bytes() == b"./a b\0"
    fake_rsync("exec <&-; exit 3")
    assert (await pull.run_rsync(ROUTE, "a b", tmp_path, lambda: False, program)).code == 3


@contextmanager
def empty_files(folder: Path) -> Iterator[None]:
    for number in range(5):
        (folder / str(number)).touch()
    yield


@pytest.mark.parametrize("fill", [empty_files, deep_folder])
async def test_folder_with_too_many_entries_or_levels_is_the_fault_of_its_replica(
    north: FileSite,
    south: FileSite,
    monkeypatch: pytest.MonkeyPatch,
    fill: Callable[[Path], AbstractContextManager[object]],
) -> None:
    """Empty files and folders have no bytes, so the size of the replica does not limit them."""

    async def run_hostile(route: Route, name: str, folder: Path, tick: Callable[[], bool], _: str) -> RsyncOutcome:
        with fill(folder):
            for _ in range(3):
                tick()
                await asyncio.wait((run._pull._looking,))  # type: ignore[union-attr, type-var]
        return RsyncOutcome(0, "")

    monkeypatch.setattr(pull, "run_rsync", run_hostile)
    monkeypatch.setattr(pull, "MAX_ENTRIES", 4)
    await north.restart(clock=SetClock())
    north.start_stage(south.make_input(south.make_replica("set/data").parent))
    run = north.stages._stages[INSTANCE, T]
    status = await north.wait_for_state("failed")
    assert (status.fault, status.source) == ("file", "south")
    assert "more than 4 entries or 100 levels: pack it into fewer files" in status.error


def test_size_of_folders_with_too_long_paths_is_that_of_their_files(tmp_path: Path) -> None:
    """rsync changes into the folder and needs relative paths only."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=folder)
        folder, above = os.open("d" * 250, os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    with open("file", "wb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as file:
        file.write(bytes(1000))
    os.close(folder)
    assert pull._size_of(tmp_path) == 1000
    pull._empty(tmp_path)
    assert os.listdir(tmp_path) == []
