"""Check that all jobs of the mohamed-2005 workload end on simulated clusters in every claiming mode."""

from collections import Counter

import pytest

from koalapy.model.job_spec import ClaimingMode, Priority
from tests.experiments.m05 import table
from tests.experiments.m05_virtual import run, with_rules

pytestmark = pytest.mark.nightly

JOBS = 100


@pytest.mark.parametrize("claiming", ClaimingMode)
def test_m05_virtual_jobs_succeed_and_high_priority_is_faster(claiming: ClaimingMode) -> None:
    completed, world = run(with_rules(claiming=claiming), jobs=JOBS)
    print(table([completed]))
    assert len(completed.outcomes) == JOBS
    assert all(outcome.succeeded for outcome in completed.outcomes)
    for figure in ("placement_time", "start_delay"):
        assert completed.mean_of(Priority.HIGH, figure) < completed.mean_of(Priority.LOW, figure)
    events = Counter(entry.event for entry in world.timeline)
    assert events["preempted"] > 0
    assert sum(outcome.restarts for outcome in completed.outcomes) > JOBS, "failures were many"
    transfers = [c.transfer_time for job in world.jobs.values() if job.attempt for c in job.attempt.components]
    assert max(transfers) > 1, "files were on their way"


def test_m05_virtual_same_seed_gives_same_run() -> None:
    first, second = (run(with_rules(claiming=ClaimingMode.INCREMENTAL), jobs=20)[0] for _ in range(2))
    assert first.outcomes == second.outcomes
