"""The page of a cluster: its row, node classes and uplink."""

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


def cluster_lines(**details: Any) -> list[list[str]]:
    return [line.split() for line in tables.cluster_page({**LINE, "details": details}).splitlines()]


def test_cluster_page_without_details_is_one_row() -> None:
    assert len(cluster_lines()) == 2
    assert cluster_lines()[1][:4] == ["north", "slurm", "usable", "4"]


def test_cluster_page_shows_node_classes_and_uplink() -> None:
    lines = cluster_lines(
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
    assert " ".join(cluster_lines(uplink={"capacity": None, "consumed": 9e6})[-1]) == (
        "uplink: 9 MB/s used; what it carries is not known"
    )
