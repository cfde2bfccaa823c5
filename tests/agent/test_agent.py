"""An agent as a whole, with real processes on an embedded cluster."""

import asyncio
import base64
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from koalapy.agent.core.settings import AgentTimeouts
from koalapy.runner.folders import MARK
from tests.agent.conftest import FakeDaemon, Site, running_pids
from tests.agent.lrm.conftest import stop_locald

pytestmark = pytest.mark.processes

T = "7.1.0"


async def test_component_from_submit_to_forget_leaves_nothing(site: Site, daemon: FakeDaemon) -> None:
    end = await site.run_component(T, ["sh", "-c", "echo $KOALA_NODE $SITE; exit 3"])
    assert daemon.headers == ["/api/v1/agents/north/connect Bearer s3cret"]
    assert (end["program_exit"], end["error"], end["infrastructure"]) == (3, "", False)
    assert end["hosts"] == ["127.0.1.1"]
    assert daemon.output[T] == b"north-1 north\n"
    states = [m["state"] for m in daemon.received("status", T)]
    assert states == sorted(states, key=["submitted", "waiting", "claimed", "running", "delivering", "ended"].index)
    assert await daemon.wait_for_ack(await daemon.send_command("forget", T)) == ""
    assert not (site.settings.directory / "test" / T).exists()


async def test_first_failed_node_is_reported_at_once(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T, 2)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", "[ $KOALA_NODE_INDEX = 0 ] && exit 9; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.status(T).get("program_exit") == 9)
    assert daemon.status(T)["state"] != "ended"
    await daemon.send_command("stop", T, reason="the program failed")
    assert (await daemon.wait_for_state(T, "ended"))["program_exit"] == 9


async def test_killed_runner_fails_component_and_ends_other_nodes(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T, 2)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", "echo $PPID; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 2)
    os.kill(int(daemon.output[T].split()[0]), signal.SIGKILL)
    end = await daemon.wait_for_state(T, "ended")
    assert end["infrastructure"]
    assert "runner killed by signal 9" in end["error"]
    assert "its runner was killed" in end["missing"]
    await daemon.wait_until(lambda: daemon.report()["idle"] == 4)


async def test_program_exceeding_walltime_is_stopped(site: Site, daemon: FakeDaemon) -> None:
    """Double the walltime until the program starts before the walltime is over."""
    for job in range(10):
        token, walltime = f"{job}.1.0", 2.0**job
        await daemon.submit_component(token, walltime=walltime)
        await daemon.wait_until(lambda token=token: daemon.status(token).get("state") in ("claimed", "ended"))  # type: ignore[misc]
        if daemon.status(token)["state"] == "claimed":
            await daemon.open_barrier(["sleep", "1000"], token)
        end = await daemon.wait_for_state(token, "ended")
        assert (end["program_exit"], end["infrastructure"]) == (143, False)
        assert end["error"] == f"walltime of {walltime:g} s exceeded"
        if "running" in [status["state"] for status in daemon.received("status", token)]:
            return
    pytest.fail("the program never ran")


async def test_output_of_stopped_component_is_delivered_after_stop(site: Site, daemon: FakeDaemon) -> None:
    """After every end of a job, the daemon stops the remaining processes of a failed program."""
    daemon.takes_output = False
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", "seq 200000; echo THE-END; exit 3"], T)
    await daemon.wait_until(lambda: daemon.status(T).get("program_exit") == 3)
    await daemon.send_command("stop", T, reason="the program failed")
    await daemon.wait_for_state(T, "delivering")
    await daemon.wait_until(lambda: daemon.report()["idle"] == 4)
    assert daemon.status(T)["state"] == "delivering"
    daemon.takes_output = True
    await daemon.stop_listening()
    await daemon.listen()
    assert (await daemon.wait_for_state(T, "ended"))["missing"] == ""
    assert daemon.output[T] == b"".join(b"%d\n" % i for i in range(1, 200_001)) + b"THE-END\n"


