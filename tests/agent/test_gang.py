"""One MPI program over two embedded clusters, each with its own agent."""

import os
import signal
import sys

import pytest

from tests.agent.conftest import FakeDaemon, Site, running_pids

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

HEAD, TAIL = "7.1.0", "7.1.1"


async def claim_gang(daemon: FakeDaemon, north: int, south: int) -> None:
    await daemon.submit_component(HEAD, north, "north")
    await daemon.submit_component(TAIL, south, "south")
    for token in (HEAD, TAIL):
        await daemon.wait_for_state(token, "claimed")


async def test_gang_runs_one_program_over_two_clusters(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim_gang(daemon, 3, 3)
    code = (
        "from mpi4py import MPI; import os; c = MPI.COMM_WORLD; print(os.environ['SITE'], c.allreduce(1), flush=True)"
    )
    await daemon.open_barrier([sys.executable, "-c", code], HEAD, TAIL, launcher="openmpi")
    head, tail = await daemon.wait_for_state(HEAD, "ended"), await daemon.wait_for_state(TAIL, "ended")
    assert (head["program_exit"], head["error"]) == (0, "")
    assert (tail["program_exit"], tail["error"]) == (None, "")
    assert sorted(daemon.output[HEAD].splitlines()) == [b"north 6"] * 3 + [b"south 6"] * 3


async def test_relay_to_lost_remote_runner_is_reported(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim_gang(daemon, 1, 2)
    await daemon.open_barrier(["sh", "-c", "echo $SITE $$; exec sleep 1000"], HEAD, TAIL, launcher="openmpi")
    await daemon.wait_until(lambda: daemon.output.get(HEAD, b"").count(b"\n") == 3)
    rank = next(int(line.split()[1]) for line in daemon.output[HEAD].splitlines() if line.startswith(b"south"))
    os.kill(find_runner(rank), signal.SIGKILL)
    tail = await daemon.wait_for_state(TAIL, "ended")
    assert tail["infrastructure"]
    assert "signal 9" in tail["error"]
    await daemon.send_command("stop", HEAD, reason="the other component was lost")
    head = await daemon.wait_for_state(HEAD, "ended")
    assert head["program_exit"] != 0
    await daemon.wait_until(lambda: all(daemon.report(c)["idle"] == 4 for c in ("north", "south")))


async def test_cancelled_gang_leaves_no_process(site: Site, other_site: Site, daemon: FakeDaemon) -> None:
    await claim_gang(daemon, 2, 1)
    await daemon.open_barrier(["sh", "-c", "setsid sleep 1000 & echo $!; wait"], HEAD, TAIL, launcher="openmpi")
    await daemon.wait_until(lambda: daemon.output.get(HEAD, b"").count(b"\n") == 3)
    pids = daemon.output[HEAD]
    for token in (TAIL, HEAD):
        await daemon.send_command("stop", token, reason="cancelled")
    for token in (TAIL, HEAD):
        end = await daemon.wait_for_state(token, "ended")
        assert not end["infrastructure"]
    assert running_pids(pids) == []


def find_runner(pid: int) -> int:
    """Return the runner above a process: a fork of locald."""
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline, open(f"/proc/{pid}/stat") as stat:
        return pid if b"locald.py" in cmdline.read() else find_runner(int(stat.read().rsplit(")")[1].split()[1]))
