"""One cluster on the terminal: its line, its nodes by class, its link to the others."""

from typing import Any

from koalapy.cli.terminal import tables

LINE = {
    "name": "north",
    "kind": "slurm",
    "state": "usable",
    "total": 4,
    "idle": 3,
    "used": 1,
    "background": 0,
    "down": 0,
    "errors": 0,
    "reason": "",
    "drained": None,
}


def shown(**details: Any) -> list[list[str]]:
    return [line.split() for line in tables.cluster_page({**LINE, "details": details}).splitlines()]


def test_of_a_cluster_of_which_nothing_more_is_known_there_is_its_line() -> None:
    assert len(shown()) == 2
    assert shown()[1][:4] == ["north", "slurm", "usable", "4"]


def test_classes_and_the_uplink_stand_below_it() -> None:
    lines = shown(
        node_classes=[
            {"name": "slow", "idle": 2, "power": 0.5, "memory": None, "total": 3},
            {"name": "", "idle": 1, "power": 2.0, "memory": 64_000_000_000, "total": 1},
        ],
        uplink={"capacity": 125e6, "consumed": 1.5e6},
    )
    assert lines[3:6] == [
        ["CLASS", "TOTAL", "IDLE", "POWER", "MEMORY"],
        ["slow", "3", "2", "0.5", "-"],
        ["all", "1", "1", "2", "64", "GB"],
    ]
    assert " ".join(lines[-1]) == "uplink: 1.5 MB/s used of 125 MB/s"
    assert " ".join(shown(uplink={"capacity": None, "consumed": 9e6})[-1]) == (
        "uplink: 9 MB/s used; what it carries is not known"
    )


def test_a_components_nodes_are_told_with_their_class() -> None:
    assert [
        tables._component_size(each) for each in ({"size": 2, "node_class": "fast"}, {"size": 2, "node_class": ""})
    ] == ["2 fast", "2"]
