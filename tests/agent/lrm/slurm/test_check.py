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
    assert [entry.ok for entry in finding.values()] == [True] * 9
    assert finding["Slurm"].result == "slurm-wlm 22.05.8"
    assert finding["partition"].result == "main"
    assert finding["nodes"].result == "4, 0 idle, 1 down: n4 is DRAIN+IDLE (disk)"
    assert finding["queue"].result == "can be read; jobs of koalapy in it: 3"
    assert finding["a job's options"].result == "Job 3 to start at 2026-11-21T10:00:00"
    assert "--account=physics" in slurm.list_calls("sbatch")[0]


UNREACHABLE = "slurm_load_partitions: Unable to contact slurm controller"
REJECTED = "allocation failure: Invalid account or account/partition combination specified"


@pytest.mark.parametrize(
    ("command", "when", "answer", "errors", "subject", "result", "hint"),
    [
        ("sinfo", "--version", "slurm 20.11.9", "", "Slurm", "20.11.9: sinfo --json needs 21.08", "to 21.08 or later"),
        ("sinfo", "--version", "what?", "", "Slurm", "what?: sinfo --json needs 21.08", "to 21.08 or later"),
        ("sinfo", "*%P*", "", UNREACHABLE, "controller", "Unable to contact", "slurmctld"),
        ("sinfo", "*%P*", "a*|up\nother|up", "", "partition", "there is no partition main", "a, other"),
        ("sinfo", "*%P*", "main*|inact", "", "partition", "main is not up", "State=UP"),
        ("squeue", COLUMNS, "slurm_load_jobs error: none", "", "queue", "cannot be read", "by hand"),
        ("sbatch", "*--test-only*", "", REJECTED, "a job's options", f"sbatch: {REJECTED}", "account"),
    ],
)
async def test_check_of_unusable_slurm_names_problem_and_remedy(
    slurm: FakeSlurm, command: str, when: str, answer: str, errors: str, subject: str, result: str, hint: str
) -> None:
    slurm.set_answer(command, f"{answer}\n", errors=f"{errors}\n", code=bool(errors), when=when)
    finding = (await run_check(slurm, partition="main", account="physics"))[subject]
    assert (finding.ok, result in finding.result, hint in finding.hint) == (False, True, True)


async def test_check_without_default_partition_fails(slurm: FakeSlurm) -> None:
    slurm.set_answer("sinfo", "main|up\n", when="*%P*")
    finding = (await run_check(slurm))["partition"]
    assert (finding.ok, finding.result) == (False, "no partition is set, and Slurm has no default one")


async def test_check_with_all_nodes_down_fails(slurm: FakeSlurm) -> None:
    document = json.loads((ANSWERS / "sinfo-22.05.json").read_bytes())
    for node in document["nodes"]:
        node.update({"state": "down", "reason": "flood"})
    slurm.set_answer("sinfo", json.dumps(document), when="*--json*")
    finding = (await run_check(slurm))["nodes"]
    assert (finding.ok, finding.result) == (False, "4, 0 idle, 4 down: n1 is DOWN (flood)")
    assert "NodeName=n1 State=RESUME" in finding.hint


async def test_check_of_any_answers_raises_nothing(slurm: FakeSlurm) -> None:
    for command in ("sinfo", "squeue", "sbatch"):
        slurm.kill_command(command)
    assert not all(entry.ok for entry in (await run_check(slurm)).values())
