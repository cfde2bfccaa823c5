"""The main features of the README, end to end: a daemon with its agents, runners and MPI programs. Ring 1."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.certificates import CertificateAuthority
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import Gate, wait_until

pytestmark = [pytest.mark.promise, pytest.mark.grid]

USER = "ada"
FOUR_NODES = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}, {"size": 2, "cluster": "south"}]}


@pytest.fixture(scope="module")
def socket_folder() -> Iterator[Path]:
    """Yield a folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="koala-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, socket_folder: Path) -> Iterator[EmbeddedGrid]:
    """Yield a daemon with TLS, two shared clusters, and a cluster that belongs to one user."""
    folder = tmp_path_factory.mktemp("end-to-end")
    authority = CertificateAuthority(folder / "authority")
    pair = authority.issue()
    configuration = {
        "clusters": {
            "north": {"nodes": 4},
            "south": {"nodes": 4},
            "home": {
                "nodes": 1,
                "network": "127.0.93",
                "identity": "own",
                "user": USER,
                "login_socket": str(socket_folder / "home.sock"),
            },
        },
        "users": {USER: {}},
        "rules": {"unreachable_after": 1},
        "tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
    }
    (folder / "koala.yaml").write_text(yaml.safe_dump(configuration))
    embedded = EmbeddedGrid(folder / "data", KOALA_CONFIG=str(folder / "koala.yaml"))
    embedded.ca_file = authority.file
    try:
        yield embedded.start()
        embedded.wait_until_idle()
    finally:
        close_grid(embedded)


def start_job(grid: EmbeddedGrid, gate: Gate) -> int:
    """Submit a program that waits for the gate on two nodes of both clusters, and wait until it runs there."""
    return grid.start_gated_job(gate, FOUR_NODES, 4)


def finish_job(grid: EmbeddedGrid, ident: int, gate: Gate, restarts: int) -> None:
    grid.finish_gated_job(ident, gate, restarts)
    grid.wait_until_idle()


def test_submit_with_wait_prints_the_output_of_every_process(grid: EmbeddedGrid) -> None:
    result = grid.run_koala("submit", "--flexible", "6", "--launcher", "processes", "--wait", "--", "echo", "hello")
    assert (result.returncode, result.stdout) == (0, "hello\n" * 6), result.stderr


@pytest.mark.mpi
def test_mpi_job_over_two_clusters_runs_as_one_program(grid: EmbeddedGrid) -> None:
    program = "from mpi4py.MPI import COMM_WORLD as w; s = w.allreduce(w.rank); w.rank or print('sum', s, 'of', w.size)"
    ident = grid.submit(FOUR_NODES, sys.executable, "-c", program, launcher="openmpi")
    job = grid.wait_for_end(ident)
    assert job["state"] == "succeeded", job
    assert grid.read_output(ident) == "sum 6 of 4\n"


def test_killed_runner_restarts_the_job(grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate)
    node = min(program.node for program in grid.list_programs(ident))
    (runner,) = grid.list_runners(f"{ident}.", node)
    runner.kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish_job(grid, ident, gate, restarts=1)


def test_killed_agent_leaves_the_job_running(grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate)
    grid.kill_agent("south")
    wait_until(lambda: grid.get_cluster("south")["state"] == "usable", "a new agent to connect")
    finish_job(grid, ident, gate, restarts=0)


def test_restarted_daemon_resumes_its_jobs(grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill_daemon()
    grid.start()
    assert grid.get_job(waiting)["state"] == "queued"
    finish_job(grid, ident, gate, restarts=0)
    assert grid.wait_for_end(waiting)["state"] == "succeeded"


def test_lost_resource_manager_restarts_the_job(grid: EmbeddedGrid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate)
    grid.find_resource_manager("south").kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish_job(grid, ident, gate, restarts=1)


def test_high_priority_job_preempts_and_restarts_low_one(grid: EmbeddedGrid) -> None:
    low_gate, high_gate = grid.make_gate(), grid.make_gate()
    low = start_job(grid, low_gate)
    high = grid.submit({"type": "flexible", "total_size": 8}, *high_gate.hold, priority="high")
    grid.wait_for_state(high, "running")
    job = grid.get_job(low)
    assert [entry["event"] for entry in job["timeline"]].count("preempted") == 1, job
    high_gate.open()
    assert grid.wait_for_end(high)["state"] == "succeeded"
    finish_job(grid, low, low_gate, restarts=0)


def test_cancel_leaves_no_process(grid: EmbeddedGrid) -> None:
    ident = start_job(grid, grid.make_gate())
    assert grid.run_koala("cancel", str(ident)).returncode == 0
    assert grid.wait_for_end(ident)["state"] == "cancelled"
    grid.wait_until_idle()


def test_staged_script_runs_and_its_results_are_fetched(grid: EmbeddedGrid, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\nmkdir out && echo "from $KOALA_CLUSTER" > "out/$KOALA_COMPONENT.txt"\n')
    script.chmod(0o755)
    options = ["--stage", str(script), "--collect", "out/*", "--launcher", "processes"]
    submission = grid.run_koala("submit", "--fixed", "north:1,south:1", *options, "--wait", "--json", "--", "./run.sh")
    assert submission.returncode == 0, submission.stderr
    ident = max(job["id"] for job in grid.http.get("/api/v1/jobs").json()["jobs"])
    download = grid.run_koala("fetch", str(ident), "--to", str(tmp_path / "results"))
    assert download.returncode == 0, download.stderr
    results = {path.name: path.read_text() for path in (tmp_path / "results").rglob("*.txt")}
    assert results == {"0.txt": "from north\n", "1.txt": "from south\n"}


def test_login_through_an_agent_submits_as_its_user(grid: EmbeddedGrid, socket_folder: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")} | {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "KOALA_LOGIN_SOCKET": str(socket_folder / "home.sock"),
        "KOALA_CA_FILE": str(grid.ca_file),
    }
    wait_until((socket_folder / "home.sock").exists, "the agent to accept logins")

    def koala(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*grid.koala_command, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    submission = koala("submit", "--fixed", "home:1", "--launcher", "processes", "--wait", "--", "true")
    assert submission.returncode == 0, submission.stderr
    assert koala("whoami").stdout.startswith(f"{USER}, user, ")
    job = grid.http.get("/api/v1/jobs", params={"limit": 1}).json()["jobs"][0]
    assert (job["owner"], job["state"]) == (USER, "succeeded")


def test_tls_client_without_ca_file_is_rejected(grid: EmbeddedGrid, tmp_path: Path) -> None:
    environment = grid.environment | {"XDG_STATE_HOME": str(tmp_path), "KOALA_TOKEN": grid.admin_token}

    def list_clusters(**variables: str) -> "subprocess.CompletedProcess[str]":
        command = [*grid.koala_command, "clusters", "--url", grid.url]
        return subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=60, check=False
        )

    rejected = list_clusters()
    assert (rejected.returncode, rejected.stdout) == (5, "")
    assert "--ca-file or KOALA_CA_FILE" in rejected.stderr
    assert list_clusters(KOALA_CA_FILE=str(grid.ca_file)).returncode == 0


@pytest.mark.mpi
def test_demo_passes_its_own_check(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")} | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "koalapy.cli.main", "demo"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "The program's own check passed." in result.stdout
