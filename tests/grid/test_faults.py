"""Faults of runners, agents, daemons and claims: jobs continue, and no node or process stays occupied."""

from collections.abc import Callable, Iterator

import pytest

from tests.grid.conftest import GRID_KINDS, grid_of_kind
from tests.grid.embedded import EmbeddedGrid, list_violations
from tests.grid.grid import Gate, Grid, wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
MPI = pytest.param("openmpi", marks=pytest.mark.mpi)
LAUNCHES = {
    "embedded": [("north", "openmpi"), ("south", "processes")],
    "testbed": [(cluster, launcher) for cluster in ("north", "south") for launcher in ("processes", "openmpi")],
}
"""Clusters and launchers by kind of grid; embedded clusters are all equal."""
CLUSTERS = {"embedded": ["east"], "testbed": ["south", "east"]}
ON_EACH_MANAGER = pytest.mark.parametrize(
    ("grid", "cluster"), [(kind, cluster) for kind in GRID_KINDS for cluster in CLUSTERS[kind]], indirect=["grid"]
)


@pytest.fixture(params=GRID_KINDS)
def grid(request: pytest.FixtureRequest) -> Iterator[Grid]:
    """Yield a grid, and check that its evidence has no violation after the fault."""
    for grid in grid_of_kind(request, KOALA_RULES__UNREACHABLE_AFTER="1"):
        yield grid
        assert not isinstance(grid, EmbeddedGrid) or list_violations(grid) == []


@pytest.fixture
def embedded(make_grid: MakeGrid) -> EmbeddedGrid:
    return make_grid(KOALA_RULES__UNREACHABLE_AFTER="1")


def start_job(grid: Grid, gate: Gate, launcher: str) -> int:
    return grid.start_gated_job(gate, grid.six_nodes, 6, launcher=launcher)


def find_first_node(grid: Grid, ident: int, cluster: str) -> str:
    """Return the first node by name that runs a program of the job in a cluster."""
    return min(p.node for p in grid.list_programs(ident) if p.node.startswith(cluster))


def finish_job(grid: Grid, ident: int, gate: Gate, restarts: int) -> None:
    grid.finish_gated_job(ident, gate, restarts)
    grid.wait_until_idle()


@pytest.mark.parametrize(
    ("grid", "cluster", "launcher"),
    [
        pytest.param(kind, cluster, launcher, marks=pytest.mark.mpi if launcher == "openmpi" else ())
        for kind in GRID_KINDS
        for cluster, launcher in LAUNCHES[kind]
    ],
    indirect=["grid"],
)
def test_killed_runner_restarts_job(grid: Grid, launcher: str, cluster: str) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, launcher)
    (runner,) = grid.list_runners(f"{ident}.", find_first_node(grid, ident, cluster))
    runner.kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish_job(grid, ident, gate, restarts=1)
    assert not any(c["errors"] for c in grid.list_clusters()), "a success resets the count"


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_killed_processes_of_node_restart_job(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, launcher)
    node = find_first_node(grid, ident, "south")
    for process in (
        *grid.list_runners(f"{ident}.", node),
        *(w for w in grid.list_workers(f"{ident}.") if w.node == node),
    ):
        process.kill()
    wait_until(lambda: grid.get_job(ident)["restarts"] == 1, "the job to be restarted")
    finish_job(grid, ident, gate, restarts=1)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_killed_agent_leaves_job_running(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, launcher)
    grid.kill_agent("south")
    wait_until(lambda: grid.get_cluster("south")["state"] == "usable", "a new agent to connect")
    finish_job(grid, ident, gate, restarts=0)


@pytest.mark.parametrize("launcher", ["processes", MPI])
def test_killed_daemon_resumes_jobs(grid: Grid, launcher: str) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, launcher)
    waiting = grid.submit({"type": "flexible", "total_size": 8}, "true")
    grid.kill_daemon()
    grid.start()
    assert grid.get_job(waiting)["state"] == "queued"
    finish_job(grid, ident, gate, restarts=0)
    assert grid.wait_for_end(waiting)["state"] == "succeeded"


def test_job_that_ends_without_daemon_succeeds(grid: Grid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, "processes")
    grid.kill_daemon()
    gate.open()
    wait_until(lambda: not grid.list_programs(ident), "the programs to end")
    grid.start()
    finish_job(grid, ident, gate, restarts=0)


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


@ON_EACH_MANAGER
def test_claim_fails_when_local_job_takes_nodes(grid: Grid, cluster: str) -> None:
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


@ON_EACH_MANAGER
def test_placement_avoids_background_load(grid: Grid, cluster: str) -> None:
    if cluster not in grid.nodes:
        cluster = "north"
    load = grid.start_local_job(cluster, grid.nodes[cluster] - 1)
    wait_until(lambda: grid.get_cluster(cluster)["idle"] == 1, "the load to be seen")
    total = sum(grid.nodes.values()) - grid.nodes[cluster] + 1
    job = grid.wait_for_end(grid.submit({"type": "flexible", "total_size": total}, "true"))
    assert {c["cluster"]: c["size"] for c in job["components"]} == grid.nodes | {cluster: 1}
    load.stop()
    grid.wait_until_idle()


def test_second_daemon_of_database_is_rejected(embedded: EmbeddedGrid) -> None:
    second = embedded.run_koala("serve", "--port", "0", "--data-dir", str(embedded.directory))
    assert second.returncode not in (0, 5)
    assert "another daemon" in second.stderr
    assert second.stderr.count("\n") == 1


def test_stopped_daemon_leaves_jobs_running(grid: Grid) -> None:
    gate = grid.make_gate()
    ident = start_job(grid, gate, "processes")
    assert grid.stop_daemon() == 0
    assert grid.list_programs(ident)
    grid.start()
    finish_job(grid, ident, gate, restarts=0)
