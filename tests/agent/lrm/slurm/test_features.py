"""Nodes available to grid jobs, by ``--constraint`` and ``--exclude``."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.slurm.offer import may_match

from .conftest import COLUMNS, FakeSlurm
from .test_offer import node_counts, take_snapshot

FEATURES = {"n1": "ib,gpu", "n2": "ib", "n3": "gpu", "n4": ""}


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [
        ("ib", "n1 n2"),
        ("ib&gpu", "n1"),
        ("ib,gpu", "n1"),
        ("ib|gpu", "n1 n2 n3"),
        ("[ib|gpu]", "n1 n2 n3"),
        ("big|ib&gpu", "n1"),
        ("(ib|gpu)&ib", "n1 n2"),
        ("ib&(gpu|big)", "n1"),
        ("[ib*1&gpu*2]", "n1 n2 n3"),
        ("ib*2", "n1 n2"),
        ("big", ""),
        (" ib & gpu ", "n1"),
        ("", "n1 n2 n3 n4"),
    ],
)
def test_may_match_evaluates_constraint(constraint: str, nodes: str) -> None:
    assert [name for name, text in FEATURES.items() if may_match(text.split(","), constraint)] == nodes.split()


@given(st.text(alphabet="ab&|()[],*2 ", max_size=12), st.frozensets(st.sampled_from("ab")))
def test_may_match_accepts_any_text(constraint: str, features: frozenset[str]) -> None:
    assert may_match(features, constraint) in (True, False)


NAMES = st.sampled_from("abc")


@given(st.lists(st.lists(NAMES, min_size=1), min_size=1), st.frozensets(NAMES))
def test_may_match_binds_and_before_or(either: list[list[str]], features: frozenset[str]) -> None:
    constraint = "|".join("&".join(names) for names in either)
    assert may_match(features, constraint) == any(features.issuperset(names) for names in either)


def show_nodes(slurm: FakeSlurm, form: str) -> None:
    """Set four idle nodes, in the format of a release of Slurm."""

    def node(name: str, text: str) -> dict[str, Any]:
        if form == "22.05":
            return {"name": name, "state": "idle", "partitions": ["main"], "features": text}
        features: object = {"total": text, "active": text} if form == "grouped" else text.split(",")
        nodes = {"nodes": [name]}
        return {"nodes": nodes, "node": {"state": ["IDLE"]}, "partition": {"name": "main"}, "features": features}

    results = [node(*entry) for entry in FEATURES.items()]
    key = "nodes" if form == "22.05" else "sinfo"
    slurm.set_answer("sinfo", json.dumps({key: results, "errors": []}), when="*--json*")
    slurm.set_answer("squeue", "", when=COLUMNS)


@pytest.mark.parametrize("form", ["22.05", "grouped", "list"])
@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (("--constraint=ib",), 2),
        (("-C", "ib&gpu"), 1),
        (("-Cgpu",), 2),
        (("--exclude=n[2-3]",), 2),
        (("-x", "n1", "--constraint", "ib"), 1),
        ((), 4),
    ],
)
async def test_snapshot_counts_nodes_that_match_only(
    slurm: FakeSlurm, form: str, options: tuple[str, ...], idle: int
) -> None:
    show_nodes(slurm, form)
    assert node_counts(await take_snapshot(slurm, "main", *options)) == (idle, idle, 0, 0)


async def test_invalid_exclude_is_a_submit_error(slurm: FakeSlurm) -> None:
    show_nodes(slurm, "22.05")
    results = await take_snapshot(slurm, "main", "--exclude=n[2-")
    assert results.submit_error.startswith("--exclude cannot be understood")
