"""What will become of those who wait: held against what then came."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.job import JobState, Launcher
from koalapy.policies.registry import builtin_policies
from koalapy.record.beginning import People
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.rules import Rules
from koalapy.simulation import twin
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.moment import Moment, moment_of
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.twin import Change, Question, answer_what_if, forecast_jobs
from tests.simulation.test_simulation import grid, job

ALIKE = 100.0
"""Seconds that every job runs."""


def crowd(number: int, **spec: Any) -> list[PlannedJob]:
    return [job(float(at), 1 + at * 5 % 12, ALIKE, **spec) for at in range(number)]


def moment_at(jobs: list[PlannedJob], until: float, rules: Rules | None = None) -> Moment:
    """What there is after so many seconds of a simulated grid."""
    simulation = Simulation(grid(), rules, until=until)
    simulation.run(jobs)
    return moment_of(simulation.scheduler.queries, People(), until)


@pytest.mark.parametrize("at", [150.0, 250.0, 333.0])
def test_where_run_times_are_known_it_foretells_what_comes(at: float) -> None:
    """Of jobs that are all alike, once some have ended: every start and end, exactly."""
    jobs = [job(float(at), 1 + at * 5 % 8, ALIKE, coallocation=1) for at in range(30)]
    came = {each.ident: each for each in Simulation(grid()).run(jobs).jobs}
    foretold = forecast_jobs(moment_at(jobs, at))
    assert len(foretold.jobs) > 5
    for each in foretold.jobs:
        assert each.ends is not None
        assert at + each.ends.middle == pytest.approx(came[each.job].ended)
        assert each.ends.low == pytest.approx(each.ends.high)
        started = came[each.job].started
        assert started is not None
        if each.starts is not None:
            assert at + each.starts.middle == pytest.approx(started)


@given(
    at=st.floats(1, 900), number=st.integers(1, 25), co=st.sampled_from(["cluster-minimization", "worst-fit", "auto"])
)
def test_whatever_the_moment_every_job_comes_to_its_end(at: float, number: int, co: str) -> None:
    moment = moment_at(crowd(number, policy=co), at)
    foretold = forecast_jobs(moment, draws=2)
    assert {each.job for each in foretold.jobs} == {each.id for each in moment.jobs}
    for each in foretold.jobs:
        assert each.not_run == 0.0
        assert each.ends is not None
        assert 0 <= each.ends.low <= each.ends.middle <= each.ends.high


def test_a_program_that_each_component_tells_of_runs_once() -> None:
    moment = moment_at([job(0.0, 12, walltime=600.0, launcher=Launcher.PROCESSES)], 10.0)
    (one,) = forecast_jobs(moment).jobs
    assert one.ends
    assert one.ends.high <= 590.0


def test_every_moment_of_a_start_can_be_taken_up() -> None:
    """Components that are submitted, claimed, or about to run."""
    where = grid(startup=5.0)
    moments: list[Moment] = []
    states: set[JobState] = set()
    simulation: Simulation

    def watch(now: float, effects: Effects) -> None:
        states.update(each.state for each in effects.jobs.values())
        moments.append(moment_of(simulation.scheduler.queries, People(), now))

    simulation = Simulation(where, watch=watch)
    simulation.run(crowd(5))
    assert {JobState.CLAIMING, JobState.STARTING, JobState.RUNNING} <= states
    for moment in moments[1:]:
        assert all(each.not_run == 0.0 for each in forecast_jobs(moment, draws=1).jobs)


def test_more_nodes_make_waits_shorter_and_fewer_longer() -> None:
    moment = moment_at(crowd(30), 250.0)
    as_it_is, more = forecast_jobs(moment), forecast_jobs(moment, Change(add={"new": 12}))
    fewer = forecast_jobs(moment, Change(drain=("south",)))
    assert as_it_is.mean_wait
    assert more.mean_wait
    assert more.mean_wait.middle < as_it_is.mean_wait.middle
    # The widest fit nowhere without it.
    assert any(each.not_run == 1.0 for each in fewer.jobs)


def test_a_job_that_comes_first_starts_before_the_others() -> None:
    moment = moment_at(crowd(30), 150.0)
    waiting = [each for each in forecast_jobs(moment).jobs if each.starts is not None]
    last = max(waiting, key=lambda each: each.starts.middle if each.starts else 0.0)
    after = forecast_jobs(moment, Change(first=last.job)).of(last.job)
    assert last.starts
    assert after
    assert after.starts
    assert after.starts.middle < last.starts.middle


def test_what_comes_later_than_the_horizon_is_left_out_and_said_so() -> None:
    moment = moment_at(crowd(30), 150.0)
    whole, short = forecast_jobs(moment), forecast_jobs(moment, horizon=150.0)
    waiting = [each for each in whole.jobs if each.starts is not None]
    assert whole.started
    assert whole.started.low == len(waiting)
    assert short.started
    assert 0 < short.started.high < len(waiting)
    soon = {each.job for each in waiting if each.starts and each.starts.high < 150.0}
    for each in short.jobs:
        known = whole.of(each.job)
        assert known
        if each.job in soon:
            assert each.starts == known.starts
        elif each.starts is not None:
            assert each.starts.high == 150.0
    assert short.started.low <= len(soon) <= short.started.high
    running = [each for each in short.jobs if each.job in soon and each.not_run]
    assert running, "it starts before the horizon, and ends after it"


def test_who_starts_at_times_only_counts_as_late_at_the_others() -> None:
    """Jobs of which nobody knows how long they run."""
    moment = moment_at([job(0.0, 12, 500.0, walltime=1000.0), job(1.0, 12, 10.0, walltime=1000.0)], 2.0)
    (_, second) = forecast_jobs(moment, draws=20, horizon=500.0).jobs
    assert second.starts
    assert second.starts.low < 400.0
    assert second.starts.high == 500.0


def test_a_policy_is_for_all_that_wait() -> None:
    moment = moment_at(crowd(30), 150.0)
    alone = forecast_jobs(moment, Change(policy="fastest-one"))
    assert any(each.not_run == 1.0 for each in alone.jobs), "those of more than 8 nodes fit on no single cluster"


def test_a_policy_that_none_of_them_can_have_is_refused() -> None:
    moment = moment_at(crowd(30), 150.0)
    with pytest.raises(UsageError, match=r"fixed places none .* it serves fixed, and they are flexible") as refused:
        forecast_jobs(moment, Change(policy="fixed"))
    assert refused.value.field == "policy"


def test_a_rule_and_a_walltime() -> None:
    moment = moment_at(crowd(30, walltime=1000.0), 250.0)
    ident = max(each.id for each in moment.jobs)
    shorter = forecast_jobs(moment, Change(rules={"queue": "fcfs"}, walltimes={ident: 10.0})).of(ident)
    assert shorter
    assert shorter.starts
    assert shorter.ends
    assert shorter.ends.middle - shorter.starts.middle == pytest.approx(10.0)


def test_with_walltimes_alone_the_interval_is_wide_and_within_them() -> None:
    jobs = crowd(12, walltime=1000.0)
    foretold = forecast_jobs(moment_at(jobs, 50.0), draws=20)
    running = [each for each in foretold.jobs if each.starts is None]
    assert running
    for each in running:
        assert each.basis == "its walltime"
        assert each.ends
        assert each.ends.low < each.ends.high <= 1000.0


def test_a_job_that_is_held_is_left_out() -> None:
    moment = moment_at(crowd(20), 250.0)
    last = max((each for each in moment.jobs if each.is_in_queue), key=lambda each: each.id)
    held = tuple(replace(each, state=JobState.HELD) if each.id == last.id else each for each in moment.beginning.jobs)
    foretold = forecast_jobs(replace(moment, beginning=replace(moment.beginning, jobs=held)), draws=1)
    assert foretold.of(last.id) is None


def test_a_cluster_that_is_out_of_reach_starts_nothing() -> None:
    moment = moment_at(crowd(20), 250.0)
    alone = replace(moment, nodes={"north": moment.nodes["north"]})
    foretold = forecast_jobs(alone, draws=1)
    assert any(each.not_run == 1.0 for each in foretold.jobs)


def test_nothing_to_foretell() -> None:
    foretold = forecast_jobs(moment_at([job(0.0, 1)], 500.0))
    assert (foretold.jobs, foretold.mean_wait, foretold.mean_response) == ((), None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(drain=("nowhere",)), "no cluster nowhere|there is no such cluster"),
        (Change(add={"north": 4}), "north already"),
        (Change(add={"new": 0}), "0 nodes"),
        (Change(first=1), "job 1 does not wait"),
        (Change(walltimes={999: 10.0}), "job 999 does not wait"),
        (Change(policy="no-such"), "no-such"),
        (Change(rules={"no_such": 1}), "no rule no_such"),
        (Change(rules={"claim_factor": 7}), "claim_factor"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: Change, said: str) -> None:
    with pytest.raises((UsageError, NotFoundError), match=said):
        forecast_jobs(moment_at(crowd(20), 250.0), change)


def test_equal_moments_give_equal_answers_also_after_they_were_packed() -> None:
    moment = moment_at(crowd(20, walltime=500.0), 50.0)
    packed: Moment = pickle.loads(pickle.dumps(moment))
    assert forecast_jobs(packed, draws=3, seed=4) == forecast_jobs(moment, draws=3, seed=4)


@pytest.mark.processes
def test_over_processes_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = moment_at(crowd(30), 150.0)
    change = Change(rules={"queue": "fcfs"})
    alone = answer_what_if(Question(moment, change, builtin_policies))
    monkeypatch.setattr(twin, "ALONE", 0)
    monkeypatch.setattr(twin, "count_processors", lambda: 3)
    assert answer_what_if(Question(moment, change, builtin_policies)) == alone
    assert alone.changed == forecast_jobs(moment, change)
