"""Staging and results through complete agents, also when an agent is killed during a transfer."""

import asyncio
import io
import os
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import FakeDaemon, Site
from tests.agent.lrm.conftest import stop_locald
from tests.agent.test_agent import AGENT_PROGRAM
from tests.agent.transfers.conftest import Gate, find_rsyncs, measure_path, needs_rsync
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles

pytestmark = pytest.mark.processes

T, S = "7.1.0", "7.1.9"
BIG = random.Random(2).randbytes(6_000_000)


def make_replica(site: Site, name: str, content: bytes, **fields: Any) -> dict[str, Any]:
    """Make a file on a site and return it as an input of a stage."""
    path = site.replicas / name
    path.write_bytes(content)
    size, checksum = measure_path(path)
    content = {"path": str(path), "size": size, "checksum": checksum, "target": name}
    return {"name": name, "source": site.settings.cluster, "part": None, **content, **fields}


async def run_component(daemon: FakeDaemon, command: list[str], token: str = T, **submit: Any) -> dict[str, Any]:
    await daemon.submit_component(token, stage=S, **submit)
    await daemon.wait_for_state(token, "claimed")
    await daemon.open_barrier(command, token)
    return await daemon.wait_for_state(token, "ended")


def read_archive(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {m.name: opened.extractfile(m).read() for m in opened}  # type: ignore[union-attr]


async def test_stat_request_of_daemon_is_answered(site: Site, daemon: FakeDaemon) -> None:
    file = make_replica(site, "data", b"1234")
    answer = await daemon.ask_agent("north", "stat", path="data", checksum=True)
    assert answer["error"] == ""
    assert answer["payload"] == {"path": file["path"], "size": 4, "checksum": file["checksum"], "parts": None}
    rejected = await daemon.ask_agent("north", "stat", path="/etc/passwd", checksum=True)
    assert (rejected["fault"], rejected["payload"]) == ("outside", {})
    assert (await daemon.ask_agent("north", "stat", checksum=True))["fault"] == "invalid"
    assert (await daemon.ask_agent("north", "dance"))["fault"] == "unknown"


async def test_results_are_sent_before_end_is_reported(
    daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon
) -> None:
    daemon_files.away = True
    await daemon.request_stage(S, make_replica(site, "in.txt", b"input"))
    await daemon.wait_for_stage(S)
    await daemon.submit_component(T, stage=S, collect=["*.txt", "sub/**"])
    await daemon.wait_for_state(T, "claimed")
    script = "echo one > a.txt; mkdir sub; echo two > sub/b; ln -s /etc/passwd c.txt; echo no > d.log; exit 3"
    await daemon.open_barrier(["sh", "-c", script], T)
    assert await asyncio.to_thread(daemon_files.answered.wait, 30)
    await daemon.wait_for_state(T, "delivering")
    assert not [status for status in daemon.received("status", T) if status["state"] == "ended"]
    assert await daemon.wait_for_ack(await daemon.send_command("forget", T)) == f"component {T} has not ended"
    daemon_files.away = False
    end = await daemon.wait_for_state(T, "ended")
    assert (end["program_exit"], end["error"]) == (3, "")
    assert read_archive(daemon_files.results[S]) == {"a.txt": b"one\n", "sub/b": b"two\n"}
    assert daemon_files.requests[-1] == f"PUT /api/v1/agents/north/results/{S} Bearer s3cret"


async def test_rejected_results_do_not_fail_component(
    daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon
) -> None:
    daemon_files.refuse = 413, "more than 1 MB"
    await daemon.request_stage(S)
    await daemon.wait_for_stage(S)
    script = "head -c 3000000 /dev/zero > a.bin"
    end = await run_component(daemon, ["sh", "-c", script], size=1, collect=["*"])
    reason = "its results could not be collected: the daemon rejects it: more than 1 MB"
    assert (end["program_exit"], end["infrastructure"], end["error"]) == (0, False, reason)
    assert daemon.output[T].decode() == f"koala: {reason}\n"


async def test_results_of_lost_node_are_collected(
    daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon
) -> None:
    """The job may still have succeeded, as when a node is lost after ``mpirun`` ended."""
    await daemon.request_stage(S)
    await daemon.wait_for_stage(S)
    end = await run_component(daemon, ["sh", "-c", "echo one > a; kill -9 $PPID; exec sleep 1000"], collect=["*"])
    assert end["infrastructure"]
    assert read_archive(daemon_files.results[S]) == {"a": b"one\n"}


async def test_results_without_run_are_not_collected(
    daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon
) -> None:
    await daemon.request_stage(S)
    await daemon.submit_component(T, stage=S, collect=["*"])
    await daemon.wait_for_state(T, "claimed")
    await daemon.send_command("stop", T, reason="test")
    await daemon.wait_for_state(T, "ended")
    assert daemon_files.requests == []


async def test_stage_stays_while_program_runs(daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon) -> None:
    await daemon.request_stage(S)
    await daemon.wait_for_stage(S)
    await daemon.submit_component(T, stage=S)
    await daemon.wait_for_state(T, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.open_barrier(["sh", "-c", f"echo up; read line < {fifo}; pwd; ls -d ."], T)
    await daemon.wait_until(lambda: daemon.output.get(T) == b"up\n")
    await daemon.wait_for_ack(await daemon.send_command("unstage", S))
    folder = site.settings.stages / f"test-{S}"
    assert folder.is_dir()
    fifo.write_text("go on\n")
    assert (await daemon.wait_for_state(T, "ended"))["program_exit"] == 0
    assert daemon.output[T].decode() == f"up\n{folder}\n.\n"
    await daemon.wait_until(lambda: not any(site.settings.stages.iterdir()))


async def test_new_agent_collects_old_results(daemon_files: FakeDaemonFiles, site: Site, daemon: FakeDaemon) -> None:
    daemon_files.away = True
    await daemon.request_stage(S)
    await daemon.submit_component(T, stage=S, collect=["a"])
    await daemon.wait_for_state(T, "claimed")
    await daemon.wait_for_stage(S)
    await daemon.open_barrier(["sh", "-c", "echo one > a"], T)
    assert await asyncio.to_thread(daemon_files.answered.wait, 30)
    await site.stop()
    daemon_files.away = False
    await site.start()
    assert (await daemon.wait_for_state(T, "ended"))["program_exit"] == 0
    assert read_archive(daemon_files.results[S]) == {"a": b"one\n"}


@needs_rsync
async def test_killed_agent_resumes_transfers(tmp_path: Path, other_site: Site, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    gate = Gate(daemon, len(BIG) // 2)
    await gate.listen()
    inventory_count = len(daemon.inventories)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT_PROGRAM, str(tmp_path), str(daemon.port))
    await daemon.wait_until(lambda: len(daemon.inventories) > inventory_count)
    file = make_replica(other_site, "big", BIG)
    await daemon.request_stage(S, file)
    await gate.reached.wait()
    partial_file = site.settings.stages / f".test-{S}" / "input-0" / "big"
    await daemon.wait_until(lambda: partial_file.exists() and partial_file.stat().st_size > len(BIG) // 4)
    killed.kill()
    await killed.wait()
    daemon.messages.clear()
    # The connection of the killed agent's pull still waits at the gate.
    gate.limit, gate.passed = sys.maxsize, 0
    try:
        await site.start()
        assert (await daemon.wait_for_stage(S))["moved"][0]["size"] < len(BIG)
        assert (site.settings.stages / f"test-{S}" / "big").read_bytes() == BIG
        assert 0 < gate.passed < 0.9 * len(BIG)
        assert find_rsyncs(site.settings.stages) == []
    finally:
        gate.open.set()
        gate.close()
        await site.stop()
        stop_locald(site.cluster)


@pytest.mark.mpi
async def test_ranks_run_in_stage_of_their_cluster(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    tokens = {"7.1.0": ("north", "7.1.0"), "7.1.1": ("south", "7.1.1")}
    for token, (cluster, stage) in tokens.items():
        file = make_replica(site if cluster == "north" else other_site, "who", f"{cluster}\n".encode())
        await daemon.request_stage(stage, file, cluster=cluster)
        await daemon.wait_for_stage(stage)
        await daemon.submit_component(token, 2, cluster, stage=stage)
        await daemon.wait_for_state(token, "claimed")
    await daemon.open_barrier(["sh", "-c", "echo $SITE $PWD `cat who`"], *tokens, launcher="openmpi")
    for token in tokens:
        assert (await daemon.wait_for_state(token, "ended"))["error"] == ""
    north, south = site.settings.stages / "test-7.1.0", other_site.settings.stages / "test-7.1.1"
    lines = sorted(daemon.output["7.1.0"].decode().splitlines())
    assert lines == [f"north {north} north"] * 2 + [f"south {south} south"] * 2
