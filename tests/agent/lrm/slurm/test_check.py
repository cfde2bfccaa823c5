"""Findings of the check, and the remedies that it prints."""

import json

import pytest

from koalapy.agent.lrm.port import Finding

from .conftest import ANSWERS, COLUMNS, FakeSlurm


async def run_check(slurm: FakeSlurm, **settings: object) -> dict[str, Finding]:
    return {entry.subject: entry for entry in await slurm.make_lrm(**settings).check_setup()}


async def test_check_of_healthy_cluster_passes(slurm: FakeSlurm) -> None:
    slurm.set_answer("sbatch", "", errors="sbatch: Job 3 to start at 2026-11-21T10:00:00\n", when="*--test-only*")
    finding = await run_check(slurm, account="physics")
    assert [entry.ok for entry in finding.values()] == [True] * 8
    assert finding["Slurm"].result == "slurm-wlm 22.05.8"
    assert finding["partition"].result == "main"
    assert finding["nodes"].result == "4, 0 idle, 1 down: n4 is DRAIN+IDLE (disk)"
    assert finding["queue"].result == "can be read; jobs of koalapy in it: 3"
    assert finding["a job's options"].result == "Job 3 to start at 2026-11-21T10:00:00"
    assert "--account=physics" in slurm.list_calls("sbatch")[0]


@pytest.mark.parametrize("text", ["slurm 20.11.9", "what?"])
async def test_check_of_old_slurm_fails(slurm: FakeSlurm, text: str) -> None:
    slurm.set_answer("sinfo", text + "\n", when="--version")
    finding = (await run_check(slurm))["Slurm"]
    assert (finding.ok, finding.result, finding.hint) == (
        False,
        f"{text}: sinfo --json needs 21.08",
        "upgrade Slurm to 21.08 or later",
    )


async def test_check_without_controller_fails(slurm: FakeSlurm) -> None:
    slurm.set_answer(
        "sinfo", "", errors="slurm_load_partitions: Unable to contact slurm controller\n", code=1, when="*%P*"
    )
    finding = (await run_check(slurm))["controller"]
    assert (finding.ok, "Unable to contact" in finding.result, "slurmctld" in finding.hint) == (False, True, True)


@pytest.mark.parametrize(
    ("listed", "partition", "text", "hint"),
    [
        ("main*|up\nother|up\n", "mian", "there is no partition mian", "main, other"),
        ("main|up\n", None, "no partition is set, and Slurm has no default one", "main"),
        ("main*|inact\n", None, "main is not up", "State=UP"),
    ],
)
async def test_check_of_wrong_partition_fails(
    slurm: FakeSlurm, listed: str, partition: str | None, text: str, hint: str
) -> None:
    slurm.set_answer("sinfo", listed, when="*%P*")
    finding = (await run_check(slurm, partition=partition))["partition"]
    assert (finding.ok, finding.result, hint in finding.hint) == (False, text, True)


async def test_check_of_unreadable_queue_fails(slurm: FakeSlurm) -> None:
    slurm.set_answer("squeue", "slurm_load_jobs error: none\n", when=COLUMNS)
    finding = (await run_check(slurm))["queue"]
    assert (finding.ok, "cannot be read" in finding.result) == (False, True)


async def test_check_with_all_nodes_down_fails(slurm: FakeSlurm) -> None:
    document = json.loads((ANSWERS / "sinfo-22.05.json").read_bytes())
    for node in document["nodes"]:
        node.update({"state": "down", "reason": "flood"})
    slurm.set_answer("sinfo", json.dumps(document), when="*--json*")
    finding = (await run_check(slurm))["nodes"]
    assert (finding.ok, finding.result) == (False, "4, 0 idle, 4 down: n1 is DOWN (flood)")
    assert "NodeName=n1 State=RESUME" in finding.hint


async def test_check_of_rejected_options_fails(slurm: FakeSlurm) -> None:
    text = "allocation failure: Invalid account or account/partition combination specified"
    slurm.set_answer("sbatch", "", errors=text + "\n", code=1, when="*--test-only*")
    finding = (await run_check(slurm, account="nobody"))["a job's options"]
    assert (finding.ok, finding.result) == (False, f"sbatch: {text}")
    assert "account" in finding.hint


async def test_check_of_any_answers_raises_nothing(slurm: FakeSlurm) -> None:
    for command in ("sinfo", "squeue", "sbatch"):
        slurm.kill_command(command)
    assert not all(entry.ok for entry in (await run_check(slurm)).values())
