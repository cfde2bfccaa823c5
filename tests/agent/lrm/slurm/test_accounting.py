"""The use of ended jobs in Slurm's accounting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.port import JobUse
from koalapy.agent.lrm.slurm.adapter import SlurmLrm
from koalapy.agent.lrm.slurm.commands import RETRY_INTERVAL_S, read_cancellers, read_size, read_time, read_uses
from tests.signals import pass_time
from tests.virtual_time import VirtualClock, VirtualTimeLoop

from .conftest import ANSWERS, COLUMNS, FakeSlurm, column_line

DATABASE = "AccountingStorageHost   = db\nAccountingStorageType   = accounting_storage/slurmdbd\n"
USE_OF_171 = JobUse(58.412, 480.0, 1_536_000 * 1024, 2)


def test_recorded_answer_has_uses_of_ended_jobs() -> None:
    uses = read_uses((ANSWERS / "sacct-24.11.txt").read_text())
    assert uses.keys() == {"1", "4"}, "2 never ran, and 7 runs"
    assert uses["1"] == JobUse(pytest.approx(4.133), 48.0, 203_748 * 1024, 1)
    assert uses["4"] == JobUse(pytest.approx(0.013), 0.0, None, 1)


def test_answer_about_long_and_lost_jobs_has_their_uses() -> None:
    uses = read_uses(
        "172|TIMEOUT|1|7205|00:40:12|\n172.batch|CANCELLED|1|7207|00:00.180|9388K\n"
        "172.0|CANCELLED|1|7205|40:11.820|2.50G\n"
        "173|NODE_FAIL|3|3600|1-02:03:04|\n173.0|NODE_FAIL|3|3600|1-02:03:04|1073741824\n"
        "175|COMPLETED|1|20|00:00:00|\n175.batch|COMPLETED|1|20|00:00:00|\n"
    )
    assert uses == {"172": JobUse(2412.0, 7205.0, int(2.5 * 1024**3), 1), "173": JobUse(93_784.0, 3600.0, 1024**3, 3)}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "171",
        "171|COMPLETED|2|480|00:58.412",
        "171|VANISHED|2|480|00:58.412|\n171.0|VANISHED|2|480|00:58.412|12K",
        "171_3|COMPLETED|2|480|00:58.412|12K",
        "171|COMPLETED|2|480||\n171.0|COMPLETED|2|480|soon|much",
        "sacct: error: slurm_persist_conn_open: Something happened",
        "²|COMPLETED|2|480|00:58.412|12K",
    ],
)
def test_answer_with_unknown_words_has_no_uses(line: str) -> None:
    assert read_uses(line) == {}


def test_answer_with_unknown_amounts_keeps_known_ones() -> None:
    assert read_uses("7|COMPLETED|?|lots||\n7.0|COMPLETED|1|4|00:02.5|16?") == {"7": JobUse(2.5)}


@given(st.lists(st.lists(st.text("0123456789.:-|KMG?²", max_size=12), max_size=8).map("|".join)).map("\n".join))
def test_any_answer_is_read(text: str) -> None:
    assert all(use.cpu_time > 0 for use in read_uses(f"7|COMPLETED|1|1||\n{text}").values())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:01.250", 1.25), ("40:11", 2411.0), ("01:02:03", 3723.0), ("2-00:00:01", 172_801.0), ("12", None)],
)
def test_time_is_read_in_every_form(text: str, seconds: float | None) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("4K", 4096), ("1.5M", 1_572_864), ("4Q", None)])
def test_size_is_read_in_every_unit(text: str, size: int | None) -> None:
    assert read_size(text) == size


def end_jobs(slurm: FakeSlurm, *ids: str) -> None:
    lines = (column_line(f"koala-x-{id}.1.0", id, "n1", state="COMPLETED") for id in ids)
    slurm.set_answer("squeue", "".join(lines), when=COLUMNS)


async def uses_in_snapshot(lrm: SlurmLrm) -> dict[str, JobUse | None]:
    return {job.id: job.use for job in (await lrm.take_snapshot()).jobs}


async def test_snapshot_reads_use_of_each_ended_job_once(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", DATABASE, when="show config")
    slurm.set_answer("sacct", "171|COMPLETED|2|480|||\n171.0|COMPLETED|2|480|00:58.412|1536000K|\n")
    lrm = slurm.make_lrm()
    end_jobs(slurm, "171", "172")
    for _ in range(2):
        assert await uses_in_snapshot(lrm) == {"171": USE_OF_171, "172": None}
    end_jobs(slurm, "171", "173")
    assert await uses_in_snapshot(lrm) == {"171": USE_OF_171, "173": None}
    first, second = slurm.list_calls("sacct")
    assert "--jobs=171,172 " in first
    assert "--jobs=173 " in second


async def test_snapshot_without_database_asks_no_accounting(slurm: FakeSlurm) -> None:
    slurm.set_answer("scontrol", "AccountingStorageType   = (null)\n", when="show config")
    end_jobs(slurm, "171")
    assert await uses_in_snapshot(slurm.make_lrm()) == {"171": None}
    assert slurm.list_calls("sacct") == []


async def test_failed_accounting_is_asked_again_after_a_pause(slurm: FakeSlurm, virtual_loop: VirtualTimeLoop) -> None:
    slurm.set_answer("scontrol", DATABASE, when="show config")
    slurm.set_answer("sacct", "", errors="sacct: error: Problem talking to the database: Connection refused", code=1)
    lrm = slurm.make_lrm(clock=VirtualClock(virtual_loop))
    for id in ("171", "172"):
        end_jobs(slurm, id)
        assert await uses_in_snapshot(lrm) == {id: None}
    assert len(slurm.list_calls("sacct")) == 1
    await pass_time(RETRY_INTERVAL_S)
    end_jobs(slurm, "173")
    await lrm.take_snapshot()
    assert len(slurm.list_calls("sacct")) == 2


def test_accounting_names_who_cancelled_job() -> None:
    text = "171|CANCELLED by 0|2|10|00:00:01|\n171.batch|CANCELLED|1|5|00:00:01|\n172|CANCELLED|1|1|00:00:00|\n"
    assert read_cancellers(text) == {"171": "root"}
    assert read_cancellers("173|CANCELLED by 4294967294|1|1|00:00:00|\n") == {"173": "uid 4294967294"}
