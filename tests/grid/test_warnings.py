"""Programs that save their state on a warning signal and resume from it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, time
state, gate = sys.argv[1] + "." + os.environ["KOALA_NODE_INDEX"], sys.argv[2]
done = int(open(state).read()) if os.path.exists(state) else 0
def save(number, frame):
    with open(state + ".new", "w") as file:
        file.write(str(done))
    os.replace(state + ".new", state)
    # The interrupted code may be printing.
    os.write(1, f"saved at {done} by {signal.Signals(number).name}".encode() + bytes([10]))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
begin, done = done, done + 1
print("from", begin, flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
while not os.path.exists(gate):
    done += 1
    time.sleep(0.02)
print("done", flush=True)
"""

TOGETHER = """
import os, signal, sys, time
from mpi4py import MPI
state, gate, grid = sys.argv[1], sys.argv[2], MPI.COMM_WORLD
done = grid.bcast(int(open(state).read()) if os.path.exists(state) else 0)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print("from", done, flush=True)
while not grid.allreduce(os.path.exists(gate), MPI.LOR):
    if grid.allreduce(len(told), MPI.MIN):
        if grid.rank == 0:
            open(state, "w").write(str(done))
        grid.Barrier()
        sys.exit(0)
    done += 1
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    embedded = EmbeddedGrid(tmp_path_factory.mktemp("grid") / "data").start()
    yield embedded
    embedded.wait_until_idle()
    close_grid(embedded)


class SavingJob:
    """A job on two nodes of north with programs that save their progress in files."""

    def __init__(self, grid: EmbeddedGrid, folder: Path, warning: str = "TERM@60", **fields: Any) -> None:
        self.grid, self.state, self.gate = grid, folder / "state", folder / "gate"
        request = {"type": "fixed", "components": [{"size": 2, "cluster": fields.pop("cluster", "north")}]}
        # A signal that arrives before Python handles it stays pending.
        early = ("env", "--block-signal=TERM,USR1")
        command = (*early, sys.executable, "-u", "-c", PROGRAM, str(self.state), str(self.gate))
        self.ident = grid.submit(request, *command, warning=warning, **fields)
        self.runs()

    def runs(self, generation: int = 1) -> None:
        """Wait until the attempt runs and handles its signals."""
        wait_until(lambda: self.grid.get_job(self.ident)["generation"] == generation, "the attempt")
        wait_until(lambda: self.grid.read_output(self.ident).count("from ") == 2, "both of its programs to be ready")

    def ends(self) -> dict[str, Any]:
        self.gate.touch()
        return self.grid.wait_for_end(self.ident)

    def events(self, name: str) -> list[str]:
        return [entry["reason"] for entry in self.grid.get_job(self.ident)["timeline"] if entry["event"] == name]

    def saved(self) -> list[int]:
        return [int(self.state.with_name(f"state.{index}").read_text()) for index in (0, 1)]


def check_resumed_from_saved_step(job: SavingJob) -> None:
    """Check that the programs resumed from their saved steps without a failure."""
    job.runs(2)
    saved = job.saved()
    assert min(saved) > 0
    end = job.ends()
    assert (end["state"], end["generation"], end["restarts"]) == ("succeeded", 2, 0)
    lines = job.grid.read_output(job.ident).splitlines()
    assert sorted(line for line in lines if line != "done") == sorted(f"from {step}" for step in saved)
    assert len(job.events("warned")) == 1
    assert not job.events("not-warned")


def test_preempted_job_saves_state_and_resumes(grid: EmbeddedGrid, tmp_path: Path) -> None:
    job = SavingJob(grid, tmp_path)
    high = grid.submit(
        {"type": "fixed", "components": [{"size": grid.nodes["north"], "cluster": "north"}]},
        "true",
        launcher="processes",
        priority="high",
    )
    assert grid.wait_for_end(high)["generation"] == 1, "it has waited for the grace"
    check_resumed_from_saved_step(job)


@pytest.mark.mpi
def test_preemption_signal_reaches_ranks_but_not_mpirun(grid: EmbeddedGrid, tmp_path: Path) -> None:
    """The program saves its state only if all ranks received the signal."""
    state, gate = tmp_path / "state", tmp_path / "gate"
    both = {"type": "fixed", "components": [{"size": 2, "cluster": name} for name in ("north", "south")]}
    command = (sys.executable, "-u", "-c", TOGETHER, str(state), str(gate))
    ident = grid.submit(both, *command, launcher="openmpi", warning="TERM@60")
    wait_until(lambda: grid.read_output(ident).count("from 0") == 4, "all ranks")
    all_of_north = {"type": "fixed", "components": [{"size": grid.nodes["north"], "cluster": "north"}]}
    high = grid.submit(all_of_north, "true", priority="high")
    assert grid.wait_for_end(high)["generation"] == 1
    saved = int(state.read_text())
    wait_until(lambda: grid.read_output(ident).count(f"from {saved}") == 4, "all ranks to confirm")
    gate.touch()
    end = grid.wait_for_end(ident)
    assert (end["state"], end["generation"], end["restarts"]) == ("succeeded", 2, 0)
    events = [entry["event"] for entry in end["timeline"]]
    assert (events.count("warned"), events.count("not-warned")) == (2, 0)
