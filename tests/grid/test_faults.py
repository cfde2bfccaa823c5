"""Something dies: afterwards the books are right, no node stays held, no process is left."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.conftest import Grid, Seen, until

MakeGrid = Callable[..., Grid]
FLEXIBLE_6 = {"type": "flexible", "total_size": 6}
MPI = pytest.param("openmpi", marks=pytest.mark.mpi)
HOLD = "while [ ! -e {go} ]; do sleep 0.05; done; echo done"


@pytest.fixture
def grid(make_grid: MakeGrid) -> Grid:
    return make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")


def runs(grid: Grid, ident: int) -> list[Seen]:
    """The programs themselves, not the runners and MPI daemons around them."""
    return [p for p in grid.workers(f"{ident}.") if p.command[1:2] == ["-c"] and "sleep 0.05; done" in p.command[2]]


def start(grid: Grid, go: Path, launcher: str) -> int:
    ident = grid.submit(FLEXIBLE_6, "sh", "-c", HOLD.format(go=go), launcher=launcher)
    grid.wait_state(ident, "running")
    until(lambda: len({p.node for p in runs(grid, ident)}) == 6, "six ranks to run")
    return ident


def finish(grid: Grid, ident: int, go: Path, restarts: int) -> None:
    go.touch()
    job = grid.wait(ident)
    assert (job["state"], job["exit_code"], job["restarts"]) == ("succeeded", 0, restarts), job
    assert grid.logs(ident).count("done") == 6
    grid.settle()


@pytest.mark.parametrize("launcher", ["processes", MPI])
@pytest.mark.parametrize("node", ["north-1", "south-2"])
def test_a_runner_is_killed(grid: Grid, tmp_path: Path, launcher: str, node: str) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, launcher)
    (runner,) = grid.runners(f"{ident}.", node)
    runner.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, go, restarts=1)
    errors = {c["name"]: c["errors"] for c in grid.clusters()}
    assert errors == {"north": 0, "south": 0}, "a success resets the count"


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_a_nodes_processes_are_killed(grid: Grid, tmp_path: Path, launcher: str) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, launcher)
    for runner in grid.runners(f"{ident}.", "south-1"):
        runner.kill()
    for process in grid.workers(f"{ident}."):
        if process.node == "south-1":
            process.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, go, restarts=1)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_an_agent_is_killed(grid: Grid, tmp_path: Path, launcher: str) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, launcher)
    agents = [p for p in grid.processes("agent", "--embedded") if "south" in p.command]
    assert len(agents) == 1
    agents[0].kill()
    until(lambda: grid.cluster("south")["state"] == "unreachable", "the loss to be noticed")
    until(lambda: grid.cluster("south")["state"] == "usable", "a new agent to connect")
    finish(grid, ident, go, restarts=0)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_the_daemon_is_killed(grid: Grid, tmp_path: Path, launcher: str) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, launcher)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill()
    grid.start()
    assert grid.job(waiting)["state"] == "queued"
    finish(grid, ident, go, restarts=0)
    assert grid.wait(waiting)["state"] == "succeeded"


def test_jobs_end_while_no_daemon_is_there(grid: Grid, tmp_path: Path) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, "processes")
    grid.kill()
    go.touch()
    until(lambda: not runs(grid, ident), "the programs to end")
    grid.start()
    finish(grid, ident, go, restarts=0)


def test_the_local_resource_manager_is_killed(grid: Grid, tmp_path: Path) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, "processes")
    forks = {p.process.pid for p in grid.forks()}
    (lrm,) = [p for p in grid.processes("locald.py") if "south" in p.command and p.process.pid not in forks]
    lrm.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, go, restarts=1)


def test_many_jobs_survive_a_killed_daemon(grid: Grid) -> None:
    idents = [grid.submit({"type": "flexible", "total_size": 1 + n % 8}, "sh", "-c", f"echo {n}") for n in range(40)]
    until(lambda: grid.job(idents[5])["state"] == "succeeded", "some to be over")
    grid.kill()
    grid.start()
    for number, ident in enumerate(idents):
        job = grid.wait(ident)
        assert (job["state"], job["restarts"]) == ("succeeded", 0)
        assert grid.logs(ident) == f"{number}\n" * (1 + number % 8)
    grid.settle()


def test_a_cluster_whose_starts_all_fail_becomes_unusable(make_grid: MakeGrid) -> None:
    grid = make_grid(KOALA_RULES__UNREACHABLE_AFTER="1", KOALA_RULES__MAX_RESTARTS="20")
    request = {"type": "fixed", "components": [{"size": 1, "cluster": "south"}]}
    ident = grid.submit(request, "sleep", "300")

    def sabotage() -> bool:
        for runner in grid.runners(f"{ident}."):
            runner.kill()
        return bool(grid.cluster("south")["state"] == "unusable")

    until(sabotage, "three errors in a row")
    job = grid.wait_state(ident, "queued")
    assert job["restarts"] == 3
    assert "unusable" in job["reason"]
    other = grid.submit({"type": "flexible", "total_size": 4}, "true")
    assert {c["cluster"] for c in grid.wait(other)["components"]} == {"north"}
    assert grid.run("clusters", "clear", "south").returncode == 0
    grid.wait_state(ident, "running")
    grid.cancel(ident)
    grid.wait(ident)
    grid.settle()


def test_local_users_who_are_faster_make_the_claim_fail(make_grid: MakeGrid) -> None:
    grid = make_grid(KOALA_RULES__CLAIM_GRACE="1")
    (agent,) = [p for p in grid.processes("agent", "--embedded") if "south" in p.command]
    agent.process.suspend()
    local = local_run(grid, "4", "sleep", "300")
    until(lambda: len([p for p in grid.processes("LOCALD_MARK=") if "300" in p.command]) >= 4, "local users to run")
    assert grid.cluster("south")["idle"] == 4, "the scheduler does not know yet"
    ident = grid.submit({"type": "fixed", "components": [{"size": 2, "cluster": "south"}]}, "true")
    assert grid.job(ident)["state"] == "claiming"
    agent.process.resume()
    until(lambda: "claim-failed" in str(grid.job(ident)["timeline"]), "the claim to fail")
    until(lambda: grid.cluster("south")["background"] == 4, "the load to be seen")
    grid.wait_state(ident, "queued")
    local.terminate()
    local.wait(timeout=60)
    job = grid.wait(ident)
    assert (job["state"], job["restarts"], grid.cluster("south")["errors"]) == ("succeeded", 0, 0)
    grid.settle()


def local_run(grid: Grid, nodes: str, *command: str) -> "subprocess.Popen[str]":
    environment = grid.environment | {"KOALA_URL": grid.url}
    return subprocess.Popen([*grid.koala, "local-run", "south", nodes, *command], env=environment, text=True)


def test_background_load_is_seen_and_kept_clear_of(make_grid: MakeGrid) -> None:
    grid = make_grid()
    local = local_run(grid, "3", "sleep", "300")
    until(lambda: grid.cluster("south")["idle"] == 1, "the load to be seen")
    job = grid.wait(grid.submit({"type": "flexible", "total_size": 5}, "true"))
    assert {c["cluster"]: c["size"] for c in job["components"]} == {"north": 4, "south": 1}
    local.terminate()
    local.wait(timeout=60)
    grid.settle()


def test_one_daemon_for_one_database(grid: Grid) -> None:
    second = grid.run("serve", "--port", "0", "--data-dir", str(grid.directory))
    assert second.returncode not in (0, 5)
    assert "another daemon" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_clean_end_leaves_running_jobs_alone_and_the_next_start_finds_them(grid: Grid, tmp_path: Path) -> None:
    go = tmp_path / "go"
    ident = start(grid, go, "processes")
    assert grid.end() == 0
    assert runs(grid, ident)
    grid.start()
    finish(grid, ident, go, restarts=0)
