"""Node classes of Slurm."""

import json
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSnapshot
from koalapy.model.errors import SiteRejected

from .conftest import COLUMNS, FakeSlurm
from .test_adapter import make_submission

GB = 1000
"""A gigabyte in the megabytes that Slurm reports."""
NODES = {"n1": ("ib", 64 * GB, 9), "n2": ("ib", 64 * GB, 9), "n3": ("ib,gpu", 64 * GB, 1), "n4": ("ib", 512 * GB, 5)}
FORMS = ["22.05", "grouped", "numbers"]


def show_nodes(slurm: FakeSlurm, form: str = "22.05", **states: str) -> None:
    """Set four nodes, in the format of a release of Slurm."""

    def node(name: str, features: str, memory: int, weight: int) -> dict[str, Any]:
        state = states.get(name, "IDLE")
        if form == "22.05":
            fields = {"features": features, "real_memory": memory, "weight": weight}
            return {"name": name, "state": state.lower(), "partitions": ["main"]} | fields
        group: dict[str, Any] = {
            "nodes": {"nodes": [name]},
            "node": {"state": [state]},
            "partition": {"name": "main"},
            "features": {"total": features, "active": features},
        }
        if form == "grouped":
            memory_range, weight_range = {"minimum": memory, "maximum": memory}, {"minimum": weight, "maximum": weight}
            return group | {"memory": memory_range, "weight": weight_range}
        return group | {"memory": memory, "weight": {"set": True, "infinite": False, "number": weight}}

    nodes = [node(name, *facts) for name, facts in NODES.items()]
    slurm.set_answer(
        "sinfo", json.dumps({"nodes" if form == "22.05" else "sinfo": nodes, "errors": []}), when="*--json*"
    )
    slurm.set_answer("squeue", "", when=COLUMNS)


def count_idle(snapshot: LrmSnapshot) -> dict[str, int]:
    return {entry.name: entry.idle for entry in snapshot.node_classes}


@pytest.mark.parametrize("form", FORMS)
async def test_classes_by_features_are_ordered_by_weight(slurm: FakeSlurm, form: str) -> None:
    show_nodes(slurm, form, n1="ALLOCATED")
    classes = (await slurm.make_lrm().take_snapshot()).node_classes
    assert [(c.name, c.total, c.idle, c.memory, c.power) for c in classes] == [
        ("gpu+ib-67.1GB", 1, 1, 64 * GB << 20, None),
        ("ib-537GB", 1, 1, 512 * GB << 20, None),
        ("ib-67.1GB", 2, 1, 64 * GB << 20, None),
    ]


@pytest.mark.parametrize("memory", [0, 1, None, "64GB", {"minimum": -1}, [], True])
async def test_unconfigured_memory_is_unknown(slurm: FakeSlurm, memory: object) -> None:
    nodes = [{"name": n, "state": "idle", "partitions": ["main"], "real_memory": memory} for n in ("n1", "n2")]
    slurm.set_answer("sinfo", json.dumps({"nodes": nodes, "errors": []}), when="*--json*")
    assert (await slurm.make_lrm().take_snapshot()).node_classes == ()


async def test_job_of_class_excludes_other_nodes(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    await slurm.make_lrm().submit_job(make_submission(tmp_path, nodes=1, node_class="ib-537GB"))
    assert " --exclude=n1,n2,n3 " in slurm.list_calls("sbatch")[-1]
    assert "--constraint" not in slurm.list_calls("sbatch")[-1], "others have that feature, too"
    await slurm.make_lrm().submit_job(make_submission(tmp_path))
    assert "--exclude" not in slurm.list_calls("sbatch")[-1]


async def test_job_of_feature_class_has_constraint(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    classes = {"fast": NodeClassSettings(feature="gpu", power=3.0)}
    adapter = slurm.make_lrm(node_classes=classes)
    assert count_idle(await adapter.take_snapshot()) == {"fast": 1, "ib-537GB": 1, "ib-67.1GB": 2}
    await adapter.submit_job(make_submission(tmp_path, nodes=1, node_class="fast"))
    assert " --constraint=gpu " in slurm.list_calls("sbatch")[-1]


async def test_job_of_class_keeps_configured_options(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    classes = {"fast": NodeClassSettings(feature="gpu"), "some": NodeClassSettings(hosts="n[1,4]")}
    adapter = slurm.make_lrm(node_classes=classes, options=("--constraint=ib", "--exclude=n4"))
    assert count_idle(await adapter.take_snapshot()) == {"fast": 1, "some": 1, "ib-67.1GB": 1}
    for name, others in (("fast", "n1,n2,n4"), ("some", "n2,n3,n4")):
        await adapter.submit_job(make_submission(tmp_path, nodes=1, node_class=name))
        options = slurm.list_calls("sbatch")[-1].split()
        assert [option for option in options if option.startswith(("--exclude", "--constraint"))] == [
            "--constraint=ib",
            "--exclude=n4",
            f"--exclude={others}",
        ], "the last one counts"


async def test_unknown_or_small_class_is_rejected_as_limit(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    for name, nodes in (("gone", 1), ("ib-537GB", 2)):
        with pytest.raises(SiteRejected, match=f"nodes of the class {name}") as refused:
            await slurm.make_lrm().submit_job(make_submission(tmp_path, nodes=nodes, node_class=name))
        assert refused.value.fault == "limit"
    assert slurm.list_calls("sbatch") == []
