"""Regular scans in stretches in which nothing happens: none that matters is left out, and others are."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState, Priority
from koalapy.scheduler.rules import Rules
from koalapy.simulation.jobs import LocalUser
from koalapy.simulation.simulation import Simulation
from tests.simulation.test_simulation import grid, job, run

DAY = 86_400.0


class EveryScan(Simulation):
    """A simulation that leaves out no scan."""

    def _are_tries_counted(self) -> bool:
        return True


@pytest.mark.parametrize("queue", ["scan", "fcfs", "head"])
def test_jobs_that_wait_for_weeks_run_when_their_turn_has_come(queue: Any) -> None:
    jobs = [job(0.0, 12, 20 * DAY), job(1.0, 12, 10 * DAY), job(2.0, 3, 5.0)]
    outcome = run(jobs, rules=Rules(queue=queue)).require_complete()
    assert {each.state for each in outcome.jobs} == {JobState.SUCCEEDED}
    assert outcome.lasted == pytest.approx(30 * DAY, abs=60.0)
    assert outcome.steps < 5_000, "most of 86,400 scans can change nothing"


def test_a_job_that_may_be_tried_so_often_only_is() -> None:
    jobs = [job(0.0, 12, 5 * DAY), job(1.0, 12, 5.0, max_placement_tries=5_000)]
    gave_up, _ = run(jobs).jobs
    assert (gave_up.state, gave_up.placement_tries) == (JobState.FAILED, 5_000)
    # Jobs of low priority have every second scan.
    assert gave_up.ended == pytest.approx(10_000 * 30.0, abs=100.0)


def test_a_mean_over_some_of_the_jobs_is_not_taken_for_one_over_all() -> None:
    outcome = run([job(0.0, 12, DAY), job(1.0, 12, DAY)], until=1.5 * DAY)
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
    aging=st.booleans(),
    world=st.fixed_dictionaries({"look_every": st.sampled_from([0.0, 700.0]), "startup": st.sampled_from([0.0, 20.0])}),
)
def test_all_comes_as_with_every_scan(jobs: Any, users: Any, queue: Any, aging: bool, world: Any) -> None:
    planned = [job(at, nodes, ran, priority=priority) for at, nodes, ran, priority in sorted(jobs, key=lambda j: j[0])]
    local_users = [LocalUser(at, cluster, 3, ran) for at, cluster, ran in sorted(users)]
    rules = Rules(queue=queue, aging=aging, max_restarts=None)
    few = run(planned, grid(**world), rules=rules, local_users=local_users)
    every = EveryScan(grid(**world), rules=rules, local_users=local_users).run(planned)
    assert [replace(each, placement_tries=0) for each in few.jobs] == [
        replace(each, placement_tries=0) for each in every.jobs
    ]
    assert few.steps <= every.steps
