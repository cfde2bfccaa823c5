"""Limits on concurrent pulls, and stages with equal inputs: one pulls, the others copy."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.transfers.roots import copy_tree
from koalapy.model.errors import SiteFault, SiteRejected, SiteUnavailable
from tests.agent.transfers.conftest import INSTANCE, FileSite, Gate, SetClock, T, Wire, measure_path, needs_rsync
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.agent.transfers.test_stages import add_bundle, make_archive, make_member

pytestmark = [needs_rsync, pytest.mark.processes]
U, V = "8.1.0", "9.1.0"
BIG = random.Random(3).randbytes(2_000_000)


async def wait_for_waiter(site: FileSite) -> None:
    """Wait until a stage waits for its turn or for the pull of another stage."""
    means = site.stages._means
    tasks = means.shared_tasks._tasks
    await site.wait_until(lambda: means.running_pulls._waiters or any(task.free._waiters for task in tasks.values()))


# Turns


async def test_pulls_stay_within_transfer_limit(north: FileSite, south: FileSite, wire: Wire, gate: Gate) -> None:
    clock = SetClock()
    await north.restart(pulls=1, clock=clock)
    north.start_stage(south.make_input(south.make_replica("big", BIG)))
    await gate.reached.wait()
    north.start_stage(south.make_input(south.make_replica("other", b"other")), token=U)
    await wait_for_waiter(north)
    assert wire.questions.count("export") == 1, "a waiting stage has no ticket"
    clock.steady = 1000.0
    assert north.stages.current_statuses(INSTANCE)[1].state == "running"
    gate.open.set()
    status = await north.wait_for_state("done", U)
    assert [(m.size, m.seconds) for m in status.moved] == [(5, 0.0)], "the wait is not measured"
    assert (await north.wait_for_state("done")).moved[0].seconds == 1000.0


async def test_interrupted_pull_releases_its_turn(north: FileSite, south: FileSite, gate: Gate) -> None:
    await north.restart(pulls=1, timeouts={"transfer_retry_s": 3600.0, "max_transfer_retry_s": 3600.0})
    north.start_stage(south.make_input(south.make_replica("big", BIG)))
    await gate.reached.wait()
    north.start_stage(south.make_input(south.make_replica("other", b"other")), token=U)
    await wait_for_waiter(north)
    gate.break_connections()
    await north.wait_for_state("done", U)
    assert north.stages.current_statuses(INSTANCE)[0].state == "running"


# Sharing


async def test_equal_inputs_share_one_pull(north: FileSite, south: FileSite, wire: Wire, gate: Gate) -> None:
    file = south.make_input(south.make_replica("big", BIG))
    folders = [north.start_stage(file)]
    await gate.reached.wait()
    folders.append(north.start_stage(replace(file, target="other"), token=U))
    await wait_for_waiter(north)
    gate.open.set()
    first, second = await north.wait_for_state("done"), await north.wait_for_state("done", U)
    paths = [folders[0] / "input", folders[1] / "other"]
    assert [path.read_bytes() == BIG for path in paths] == [True, True]
    assert not paths[0].samefile(paths[1]), "a program may write to its own copy"
    assert [len(first.moved), len(second.moved)] == [1, 0], "one transfer was measured"
    assert second.staged == second.size == len(BIG)
    assert wire.questions.count("export") == 1
    assert os.listdir(north.directory / "stages" / f".{INSTANCE}-{U}") == ["journal"]


async def test_shared_folder_is_copied_complete(north: FileSite, south: FileSite, wire: Wire) -> None:
    south.make_replica("set/deep/data")
    south.make_replica("set/-a b\nü*")
    south.make_replica("set/run.sh").chmod(0o755)
    (south.replicas / "set" / "empty").mkdir()
    file = south.make_input(south.replicas / "set")
    north.start_stage(file)
    await north.wait_for_state("done")
    folder = north.start_stage(file, token=U)
    await north.wait_for_state("done", U)
    assert measure_path(folder / "input") == measure_path(south.replicas / "set")
    assert (folder / "input" / "run.sh").stat().st_mode & 0o777 == 0o500
    assert (folder / "input" / "deep" / "data").stat().st_mode & 0o777 == 0o400
    assert wire.questions.count("export") == 1


@pytest.mark.parametrize("unwanted", ["leader", "follower"])
async def test_discarded_stage_does_not_affect_others(
    north: FileSite, south: FileSite, wire: Wire, gate: Gate, unwanted: str
) -> None:
    file = south.make_input(south.make_replica("big", BIG))
    folders = {T: north.start_stage(file)}
    await gate.reached.wait()
    folders |= {token: north.start_stage(file, token=token) for token in (U, V)}
    await wait_for_waiter(north)
    discarded = T if unwanted == "leader" else U
    north.stages.discard_stage(INSTANCE, discarded)
    gate.open.set()
    for token in {T, U, V} - {discarded}:
        await north.wait_for_state("done", token)
        assert (folders[token] / "input").read_bytes() == BIG
    assert wire.questions.count("export") == (2 if unwanted == "leader" else 1)
    await north.wait_until(lambda: len(os.listdir(north.directory / "stages")) == 4)


def rewrite_file(place: Path) -> None:
    place.chmod(0o600)  # inputs are read-only
    place.write_bytes(b"C" * place.stat().st_size)


def remove_file(place: Path) -> None:
    place.unlink()


def replace_by_link(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


def replace_by_pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


@pytest.mark.parametrize("change", [rewrite_file, remove_file, replace_by_link, replace_by_pipe])
async def test_changed_input_is_not_shared(
    north: FileSite, south: FileSite, wire: Wire, change: Callable[[Path], None]
) -> None:
    file = south.make_input(south.make_replica("data"))
    first = north.start_stage(file)
    await north.wait_for_state("done")
    change(first / "input")
    folder = north.start_stage(file, token=U)
    await north.wait_for_state("done", U)
    assert (folder / "input").read_bytes() == b"content\n"
    assert wire.questions.count("export") == 2


async def test_waiting_stages_fail_with_same_reason(north: FileSite, south: FileSite) -> None:
    file, requests, go_on = south.make_input(south.make_replica("data")), [], asyncio.Event()

    async def raise_missing(payload: Any) -> dict[str, object]:
        requests.append(payload)
        await go_on.wait()
        raise SiteRejected("data is not there", fault=SiteFault.MISSING)

    south.handlers["export"] = raise_missing
    north.start_stage(file)
    north.start_stage(file, token=U)
    await wait_for_waiter(north)
    go_on.set()
    for token in (T, U):
        failed = await north.wait_for_state("failed", token)
        assert (failed.fault, failed.file) == ("file", "/logical")
    assert len(requests) == 1
    south.start()
    north.start_stage(file, token=V)
    await north.wait_for_state("done", V)


async def test_failed_stage_does_not_affect_others(
    north: FileSite, south: FileSite, daemon_files: FakeDaemonFiles, wire: Wire, gate: Gate
) -> None:
    file = south.make_input(south.make_replica("big", BIG))
    north.start_stage(file, bundle=add_bundle(daemon_files, make_archive(make_member("input"))))
    await gate.reached.wait()
    folder = north.start_stage(file, token=U)
    await wait_for_waiter(north)
    gate.open.set()
    assert "own files also contain 'input'" in (await north.wait_for_state("failed")).error
    await north.wait_for_state("done", U)
    assert (folder / "input").read_bytes() == BIG


def test_cancelled_copy_ends(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(BIG)
    stop = threading.Event()
    copied = copy_tree(tmp_path / "data", tmp_path / "one", stop)
    assert (copied.size, copied.checksum) == measure_path(tmp_path / "data")
    stop.set()
    with pytest.raises(SiteUnavailable):
        copy_tree(tmp_path / "one", tmp_path / "two", stop)
    assert (tmp_path / "two").stat().st_size == 0
