"""A job's program goes for another job's node of the same account: it reads, guesses, forges and orders, in vain."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.agent.conftest import FakeDaemon, Site

pytestmark = pytest.mark.processes

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
    await daemon.until(lambda: b"\n" in daemon.output.get(VICTIM, b""))
    return gate, int(daemon.output[VICTIM])


async def test_another_jobs_program_gets_nothing_and_is_told_of(site: Site, daemon: FakeDaemon) -> None:
    gate, runner = await victim(site, daemon)
    locald = int(json.loads((site.cluster.directory / "locald.json").read_text())["pid"])
    got = await attack(site, daemon, [runner, locald])
    assert got["secrets"] is False
    assert got["heard"] == []
    assert got["memory"] == {str(runner): [], str(locald): []}
    assert got["orders"] == [["error", "kind"]] * 3
    told = daemon.said("impostor")
    assert (told[0]["token"], told[0]["how"]) == (VICTIM, "forged")
    gate.write_text("go on\n")
    status = await daemon.reaches(VICTIM, "ended")
    assert (status["program_exit"], status["error"]) == (7, "")
    assert daemon.output[VICTIM] == f"{runner}\ngenuine\n".encode()


async def test_a_result_that_another_job_wrote_is_none_for_the_next_agent(site: Site, daemon: FakeDaemon) -> None:
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
