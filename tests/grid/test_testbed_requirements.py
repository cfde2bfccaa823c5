"""What jobs require of nodes, on Slurm 22.05, Slurm 24.11 and Grid Engine: features, GPUs, accounts, excluded nodes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.grid.grid import wait_until
from tests.grid.testbed import WEST, Testbed

ALL_AT_ONCE = [
    {"cluster": "south", "size": 1, "cores": 2, "memory": "3GB", "features": ["quick"], "partition": "batch"},
    {"cluster": "east", "size": 1, "features": ["ssd"], "gpus": 2, "partition": "all.q", "account": "climate"},
    {"cluster": WEST, "size": 2, "features": ["ib"], "gpus": "h100:1", "account": "climate", "qos": "long"},
]


@pytest.fixture(scope="module")
def bed(testbed: Testbed) -> Iterator[Testbed]:
    with testbed.open_west():
        yield testbed


def read_idle_classes(bed: Testbed, cluster: str) -> dict[str, int]:
    """Return the idle nodes of each class by the names of its features and GPUs."""
    classes = bed.http.get(f"/api/v1/clusters/{cluster}").json()["details"]["node_classes"]
    return {"+".join([*c["features"], *(f"{g['count']}x{g['type']}" for g in c["gpus"])]): c["idle"] for c in classes}


def test_one_job_gets_what_its_components_require_of_each_manager(bed: Testbed) -> None:
    gate = bed.make_gate()
    program = f'echo "at $KOALA_NODE"; {gate.hold[2]}'
    ident = bed.submit({"type": "fixed", "components": ALL_AT_ONCE}, "sh", "-c", program)
    bed.wait_for_state(ident, "running")
    south, west = bed.heads["south"], bed.west_head
    assert "Features=quick" in south.shell("scontrol show job -o $(squeue -h -o %i)")
    account, qos, features, gpus = west.run("squeue", "-h", "-u", "koala", "-o", "%a %q %f %b").split()
    assert (account, qos, features, gpus[-10:]) == ("climate", "long", "ib", "gpu:h100:1")
    listing = bed.heads["east"].shell("qstat -j $(qstat -u koala | awk 'NR > 2 { print $1 }')")
    assert "east-1" in next(line for line in listing.splitlines() if line.startswith("hard resource_list"))
    assert "climate" in next(line for line in listing.splitlines() if line.startswith("project"))
    wait_until(lambda: read_idle_classes(bed, "south")["plain+quick"] == 0, "the node to be used")
    gate.open()
    assert bed.wait_for_end(ident)["state"] == "succeeded", bed.read_output(ident)
    nodes = [line.split()[1] for line in bed.read_output(ident).splitlines() if line.startswith("at ")]
    assert sorted(nodes) == ["east-1", "south-1", "west-2", "west-3"]


def test_nodes_are_chosen_by_gpus_and_names(bed: Testbed) -> None:
    """GPUs choose a node of any cluster; excluded nodes are avoided by each resource manager."""
    jobs: dict[int, list[str]] = {}

    def submit(components: list[dict[str, Any]], nodes: list[str], **fields: Any) -> None:
        kind = "fixed" if "cluster" in components[0] else "nonfixed"
        jobs[bed.submit({"type": kind, "components": components}, "sh", "-c", "echo $KOALA_NODE", **fields)] = nodes

    submit([{"size": 1}], ["south-2"], gpus="a100:1", exclude=[WEST])
    submit(
        [{"cluster": "north", "size": 2}, {"cluster": "east", "size": 2}],
        ["east-2", "east-3", "north-1", "north-3"],
        exclude=["east-1", "north-2"],
    )
    submit([{"cluster": WEST, "size": 2}], ["west-1", "west-3"], exclude=["west-2"])
    for ident, nodes in jobs.items():
        assert bed.wait_for_end(ident)["state"] == "succeeded", bed.read_output(ident)
        assert sorted(bed.read_output(ident).split()) == nodes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fixed", "south:1", "--memory", "5GB"], "nearest: south has 4.19 GB of memory on 2 nodes"),
        (["--fixed", "south:1", "--cores", "3"], "nearest: south has 2 cores on 2 nodes"),
        (["--flexible", "1", "--gpus", "a100:4"], "nearest: south has 2 GPUs a100 on 1 node"),
        (["--flexible", "1", "--feature", "quik"], "did you mean quick"),
        (["--fixed", "north:1", "--partition", "bach"], "did you mean batch"),
        (["--fixed", "east:4", "--exclude", "east-1"], "3"),
    ],
)
def test_requirement_that_no_node_meets_is_rejected_with_the_nearest(
    bed: Testbed, options: list[str], message: str
) -> None:
    refused = bed.run_koala("submit", *options, "--launcher", "processes", "--", "true")
    assert refused.returncode == 2
    assert message in refused.stderr


def test_account_that_a_cluster_does_not_allow_fails_with_the_allowed_ones(bed: Testbed) -> None:
    ended = {
        cluster: bed.submit({"type": "fixed", "components": [{"cluster": cluster, "size": 2}]}, "true", account="local")
        for cluster in ("north", "east", WEST)
    }
    for cluster, ident in ended.items():
        job = bed.wait_for_end(ident)
        allowed = "the cluster allows no choice" if cluster == "north" else "allowed: climate"
        assert (job["state"], f"account local may not be chosen here; {allowed}" in job["reason"]) == (
            "failed",
            True,
        ), json.dumps(job)
        assert bed.get_cluster(cluster)["errors"] == 0
