"""Who cancelled jobs, by Slurm's accounting, and forms of time limits."""

import pytest

from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from koalapy.agent.lrm.slurm.commands import read_cancellers, read_time

from .conftest import COLUMNS, FakeSlurm, column_line

DATABASE = "AccountingStorageType   = accounting_storage/slurmdbd\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:01.250", 1.25), ("40:11", 2411.0), ("01:02:03", 3723.0), ("2-00:00:01", 172_801.0), ("12", None)],
)
def test_time_is_read_in_every_form(text: str, seconds: float | None) -> None:
    assert read_time(text) == seconds


async def reasons_in_snapshot(slurm: FakeSlurm, lrm: SlurmLrm, *ids: str) -> list[str]:
    lines = (column_line(f"koala-x-{id}.1.0", id, "n1", state="CANCELLED") for id in ids)
    slurm.set_answer("squeue", "".join(lines), when=COLUMNS)
    return [job.reason for job in (await lrm.take_snapshot()).jobs]


async def test_snapshot_asks_once_who_cancelled_jobs(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", DATABASE, when="show config")
    slurm.set_answer("sacct", "171|CANCELLED by 0\n172|CANCELLED\n")
    lrm = slurm.make_lrm()
    unknown = "cancelled in Slurm, and not by koalapy"
    for _ in range(2):
        assert await reasons_in_snapshot(slurm, lrm, "171", "172") == ["cancelled in Slurm by root", unknown]
    slurm.set_answer("sacct", "", errors="sacct: error: Problem talking to the database: Connection refused", code=1)
    assert await reasons_in_snapshot(slurm, lrm, "171", "173") == ["cancelled in Slurm by root", unknown]
    first, second = slurm.list_calls("sacct")
    assert "--jobs=171,172 " in first
    assert "--jobs=173 " in second


async def test_snapshot_without_database_asks_no_accounting(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", "AccountingStorageType   = (null)\n", when="show config")
    assert await reasons_in_snapshot(slurm, slurm.make_lrm(), "171") == ["cancelled in Slurm, and not by koalapy"]
    assert slurm.list_calls("sacct") == []


async def test_configuration_that_cannot_be_read_is_read_again(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", "", errors="slurm_load_ctl_conf error: Unspecified error", code=1, when="show config")
    slurm.set_answer("sacct", "172|CANCELLED by 0\n")
    lrm = slurm.make_lrm()
    assert await reasons_in_snapshot(slurm, lrm, "171") == ["cancelled in Slurm, and not by koalapy"]
    slurm.set_answer("scontrol", DATABASE, when="show config")
    assert await reasons_in_snapshot(slurm, lrm, "172") == ["cancelled in Slurm by root"]


def test_account_without_name_cancelled_job_as_its_number() -> None:
    assert read_cancellers("173|CANCELLED by 4294967294\n") == {"173": "uid 4294967294"}