async def test_long_output_is_sent_as_head_and_tail(site: Site, daemon: FakeDaemon) -> None:
    daemon.output_limit = 100_000
    await daemon.stop_listening()
    await daemon.listen()
    await daemon.wait_until(lambda: len(daemon.inventories) == 2)
    daemon.takes_output = False
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["seq", "2000000"], T)
    await daemon.wait_for_state(T, "delivering")
    folder = site.settings.directory / "test" / T
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * 1024**2 + 200_000
    daemon.takes_output = True
    await daemon.stop_listening()
    await daemon.listen()
    await daemon.wait_for_state(T, "ended")
    expected = b"".join(b"%d\n" % i for i in range(1, 2_000_001))
    pieces = [(m["offset"], base64.b64decode(m["data"])) for m in daemon.received("output", T)]
    assert all(expected[offset : offset + len(data)] == data for offset, data in pieces)
    sent_positions = {position for offset, data in pieces for position in range(offset, offset + len(data))}
    assert sent_positions >= {*range(50_000), *range(len(expected) - 50_000, len(expected))}


@pytest.mark.parametrize("lines", [3, 300_000])
async def test_unsent_output_of_killed_runner_is_recovered(site: Site, daemon: FakeDaemon, lines: int) -> None:
    """The program ends without an agent, and its runner is killed before the next agent starts."""
    await daemon.submit_component(T, 2)
    await daemon.wait_for_state(T, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    script = f"echo $PPID; [ $KOALA_NODE_INDEX = 0 ] && exit; read line < {fifo}; seq {lines}; printf end"
    await daemon.open_barrier(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 2)
    first_output = daemon.output[T]
    await site.stop()
    with fifo.open("w") as file:
        file.write("go on\n")
    results = [site.settings.directory / "test" / T / f"result.{node}.json" for node in (0, 1)]
    await daemon.wait_until(lambda: all(result.exists() for result in results))
    for runner in first_output.split():
        with suppress(ProcessLookupError):  # the runner of node 0 may have ended
            os.kill(int(runner), signal.SIGKILL)
    await site.start()
    end = await daemon.wait_for_state(T, "ended")
    assert (end["program_exit"], end["error"], end["missing"]) == (0, "", "")
    assert daemon.output[T] == first_output + b"".join(b"%d\n" % n for n in range(1, lines + 1)) + b"end"


async def test_killed_agent_loses_no_component(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT_PROGRAM, str(tmp_path), str(daemon.port))
    await daemon.wait_until(lambda: len(daemon.inventories) == 1)
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.submit_component(T, 2)
    await daemon.submit_component("8.1.0", 3)
    await daemon.wait_for_state(T, "claimed")
    queued_job = (await daemon.wait_for_state("8.1.0", "waiting"))["lrm_job"]
    script = f"echo $KOALA_NODE one; [ $KOALA_NODE_INDEX = 1 ] || read line < {fifo}; echo $KOALA_NODE two"
    await daemon.open_barrier(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 3)
    killed.kill()
    await killed.wait()
    daemon.messages.clear()
    try:
        await site.start()
        await daemon.wait_for_state(T, "running")
        with fifo.open("w") as file:
            file.write("go on\n")
        assert (await daemon.wait_for_state(T, "ended"))["program_exit"] == 0
        lines = daemon.output[T].decode().splitlines()
        assert sorted(lines) == ["north-1 one", "north-1 two", "north-2 one", "north-2 two"]
        assert (await daemon.wait_for_state("8.1.0", "claimed"))["lrm_job"] == queued_job
        await daemon.wait_until(lambda: daemon.report()["holding"] == ["8.1.0"])
    finally:
        await site.stop()
        stop_locald(site.cluster)


AGENT_PROGRAM = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from tests.agent.conftest import FakeDaemon, Site
from koalapy.agent.core.agent import run_agent
from koalapy.agent.lrm.local.adapter import LocalLrm
daemon = FakeDaemon()
daemon.port = int(sys.argv[2])
site = Site(Path(sys.argv[1]), daemon)
asyncio.run(run_agent(site.settings, LocalLrm(site.cluster, "koala-")))
"""


@pytest.mark.parametrize("content", [b"", b"\0" * 30, b'{"host": "\xe9\xff\xfe\x80"}', b"[]", b'{"port": 1e99}'])
async def test_runner_connects_after_address_file_is_repaired(daemon: FakeDaemon, site: Site, content: bytes) -> None:
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 5"], T)
    await daemon.wait_for_state(T, "running")
    await site.stop()
    site.settings.address_file.write_bytes(content)
    await site.start()
    await asyncio.to_thread((site.settings.directory / "test" / T / "go").touch)
    assert (await daemon.wait_for_state(T, "ended"))["program_exit"] == 5


SLEEP_SCRIPT = "echo $$; exec sleep 300"
PROGRAMS = {
    "plain": ["sh", "-c", SLEEP_SCRIPT],
    "clean environment": ["env", "-i", "sh", "-c", SLEEP_SCRIPT],
    "daemon": ["sh", "-c", f"env -i setsid sh -c '{SLEEP_SCRIPT}' & wait"],
    "daemon without a parent": ["sh", "-c", f"(env -i setsid sh -c '{SLEEP_SCRIPT}' &); sleep 300"],
    "ignores signals": ["env", "-i", "sh", "-c", "trap '' TERM HUP INT; echo $$; while :; do sleep 1; done"],
}


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def run_program(daemon: FakeDaemon, program: list[str]) -> None:
    """Run a program as component ``T``, and wait for its first line."""
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(program, T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").endswith(b"\n"))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_runner_ends_program_when_lrm_is_killed(daemon: FakeDaemon, site: Site, program: list[str]) -> None:
    await run_program(daemon, program)
    assert len(running_pids(daemon.output[T])) == 1
    os.kill(int((site.cluster.directory / "locald.pid").read_text()), signal.SIGKILL)
    status = await daemon.wait_for_state(T, "ended")
    assert running_pids(daemon.output[T]) == [], "no process is left when the end is reported"
    assert status["infrastructure"]
    assert "resource manager" in status["error"]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_component_ends_when_lrm_and_runner_are_killed(
    daemon: FakeDaemon, site: Site, program: list[str]
) -> None:
    await run_program(daemon, program)
    (pid,) = running_pids(daemon.output[T])
    locald = int((site.cluster.directory / "locald.pid").read_text())
    runners = list_children(locald)
    assert runners
    try:
        for process in (locald, *runners):
            with suppress(ProcessLookupError):  # a child that prepares the job may have ended
                os.kill(process, signal.SIGKILL)
        status = await daemon.wait_for_state(T, "ended")
        assert running_pids(daemon.output[T]) == []
        assert status["infrastructure"]
    finally:
        if running_pids(daemon.output[T]):
            os.kill(pid, signal.SIGKILL)


BLOCK_RMTREE = """
import pathlib, shutil, time
def stuck(path, ignore_errors):
    for name in ("journal", "stream.0"):
        (pathlib.Path(path) / name).unlink()
    time.sleep(1000)
shutil.rmtree = stuck
"""


async def test_agent_killed_during_forget_leaves_nothing(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCK_RMTREE + AGENT_PROGRAM, str(tmp_path), str(daemon.port)
    )
    await daemon.wait_until(lambda: len(daemon.inventories) == 1)
    await site.run_component(T, ["echo", "one"])
    folder = site.settings.directory / "test" / T
    forgotten = folder.with_name(f"{T}.forgotten")
    await daemon.send_command("forget", T)
    await daemon.wait_until(lambda: forgotten.exists() and not (forgotten / "stream.0").exists())
    killed.kill()
    await killed.wait()
    assert list(forgotten.iterdir())
    halfway = folder.with_name("6.1.0")
    halfway.mkdir()
    (halfway / "runner.log").write_text("of an agent that did not rename what it removed")
    try:
        await site.start()
        assert daemon.inventories[-1] == []
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == []
    finally:
        await site.stop()
        stop_locald(site.cluster)


async def test_folder_of_killed_runner_is_removed(tmp_path: Path, daemon: FakeDaemon) -> None:
    with TemporaryDirectory(prefix="t") as base:
        site = Site(tmp_path, daemon)
        site.timeouts = AgentTimeouts(sweep_interval_s=0.05)
        environment = {**site.settings.environment, "TMPDIR": base}
        site.settings = replace(site.settings, environment=environment)
        await site.start()
        try:
            await daemon.submit_component(T)
            await daemon.wait_for_state(T, "claimed")
            await daemon.open_barrier(["sh", "-c", "echo up; exec sleep 1000"], T, launcher="openmpi")
            await daemon.wait_until(lambda: daemon.output.get(T) == b"up\n")
            (folder,) = os.listdir(base)
            os.kill(find_lock_holder(Path(base, folder, MARK)), signal.SIGKILL)
            assert (await daemon.wait_for_state(T, "ended"))["infrastructure"]
            await daemon.wait_until(lambda: not os.listdir(base))
        finally:
            await site.stop()
            await asyncio.to_thread(stop_locald, site.cluster)


def find_lock_holder(path: Path) -> int:
    """Return the process that holds a lock on a file. Only root can read the open files of a runner."""
    inode = path.stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    (holder,) = {int(pid) for *_, pid, file, _, _ in locks if int(file.rpartition(":")[2]) == inode}
    return holder


ATTACKER = Path(__file__).with_name("attacker.py")
VICTIM, OTHER = "7.1.0", "8.1.0"
DROP_CAPABILITIES = ["setpriv", "--bounding-set=-sys_ptrace,-perfmon,-sys_admin"] if os.geteuid() == 0 else []
"""Removes the capabilities by which root could read the memory of any process."""


async def run_attacker(site: Site, daemon: FakeDaemon, pids: list[int]) -> dict[str, object]:
    """Run the attacker as a job and return its findings."""
    await daemon.submit_component(OTHER)
    await daemon.wait_for_state(OTHER, "claimed")
    program = [sys.executable, str(ATTACKER), str(site.settings.directory), str(site.cluster.directory)]
    await daemon.open_barrier([*DROP_CAPABILITIES, *program, VICTIM, ",".join(map(str, pids))], OTHER)
    status = await daemon.wait_for_state(OTHER, "ended")
    assert status["program_exit"] == 0, daemon.output[OTHER]
    findings: dict[str, object] = json.loads(daemon.output[OTHER])
    return findings


async def start_victim(site: Site, daemon: FakeDaemon) -> tuple[Path, int]:
    """Start a job that prints the process ID of its runner and waits at a gate. Return both."""
    await daemon.submit_component(VICTIM)
    await daemon.wait_for_state(VICTIM, "claimed")
    gate = site.settings.directory / "gate"
    os.mkfifo(gate)
    await daemon.open_barrier(["sh", "-c", f"echo $PPID; read line < {gate}; echo genuine; exit 7"], VICTIM)
    await daemon.wait_until(lambda: b"\n" in daemon.output.get(VICTIM, b""))
    return gate, int(daemon.output[VICTIM])


@pytest.mark.evidence("J2", "J3", "J5", "C16")
async def test_attacking_job_learns_nothing_and_is_reported(site: Site, daemon: FakeDaemon) -> None:
    gate, runner = await start_victim(site, daemon)
    locald = int((site.cluster.directory / "locald.pid").read_text())
    findings = await run_attacker(site, daemon, [runner, locald])
    assert findings["secrets"] is False
    assert findings["heard"] == []
    assert findings["memory"] == {str(runner): [], str(locald): []}
    assert findings["orders"] == [["error", "kind"]] * 5
    rejections = daemon.received("impostor")
    assert (rejections[0]["token"], rejections[0]["how"]) == (VICTIM, "forged")
    gate.write_text("go on\n")
    status = await daemon.wait_for_state(VICTIM, "ended")
    assert (status["program_exit"], status["error"]) == (7, "")
    assert daemon.output[VICTIM] == f"{runner}\ngenuine\n".encode()


@pytest.mark.evidence("J3")
async def test_result_written_by_another_job_is_ignored(site: Site, daemon: FakeDaemon) -> None:
    """While the agent is away, the genuine runner also writes its result to that folder."""
    gate, runner = await start_victim(site, daemon)
    await run_attacker(site, daemon, [runner])
    await site.stop()
    await site.start()
    await daemon.wait_for_state(VICTIM, "running")
    gate.write_text("go on\n")
    status = await daemon.wait_for_state(VICTIM, "ended")
    assert (status["program_exit"], status["error"], status["missing"]) == (7, "", "")
    assert daemon.output[VICTIM] == f"{runner}\ngenuine\n".encode()
