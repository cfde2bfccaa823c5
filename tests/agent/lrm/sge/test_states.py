"""State letters and numbers of Grid Engine."""

from dataclasses import replace

import pytest

from koalapy.agent.lrm.port import JobEnd, LrmJobState
from koalapy.agent.lrm.sge.answers import (
    QUEUE_STATES,
    AccountingRecord,
    end_of,
    is_broken,
    job_state,
    queue_state,
    read_accounting,
    read_waiting_reason,
)

from .test_qstat import ANSWERS


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("qw hqw hRwq Rq dqw Eqw Ehqw EhRqw", LrmJobState.QUEUED),
        (
            "r t Rr Rt hr ht hRr s ts S tS T tT Rs Rts RS RtS RT RtT dr dt dRr dRt ds dS dT dRs dRS dRT P",
            LrmJobState.RUNNING,
        ),
        ("z", LrmJobState.ENDED),
        (" ? x", LrmJobState.UNKNOWN),
    ],
)
def test_job_state_of_words_in_the_manual(text: str, state: LrmJobState) -> None:
    for letters in text.split(" "):
        assert job_state(letters) is state, letters
        assert is_broken(letters) == letters.startswith("E")


def test_queue_state_of_each_letter() -> None:
    assert set("acouACDESdsP") == QUEUE_STATES.keys()
    assert [queue_state(states) for states in ("", "a", "A", "aS", "au", "d", "?", "dE")] == [
        "idle",
        "busy",
        "busy",
        "busy",
        "down",
        "down",
        "down",
        "down",
    ]


def test_read_accounting_returns_records() -> None:
    records = read_accounting((ANSWERS / "qacct.txt").read_text())
    assert [(r.job, r.failed, r.exit_status, r.limit, r.wallclock) for r in records] == [
        ("39", 0, 3, None, 0.0),
        ("40", 100, 137, None, 0.0),
        ("41", 37, 137, 1.0, 2.0),
        ("43", 26, 0, None, 0.0),
    ]
    assert {record.owner for record in records} == {"koala"}
    assert records[0].name == "koala-instance123-12.1.0"
    assert [end_of(record, cancelled=False) for record in records] == [
        JobEnd(3),
        JobEnd(137, lost=True, reason="ended by signal 9"),
        JobEnd(137, reason="walltime exceeded", exceeded="walltime"),
        JobEnd(None, lost=True, reason="Grid Engine failed opening input/output file (code 26)"),
    ]


@pytest.mark.parametrize(
    "text", ["", "error: job id 7 not found\n", "=====\nfailed 0\n", "=====\njobnumber 1\nfailed x\n"]
)
def test_read_accounting_skips_incomplete_records(text: str) -> None:
    assert read_accounting(text) == []


def test_end_of_cancelled_job_is_not_lost() -> None:
    killed = AccountingRecord("1", "h2-1", "koala-a", "koala", 100, "assumedly after job", 137, 5.0, 60.0)
    assert end_of(killed, cancelled=True) == JobEnd(137, reason="cancelled")
    assert end_of(replace(killed, wallclock=60.0), cancelled=False).reason == "walltime exceeded"
    assert end_of(replace(killed, failed=0, failure=""), cancelled=False).lost


FIELDS = """\
======
qname        all.q
hostname     n1
owner        koala
jobname      koala-a
jobnumber    101
"""


@pytest.mark.parametrize(
    ("fields", "exceeded"),
    [
        (
            "failed 44  : execd enforced h_rt limit\nexit_status 137\nru_wallclock 7195.2\ncategory -l h_rt=7200",
            "walltime",
        ),
        ("failed 44\nexit_status 137\nru_wallclock 7195\ncategory -l h_rt=7200", "walltime"),
        ("failed 52\nexit_status 137\nru_wallclock 12\ncategory -l h_rt=7200", "memory"),
        (
            "failed 46  : execd enforced h_vmem limit\nexit_status 137\nru_wallclock 7200\ncategory -l h_rt=7200",
            "memory",
        ),
        ("failed 47  : execd enforced h_rss limit\nexit_status 137\nru_wallclock 9", "memory"),
        (
            "failed 37  : qmaster enforced h_rt, h_cpu, or h_vmem limit\nexit_status 137 (Killed)\nru_wallclock 12s\n"
            "category -l h_rt=86400",
            "memory",
        ),
        (
            "failed 37  : qmaster enforced h_rt, h_cpu, or h_vmem limit\nexit_status 137\nru_wallclock 86395\n"
            "category -l h_rt=86400,h_vmem=25G",
            "walltime",
        ),
        ("failed 37\nexit_status 137\nru_wallclock 12", "walltime"),
        (
            "failed 100 : assumedly after job\nexit_status 140 (User defined signal 2)\nru_wallclock 3\n"
            "category -l h_rt=7200",
            "memory",
        ),
        ("failed 100\nexit_status 137\nmaxvmem 4.001G\nslots 1\ncategory -l h_vmem=4G,h_rt=60", "memory"),
        ("failed 100\nexit_status 137\nmaxvmem 4.001G\nslots 2\ncategory -l h_vmem=4G,h_rt=60", ""),
        ("failed 100\nexit_status 137\nmaxvmem 4.001G\nslots 2\ncategory -l h_rt=60", ""),
        ("failed 100\nexit_status 137\nru_wallclock 12", ""),
        ("failed 26  : opening input/output file\nexit_status 0", ""),
        ("failed 0\nexit_status 140", "memory"),
        ("failed 0\nexit_status 0", ""),
    ],
)
def test_end_of_record_names_exceeded_limit(fields: str, exceeded: str) -> None:
    (record,) = read_accounting(FIELDS + fields)
    end = end_of(record, cancelled=False)
    assert end.exceeded == exceeded
    assert not (exceeded and end.lost)


def test_end_of_cancelled_record_names_no_limit() -> None:
    (record,) = read_accounting(FIELDS + "failed 100\nexit_status 140\nmaxvmem 5G\ncategory -l h_vmem=4G")
    assert end_of(record, cancelled=True) == JobEnd(140, reason="cancelled")


WAITING = """job_number:                 9
scheduling info:            queue instance "all.q@east-1" dropped because it is full
                            cannot run in queue "all.q@east-2" because it is not contained
                            cannot run in PE "koala" because it only offers 2 slots
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WAITING, 'queue instance "all.q@east-1" dropped because it is full'),
        (
            WAITING.replace("dropped because it is full", "is odd"),
            'cannot run in PE "koala" because it only offers 2 slots',
        ),
        ("job_number: 9\nscheduling info:            (Collecting of scheduler job information is turned off)\n", ""),
        ("job_number: 9\n", ""),
        ("", ""),
    ],
)
def test_waiting_reason_is_read_from_scheduling_info(text: str, reason: str) -> None:
    assert read_waiting_reason(text) == reason
