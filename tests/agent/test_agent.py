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
from tests.agent.conftest import FakeDaemon, Site, alive

pytestmark = pytest.mark.processes

T = "7.1.0"


async def test_component_from_submit_to_forget_leaves_nothing(site: Site, daemon: FakeDaemon) -> None:
    end = await site.finish(T, ["sh", "-c", "echo $KOALA_NODE $SITE; exit 3"])
    assert daemon.headers == ["/api/v1/agents/north/connect Bearer s3cret"]
    assert (end["program_exit"], end["error"], end["infrastructure"]) == (3, "", False)
    assert end["hosts"] == ["127.0.1.1"]
    assert daemon.output[T] == b"north-1 north\n"
    states = [m["state"] for m in daemon.received("status", T)]
    assert states == sorted(states, key=["submitted", "waiting", "claimed", "running", "delivering", "ended"].index)
    assert await daemon.acknowledged(await daemon.command("forget", T)) == ""
    assert not (site.settings.directory / "test" / T).exists()


async def test_lines_of_several_nodes_are_kept_whole(site: Site, daemon: FakeDaemon) -> None:
    end = await site.finish(T, ["sh", "-c", "for i in 1 2 3 4 5; do echo $KOALA_NODE line $i; done"], size=3)
    assert end["program_exit"] == 0
    lines = daemon.output[T].decode().splitlines()
    for node in ("north-1", "north-2", "north-3"):
        assert [line for line in lines if line.startswith(node)] == [f"{node} line {i}" for i in range(1, 6)]


