"""Plans are determined by their seed, and only processes of the grid are targets."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos import victims
from tests.chaos.faults import MAX_STOP_S, plan_faults
from tests.chaos.injector import Waker
from tests.chaos.workload import CLUSTERS, KINDS, plan_jobs, plan_local_users
from tests.grid.grid import wait_until


def test_equal_seeds_give_equal_plans() -> None:
    assert plan_jobs(7, 50) == plan_jobs(7, 50) != plan_jobs(8, 50)
    assert plan_jobs(7, 50) == plan_jobs(7, 60)[:50]
    assert plan_local_users(7, 9, 60) == plan_local_users(7, 9, 60) != plan_local_users(8, 9, 60)
    assert plan_faults(7, 50, 60, database=True) == plan_faults(7, 50, 60, database=True)


def test_full_plan_contains_every_kind() -> None:
    jobs, faults = plan_jobs(1, 700), plan_faults(1, 200, 200, database=True)
    assert {job.kind for job in jobs} == KINDS.keys()
    assert {job.body["request"]["type"] for job in jobs} == {"fixed", "nonfixed", "flexible"}
    assert {job.body["priority"] for job in jobs} == {"high", "low"}
    assert {job.body["claiming"] for job in jobs} == {"atomic", "incremental"}
    assert {fault.target for fault in faults} == {"daemon", "agent", "lrm", "runner", "mpi", "database"}
    assert {fault.timing for fault in faults} == {"any", "start-up", "barrier", "forgetting", "draining"}
    assert all(0 <= fault.time_s <= 200 and 0 <= fault.seconds <= MAX_STOP_S for fault in faults)
    assert [fault.time_s for fault in faults] == sorted(fault.time_s for fault in faults)


def test_every_job_fits_the_idle_grid() -> None:
    for job in plan_jobs(2, 700):
        request = job.body["request"]
        if request["type"] == "fixed":
            assert all(component["size"] <= CLUSTERS[component["cluster"]] for component in request["components"])
        elif request["type"] == "nonfixed":
            assert max(component["size"] for component in request["components"]) <= max(CLUSTERS.values())
        else:
            assert request["total_size"] <= sum(CLUSTERS.values())


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that names the folder only in its environment, as ranks do."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(command, env={"LOCALD_MARK": f"1.0@{tmp_path}/data"})
    yield process
    process.kill()
    process.wait()


@pytest.mark.processes
def test_victim_must_name_the_folder_of_the_grid(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    wait_until(lambda: process.pid in victims.list_processes(tmp_path), "it to be found")
    assert victims.list_processes(tmp_path / "other") == {}
    assert victims.open_victim("runner", process.pid, tmp_path / "other") is None
    victim = victims.open_victim("runner", process.pid, tmp_path)
    assert victim is not None
    assert victim.signal(signal.SIGKILL)
    process.wait()
    assert not victim.is_alive
    assert not victim.signal(signal.SIGKILL), "its process id may have been reused"
    victim.close()


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_suspended_process_is_resumed_in_time_or_at_end(
    tmp_path: Path, process: "subprocess.Popen[bytes]", seconds: float
) -> None:
    waker = Waker()
    waker.start()
    wait_until(lambda: process.pid in victims.list_processes(tmp_path), "it to be found")
    victim = victims.open_victim("runner", process.pid, tmp_path)
    assert victim is not None
    victim.signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it to stop")
    waker.add(victim, seconds)
    if seconds:
        waker.close()
    wait_until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED, "it to go on")
    waker.close()
