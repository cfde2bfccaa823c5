"""Periodic scans while the grid does not change: only scans without effect are skipped."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.model.job_spec import Priority
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import LocalUser
from koalapy.simulation.simulation import Simulation
from tests.simulation.test_simulation import create_grid, make_job, run_jobs

DAY = 86_400.0


class EveryScan(Simulation):
    """A simulation that skips no scan."""

    def _are_tries_counted(self) -> bool:
        return True


@pytest.mark.parametrize("queue", ["scan", "fcfs", "head"])
def test_regular_scans_with_jobs_waiting_for_weeks_skip_most_scans(queue: Any) -> None:
    jobs = [make_job(0.0, 12, 20 * DAY), make_job(1.0, 12, 10 * DAY), make_job(2.0, 3, 5.0)]
    outcome = run_jobs(jobs, rules=Rules(queue=queue)).require_complete()
    assert {result.state for result in outcome.jobs} == {JobState.SUCCEEDED}
    assert outcome.lasted == pytest.approx(30 * DAY, abs=60.0)
    assert outcome.steps < 5_000, "most of 86,400 scans can change nothing"


def test_job_with_max_placement_tries_gives_up_after_them() -> None:
    jobs = [make_job(0.0, 12, 5 * DAY), make_job(1.0, 12, 5.0, max_placement_tries=5_000)]
    gave_up, _ = run_jobs(jobs).jobs
    assert (gave_up.state, gave_up.placement_tries) == (JobState.FAILED, 5_000)
    # Jobs of low priority are placed in every second scan.
    assert gave_up.ended == pytest.approx(10_000 * 30.0, abs=100.0)


def test_require_complete_with_unfinished_job_raises_value_error() -> None:
    outcome = run_jobs([make_job(0.0, 12, DAY), make_job(1.0, 12, DAY)], until=1.5 * DAY)
    assert outcome.mean_response() == DAY
    with pytest.raises(ValueError, match="1 jobs did not end"):
        outcome.require_complete()


sizes = st.sampled_from([1, 2, 5, 8, 12])
lasts = st.sampled_from([10.0, 3_000.0, 20_000.0, DAY])
priorities = st.sampled_from(list(Priority))


@given(
    jobs=st.lists(st.tuples(st.floats(0, DAY / 2), sizes, lasts, priorities), min_size=1, max_size=8),
    users=st.lists(st.tuples(st.floats(0, DAY / 2), st.sampled_from(["north", "south"]), lasts), max_size=4),
    queue=st.sampled_from(["scan", "fcfs", "head"]),
    plan_after=st.sampled_from([None, 0.0]),
    world=st.fixed_dictionaries({"look_every": st.sampled_from([0.0, 700.0]), "startup": st.sampled_from([0.0, 20.0])}),
)
def test_regular_scans_give_the_outcome_of_every_scan(
    jobs: Any, users: Any, queue: Any, plan_after: Any, world: Any
) -> None:
    planned = [
        make_job(arrival, nodes, ran, priority=priority)
        for arrival, nodes, ran, priority in sorted(jobs, key=lambda j: j[0])
    ]
    local_users = [LocalUser(arrival, cluster, 3, ran) for arrival, cluster, ran in sorted(users)]
    rules = Rules(queue=queue, plan_after=plan_after, max_restarts=None)
    few = run_jobs(planned, create_grid(**world), rules=rules, local_users=local_users)
    every = EveryScan(create_grid(**world), rules=rules, local_users=local_users).run(planned)
    assert [replace(result, placement_tries=0) for result in few.jobs] == [
        replace(result, placement_tries=0) for result in every.jobs
    ]
    assert few.steps <= every.steps
