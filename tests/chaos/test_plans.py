"""One seed, one plan; and nobody's processes but the grid's own are ever touched."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos import victims
from tests.chaos.faults import LONGEST_STOP, plan_faults
from tests.chaos.injector import Waker
from tests.chaos.workload import CLUSTERS, KINDS, plan_jobs, plan_local_users
from tests.grid.grid import wait_until


def test_a_seed_is_a_plan() -> None:
    assert plan_jobs(7, 50) == plan_jobs(7, 50) != plan_jobs(8, 50)
    assert plan_jobs(7, 50) == plan_jobs(7, 60)[:50]
    assert plan_local_users(7, 9, 60) == plan_local_users(7, 9, 60) != plan_local_users(8, 9, 60)
    assert plan_faults(7, 50, 60, database=True) == plan_faults(7, 50, 60, database=True)


def test_a_whole_plan_has_something_of_everything() -> None:
    jobs, faults = plan_jobs(1, 700), plan_faults(1, 200, 200, database=True)
    assert {job.kind for job in jobs} == KINDS.keys()
    assert {job.body["request"]["type"] for job in jobs} == {"fixed", "nonfixed", "flexible"}
    assert {job.body["priority"] for job in jobs} == {"high", "low"}
    assert {job.body["claiming"] for job in jobs} == {"atomic", "incremental"}
    assert {fault.whom for fault in faults} == {"daemon", "agent", "lrm", "runner", "mpi", "database"}
    assert {fault.moment for fault in faults} == {"any", "start-up", "barrier", "forgetting", "draining"}
    assert all(0 <= fault.at <= 200 and 0 <= fault.seconds <= LONGEST_STOP for fault in faults)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)


def test_every_job_can_be_placed_on_the_idle_grid() -> None:
    for job in plan_jobs(2, 700):
        request = job.body["request"]
        if request["type"] == "fixed":
            assert all(one["size"] <= CLUSTERS[one["cluster"]] for one in request["components"])
        elif request["type"] == "nonfixed":
            assert max(one["size"] for one in request["components"]) <= max(CLUSTERS.values())
        else:
            assert request["total_size"] <= sum(CLUSTERS.values())


@pytest.fixture
def process(tmp_path: Path) -> "subprocess.Popen[bytes]":
    """One that names the folder in its environment only, as ranks do."""
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(words, env={"LOCALD_MARK": f"1.0@{tmp_path}/data"})
    yield process
    process.kill()
    process.wait()


@pytest.mark.processes
def test_only_what_names_the_folder_is_a_victim(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    wait_until(lambda: process.pid in victims.everything(tmp_path), "it to be seen")
    assert victims.everything(tmp_path / "other") == {}
    assert victims.victim("runner", process.pid, tmp_path / "other") is None
    found = victims.victim("runner", process.pid, tmp_path)
    assert found is not None
    assert found.signal(signal.SIGKILL)
    process.wait()
    assert not found.alive
    assert not found.signal(signal.SIGKILL), "its number may be another's by now"
    found.close()


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_what_was_stopped_goes_on_when_its_time_has_come_or_all_is_over(
    tmp_path: Path, process: "subprocess.Popen[bytes]", seconds: float
) -> None:
    waker = Waker()
    waker.start()
    wait_until(lambda: process.pid in victims.everything(tmp_path), "it to be seen")
    found = victims.victim("runner", process.pid, tmp_path)
    assert found is not None
    found.signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it to stop")
    waker.add(found, seconds)
    if seconds:
        waker.close()
    wait_until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED, "it to go on")
    waker.close()
