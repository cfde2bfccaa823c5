"""``koala history``: lists, sums and formats."""

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from koalapy.daemon.jobs.history import History
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.history import HistoryStore
from koalapy.store.opening import Stores
from koalapy.store.records import Batch
from tests.cli.conftest import Koala, Server
from tests.memory_stores import memory_stores

NOW = 1_700_000_000.0
GB = 10**9


def make_job(ident: int, owner: str, state: JobState, measured: int, **spec: object) -> Job:
    """Return a job of 2 nodes that ended so many hours ago as its id, and ran for an hour on two processors a node."""
    ended = NOW - 3600.0 * ident
    used = {"cpu_time": 3600.0 * measured, "cpu_available": 7200.0 * measured, "peak_memory": ident * GB}
    component = Component(0, "north", 2, ComponentState.ENDED, claimed_at=ended - 3600.0, ended_at=ended)
    component = replace(component, measured_nodes=measured, **(used if measured else {}))  # type: ignore[arg-type]
    job = Job(ident, JobSpec(FlexibleRequest(2), ("true",), owner=owner, **spec), ended - 3660.0, state)  # type: ignore[arg-type]
    attempt = Attempt(1, (component,), ended - 3610.0)
    return replace(
        job, generation=1, attempt=attempt, started_at=ended - 3600.0, ended_at=ended, reason="exited with 3"
    )


JOBS = [
    make_job(1, "ada", JobState.SUCCEEDED, 2, name="=wave"),
    make_job(2, "ada", JobState.FAILED, 1, name="wave-2"),
    make_job(3, "bob", JobState.SUCCEEDED, 2),
    make_job(4, "ada", JobState.SUCCEEDED, 0),
    make_job(24 * 9, "ada", JobState.SUCCEEDED, 2),
]


@pytest.fixture
def stores() -> Stores:
    stores = memory_stores()
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={job.id: job for job in JOBS}))
    return stores


@pytest.fixture
def server(stores: Stores) -> Iterator[Server]:
    with Server(history=History(stores.history, lambda: NOW, list)) as server:
        yield server


def test_history_lists_own_jobs_of_last_week(koala: Koala) -> None:
    result = koala("history")
    lines = result.out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "=wave"], ["2", "wave-2"], ["4", "-"]]
    cells = re.split(r"  +", lines[1])
    assert cells[3:6] == ["succeeded", "2", "north"]
    assert cells[6:] == ["2023-11-14 21:13:20", "1:00", "1:00:00", "2.00", "50.0%", "1 GB", "-"]
    assert "50.0%?  2 GB?   exited with 3" in lines[2], "one of its two nodes is not known"
    assert lines[3].split()[-3:] == ["-", "-", "-"], "unknown, not zero"
    assert lines[-1] == (
        "3 jobs: 2 succeeded, 1 failed; 6.00 node-hours; mean wait 1:00; mean run 1:00:00; CPU 50.0% "
        "(2 jobs are not fully known)"
    )


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ("--all", [1, 2, 3, 4]),
        ("--user bob", [3]),
        ("--state failed", [2]),
        ("--state failed --state succeeded --since 3h", [1, 2]),
        ("--state failed,succeeded --since 3h", [1, 2]),
        ("--since 2h30m --until 90m", [2]),
        ("--since 2023-11-01", [1, 2, 4, 216]),
        ("--name wave*", [2]),
        ("--cluster north --limit 2", [1, 2]),
        ("--sort memory", [2, 1, 4]),
        ("--sort efficiency --limit 1", [2]),
        ("--user eve", []),
    ],
)
def test_history_options_select_jobs(koala: Koala, options: str, ids: list[int]) -> None:
    result = koala("history", "--json", *options.split())
    assert (result.code, [job["id"] for job in json.loads(result.out)["jobs"]]) == (0, ids)


def test_history_says_how_many_jobs_there_are(koala: Koala) -> None:
    assert koala("history", "--limit", "1").out.splitlines()[-1].startswith("1 of 3 jobs; --limit 100 for more: 2 succ")
    result = koala("history", "--user", "eve")
    assert (result.code, result.err) == (0, "koala: no such job ended since 7d\n")


def test_history_as_csv_has_a_line_for_each_job(koala: Koala) -> None:
    rows = list(csv.DictReader(io.StringIO(koala("history", "--format", "csv").out)))
    assert [(row["id"], row["name"], row["efficiency"], row["clusters"]) for row in rows] == [
        ("1", "'=wave", "0.5", "north"),
        ("2", "wave-2", "0.5", "north"),
        ("4", "", "", "north"),
    ]


def test_history_sums_cover_all_jobs(koala: Koala) -> None:
    facts = dict(line.strip().split("  ") for line in koala("history", "--all", "--sum").out.splitlines())
    assert (facts["jobs"], facts["node-hours"], facts["largest memory"]) == ("4", "8.00", "3 GB on one node")
    assert facts["CPU-hours"] == "5.00 of 10.00, 50.0%"
    sums = json.loads(koala("history", "--sum", "--json").out)["sums"]
    assert (sums["jobs"], sums["unmeasured"]) == (3, 2)
    (row,) = csv.DictReader(io.StringIO(koala("history", "--sum", "--format", "csv").out))
    assert (row["jobs"], row["failed"]) == ("3", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--since 7", "--since is '7', which has no unit; give 7s, 7m, 7h or 7d"),
        ("--since 1h --until 2h", "--since is 1h, which is after until, 2h; give the earlier time as since"),
        ("--state running", "--state is running, and the history has only jobs that ended"),
        ("--all --user bob", "--all and --user cannot be given together"),
    ],
)
def test_history_rejects_unsuitable_options(koala: Koala, options: str, message: str) -> None:
    result = koala("history", *options.split())
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_usage_shows_days(koala: Koala) -> None:
    assert koala("usage", "--days", str(int(time.time() - NOW) // 86400 + 30), "--step", "all").code == 0


def test_history_read_in_parts_equals_that_of_one_page(koala: Koala, stores: Stores) -> None:
    parts = Server(history=History(HistoryStore(stores.jobs.database, max_examined=2), lambda: NOW, list))
    parts.start()
    try:
        for options in ("--all --sort memory", "--all --sum"):
            command = ("history", "--json", *options.split())
            assert koala(*command, "--url", parts.url).out == koala(*command).out
    finally:
        parts.end()
