"""One MPI program over two embedded clusters, each behind an agent of its own."""

import os
import signal
import sys

import pytest

from tests.agent.conftest import FakeDaemon, Site, alive

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

HEAD, TAIL = "7.1.0", "7.1.1"


async def claim(daemon: FakeDaemon, north: int, south: int) -> None:
    await daemon.submit(HEAD, north, "north")
    await daemon.submit(TAIL, south, "south")
    for token in (HEAD, TAIL):
        await daemon.reaches(token, "claimed")


async def test_gang_runs_one_program_over_two_clusters(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim(daemon, 3, 3)
    code = (
        "from mpi4py import MPI; import os; c = MPI.COMM_WORLD; print(os.environ['SITE'], c.allreduce(1), flush=True)"
    )
    await daemon.open([sys.executable, "-c", code], HEAD, TAIL, launcher="openmpi")
    head, tail = await daemon.reaches(HEAD, "ended"), await daemon.reaches(TAIL, "ended")
    assert (head["program_exit"], head["error"]) == (0, "")
    assert (tail["program_exit"], tail["error"]) == (None, "")
    assert sorted(daemon.output[HEAD].splitlines()) == [b"north 6"] * 3 + [b"south 6"] * 3


async def test_relay_to_lost_remote_runner_is_reported(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim(daemon, 1, 2)
    await daemon.open(["sh", "-c", "echo $SITE $$; exec sleep 1000"], HEAD, TAIL, launcher="openmpi")
    await daemon.wait_until(lambda: daemon.output.get(HEAD, b"").count(b"\n") == 3)
    rank = next(int(line.split()[1]) for line in daemon.output[HEAD].splitlines() if line.startswith(b"south"))
    os.kill(runner_above(rank), signal.SIGKILL)
    tail = await daemon.reaches(TAIL, "ended")
    assert tail["infrastructure"]
    assert "signal 9" in tail["error"]
    await daemon.command("stop", HEAD, reason="the other component was lost")
    head = await daemon.reaches(HEAD, "ended")
    assert head["program_exit"] != 0
    await daemon.wait_until(lambda: all(daemon.report(c)["idle"] == 4 for c in ("north", "south")))


async def test_cancelled_gang_leaves_no_process(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim(daemon, 2, 1)
    await daemon.open(["sh", "-c", "setsid sleep 1000 & echo $!; wait"], HEAD, TAIL, launcher="openmpi")
    await daemon.wait_until(lambda: daemon.output.get(HEAD, b"").count(b"\n") == 3)
    pids = daemon.output[HEAD]
    for token in (TAIL, HEAD):
        await daemon.command("stop", token, reason="cancelled")
    for token in (TAIL, HEAD):
        end = await daemon.reaches(token, "ended")
        assert not end["infrastructure"]
    assert alive(pids) == []


def runner_above(pid: int) -> int:
    """The runner below which a process runs: a fork of locald."""
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline, open(f"/proc/{pid}/stat") as stat:
        return pid if b"locald.py" in cmdline.read() else runner_above(int(stat.read().rsplit(")")[1].split()[1]))
