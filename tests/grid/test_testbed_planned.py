"""A wide job over Slurm and Grid Engine that starts when it was promised while narrow jobs flow around it."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from koalapy.model.job import ON_TIME_S
from tests.grid.grid import wait_until
from tests.grid.testbed import Testbed

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

WIDE = {"type": "fixed", "components": [{"cluster": "north", "size": 3}, {"cluster": "east", "size": 3}]}
LAST = {"type": "fixed", "components": [{"cluster": "north", "size": 1}, {"cluster": "east", "size": 1}]}
ONE = {"type": "flexible", "total_size": 1}
NARROW_JOBS = 60


@pytest.fixture(scope="module")
def bed(testbed: Testbed) -> Iterator[Testbed]:
    """Yield the testbed with a daemon that plans the start of a job as soon as it waits."""
    testbed.restart_daemon(KOALA_RULES__PLAN_AFTER="0")
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()
    testbed.restart_daemon()


def started_at(job: dict[str, Any]) -> float:
    return datetime.fromisoformat(job["started_at"]).timestamp()


def test_wide_job_starts_when_promised_while_narrow_jobs_flow_around_it(bed: Testbed) -> None:
    last = bed.submit(LAST, "sleep", "600", walltime="3m")
    bed.wait_for_state(last, "running")
    wide = bed.submit(WIDE, "true", walltime="1m")
    promise = wait_until(lambda: bed.get_job(wide)["planned_start"], "the wide job to have a planned start")
    narrow = [bed.submit(ONE, "sleep", "10", walltime="20s") for _ in range(NARROW_JOBS)]
    ended = bed.wait_for_end(wide, 300)
    promised, start = datetime.fromisoformat(promise["first"]).timestamp(), started_at(ended)
    jobs = [bed.wait_for_end(job, 300) for job in narrow]
    before = [job for job in jobs if started_at(job) < start]
    around = [job for job in before if job["components"][0]["cluster"] != "south"]
    print(f"promised {promise['first']}, started {ended['started_at']}: {start - promised:+.0f} s;")
    print(f"{len(before)} narrow jobs began before, {len(around)} of them on its clusters")
    print(bed.get_job(last)["state"], bed.get_job(last)["reason"])
    assert ended["state"] == "succeeded", ended
    assert start <= promised + ON_TIME_S, ended["timeline"]
    assert ended["planned_start"]["moved_because"] == ""
    assert len(around) >= 8
    assert len(before) < NARROW_JOBS, "the others waited for its nodes"
    assert {job["state"] for job in jobs} == {"succeeded"}
