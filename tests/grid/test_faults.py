"""Something dies: afterwards the books are right, no node stays held, no process is left."""

from collections.abc import Callable, Iterator

import pytest

from tests.grid.conftest import GRID_KINDS, grid_of_kind
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Gate, Grid, wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
MPI = pytest.param("openmpi", marks=pytest.mark.mpi)


@pytest.fixture(params=GRID_KINDS)
def grid(request: pytest.FixtureRequest) -> Iterator[Grid]:
    yield from grid_of_kind(request, KOALA_RULES__UNREACHABLE_AFTER="1")


@pytest.fixture
def embedded(make_grid: MakeGrid) -> EmbeddedGrid:
    return make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")


def start(grid: Grid, gate: Gate, launcher: str) -> int:
    return grid.start_gated_job(gate, grid.six_nodes, 6, launcher=launcher)


def node_of(grid: Grid, ident: int, cluster: str) -> str:
    """The first node that the job has in a cluster, by its name there."""
    return min(p.node for p in grid.list_programs(ident) if p.node.startswith(cluster))


def finish(grid: Grid, ident: int, gate: Gate, restarts: int) -> None:
    grid.finish_gated_job(ident, gate, restarts)
    grid.wait_until_idle()


@pytest.mark.parametrize("launcher", ["processes", MPI])
@pytest.mark.parametrize("cluster", ["north", "south"])
def test_a_runner_is_killed(grid: Grid, launcher: str, cluster: str) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, launcher)
    (runner,) = grid.list_runners(f"{ident}.", node_of(grid, ident, cluster))
    runner.kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)
    assert not any(c["errors"] for c in grid.list_clusters()), "a success resets the count"


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_a_nodes_processes_are_killed(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, launcher)
    node = node_of(grid, ident, "south")
    for process in (
        *grid.list_runners(f"{ident}.", node),
        *(w for w in grid.list_workers(f"{ident}.") if w.node == node),
    ):
        process.kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish(grid, ident, gate, restarts=1)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_an_agent_is_killed(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, launcher)
    grid.kill_agent("south")
    wait_until(lambda: grid.get_cluster("south")["state"] == "usable", "a new agent to connect")
    finish(grid, ident, gate, restarts=0)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_the_daemon_is_killed(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, launcher)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill_daemon()
    grid.start()
    assert grid.get_job(waiting)["state"] == "queued"
    finish(grid, ident, gate, restarts=0)
    assert grid.wait_for_end(waiting)["state"] == "succeeded"


def test_jobs_end_while_no_daemon_is_there(grid: Grid) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, "processes")
    grid.kill_daemon()
    gate.open()
    wait_until(lambda: not grid.list_programs(ident), "the programs to end")
    grid.start()
    finish(grid, ident, gate, restarts=0)


def test_many_jobs_survive_a_killed_daemon(grid: Grid) -> None:
    idents = [grid.submit({"type": "flexible", "total_size": 1 + n % 8}, "sh", "-c", f"echo {n}") for n in range(16)]
    wait_until(lambda: grid.get_job(idents[5])["state"] == "succeeded", "some to be over")
    grid.kill_daemon()
    grid.start()
    for number, ident in enumerate(idents):
        job = grid.wait_for_end(ident)
        assert (job["state"], job["restarts"]) == ("succeeded", 0)
        assert grid.read_output(ident) == f"{number}\n" * (1 + number % 8)
    grid.wait_until_idle()


@pytest.mark.parametrize("cluster", ["south", "east"])
def test_local_users_who_are_faster_make_the_claim_fail(grid: Grid, cluster: str) -> None:
    if cluster not in grid.nodes:
        cluster = "north"
    size = grid.nodes[cluster]
    request = {"type": "fixed", "components": [{"size": 2, "cluster": cluster}]}
    ident, resume = grid.submit_to_stopped_agent(cluster, request, "true")
    try:
        load = grid.start_local_job(cluster, size)
    finally:
        resume()
    wait_until(lambda: "claim-failed" in str(grid.get_job(ident)["timeline"]), "the claim to fail")
    wait_until(lambda: grid.get_cluster(cluster)["background"] == size, "the load to be seen")
    grid.wait_for_state(ident, "queued")
    load.stop()
    job = grid.wait_for_end(ident)
    assert (job["state"], job["restarts"], grid.get_cluster(cluster)["errors"]) == ("succeeded", 0, 0)
    grid.wait_until_idle()


@pytest.mark.parametrize("cluster", ["south", "east"])
def test_background_load_is_seen_and_kept_clear_of(grid: Grid, cluster: str) -> None:
    if cluster not in grid.nodes:
        cluster = "north"
    load = grid.start_local_job(cluster, grid.nodes[cluster] - 1)
    wait_until(lambda: grid.get_cluster(cluster)["idle"] == 1, "the load to be seen")
    total = sum(grid.nodes.values()) - grid.nodes[cluster] + 1
    job = grid.wait_for_end(grid.submit({"type": "flexible", "total_size": total}, "true"))
    assert {c["cluster"]: c["size"] for c in job["components"]} == grid.nodes | {cluster: 1}
    load.stop()
    grid.wait_until_idle()


def test_one_daemon_for_one_database(embedded: EmbeddedGrid) -> None:
    second = embedded.run_koala("serve", "--port", "0", "--data-dir", str(embedded.directory))
    assert second.returncode not in (0, 5)
    assert "another daemon" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_clean_end_leaves_running_jobs_alone_and_the_next_start_finds_them(grid: Grid) -> None:
    gate = grid.make_gate()
    ident = start(grid, gate, "processes")
    assert grid.stop_daemon() == 0
    assert grid.list_programs(ident)
    grid.start()
    finish(grid, ident, gate, restarts=0)
