"""Node classes of Slurm."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import LrmSnapshot
from koalapy.agent.lrm.slurm.answers import read_gres
from koalapy.model.errors import SiteRejected
from koalapy.model.node_requirement import Gpus, NodeRequirement
from koalapy.model.reports import NodePartReport

from .conftest import COLUMNS, FakeSlurm, column_line, partition_lines
from .test_adapter import make_submission

GB = 1000
"""A gigabyte in the megabytes that Slurm reports."""
NODES = {"n1": ("ib", 64 * GB, 9), "n2": ("ib", 64 * GB, 9), "n3": ("ib,gpu", 64 * GB, 1), "n4": ("ib", 512 * GB, 5)}
FORMS = ["22.05", "grouped", "numbers"]


GRES = {"n3": "gpu:a100:2(S:0-1),tape:1", "n4": "gpu:2(S:0,1)"}
CPUS = {"n3": 32, "n4": 64}
NOTHING_USED: Mapping[str, tuple[int, int, str]] = {}
PARTITIONS = {"n3": ["main", "gpu"]}


def show_nodes(
    slurm: FakeSlurm, form: str = "22.05", used: Mapping[str, tuple[int, int, str]] = NOTHING_USED, **states: str
) -> None:
    """Set four nodes, in the format of a release of Slurm; ``used``: allocated processors, megabytes and GPUs."""

    def node(name: str, features: str, memory: int, weight: int) -> dict[str, Any]:
        state = states.get(name, "IDLE")
        cpus, megabytes, gpus = used.get(name, (0, 0, "gpu:0"))
        if form == "22.05":
            fields = {"features": features, "real_memory": memory, "weight": weight}
            fields |= {"cpus": CPUS.get(name, 8), "gres": GRES.get(name, ""), "gres_used": gpus}
            fields |= {"alloc_cpus": cpus, "alloc_memory": megabytes}
            return {"name": name, "state": state.lower(), "partitions": PARTITIONS.get(name, ["main"])} | fields
        group: dict[str, Any] = {
            "nodes": {"nodes": [name]},
            "node": {"state": [state]},
            "partition": {"name": "main"},
            "features": {"total": features, "active": features},
            "gres": {"total": GRES.get(name, ""), "used": gpus},
            "cpus": {"allocated": cpus, "total": 99, "minimum": CPUS.get(name, 8), "maximum": CPUS.get(name, 8)},
        }
        if form == "grouped":
            weight_range = {"minimum": weight, "maximum": weight}
            memory_range = {"minimum": memory, "maximum": memory, "allocated": megabytes}
            return group | {"memory": memory_range, "weight": weight_range}
        return group | {"memory": memory, "weight": {"set": True, "infinite": False, "number": weight}}

    nodes = [node(name, *facts) for name, facts in NODES.items()]
    if form != "22.05":
        nodes += [
            entry | {"partition": {"name": other}}
            for entry in list(nodes)
            for other in PARTITIONS.get(entry["nodes"]["nodes"][0], [])[1:]
        ]
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
        ("gpu+ib-2xa100-67.1GB", 1, 1, 64 * GB << 20, None),
        ("ib-2xgpu-537GB", 1, 1, 512 * GB << 20, None),
        ("ib-67.1GB", 2, 1, 64 * GB << 20, None),
    ]


@pytest.mark.parametrize("memory", [0, 1, None, "64GB", {"minimum": -1}, [], True])
async def test_unconfigured_memory_is_unknown(slurm: FakeSlurm, memory: object) -> None:
    nodes = [{"name": n, "state": "idle", "partitions": ["main"], "real_memory": memory} for n in ("n1", "n2")]
    slurm.set_answer("sinfo", json.dumps({"nodes": nodes, "errors": []}), when="*--json*")
    assert [c.memory for c in (await slurm.make_lrm().take_snapshot()).node_classes] == [None]


async def test_job_of_class_excludes_other_nodes(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    await slurm.make_lrm().submit_job(make_submission(tmp_path, nodes=1, node_class="ib-2xgpu-537GB"))
    assert " --exclude=n[1-3] " in slurm.list_calls("sbatch")[-1]
    assert "--constraint" not in slurm.list_calls("sbatch")[-1], "others have that feature, too"
    await slurm.make_lrm().submit_job(make_submission(tmp_path))
    assert "--exclude" not in slurm.list_calls("sbatch")[-1]


async def test_job_of_feature_class_has_constraint(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    classes = {"fast": NodeClassSettings(feature="gpu", power=3.0)}
    adapter = slurm.make_lrm(node_classes=classes)
    assert count_idle(await adapter.take_snapshot()) == {"fast": 1, "ib-2xgpu-537GB": 1, "ib-67.1GB": 2}
    await adapter.submit_job(make_submission(tmp_path, nodes=1, node_class="fast"))
    assert " --constraint=gpu " in slurm.list_calls("sbatch")[-1]


async def test_job_of_class_keeps_configured_options(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    classes = {"fast": NodeClassSettings(feature="gpu"), "some": NodeClassSettings(hosts="n[1,4]")}
    adapter = slurm.make_lrm(node_classes=classes, options=("--constraint=ib", "--exclude=n4"))
    assert count_idle(await adapter.take_snapshot()) == {"fast": 1, "some": 1, "ib-67.1GB": 1}
    for name, others in (("fast", "n[1-2],n4"), ("some", "n[2-4]")):
        await adapter.submit_job(make_submission(tmp_path, nodes=1, node_class=name))
        options = slurm.list_calls("sbatch")[-1].split()
        assert [option for option in options if option.startswith(("--exclude", "--constraint"))] == [
            "--constraint=ib",
            "--exclude=n4",
            f"--exclude={others}",
        ], "the last one counts"


async def test_unknown_or_small_class_is_rejected_as_limit(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    for name, nodes in (("gone", 1), ("ib-2xgpu-537GB", 2)):
        with pytest.raises(SiteRejected, match=f"nodes of the class {name}") as refused:
            await slurm.make_lrm().submit_job(make_submission(tmp_path, nodes=nodes, node_class=name))
        assert refused.value.fault == "limit"
    assert slurm.list_calls("sbatch") == []


@pytest.mark.parametrize("form", FORMS)
async def test_classes_have_cores_gpus_features_and_partitions(slurm: FakeSlurm, form: str) -> None:
    show_nodes(slurm, form)
    classes = (await slurm.make_lrm(partition="main,gpu").take_snapshot()).node_classes
    assert [(c.total, c.cores, c.gpus, c.features, c.partitions) for c in classes] == [
        (1, 32, (Gpus(2, "a100"),), ("gpu", "ib"), ("gpu", "main")),
        (1, 64, (Gpus(2),), ("ib",), ("main",)),
        (2, 8, (), ("ib",), ("main",)),
    ]


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:a100:2(S:0-1),gpu:v100:1(IDX:0,2),tape:4", (Gpus(2, "a100"), Gpus(1, "v100"))),
        ("gpu", (Gpus(1),)),
        ("gpu:3", (Gpus(3),)),
        ("gpu:a100", (Gpus(1, "a100"),)),
        ("gpu:bad type:2", (Gpus(2),)),
        ("gpu:999999", (Gpus(1000),)),
        ("", ()),
        ("(null)", ()),
        (None, ()),
        ({"total": "gpu:1", "used": ""}, (Gpus(1),)),
        ([], ()),
        ("gpu:a:0", ()),
    ],
)
def test_read_gres(gres: object, expected: tuple[Gpus, ...]) -> None:
    assert read_gres(gres) == expected


OPTIONS = ("--partition", "--account", "--qos", "--constraint", "--gres", "--exclude")


def node_options(slurm: FakeSlurm) -> list[str]:
    """Return the options of the last submission that concern its nodes and its account."""
    return [option for option in slurm.list_calls("sbatch")[-1].split() if option.startswith(OPTIONS)][1:]


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        (NodeRequirement(), []),
        (NodeRequirement(features=("ib", "gpu")), ["--constraint=ib&gpu"]),
        (NodeRequirement(gpus=Gpus(1)), ["--gres=gpu:1"]),
        (NodeRequirement(gpus=Gpus(2, "a100")), ["--gres=gpu:a100:2"]),
        (NodeRequirement(cores=16), ["--exclude=n[1-2]"]),
        (NodeRequirement(memory=10**11), ["--exclude=n[1-3]"]),
        (NodeRequirement(cores=64, gpus=Gpus(1)), ["--gres=gpu:1", "--exclude=n3"]),
        (NodeRequirement(partition="gpu"), ["--partition=gpu"]),
        (NodeRequirement(exclude=("n[1-2]", "elsewhere")), ["--exclude=n[1-2]"]),
        (NodeRequirement(account="climate", qos="long"), ["--account=climate", "--qos=long"]),
    ],
)
async def test_requirement_becomes_options_of_sbatch(
    slurm: FakeSlurm, tmp_path: Path, requirement: NodeRequirement, expected: list[str]
) -> None:
    show_nodes(slurm)
    adapter = slurm.make_lrm(partition="main,gpu", allowed_account=["climate"], allowed_qos=["long"])
    await adapter.submit_job(make_submission(tmp_path, nodes=1, requirement=requirement))
    assert node_options(slurm) == expected


async def test_configured_constraint_is_kept_beside_required_feature(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    adapter = slurm.make_lrm(options=("--constraint=ib", "--exclude=n4"))
    await adapter.submit_job(make_submission(tmp_path, nodes=1, requirement=NodeRequirement(features=("gpu",))))
    assert slurm.list_calls("sbatch")[-1].count("--constraint") == 1
    assert " --exclude=n[1-2],n4 " in slurm.list_calls("sbatch")[-1]


@pytest.mark.parametrize(
    ("requirement", "problem", "fault"),
    [
        (NodeRequirement(features=("gpu",)), "2 nodes with feature gpu requested, but it has 1", "limit"),
        (NodeRequirement(partition="secret"), "with partition secret requested, but it has 0", "limit"),
        (NodeRequirement(exclude=("n[1-3]",)), "2 nodes that are not excluded requested, but it has 1", "limit"),
        (NodeRequirement(exclude=("n[3-1]",)), "exclude cannot be understood", "job"),
        (NodeRequirement(account="other"), "account other may not be chosen here", "unsuitable"),
        (NodeRequirement(qos="long"), "qos long may not be chosen here", "unsuitable"),
    ],
)
async def test_requirement_that_cannot_be_met_is_rejected(
    slurm: FakeSlurm, tmp_path: Path, requirement: NodeRequirement, problem: str, fault: str
) -> None:
    show_nodes(slurm)
    with pytest.raises(SiteRejected, match=problem) as refused:
        await slurm.make_lrm().submit_job(make_submission(tmp_path, nodes=2, requirement=requirement))
    assert refused.value.fault == fault
    assert slurm.list_calls("sbatch") == []


async def test_rejection_of_chosen_account_concerns_the_job_only(slurm: FakeSlurm, tmp_path: Path) -> None:
    show_nodes(slurm)
    text = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    slurm.set_answer("sbatch", "", errors=text, code=1)
    adapter = slurm.make_lrm(allowed_account=["climate"])
    for requirement, fault in ((NodeRequirement(account="climate"), "unsuitable"), (NodeRequirement(), "site")):
        with pytest.raises(SiteRejected, match="Invalid account") as refused:
            await adapter.submit_job(make_submission(tmp_path, nodes=1, requirement=requirement))
        assert refused.value.fault == fault


SHARE = {"share": True, "identity": "own", "partition": "main,gpu"}
USED = {"n1": (2, 8 * GB, ""), "n2": (2, 60 * GB, ""), "n3": (30, 6 * GB, "gpu:a100:1(IDX:0)"), "n4": (64, 0, "gpu:0")}


@pytest.mark.parametrize("form", ["22.05", "grouped"])
async def test_site_that_shares_reports_what_jobs_leave_of_nodes(slurm: FakeSlurm, form: str) -> None:
    show_nodes(slurm, form, USED, n1="MIXED", n2="MIXED", n3="MIXED", n4="MIXED")
    snapshot = await slurm.make_lrm(**SHARE).take_snapshot()
    assert snapshot.shares
    assert {c.name: c.parts for c in snapshot.node_classes if c.parts} == {
        "gpu+ib-2xa100-67.1GB": (NodePartReport(1, 2, 58 * GB << 20, (Gpus(1, "a100"),)),),
        "ib-67.1GB": (NodePartReport(1, 6, 4 * GB << 20), NodePartReport(1, 6, 56 * GB << 20)),
    }
    assert (snapshot.idle, snapshot.background) == (0, 4)
    snapshot = await slurm.make_lrm(partition="main,gpu").take_snapshot()
    assert not snapshot.shares
    assert not any(c.parts for c in snapshot.node_classes)


@pytest.mark.parametrize(
    "state", ["ALLOCATED", "MIXED+DRAIN", "MIXED+PLANNED", "MIXED+COMPLETING", "IDLE", "MIXED+NEW"]
)
async def test_node_that_takes_no_job_has_no_part(slurm: FakeSlurm, state: str) -> None:
    show_nodes(slurm, "22.05", USED, n1=state, n2="DOWN", n3="DOWN", n4="DOWN")
    assert not any(c.parts for c in (await slurm.make_lrm(**SHARE).take_snapshot()).node_classes)


async def test_node_of_a_job_that_has_just_started_has_no_part_yet(slurm: FakeSlurm) -> None:
    """Slurm listed the nodes before it started the job."""
    show_nodes(slurm, "22.05", USED, n1="MIXED", n2="DOWN", n3="DOWN", n4="DOWN")
    slurm.set_answer("squeue", column_line(id="1", name="koala-x-1.1.0", nodes="n1", state="RUNNING"), when=COLUMNS)
    adapter = slurm.make_lrm(**SHARE)
    assert [sum(len(c.parts) for c in (await adapter.take_snapshot()).node_classes) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("configuration", "partitions", "reason"),
    [
        (
            "SelectType             = select/linear\n",
            partition_lines("main", "gpu"),
            "Slurm has SelectType=select/linear",
        ),
        ("", partition_lines("main", "gpu", share="EXCLUSIVE"), "partition main has OverSubscribe=EXCLUSIVE"),
        ("", partition_lines("main", "gpu").replace("User=NO", "User=YES"), "partition main has ExclusiveUser=YES"),
        ("", "", "partitions main,gpu is not shown by scontrol"),
    ],
)
async def test_slurm_that_gives_whole_nodes_only_offers_no_parts(
    slurm: FakeSlurm, tmp_path: Path, configuration: str, partitions: str, reason: str
) -> None:
    """Else jobs would be placed on parts of nodes without end, and never start."""
    show_nodes(slurm, "22.05", USED, n1="MIXED", n2="MIXED", n3="MIXED", n4="MIXED")
    slurm.set_answer("sinfo", "main*|up|1-infinite\ngpu|up|1-infinite\n", when="*%P*")
    slurm.set_answer("scontrol", configuration, when="show config")
    slurm.set_answer("scontrol", partitions, when="show partition *")
    adapter = slurm.make_lrm(**SHARE)
    snapshot = await adapter.take_snapshot()
    assert not snapshot.shares
    assert not any(c.parts for c in snapshot.node_classes)
    assert reason in " ".join(snapshot.notices)
    assert reason in " ".join(finding.result for finding in await adapter.check_setup() if finding.subject == "share")
    requirement = NodeRequirement(cores=4, share=True)
    await adapter.submit_job(make_submission(tmp_path, nodes=1, requirement=requirement))
    assert "--exclusive --no-requeue --mem=0" in slurm.list_calls("sbatch")[-1]


async def test_parts_beyond_the_limit_of_a_partition_are_not_reported(slurm: FakeSlurm) -> None:
    show_nodes(slurm, "22.05", dict.fromkeys(("n1", "n2"), (2, 0, "")), n1="MIXED", n2="MIXED", n4="DOWN")
    slurm.set_answer("sinfo", "main*|up|1-2\n", when="*%P*")
    snapshot = await slurm.make_lrm(share=True, identity="own").take_snapshot()
    assert (snapshot.idle, sum(part.nodes for c in snapshot.node_classes for part in c.parts)) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "memory", "expected"),
    [
        (SHARE, None, "--cpus-per-task=4 --no-requeue --mem-per-cpu=2000M"),
        (SHARE, 10**9, "--cpus-per-task=4 --no-requeue --mem=954M"),
        (SHARE | {"options": ("--mem=1G",)}, None, "--cpus-per-task=4 --no-requeue --partition"),
        ({"partition": "main,gpu"}, None, "--exclusive --no-requeue --mem=0"),
    ],
)
async def test_job_that_shares_gets_processors_and_memory_where_the_site_shares(
    slurm: FakeSlurm, tmp_path: Path, settings: dict[str, Any], memory: int | None, expected: str
) -> None:
    show_nodes(slurm)
    requirement = NodeRequirement(cores=4, memory=memory, share=True)
    await slurm.make_lrm(**settings).submit_job(make_submission(tmp_path, nodes=1, requirement=requirement))
    assert f"--ntasks-per-node=1 {expected}" in slurm.list_calls("sbatch")[-1]
    script = (tmp_path / "launch").read_text()
    assert ("--cpu-bind=cores" in script, "$bind --cpus-per-task=4" in script) == (("share" in settings),) * 2
