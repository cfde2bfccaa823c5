"""Something dies: afterwards the books are right, no node stays held, no process is left."""

from collections.abc import Callable, Iterator

import pytest

from tests.grid.conftest import WORLDS, world_of
from tests.grid.embedded import Embedded
from tests.grid.world import Gate, World, until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., Embedded]
MPI = pytest.param("openmpi", marks=pytest.mark.mpi)


@pytest.fixture(params=WORLDS)
def grid(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from world_of(request, KOALA_RULES__UNREACHABLE_AFTER="1")


@pytest.fixture
def embedded(make_grid: MakeGrid) -> Embedded:
    return make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")


def start(grid: World, gate: Gate, launcher: str) -> int:
    return grid.start_waiting(gate, grid.six, 6, launcher=launcher)


def node_of(grid: World, ident: int, cluster: str) -> str:
    """The first node that the job has in a cluster, by its name there."""
    return min(p.node for p in grid.programs(ident) if p.node.startswith(cluster))


def finish(grid: World, ident: int, gate: Gate, restarts: int) -> None:
    grid.finish_waiting(ident, gate, restarts)
    grid.settle()


@pytest.mark.parametrize("launcher", ["processes", MPI])
@pytest.mark.parametrize("cluster", ["north", "south"])
def test_a_runner_is_killed(grid: World, launcher: str, cluster: str) -> None:
    gate = grid.gate()
    ident = start(grid, gate, launcher)
    (runner,) = grid.runners(f"{ident}.", node_of(grid, ident, cluster))
    runner.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)
    assert not any(c["errors"] for c in grid.clusters()), "a success resets the count"


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_a_nodes_processes_are_killed(grid: World, launcher: str) -> None:
    gate = grid.gate()
    ident = start(grid, gate, launcher)
    node = node_of(grid, ident, "south")
    for process in (*grid.runners(f"{ident}.", node), *(w for w in grid.workers(f"{ident}.") if w.node == node)):
        process.kill()
    until(lambda: grid.job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_an_agent_is_killed(grid: World, launcher: str) -> None:
    gate = grid.gate()
    ident = start(grid, gate, launcher)
    grid.kill_agent("south")
    until(lambda: grid.cluster("south")["state"] == "usable", "a new agent to connect")
    finish(grid, ident, gate, restarts=0)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_the_daemon_is_killed(grid: World, launcher: str) -> None:
    gate = grid.gate()
    ident = start(grid, gate, launcher)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill()
    grid.start()
    assert grid.job(waiting)["state"] == "queued"
    finish(grid, ident, gate, restarts=0)
    assert grid.wait(waiting)["state"] == "succeeded"


def test_jobs_end_while_no_daemon_is_there(grid: World) -> None:
    gate = grid.gate()
    ident = start(grid, gate, "processes")
    grid.kill()
    gate.open()
    until(lambda: not grid.programs(ident), "the programs to end")
    grid.start()
    finish(grid, ident, gate, restarts=0)


def test_many_jobs_survive_a_killed_daemon(grid: World) -> None:
    idents = [grid.submit({"type": "flexible", "total_size": 1 + n % 8}, "sh", "-c", f"echo {n}") for n in range(16)]
    until(lambda: grid.job(idents[5])["state"] == "succeeded", "some to be over")
    grid.kill()
    grid.start()
    for number, ident in enumerate(idents):
        job = grid.wait(ident)
        assert (job["state"], job["restarts"]) == ("succeeded", 0)
        assert grid.logs(ident) == f"{number}\n" * (1 + number % 8)
    grid.settle()


@pytest.mark.parametrize("cluster", ["south", "east"])
def test_local_users_who_are_faster_make_the_claim_fail(grid: World, cluster: str) -> None:
    if cluster not in grid.nodes:
        cluster = "north"
    size = grid.nodes[cluster]
    request = {"type": "fixed", "components": [{"size": 2, "cluster": cluster}]}
    ident, resume = grid.submit_unheard(cluster, request, "true")
    try:
        load = grid.local_load(cluster, size)
    finally:
        resume()
    until(lambda: "claim-failed" in str(grid.job(ident)["timeline"]), "the claim to fail")
    until(lambda: grid.cluster(cluster)["background"] == size, "the load to be seen")
    grid.wait_state(ident, "queued")
    load.stop()
    job = grid.wait(ident)
    assert (job["state"], job["restarts"], grid.cluster(cluster)["errors"]) == ("succeeded", 0, 0)
    grid.settle()


@pytest.mark.parametrize("cluster", ["south", "east"])
def test_background_load_is_seen_and_kept_clear_of(grid: World, cluster: str) -> None:
    if cluster not in grid.nodes:
        cluster = "north"
    load = grid.local_load(cluster, grid.nodes[cluster] - 1)
    until(lambda: grid.cluster(cluster)["idle"] == 1, "the load to be seen")
    total = sum(grid.nodes.values()) - grid.nodes[cluster] + 1
    job = grid.wait(grid.submit({"type": "flexible", "total_size": total}, "true"))
    assert {c["cluster"]: c["size"] for c in job["components"]} == grid.nodes | {cluster: 1}
    load.stop()
    grid.settle()


def test_one_daemon_for_one_database(embedded: Embedded) -> None:
    second = embedded.run("serve", "--port", "0", "--data-dir", str(embedded.directory))
    assert second.returncode not in (0, 5)
    assert "another daemon" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_clean_end_leaves_running_jobs_alone_and_the_next_start_finds_them(grid: World) -> None:
    gate = grid.gate()
    ident = start(grid, gate, "processes")
    assert grid.end() == 0
    assert grid.programs(ident)
    grid.start()
    finish(grid, ident, gate, restarts=0)
