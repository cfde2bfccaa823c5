"""Processors of ranks: the check of a node, the number of threads, and the binding."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.runner import rank_processors
from koalapy.runner.exec_guard import write_rank_script
from koalapy.runner.plan import Plan
from koalapy.runner.rank_processors import binding_lines, check_processors, distribute_ranks, sort_by_core
from koalapy.runner.settings import Failure
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES_4, FakeAgent, make_plan

PROCESSORS = sorted(os.sched_getaffinity(0))
RANKS = min(2, len(PROCESSORS))
SHOW = [
    sys.executable,
    "-c",
    "import os; print(os.environ['OMP_NUM_THREADS'], *sorted(os.sched_getaffinity(0)), flush=True)",
]
NODE: Any = SimpleNamespace(name="n1", shares_processors=False, program_environment={"OMP_NUM_THREADS": "64"})
EMBEDDED: Any = SimpleNamespace(name="n1", shares_processors=True, program_environment={})


def plan_of(slots: int, cpus_per_rank: int | None, launcher: str = "openmpi", **environment: str) -> Plan:
    place = {"host": "n1", "cluster": "north", "token": "7.1.0", "node": 0, "slots": slots}
    context = {"token": "7.1.0", "command": SHOW, "environment": environment, "nodes": [0]}
    message = {"job": 7, "generation": 1, "launcher": launcher, "head": "7.1.0", "cpus_per_rank": cpus_per_rank}
    return Plan({**message, "nodes": [place], "contexts": [context]}, "7.1.0", 0)


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the node have four processors, of which 0 and 2 are threads of one core, and 1 and 3 of another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(rank_processors, "_place", lambda processor: (0, processor % 2))


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("plan", "each"),
    [
        (plan_of(3, 2), "3 ranks with 2 processors each"),
        (plan_of(1, 5), "a rank with 5 processors"),
        (plan_of(9, 5, "processes"), "a rank with 5 processors"),
    ],
)
def test_node_with_too_few_processors_is_refused(plan: Plan, each: str) -> None:
    with pytest.raises(Failure) as raised:
        check_processors(plan, NODE)
    assert raised.value.code == 2
    assert raised.value.message == (
        f"node n1 has 4 processors for this job, too few for {each}: "
        "ask for fewer with --cpus-per-rank or --ppn, or for larger nodes with --cores"
    )
    assert binding_lines(plan, NODE) == []


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize("plan", [plan_of(2, 2), plan_of(9, None), plan_of(9, 4, "processes")])
def test_node_with_enough_processors_is_used(plan: Plan) -> None:
    check_processors(plan, NODE)


@pytest.mark.usefixtures("four_processors")
def test_ranks_get_all_threads_of_their_cores() -> None:
    assert sort_by_core({0, 1, 2, 3}) == [0, 2, 1, 3]
    cases, _bind = binding_lines(plan_of(2, 2), NODE)
    assert "0) processors=0,2;; 1) processors=1,3;;" in cases


def test_ranks_of_shared_or_unasked_processors_are_not_bound() -> None:
    assert binding_lines(plan_of(1, 1), EMBEDDED) == []
    assert binding_lines(plan_of(1, None), NODE) == []


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(("count", "is_bound"), [(4, False), (8, True)])
def test_ranks_on_shared_node_are_bound_if_the_resource_manager_binds_their_job(
    count: int, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    plan = plan_of(1, 2)
    plan.message["share"] = True
    assert bool(binding_lines(plan, NODE)) is is_bound
    plan.message["cpus_per_rank"] = 4
    assert binding_lines(plan, NODE), "it has the whole node"


def test_requested_processors_are_the_number_of_threads() -> None:
    assert plan_of(1, 4).environment(NODE)["OMP_NUM_THREADS"] == "4"
    assert plan_of(1, 4, OMP_NUM_THREADS="2").environment(NODE)["OMP_NUM_THREADS"] == "2", "the job's own"
    assert plan_of(1, None).environment(NODE)["OMP_NUM_THREADS"] == "64", "the site's"


@pytest.mark.processes
def test_rank_script_binds_each_rank_to_own_processors(tmp_path: Path) -> None:
    plan = plan_of(RANKS, 1)
    script = write_rank_script(
        str(tmp_path), SHOW, plan.environment(NODE), "", str(tmp_path), binding=binding_lines(plan, NODE)
    )
    seen = []
    for rank in range(RANKS):
        rank_environment = {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        seen += subprocess.check_output(["/bin/sh", script], env=rank_environment, text=True).split()[1:]
    assert sorted(map(int, seen)) == sorted(sort_by_core(PROCESSORS)[:RANKS])


@pytest.mark.processes
@pytest.mark.mpi
@pytest.mark.parametrize("environment", [MPI_ENVIRONMENT, {**MPI_ENVIRONMENT, **SERIES_4}], ids=["5", "4"])
async def test_program_has_requested_processors_in_each_series(agent: FakeAgent, environment: dict[str, str]) -> None:
    node = await agent.start("7.1.0", 0, "127.0.0.1", KOALA_NODE_INDEX="0", **environment)
    plan = make_plan([node], SHOW, launcher="openmpi") | {"cpus_per_rank": 1}
    plan["nodes"][0]["slots"] = RANKS
    node.send(**plan)
    end = await node.expect("exit")
    assert (end["code"], end["error"]) == (0, "")
    expected = [f"1 {processor}" for processor in sorted(sort_by_core(PROCESSORS)[:RANKS])]
    assert sorted(node.output.decode().splitlines()) == expected


@pytest.mark.processes
async def test_program_with_too_many_processors_ends_with_its_fault(agent: FakeAgent) -> None:
    nodes = [await agent.start("7.1.0", 0, "127.0.1.1"), await agent.start("7.1.1", 0, "127.0.2.1")]
    for node in nodes:
        node.send(**make_plan(nodes, SHOW, launcher="processes"), cpus_per_rank=len(PROCESSORS) + 1)
    for node in nodes:
        end = await node.expect("exit")
        assert (end["code"], end["infrastructure"]) == (2, False)
    assert b"too few for a rank with" in nodes[0].output


def test_chosen_nodes_with_one_host_name_on_two_clusters_get_ranks_by_index() -> None:
    plan = plan_of(2, None)
    plan.nodes.append({**plan.nodes[0], "cluster": "south"})
    request: dict[str, Any] = {"hosts": None, "clusters": None, "per_node": None, "ranks": 1, "oversubscribe": False}
    assert distribute_ranks(plan, {**request, "indices": [1]}) == [0, 1]
    assert distribute_ranks(plan, {**request, "indices": None}) == [1, 0]
