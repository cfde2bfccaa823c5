"""The numbers of nodes are the same on all pages, in REST answers and in the metrics, in each scene."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.scenes import SCENES, serve_scene

KINDS = ("idle", "local", "down", "withheld", "unknown")
OURS = ("running", "claimed")
RENAMED = {"ours": "used", "local": "background", "unknown": "unknown"}
"""Keys of REST answers by kind of the metrics."""
pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", sorted(SCENES))
def test_node_counts_of_pages_rest_and_metrics_are_equal_in_each_scene(name: str, tmp_path: Path) -> None:
    with serve_scene(name, tmp_path) as scene:

        def read(path: str) -> Any:
            return scene.http.get(path).json()

        records = {record["name"]: record for record in read("/api/v1/clusters")["clusters"]}
        pages = {"overview": read("/now.json")["nodes"], "clusters": read("/clusters.json")["nodes"]}
        maps = {row["cluster"]: row["nodes"] for row in read("/network.json")["map"]["clusters"]}
        metrics = scene.http.get("/metrics").text
    counted = {kind: sum(record[kind] for record in records.values()) for kind in ("idle", "down", "withheld")}
    counted |= {kind: sum(record[key] for record in records.values()) for kind, key in RENAMED.items()}
    assert sum(counted.values()) == sum(record["total"] for record in records.values())
    for record in records.values():
        if record["state"] == "unreachable":
            assert (record["unknown"], record["used"], record["idle"]) == (record["total"], 0, 0)
    map_total: Counter[str] = Counter()
    for nodes in maps.values():
        map_total.update(nodes)
    for page in (*pages.values(), map_total):
        assert {kind: page[kind] for kind in KINDS} | {"ours": sum(page[kind] for kind in OURS)} == counted
    by_kind: Counter[str] = Counter()
    for kind, value in re.findall(r'^koala_nodes\{cluster="[^"]+",kind="(\w+)"\} (\S+)', metrics, re.MULTILINE):
        by_kind[kind] += int(float(value))
    assert dict(by_kind) == counted
