"""Jobs of users on a live grid: placement, output, exit codes, walltimes."""

import json

import pytest

from tests.grid.grid import Grid, wait_until
from tests.runner.test_host_names import WHO_SHARES, assert_groups_agree

pytestmark = pytest.mark.processes

FLEXIBLE_6 = {"type": "flexible", "total_size": 6}
ONE = {"type": "flexible", "total_size": 1}


def read_sizes(job: dict) -> dict[str, int]:  # type: ignore[type-arg]
    return {c["cluster"]: c["size"] for c in job["components"]}


@pytest.mark.mpi
def test_flexible_mpi_job_spans_all_clusters(grid: Grid) -> None:
    command = ["--", "python", "-m", "koalapy.apps.poisson", "--grid", "64"]
    result = grid.run_koala("submit", "--flexible", "8", "--ppn", "1", "--wait", "--json", *command)
    assert result.returncode == 0, result.stderr
    job = json.loads(result.stdout)
    assert job["state"] == "succeeded"
    assert read_sizes(job) == grid.nodes
    output = grid.read_output(job["id"])
    assert "passed" in output
    used_nodes = {line.split(" on ")[1].split()[0] for line in output.splitlines() if line.startswith("rank ")}
    assert len(used_nodes) == 8


@pytest.mark.mpi
def test_mpi_job_starts_ranks_per_node(grid: Grid) -> None:
    ident = grid.submit(FLEXIBLE_6, "python", "-m", "koalapy.apps.prime", launcher="openmpi", processes_per_node=2)
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    output = grid.read_output(ident)
    assert sum(line.startswith("rank ") for line in output.splitlines()) == 12


@pytest.mark.mpi
def test_mpi_ranks_share_memory_within_their_node(grid: Grid) -> None:
    """Distinguish embedded nodes, which share one host name."""
    ident = grid.submit(FLEXIBLE_6, grid.python, "-c", WHO_SHARES, launcher="openmpi", processes_per_node=2)
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    rank_groups = json.loads(grid.read_output(ident).splitlines()[-1])
    assert len(rank_groups) == 12
    assert_groups_agree(rank_groups)


@pytest.mark.mpi
def test_coupled_programs_run_as_one_mpi_job(grid: Grid) -> None:
    program = (
        "import os; from mpi4py import MPI; c = MPI.COMM_WORLD; "
        "print(*c.gather(os.environ['PART'], 0) or ['-'], c.size, flush=True)"
    )
    components = [
        {"size": 2, "environment": {"PART": "ocean"}, "command": [grid.python, "-c", program]},
        {"size": 3, "environment": {"PART": "air"}, "command": [grid.python, "-c", program + "; 1"]},
    ]
    ident = grid.submit({"type": "nonfixed", "components": components}, launcher="openmpi")
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    first = next(line for line in grid.read_output(ident).splitlines() if not line.startswith("-"))
    assert sorted(first.split()[:5]) == ["air"] * 3 + ["ocean"] * 2


def test_fixed_components_run_in_their_clusters(grid: Grid) -> None:
    request = {"type": "fixed", "components": [{"size": 1, "cluster": "south"}, {"size": 3, "cluster": "north"}]}
    ident = grid.submit(request, "sh", "-c", "echo $KOALA_CLUSTER $KOALA_NODE $KOALA_NODES")
    job = grid.wait_for_end(ident)
    assert [(c["cluster"], c["size"]) for c in job["components"]] == [("south", 1), ("north", 3)]
    assert sorted(grid.read_output(ident).splitlines()) == [
        "north north-1 4",
        "north north-2 4",
        "north north-3 4",
        "south south-1 4",
    ]


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["sh", "-c", "echo so far; exit 3"], 3, "so far"),
        (["no-such-program"], 127, "command not found: no-such-program"),
        (["sh", "-c", "kill -9 $$"], 137, ""),
    ],
)
@pytest.mark.parametrize("launcher", ["processes", pytest.param("openmpi", marks=pytest.mark.mpi)])
def test_failed_program_fails_the_job(grid: Grid, launcher: str, command: list[str], code: int, says: str) -> None:
    ident = grid.submit(FLEXIBLE_6, *command, launcher=launcher)
    job = grid.wait_for_end(ident)
    # mpirun 5.0.11 itself crashes in about 1 of 100 runs when a rank fails, and then the job is correctly restarted.
    crashes = sum("mpirun was killed by signal 11" in e["reason"] for e in job["timeline"] if e["event"] == "requeued")
    assert (job["state"], job["exit_code"], job["restarts"]) == ("failed", code, crashes)
    assert says in grid.read_output(ident)
    assert not any(c["errors"] for c in grid.list_clusters())


@pytest.mark.parametrize("launcher", ["processes", pytest.param("openmpi", marks=pytest.mark.mpi)])
def test_cancelled_job_leaves_no_process(grid: Grid, launcher: str) -> None:
    stubborn = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 300 & wait' & echo up; sleep 300 & wait; sleep 300"
    ident = grid.submit(FLEXIBLE_6, "sh", "-c", stubborn, launcher=launcher)
    grid.wait_for_state(ident, "running")
    wait_until(lambda: grid.read_output(ident).count("up") == 6, "every rank to be up")
    assert grid.list_workers(f"{ident}.")
    grid.cancel(ident)
    job = grid.wait_for_end(ident)
    assert job["state"] == "cancelled"
    assert grid.list_workers(f"{ident}.") == []
    grid.wait_until_idle()


def test_job_over_its_walltime_is_ended(grid: Grid) -> None:
    job = grid.wait_for_end(grid.submit(ONE, "sleep", "300", walltime=1))
    assert job["state"] == "failed"
    assert job["reason"] == "walltime of 1 s exceeded"


def test_job_output_is_written_to_file(grid: Grid) -> None:
    folder = grid.make_folder()
    ident = grid.submit(ONE, "echo", "hello", workdir=folder.path, output="out.txt")
    job = grid.wait_for_end(ident)
    assert job["state"] == "succeeded"
    assert folder.read("out.txt", job["components"][0]["cluster"]) == "hello\n"
    assert grid.read_output(ident) == "hello\n"


def test_logs_follow_prints_output_as_written(grid: Grid) -> None:
    gate = grid.make_gate()
    ident = grid.submit(ONE, "sh", "-c", f"echo first; while [ ! -e {gate.path} ]; do sleep 0.05; done; echo second")
    with grid.http.stream("GET", f"/api/v1/jobs/{ident}/logs", params={"follow": True}) as stream:
        pieces = stream.iter_text()
        assert next(pieces) == "first\n"
        gate.open()
        assert "".join(pieces) == "second\n"
