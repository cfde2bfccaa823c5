"""A dozen promises, each kept by a real daemon with real agents, runners and MPI programs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.certificates import Authority
from tests.grid.embedded import Embedded, close
from tests.grid.world import Gate, until

pytestmark = [pytest.mark.promise, pytest.mark.grid]

USER = "ada"
FOUR_NODES = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}, {"size": 2, "cluster": "south"}]}


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="koala-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> Iterator[Embedded]:
    """One daemon with TLS, two clusters for everybody and one of a user of their own."""
    folder = tmp_path_factory.mktemp("promises")
    authority = Authority(folder / "authority")
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
                "login_socket": str(sockets / "home.sock"),
            },
        },
        "users": {USER: {}},
        "rules": {"unreachable_after": 1},
        "tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
    }
    (folder / "koala.yaml").write_text(yaml.safe_dump(configuration))
    embedded = Embedded(folder / "data", KOALA_CONFIG=str(folder / "koala.yaml"))
    embedded.ca_file = authority.file
    yield embedded.start()
    embedded.settle()
    close(embedded)


def start(grid: Embedded, gate: Gate) -> int:
    """Submit a program that waits for the gate on two nodes of both clusters, and wait until it runs there."""
    return grid.start_waiting(gate, FOUR_NODES, 4)


def finish(grid: Embedded, ident: int, gate: Gate, restarts: int) -> None:
    grid.finish_waiting(ident, gate, restarts)
    grid.settle()


def test_submit_with_wait_prints_the_output_of_every_process(grid: Embedded) -> None:
    done = grid.run("submit", "--flexible", "6", "--launcher", "processes", "--wait", "--", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n" * 6), done.stderr


@pytest.mark.mpi
def test_mpi_job_over_two_clusters_runs_as_one_program(grid: Embedded) -> None:
    program = "from mpi4py.MPI import COMM_WORLD as w; s = w.allreduce(w.rank); w.rank or print('sum', s, 'of', w.size)"
    ident = grid.submit(FOUR_NODES, sys.executable, "-c", program, launcher="openmpi")
    job = grid.wait(ident)
    assert job["state"] == "succeeded", job
    assert grid.logs(ident) == "sum 6 of 4\n"


def test_killed_runner_restarts_the_job(grid: Embedded) -> None:
    gate = grid.gate()
    ident = start(grid, gate)
    node = min(program.node for program in grid.programs(ident))
    (runner,) = grid.runners(f"{ident}.", node)
    runner.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)


def test_killed_agent_leaves_the_job_running(grid: Embedded) -> None:
    gate = grid.gate()
    ident = start(grid, gate)
    grid.kill_agent("south")
    until(lambda: grid.cluster("south")["state"] == "usable", "a new agent to connect")
    finish(grid, ident, gate, restarts=0)


def test_killed_daemon_finds_its_jobs_again(grid: Embedded) -> None:
    gate = grid.gate()
    ident = start(grid, gate)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill()
    grid.start()
    assert grid.job(waiting)["state"] == "queued"
    finish(grid, ident, gate, restarts=0)
    assert grid.wait(waiting)["state"] == "succeeded"


def test_lost_resource_manager_restarts_the_job(grid: Embedded) -> None:
    gate = grid.gate()
    ident = start(grid, gate)
    grid.resource_manager("south").kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)


def test_high_priority_job_preempts_a_low_one_that_runs_again(grid: Embedded) -> None:
    low_gate, high_gate = grid.gate(), grid.gate()
    low = start(grid, low_gate)
    high = grid.submit({"type": "flexible", "total_size": 8}, *high_gate.hold, priority="high")
    grid.wait_state(high, "running")
    job = grid.job(low)
    assert [entry["event"] for entry in job["timeline"]].count("preempted") == 1, job
    high_gate.open()
    assert grid.wait(high)["state"] == "succeeded"
    finish(grid, low, low_gate, restarts=0)


def test_cancel_leaves_no_process(grid: Embedded) -> None:
    ident = start(grid, grid.gate())
    assert grid.run("cancel", str(ident)).returncode == 0
    assert grid.wait(ident)["state"] == "cancelled"
    grid.settle()


def test_staged_script_runs_on_both_clusters_and_its_files_are_fetched(grid: Embedded, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\nmkdir out && echo "from $KOALA_CLUSTER" > "out/$KOALA_COMPONENT.txt"\n')
    script.chmod(0o755)
    options = ["--stage", str(script), "--collect", "out/*", "--launcher", "processes"]
    done = grid.run("submit", "--fixed", "north:1,south:1", *options, "--wait", "--json", "--", "./run.sh")
    assert done.returncode == 0, done.stderr
    ident = max(job["id"] for job in grid.http.get("/api/v1/jobs").json()["jobs"])
    fetched = grid.run("fetch", str(ident), "--to", str(tmp_path / "results"))
    assert fetched.returncode == 0, fetched.stderr
    results = {path.name: path.read_text() for path in (tmp_path / "results").rglob("*.txt")}
    assert results == {"0.txt": "from north\n", "1.txt": "from south\n"}


def test_login_through_an_agent_submits_as_its_user(grid: Embedded, sockets: Path, tmp_path: Path) -> None:
    home = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")} | {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "KOALA_LOGIN_SOCKET": str(sockets / "home.sock"),
        "KOALA_CA_FILE": str(grid.ca_file),
    }
    until((sockets / "home.sock").exists, "the agent to accept logins")

    def koala(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*grid.koala, *words], env=home, capture_output=True, text=True, timeout=60, check=False)

    done = koala("submit", "--fixed", "home:1", "--launcher", "processes", "--wait", "--", "true")
    assert done.returncode == 0, done.stderr
    assert koala("whoami").stdout.startswith(f"{USER}, user, ")
    job = grid.http.get("/api/v1/jobs", params={"limit": 1}).json()["jobs"][0]
    assert (job["owner"], job["state"]) == (USER, "succeeded")


def test_tls_refuses_a_client_that_does_not_trust_the_daemon(grid: Embedded, tmp_path: Path) -> None:
    environment = grid.environment | {"XDG_STATE_HOME": str(tmp_path), "KOALA_TOKEN": grid.shown}

    def clusters(**more: str) -> "subprocess.CompletedProcess[str]":
        command = [*grid.koala, "clusters", "--url", grid.url]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=60, check=False)

    refused = clusters()
    assert (refused.returncode, refused.stdout) == (5, "")
    assert "--ca-file or KOALA_CA_FILE" in refused.stderr
    assert clusters(KOALA_CA_FILE=str(grid.ca_file)).returncode == 0


@pytest.mark.mpi
def test_demo_passes_its_own_check(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")} | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "koalapy.cli.main", "demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "The program's own check passed." in done.stdout