async def test_first_failed_node_is_reported_at_once(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "[ $KOALA_NODE_INDEX = 0 ] && exit 9; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.status(T).get("program_exit") == 9)
    assert daemon.status(T)["state"] != "ended"
    await daemon.command("stop", T, reason="the program failed")
    assert (await daemon.reaches(T, "ended"))["program_exit"] == 9


async def test_stopping_one_that_waits_in_the_queue(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit("7.1.0", 4)
    await daemon.reaches("7.1.0", "claimed")
    await daemon.submit("7.1.1", 1)
    await daemon.reaches("7.1.1", "waiting")
    await daemon.command("stop", "7.1.1", reason="test")
    end = await daemon.reaches("7.1.1", "ended")
    assert (end["error"], end["infrastructure"]) == ("", False)


async def test_more_nodes_than_there_are_is_a_limit_and_no_error_of_the_cluster(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T, 5)
    end = await daemon.reaches(T, "ended")
    assert (end["infrastructure"], end["refused"]) == (False, "limit")
    assert "5" in end["error"]


async def test_killed_runner_fails_component_and_ends_other_nodes(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "echo $PPID; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 2)
    os.kill(int(daemon.output[T].split()[0]), signal.SIGKILL)
    end = await daemon.reaches(T, "ended")
    assert end["infrastructure"]
    assert "runner killed by signal 9" in end["error"]
    assert "its runner was killed" in end["missing"]
    await daemon.wait_until(lambda: daemon.report()["idle"] == 4)


async def test_half_a_line_of_a_runner_that_was_killed_is_delivered(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    script = "[ $KOALA_NODE_INDEX = 0 ] && printf '%s\\nhalf a line' $PPID; exec sleep 1000"
    await daemon.open(["sh", "-c", script], T)
    await daemon.wait_until(lambda: b"\n" in daemon.output.get(T, b""))
    os.kill(int(daemon.output[T]), signal.SIGKILL)
    assert (await daemon.reaches(T, "ended"))["infrastructure"]
    assert daemon.output[T].endswith(b"\nhalf a line")


async def test_walltime_is_the_programs_end(site: Site, daemon: FakeDaemon) -> None:
    """As much of it as a program needs to be running by then."""
    for job in range(10):
        token, walltime = f"{job}.1.0", 2.0**job
        await daemon.submit(token, walltime=walltime)
        await daemon.wait_until(lambda token=token: daemon.status(token).get("state") in ("claimed", "ended"))  # type: ignore[misc]
        if daemon.status(token)["state"] == "claimed":
            await daemon.open(["sleep", "1000"], token)
        end = await daemon.reaches(token, "ended")
        assert (end["program_exit"], end["infrastructure"]) == (143, False)
        assert end["error"] == f"walltime of {walltime:g} s exceeded"
        if "running" in [status["state"] for status in daemon.received("status", token)]:
            return
    pytest.fail("it never ran")


async def test_much_output_arrives_whole_before_the_end_is_told(site: Site, daemon: FakeDaemon) -> None:
    end = await site.finish(T, ["seq", "400000"])
    assert end["program_exit"] == 0
    assert daemon.output[T] == b"".join(b"%d\n" % i for i in range(1, 400_001))


async def test_output_of_stopped_component_arrives_whole_after_its_end(site: Site, daemon: FakeDaemon) -> None:
    """As after every end of a job: the daemon stops what is left of a program that has failed."""
    daemon.takes_output = False
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "seq 200000; echo THE-END; exit 3"], T)
    await daemon.wait_until(lambda: daemon.status(T).get("program_exit") == 3)
    await daemon.command("stop", T, reason="the program failed")
    await daemon.reaches(T, "delivering")
    await daemon.wait_until(lambda: daemon.report()["idle"] == 4)
    assert daemon.status(T)["state"] == "delivering"
    daemon.takes_output = True
    await daemon.leave()
    await daemon.listen()
    assert (await daemon.reaches(T, "ended"))["missing"] == ""
    assert daemon.output[T] == b"".join(b"%d\n" % i for i in range(1, 200_001)) + b"THE-END\n"


async def test_long_output_is_sent_as_head_and_tail(site: Site, daemon: FakeDaemon) -> None:
    daemon.output_limit = 100_000
    await daemon.leave()
    await daemon.listen()
    await daemon.wait_until(lambda: len(daemon.inventories) == 2)
    daemon.takes_output = False
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(["seq", "2000000"], T)
    await daemon.reaches(T, "delivering")
    folder = site.settings.directory / "test" / T
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * 1024**2 + 200_000
    daemon.takes_output = True
    await daemon.leave()
    await daemon.listen()
    await daemon.reaches(T, "ended")
    whole = b"".join(b"%d\n" % i for i in range(1, 2_000_001))
    pieces = [(m["offset"], base64.b64decode(m["data"])) for m in daemon.received("output", T)]
    assert all(whole[offset : offset + len(data)] == data for offset, data in pieces)
    sent = {place for offset, data in pieces for place in range(offset, offset + len(data))}
    assert sent >= {*range(50_000), *range(len(whole) - 50_000, len(whole))}


async def test_programs_outlive_the_daemon(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.open(["sh", "-c", f"echo one; read line < {fifo}; echo two; exit 6"], T)
    await daemon.wait_until(lambda: daemon.output.get(T) == b"one\n")
    await daemon.leave()
    with fifo.open("w") as file:
        file.write("go on\n")
    journal = site.settings.directory / "test" / T / "journal"
    await daemon.wait_until(lambda: '"end"' in journal.read_text())
    await daemon.listen()
    end = await daemon.reaches(T, "ended")
    assert end["program_exit"] == 6
    assert daemon.output[T] == b"one\ntwo\n"


async def test_new_agent_resumes_components_of_old_one(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit("7.1.0")
    await daemon.submit("8.1.0")
    for token in ("7.1.0", "8.1.0"):
        await daemon.reaches(token, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.open(["sh", "-c", f"echo one; read line < {fifo}; echo two; exit 6"], "7.1.0")
    await daemon.wait_until(lambda: daemon.output.get("7.1.0") == b"one\n")
    await site.stop()
    daemon.messages.clear()
    await site.start()
    assert sorted(s["token"] for s in daemon.inventories[-1]) == ["7.1.0", "8.1.0"]
    await daemon.reaches("7.1.0", "running")
    await daemon.reaches("8.1.0", "claimed")
    with fifo.open("w") as file:
        file.write("go on\n")
    assert (await daemon.reaches("7.1.0", "ended"))["program_exit"] == 6
    assert daemon.output["7.1.0"] == b"one\ntwo\n"
    await daemon.open(["true"], "8.1.0")
    assert (await daemon.reaches("8.1.0", "ended"))["program_exit"] == 0


async def test_component_ended_without_agent_is_found(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "echo up; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.output.get(T) == b"up\n")
    await site.stop()
    site.cluster.stop()
    await site.start()
    end = await daemon.reaches(T, "ended")
    assert end["infrastructure"]
    assert end["error"]


@pytest.mark.parametrize("lines", [3, 300_000])
async def test_output_not_sent_by_a_dead_runner_is_found(site: Site, daemon: FakeDaemon, lines: int) -> None:
    """The program ends while there is no agent, and its runner is killed before there is one."""
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    script = f"echo $PPID; [ $KOALA_NODE_INDEX = 0 ] && exit; read line < {fifo}; seq {lines}; printf end"
    await daemon.open(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 2)
    before = daemon.output[T]
    await site.stop()
    with fifo.open("w") as file:
        file.write("go on\n")
    results = [site.settings.directory / "test" / T / f"result.{node}.json" for node in (0, 1)]
    await daemon.wait_until(lambda: all(result.exists() for result in results))
    for runner in before.split():
        with suppress(ProcessLookupError):  # that of node 0 may have been let go
            os.kill(int(runner), signal.SIGKILL)
    await site.start()
    end = await daemon.reaches(T, "ended")
    assert (end["program_exit"], end["error"], end["missing"]) == (0, "", "")
    assert daemon.output[T] == before + b"".join(b"%d\n" % n for n in range(1, lines + 1)) + b"end"


async def test_output_that_died_with_its_runner_is_told_to_be_missing(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.open(["sh", "-c", f"echo $PPID; read line < {fifo}; echo end"], T)
    await daemon.wait_until(lambda: b"\n" in daemon.output.get(T, b""))
    await site.stop()
    with fifo.open("w") as file:
        file.write("go on\n")
    folder = site.settings.directory / "test" / T
    await daemon.wait_until((folder / "result.0.json").exists)
    os.kill(int(daemon.output[T]), signal.SIGKILL)
    for path in folder.glob("output.0.*"):
        path.unlink()
    await site.start()
    end = await daemon.reaches(T, "ended")
    assert end["program_exit"] == 0
    assert "4 bytes of node 0" in end["missing"]


async def test_stopped_component_with_killed_runner_reports_missing_output(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T, 2)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "echo $KOALA_NODE_INDEX $PPID; exec sleep 1000"], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 2)
    runners = dict(line.split() for line in daemon.output[T].decode().splitlines())
    os.kill(int(runners["1"]), signal.SIGSTOP)
    await daemon.acknowledged(await daemon.command("stop", T, reason="the program failed"))
    os.kill(int(runners["1"]), signal.SIGKILL)
    end = await daemon.reaches(T, "ended")
    assert (end["error"], end["missing"]) == ("", "possibly the end of what node 1 wrote: its runner was killed")


async def test_killed_agent_loses_nothing(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, str(tmp_path), str(daemon.port))
    await daemon.wait_until(lambda: len(daemon.inventories) == 1)
    fifo = site.settings.directory / "go"
    os.mkfifo(fifo)
    await daemon.submit(T, 2)
    await daemon.submit("8.1.0", 3)
    await daemon.reaches(T, "claimed")
    await daemon.reaches("8.1.0", "waiting")
    script = f"echo $KOALA_NODE one; [ $KOALA_NODE_INDEX = 1 ] || read line < {fifo}; echo $KOALA_NODE two"
    await daemon.open(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"\n") == 3)
    killed.kill()
    await killed.wait()
    daemon.messages.clear()
    try:
        await site.start()
        await daemon.reaches(T, "running")
        with fifo.open("w") as file:
            file.write("go on\n")
        assert (await daemon.reaches(T, "ended"))["program_exit"] == 0
        lines = daemon.output[T].decode().splitlines()
        assert sorted(lines) == ["north-1 one", "north-1 two", "north-2 one", "north-2 two"]
        assert (await daemon.reaches("8.1.0", "claimed"))["lrm_job"] == "2"
        assert daemon.report()["holding"] == ["8.1.0"]
    finally:
        await site.stop()
        site.cluster.stop()


AGENT = """
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


async def test_component_without_journal_entry_is_ignored(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    folder = site.settings.directory / "test" / T
    folder.mkdir(parents=True)
    (folder / "journal").write_text('\n{"submit": {"size": 1,')
    await site.start()
    try:
        assert daemon.inventories[-1] == []
        assert not folder.exists()
        await daemon.submit(T)
        await daemon.reaches(T, "claimed")
    finally:
        await site.stop()
        await asyncio.to_thread(site.cluster.stop)


@pytest.mark.parametrize("content", [b"", b"\0" * 30, b'{"host": "\xe9\xff\xfe\x80"}', b"[]", b'{"port": 1e99}'])
async def test_runners_find_agent_after_its_address_file_is_damaged(
    daemon: FakeDaemon, site: Site, content: bytes
) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 5"], T)
    await daemon.reaches(T, "running")
    await site.stop()
    site.settings.address_file.write_bytes(content)
    await site.start()
    await asyncio.to_thread((site.settings.directory / "test" / T / "go").touch)
    assert (await daemon.reaches(T, "ended"))["program_exit"] == 5


SLEEP = "echo $$; exec sleep 300"
PROGRAMS = {
    "plain": ["sh", "-c", SLEEP],
    "clean environment": ["env", "-i", "sh", "-c", SLEEP],
    "daemon": ["sh", "-c", f"env -i setsid sh -c '{SLEEP}' & wait"],
    "daemon without a parent": ["sh", "-c", f"(env -i setsid sh -c '{SLEEP}' &); sleep 300"],
    "ignores signals": ["env", "-i", "sh", "-c", "trap '' TERM HUP INT; echo $$; while :; do sleep 1; done"],
}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def run_program(daemon: FakeDaemon, program: list[str]) -> None:
    """Run a program as component ``T``, and wait for its first line."""
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(program, T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").endswith(b"\n"))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_runner_ends_program_when_lrm_is_killed(daemon: FakeDaemon, site: Site, program: list[str]) -> None:
    await run_program(daemon, program)
    assert len(alive(daemon.output[T])) == 1
    os.kill(int((site.cluster.directory / "locald.pid").read_text()), signal.SIGKILL)
    status = await daemon.reaches(T, "ended")
    assert alive(daemon.output[T]) == [], "none is left when it is told that it has ended"
    assert status["infrastructure"]
    assert "resource manager" in status["error"]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_component_ends_when_lrm_and_runner_are_killed(
    daemon: FakeDaemon, site: Site, program: list[str]
) -> None:
    await run_program(daemon, program)
    (pid,) = alive(daemon.output[T])
    locald = int((site.cluster.directory / "locald.pid").read_text())
    runners = children_of(locald)
    assert runners
    try:
        for each in (locald, *runners):
            os.kill(each, signal.SIGKILL)
        status = await daemon.reaches(T, "ended")
        assert alive(daemon.output[T]) == []
        assert status["infrastructure"]
    finally:
        if alive(daemon.output[T]):
            os.kill(pid, signal.SIGKILL)


STUCK = """
import pathlib, shutil, time
def stuck(path, ignore_errors):
    for name in ("journal", "stream.0"):
        (pathlib.Path(path) / name).unlink()
    time.sleep(1000)
shutil.rmtree = stuck
"""


async def test_agent_killed_during_forget_leaves_nothing(tmp_path: Path, daemon: FakeDaemon) -> None:
    site = Site(tmp_path, daemon)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK + AGENT, str(tmp_path), str(daemon.port))
    await daemon.wait_until(lambda: len(daemon.inventories) == 1)
    await site.finish(T, ["echo", "one"])
    folder = site.settings.directory / "test" / T
    forgotten = folder.with_name(f"{T}.forgotten")
    await daemon.command("forget", T)
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
        site.cluster.stop()


async def test_folder_of_killed_runner_is_removed(tmp_path: Path, daemon: FakeDaemon) -> None:
    with TemporaryDirectory(prefix="t") as base:
        site = Site(tmp_path, daemon)
        site.timeouts = AgentTimeouts(sweep_interval_s=0.05)
        environment = {**site.settings.environment, "TMPDIR": base}
        site.settings = replace(site.settings, environment=environment)
        await site.start()
        try:
            await daemon.submit(T)
            await daemon.reaches(T, "claimed")
            await daemon.open(["sh", "-c", "echo up; exec sleep 1000"], T, launcher="openmpi")
            await daemon.wait_until(lambda: daemon.output.get(T) == b"up\n")
            (folder,) = os.listdir(base)
            os.kill(holder_of(Path(base, folder, MARK)), signal.SIGKILL)
            assert (await daemon.reaches(T, "ended"))["infrastructure"]
            await daemon.wait_until(lambda: not os.listdir(base))
        finally:
            await site.stop()
            await asyncio.to_thread(site.cluster.stop)


def holder_of(path: Path) -> int:
    """The process that has a file locked: what a runner has open is shown to nobody but root."""
    inode = path.stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    (holder,) = {int(pid) for *_, pid, file, _, _ in locks if int(file.rpartition(":")[2]) == inode}
    return holder


ATTACKER = Path(__file__).with_name("attacker.py")
VICTIM, OTHER = "7.1.0", "8.1.0"
ROOTS_LOOK = ["setpriv", "--bounding-set=-sys_ptrace,-perfmon,-sys_admin"] if os.geteuid() == 0 else []
"""Root may look into every process, whatever it does against that: it is to be as any account is to itself."""


async def attack(site: Site, daemon: FakeDaemon, pids: list[int]) -> dict[str, object]:
    """What a job gets out of it."""
    await daemon.submit(OTHER)
    await daemon.reaches(OTHER, "claimed")
    program = [sys.executable, str(ATTACKER), str(site.settings.directory), str(site.cluster.directory)]
    await daemon.open([*ROOTS_LOOK, *program, VICTIM, ",".join(map(str, pids))], OTHER)
    status = await daemon.reaches(OTHER, "ended")
    assert status["program_exit"] == 0, daemon.output[OTHER]
    got: dict[str, object] = json.loads(daemon.output[OTHER])
    return got


async def victim(site: Site, daemon: FakeDaemon) -> tuple[Path, int]:
    """Somebody's job, which says who its runner is and waits at a gate."""
    await daemon.submit(VICTIM)
    await daemon.reaches(VICTIM, "claimed")
    gate = site.settings.directory / "gate"
    os.mkfifo(gate)
    await daemon.open(["sh", "-c", f"echo $PPID; read line < {gate}; echo genuine; exit 7"], VICTIM)
    await daemon.wait_until(lambda: b"\n" in daemon.output.get(VICTIM, b""))
    return gate, int(daemon.output[VICTIM])


@pytest.mark.evidence("J2", "J3", "J5", "C16")
async def test_another_jobs_program_gets_nothing_and_is_told_of(site: Site, daemon: FakeDaemon) -> None:
    gate, runner = await victim(site, daemon)
    locald = int(json.loads((site.cluster.directory / "locald.json").read_text())["pid"])
    got = await attack(site, daemon, [runner, locald])
    assert got["secrets"] is False
    assert got["heard"] == []
    assert got["memory"] == {str(runner): [], str(locald): []}
    assert got["orders"] == [["error", "kind"]] * 3
    told = daemon.received("impostor")
    assert (told[0]["token"], told[0]["how"]) == (VICTIM, "forged")
    gate.write_text("go on\n")
    status = await daemon.reaches(VICTIM, "ended")
    assert (status["program_exit"], status["error"]) == (7, "")
    assert daemon.output[VICTIM] == f"{runner}\ngenuine\n".encode()


@pytest.mark.evidence("J3")
async def test_result_written_by_another_job_is_ignored(site: Site, daemon: FakeDaemon) -> None:
    """While nobody listens, the runner's own word is in the same folder."""
    gate, runner = await victim(site, daemon)
    await attack(site, daemon, [runner])
    await site.stop()
    await site.start()
    await daemon.reaches(VICTIM, "running")
    gate.write_text("go on\n")
    status = await daemon.reaches(VICTIM, "ended")
    assert (status["program_exit"], status["error"], status["missing"]) == (7, "", "")
    assert daemon.output[VICTIM] == f"{runner}\ngenuine\n".encode()
