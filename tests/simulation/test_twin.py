"""Forecasts of waiting jobs, compared with the actual course."""

import json
import pickle
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.advice import Run, Size
from koalapy.model.array import TaskIndices
from koalapy.model.dependency import Dependency, EndCondition
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.job import JobState, new_job
from koalapy.model.job_sizes import JobSizes, NodeReservation
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.request import LinkUse
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import ReservationChanged
from koalapy.scheduler.rules import Rules
from koalapy.simulation import twin
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.moment import Moment, moment_of
from koalapy.simulation.record.format import People
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.twin import (
    Change,
    Expected,
    Interval,
    Question,
    RunTimeEstimates,
    answer_what_if,
    forecast_jobs,
    ignore_progress,
)
from koalapy.simulation.wire import answer_question, read_answer, write_question
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_lrm_reservations import HOUR, create_world
from tests.scheduler.test_relays import BOTH, UNREACHABLE, world_of
from tests.scheduler.test_reservations import BEGINS, ENDS, SITE_NAME, ReservingWorld, create_reservation
from tests.scheduler.test_shared_nodes import SharingWorld
from tests.scheduler.world import World
from tests.simulation.test_simulation import create_grid, make_job

ALIKE = 100.0
"""Run time of every job, in seconds."""


def crowd_of_jobs(number: int, **spec: Any) -> list[PlannedJob]:
    return [make_job(float(arrival), 1 + arrival * 5 % 12, ALIKE, **spec) for arrival in range(number)]


def create_snapshot(jobs: list[PlannedJob], until: float, rules: Rules | None = None) -> Moment:
    """Return a snapshot of a simulated grid after ``until`` seconds."""
    simulation = Simulation(create_grid(), rules, until=until)
    simulation.run(jobs)
    return moment_of(simulation.scheduler.queries, People(), until)


@pytest.mark.parametrize("now", [150.0, 250.0, 333.0])
def test_forecast_with_known_run_times_is_exact(now: float) -> None:
    """Equal jobs, of which some have ended: each start and end is exact."""
    jobs = [make_job(float(now), 1 + now * 5 % 8, ALIKE, coallocation=1) for now in range(30)]
    actual = {expected.ident: expected for expected in Simulation(create_grid()).run(jobs).jobs}
    prediction = forecast_jobs(create_snapshot(jobs, now))
    assert len(prediction.jobs) > 5
    for expected in prediction.jobs:
        assert expected.ends is not None
        assert now + expected.ends.middle == pytest.approx(actual[expected.job].ended)
        assert expected.ends.low == pytest.approx(expected.ends.high)
        started = actual[expected.job].started
        assert started is not None
        if expected.starts is not None:
            assert now + expected.starts.middle == pytest.approx(started)


@given(
    now=st.floats(1, 900), number=st.integers(1, 25), co=st.sampled_from(["cluster-minimization", "worst-fit", "auto"])
)
def test_forecast_of_any_snapshot_ends_every_job(now: float, number: int, co: str) -> None:
    moment = create_snapshot(crowd_of_jobs(number, policy=co), now)
    prediction = forecast_jobs(moment, draws=2)
    assert {expected.job for expected in prediction.jobs} == {expected.id for expected in moment.jobs}
    for expected in prediction.jobs:
        assert expected.not_run == 0.0
        assert expected.ends is not None
        assert 0 <= expected.ends.low <= expected.ends.middle <= expected.ends.high


def test_forecast_of_processes_launcher_runs_program_once() -> None:
    moment = create_snapshot([make_job(0.0, 12, walltime=600.0, launcher=Launcher.PROCESSES)], 10.0)
    (expected,) = forecast_jobs(moment).jobs
    assert expected.ends
    assert expected.ends.high <= 590.0


def test_forecast_from_any_state_of_a_start_succeeds() -> None:
    """Components that are submitted, claimed, or about to run."""
    simulated = create_grid(startup=5.0)
    moments: list[Moment] = []
    states: set[JobState] = set()
    simulation: Simulation

    def watch(now: float, effects: Effects) -> None:
        states.update(expected.state for expected in effects.jobs.values())
        moments.append(moment_of(simulation.scheduler.queries, People(), now))

    simulation = Simulation(simulated, watch=watch)
    simulation.run(crowd_of_jobs(5))
    assert {JobState.CLAIMING, JobState.STARTING, JobState.RUNNING} <= states
    for moment in moments[1:]:
        assert all(expected.not_run == 0.0 for expected in forecast_jobs(moment, draws=1).jobs)


def test_forecast_with_added_nodes_shortens_waits() -> None:
    moment = create_snapshot(crowd_of_jobs(30), 250.0)
    as_it_is, extended = forecast_jobs(moment), forecast_jobs(moment, Change(add={"new": 12}))
    fewer = forecast_jobs(moment, Change(drain=("south",)))
    assert as_it_is.mean_wait
    assert extended.mean_wait
    assert extended.mean_wait.middle < as_it_is.mean_wait.middle
    # The widest jobs fit only on south.
    assert any(expected.not_run == 1.0 for expected in fewer.jobs)


def test_forecast_of_job_put_first_starts_earlier() -> None:
    moment = create_snapshot(crowd_of_jobs(30), 150.0)
    waiting = [expected for expected in forecast_jobs(moment).jobs if expected.starts is not None]
    last = max(waiting, key=lambda expected: expected.starts.middle if expected.starts else 0.0)
    changed = forecast_jobs(moment, Change(first=last.job)).of(last.job)
    assert last.starts
    assert changed
    assert changed.starts
    assert changed.starts.middle < last.starts.middle


def test_forecast_beyond_horizon_counts_as_not_run() -> None:
    moment = create_snapshot(crowd_of_jobs(30), 150.0)
    unlimited, short = forecast_jobs(moment), forecast_jobs(moment, horizon=150.0)
    waiting = [each for each in unlimited.jobs if each.starts is not None]
    assert unlimited.started
    assert unlimited.started.low == len(waiting)
    assert short.started
    assert 0 < short.started.high < len(waiting)
    soon = {each.job for each in waiting if each.starts and each.starts.high < 150.0}
    for each in short.jobs:
        expected = unlimited.of(each.job)
        assert expected
        if each.job in soon:
            assert each.starts == expected.starts
        elif each.starts is not None:
            assert each.starts.high == 150.0
    assert short.started.low <= len(soon) <= short.started.high
    running = [each for each in short.jobs if each.job in soon and each.not_run]
    assert running, "it starts before the horizon, and ends after it"


def test_forecast_of_uncertain_start_reaches_the_horizon() -> None:
    """The run times of the jobs are unknown."""
    moment = create_snapshot([make_job(0.0, 12, 500.0, walltime=1000.0), make_job(1.0, 12, 10.0, walltime=1000.0)], 2.0)
    (_, second) = forecast_jobs(moment, draws=20, horizon=500.0).jobs
    assert second.starts
    assert second.starts.low < 400.0
    assert second.starts.high == 500.0


def test_change_of_policy_applies_to_all_waiting_jobs() -> None:
    moment = create_snapshot(crowd_of_jobs(30), 150.0)
    alone = forecast_jobs(moment, Change(policy="fastest-one"))
    assert any(expected.not_run == 1.0 for expected in alone.jobs), (
        "those of more than 8 nodes fit on no single cluster"
    )


def test_change_to_policy_that_serves_no_job_is_rejected() -> None:
    moment = create_snapshot(crowd_of_jobs(30), 150.0)
    with pytest.raises(UsageError, match=r"fixed places none .* it serves fixed, and they are flexible") as refused:
        forecast_jobs(moment, Change(policy="fixed"))
    assert refused.value.field == "policy"


def test_change_of_rule_and_walltime_shortens_run() -> None:
    moment = create_snapshot(crowd_of_jobs(30, walltime=1000.0), 250.0)
    ident = max(expected.id for expected in moment.jobs)
    shorter = forecast_jobs(moment, Change(rules={"queue": "fcfs"}, walltimes={ident: 10.0})).of(ident)
    assert shorter
    assert shorter.starts
    assert shorter.ends
    assert shorter.ends.middle - shorter.starts.middle == pytest.approx(10.0)


def test_forecast_counts_node_seconds_from_the_snapshot() -> None:
    day = 86_400.0
    moment = create_snapshot([make_job(0.0, 6, 2 * day, walltime=2 * day)], day)
    assert forecast_jobs(moment).utilisation == pytest.approx(6 / 12)
    assert forecast_jobs(moment, horizon=60.0).utilisation == pytest.approx(6 / 12)


def test_forecast_from_walltimes_alone_is_wide() -> None:
    jobs = crowd_of_jobs(12, walltime=1000.0)
    prediction = forecast_jobs(create_snapshot(jobs, 50.0), draws=20)
    running = [expected for expected in prediction.jobs if expected.starts is None]
    assert running
    for expected in running:
        assert expected.basis == "its walltime"
        assert expected.ends
        assert expected.ends.low < expected.ends.high <= 1000.0


@pytest.mark.parametrize("now", [5.0, 1005.0])
def test_forecast_of_job_with_limited_tries_counts_those_so_far(now: float) -> None:
    jobs = [make_job(0.0, 12, 9000.0, walltime=9000.0)]
    jobs += [make_job(at, 12, max_placement_tries=100) for at in (1.0, 301.0) if at < now]
    rules = Rules(scan_interval=10.0)
    actual = {outcome.ident: outcome.ended for outcome in Simulation(create_grid(), rules).run(jobs).jobs}
    moment = create_snapshot(jobs, now, rules)
    history = (Run("program", Size(12, 0), ("north", "south"), 9000.0),) * 3
    forecast = forecast_jobs(replace(moment, beginning=replace(moment.beginning, runs=history)), draws=1)
    for expected in forecast.jobs[1:]:
        assert expected.ends is not None
        assert now + expected.ends.middle == pytest.approx(actual[expected.job], abs=20.0)
        assert actual[expected.job] < 3000.0


def test_forecast_excludes_held_job() -> None:
    moment = create_snapshot(crowd_of_jobs(20), 250.0)
    last = max((expected for expected in moment.jobs if expected.is_in_queue), key=lambda expected: expected.id)
    held = tuple(
        replace(expected, state=JobState.HELD) if expected.id == last.id else expected
        for expected in moment.beginning.jobs
    )
    prediction = forecast_jobs(replace(moment, beginning=replace(moment.beginning, jobs=held)), draws=1)
    assert prediction.of(last.id) is None


def test_forecast_continues_when_a_held_job_misses_its_deadline() -> None:
    moment = create_snapshot(crowd_of_jobs(20), 250.0)
    last = max((expected for expected in moment.jobs if expected.is_in_queue), key=lambda expected: expected.id)
    jobs = tuple(
        replace(job, state=JobState.HELD, spec=replace(job.spec, deadline=255.0)) if job.id == last.id else job
        for job in moment.beginning.jobs
    )
    prediction = forecast_jobs(replace(moment, beginning=replace(moment.beginning, jobs=jobs)), draws=1)
    assert prediction.of(last.id) is None
    assert len(prediction.jobs) > 1


def test_forecast_with_unreachable_cluster_starts_nothing_there() -> None:
    moment = create_snapshot(crowd_of_jobs(20), 250.0)
    alone = replace(moment, nodes={"north": moment.nodes["north"]})
    prediction = forecast_jobs(alone, draws=1)
    assert any(expected.not_run == 1.0 for expected in prediction.jobs)


def test_forecast_without_unfinished_jobs_is_empty() -> None:
    prediction = forecast_jobs(create_snapshot([make_job(0.0, 1)], 500.0))
    assert (prediction.jobs, prediction.mean_wait, prediction.mean_response) == ((), None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(drain=("nowhere",)), "no cluster nowhere|there is no such cluster"),
        (Change(add={"north": 4}), "north already"),
        (Change(add={"new": 0}), "0 nodes"),
        (Change(first=1), "job 1 is not queued"),
        (Change(walltimes={999: 10.0}), "job 999 is not queued"),
        (Change(policy="no-such"), "no-such"),
        (Change(rules={"no_such": 1}), "no rule no_such"),
        (Change(rules={"claim_factor": 7}), "claim_factor"),
    ],
)
def test_change_with_invalid_value_is_rejected(change: Change, message: str) -> None:
    with pytest.raises((UsageError, NotFoundError), match=message):
        forecast_jobs(create_snapshot(crowd_of_jobs(20), 250.0), change)


def test_forecast_of_pickled_snapshot_is_the_same() -> None:
    moment = create_snapshot(crowd_of_jobs(20, walltime=500.0), 50.0)
    packed: Moment = pickle.loads(pickle.dumps(moment))
    assert forecast_jobs(packed, draws=3, seed=4) == forecast_jobs(moment, draws=3, seed=4)


@pytest.mark.processes
def test_answer_what_if_over_processes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = create_snapshot(crowd_of_jobs(30), 150.0)
    change = Change(rules={"queue": "fcfs"})
    alone = answer_what_if(Question(moment, change, builtin_policies))
    monkeypatch.setattr(twin, "ALONE", 0)
    monkeypatch.setattr(twin, "count_processors", lambda: 3)
    assert answer_what_if(Question(moment, change, builtin_policies)) == alone
    assert alone.changed == forecast_jobs(moment, change)


@pytest.mark.parametrize("now", [0.5, 150.0, 350.0])
def test_forecast_of_an_array_ends_with_its_last_task(now: float) -> None:
    moment = create_snapshot([make_job(0.0, 4, ALIKE, array=TaskIndices.parse("1-8%2"), walltime=ALIKE)], now)
    expected = forecast_jobs(moment).of(1)
    assert expected is not None
    assert expected.ends is not None
    assert 0 < expected.ends.high <= 400.0 - now + 1e-6
    assert expected.not_run == 0.0


@pytest.mark.parametrize(("limit", "may_start"), [("%1", False), ("", True)])
def test_forecast_of_array_with_started_task_has_no_start(limit: str, may_start: bool) -> None:
    array = make_job(0.0, 4, 1000.0, array=TaskIndices.parse(f"1-20{limit}"), walltime=1000.0)
    moment = create_snapshot([array, make_job(1.0, 12, ALIKE, walltime=ALIKE)], 3500.0)
    assert moment.jobs[0].may_start_task is may_start
    forecast = forecast_jobs(moment, draws=3)
    expected, wide = forecast.jobs[0], forecast.jobs[-1]
    assert (expected.state, expected.starts, expected.runs) == (JobState.RUNNING, None, None)
    assert forecast.started == Interval(1, 1, 1), "the other job"
    assert forecast.mean_wait == wide.starts
    assert forecast.mean_response == wide.ends


@pytest.mark.parametrize("retry_at", [None, 960.0])
def test_forecast_of_requeued_job_counts_only_its_next_start(retry_at: float | None) -> None:
    moment = create_snapshot([make_job(0.0, 12, 1000.0, walltime=1000.0)], 900.0)
    job = replace(moment.jobs[0], state=JobState.QUEUED, retry_at=retry_at)
    assert job.started_at == 0.0
    moment = replace(moment, beginning=replace(moment.beginning, jobs=(job,)))
    forecast = forecast_jobs(moment)
    assert middle_start(forecast.jobs[0]) == pytest.approx(0.0 if retry_at is None else 60.0, abs=1.0)
    unreachable = forecast_jobs(replace(moment, nodes={}), Change(drain=("north",), begin=1000.0))
    assert unreachable.jobs[0].starts is None
    assert unreachable.started == Interval(0, 0, 0)
    assert unreachable.there == {}


@pytest.mark.parametrize("change", [{"state": JobState.QUEUED}, {"ending": JobState.QUEUED}])
def test_forecast_of_requeued_job_draws_a_whole_run_time(change: dict[str, Any]) -> None:
    moment = create_snapshot([make_job(0.0, 8, 1000.0, walltime=1000.0)], 900.0)
    job = replace(moment.jobs[0], **change)
    estimates = RunTimeEstimates((), {})
    run_times = [estimates.draw_run_time(job, moment.now, Random(seed)) for seed in range(20)]
    assert min(run_times) < 500.0
    assert all(estimates.draw_run_time(moment.jobs[0], moment.now, Random(seed)) >= 900.0 for seed in range(20))


def known_times(interval: Interval | None) -> float | None:
    """Return the time of a forecast with one simulation; None if it is unknown."""
    return None if interval is None else interval.middle


@example(now=1.0, size=17, limit="", nodes=1, others=[(1.0, 2, False), (1.0, 11, False)], max_tasks=1, queue="scan")
@given(
    now=st.floats(1, 400),
    size=st.integers(10, 20),
    limit=st.sampled_from(["", "%2", "%5"]),
    nodes=st.integers(1, 4),
    others=st.lists(st.tuples(st.floats(0, 300), st.integers(1, 12), st.booleans()), max_size=3),
    max_tasks=st.integers(1, 16),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
)
def test_forecast_with_max_tasks_has_the_times_of_the_whole_simulation(
    now: float, size: int, limit: str, nodes: int, others: Any, max_tasks: int, queue: Any
) -> None:
    jobs = [make_job(0.0, nodes, 37.0, array=TaskIndices.parse(f"1-{size}{limit}"))]
    jobs += [make_job(at, wide, 50.0, priority=list(Priority)[is_low]) for at, wide, is_low in sorted(others)]
    moment = create_snapshot(jobs, now, Rules(queue=queue))
    whole = forecast_jobs(moment, draws=1, seed=3)
    cut = forecast_jobs(moment, draws=1, seed=3, max_tasks=max_tasks)
    assert cut.horizon <= whole.horizon
    assert bool(cut.note) == (cut.horizon < whole.horizon)
    for expected, complete in zip(cut.jobs, whole.jobs, strict=True):
        assert expected.job == complete.job
        times = [(expected.starts, complete.starts)]
        if not any(job.id == expected.job and job.tasks for job in moment.jobs):
            times.append((expected.ends, complete.ends))
        for interval, whole_interval in times:
            predicted, actual = known_times(interval), known_times(whole_interval)
            if predicted is None and actual is not None:
                assert actual >= cut.horizon - 1e-6, "times before the end of the simulation are known"
            elif predicted != actual:
                # A job of high priority preempts it after that end, and it starts again.
                assert interval is expected.starts
                assert actual is not None
                assert actual >= cut.horizon
                assert any(not is_low for _, _, is_low in others)


@pytest.mark.parametrize("tasks", ["1-400%3", "1-1000000"])
def test_forecast_of_large_array_extrapolates_its_end(tasks: str) -> None:
    indices = TaskIndices.parse(tasks)
    moment = create_snapshot([make_job(0.0, 4, ALIKE, array=indices), make_job(1.0, 12, ALIKE)], 350.0)
    history = (Run("program", Size(4, 0), ("north",), ALIKE),) * 3
    moment = replace(moment, beginning=replace(moment.beginning, runs=history))
    forecast = forecast_jobs(moment, horizon=1e9, max_tasks=30)
    array, wide = forecast.jobs[0], forecast.jobs[-1]
    assert array.ends is not None
    assert array.ends.middle == pytest.approx(indices.size / 3 * ALIKE, rel=0.1)
    assert wide.starts is None
    assert forecast.note.startswith("only the first 30 of ")


@given(max_tasks=st.integers(1, 30), nodes=st.integers(1, 12), width=st.integers(1, 3))
def test_simulation_with_max_tasks_starts_less_than_twice_as_many(max_tasks: int, nodes: int, width: int) -> None:
    arrays = [make_job(0.0, nodes, ALIKE, array=TaskIndices.parse("1-1000000")) for _ in range(width)]
    moment = create_snapshot(arrays, 50.0)
    wider = Change(add={"new": 100}).of(moment, builtin_policies())
    plans = {job.id: PlannedJob(0.0, job.spec, ALIKE) for job in wider.jobs}
    simulation = Simulation(wider.create_grid(), moment=wider, known=plans, max_tasks=max_tasks)
    simulation.run(())
    before = sum(job.tasks.waiting for job in moment.jobs if job.tasks)
    started = before - sum(job.tasks.waiting for job in simulation.scheduler.queries.jobs() if job.tasks)
    assert max_tasks <= started < 2 * max_tasks


def add_dependent(moment: Moment, planned: PlannedJob, dependency: Dependency | None = None) -> Moment:
    """Return the snapshot with another job, which may wait for the end of an earlier one."""
    clauses = ((dependency,),) if dependency is not None else ()
    ident = 1 + max(job.id for job in moment.beginning.jobs)
    job = new_job(ident, replace(planned.spec, after=clauses), moment.now, clauses)
    jobs = (*moment.beginning.jobs, replace(job, queue_seq=ident))
    return replace(moment, beginning=replace(moment.beginning, jobs=jobs))


def test_forecast_counts_shared_nodes_once() -> None:
    """Of 4 nodes, three jobs share one, so that 3 are idle; the fourth is idle when the last of them has ended."""
    world = SharingWorld({"north": 4})
    for walltime in (100.0, 200.0, 300.0):
        world.share(cores=1, walltime=walltime)
    world.advance(5)
    moment = moment_of(world.queries, People(), world.now)
    assert moment.nodes["north"].overlap == 2
    for nodes, earliest, latest in ((3, 0.0, 1.0), (4, 1.0, 300.0)):
        planned = make_job(world.now, nodes, ALIKE)
        expected = forecast_jobs(add_dependent(moment, planned), draws=9).of(4)
        assert expected is not None
        assert expected.starts is not None
        assert earliest <= expected.starts.low <= expected.starts.high <= latest, (nodes, expected)


@given(begin=st.floats(10.0, 20 * 86_400.0), tries=st.sampled_from([None, 10]), has_dependent=st.booleans())
def test_forecast_of_job_with_begin_starts_then(begin: float, tries: int | None, has_dependent: bool) -> None:
    jobs = [make_job(0.0, 12, ALIKE, begin=begin, max_placement_tries=tries)]
    moment = create_snapshot(jobs, 5.0)
    if has_dependent:
        moment = add_dependent(moment, make_job(5.0, 12, ALIKE), Dependency(1, EndCondition.FAILED))
    expected = forecast_jobs(moment, draws=1).of(1)
    assert expected is not None
    assert expected.starts is not None
    assert expected.starts.middle == pytest.approx(begin - 5.0, abs=1.0), "start-up takes up to a second"
    assert expected.not_run == 0.0


@given(deadline=st.floats(1000.0, 20 * 86_400.0))
def test_forecast_of_job_after_a_missed_deadline_starts_at_latest_start(deadline: float) -> None:
    never = make_job(0.0, 12, ALIKE, deadline=deadline, walltime=600.0)
    moment = create_snapshot([make_job(0.0, 12, ALIKE), never], 0.5)
    moment = add_dependent(moment, make_job(0.5, 4, ALIKE), Dependency(2, EndCondition.ANY))
    expected = forecast_jobs(replace(moment, nodes={"north": moment.nodes["north"]}), draws=1).of(3)
    assert expected is not None
    assert expected.starts is not None
    assert expected.starts.middle == pytest.approx(deadline - 600.5, abs=1.0), "start-up takes up to a second"


def forecast_world(world: World) -> dict[int, Expected]:
    """Return the forecast of each job of a scheduler that is not itself simulated."""
    forecast = forecast_jobs(moment_of(world.queries, People(), world.now), draws=5)
    return {expected.job: expected for expected in forecast.jobs}


def middle_start(expected: Expected) -> float:
    assert expected.starts is not None, "it starts in a simulation"
    return expected.starts.middle


@pytest.mark.parametrize("running", [0, 6])
def test_forecast_of_job_that_would_run_into_reservation_starts_after_it(running: int) -> None:
    """Nodes of jobs that end before the reservation are reserved, too."""
    world = create_world(NodeReservation("works", 10, 10 - running, HOUR, 3 * HOUR), north=10)
    if running:
        world.submit(flexible(running), walltime=600.0, run_time=1000.0)
        world.advance(5)
    job = world.submit(flexible(6), walltime=2 * HOUR)
    world.advance(1)
    assert world.state(job) is JobState.QUEUED
    assert middle_start(forecast_world(world)[job]) == pytest.approx(3 * HOUR - world.now, abs=60.0)


@pytest.mark.parametrize("is_own", [False, True])
def test_forecast_counts_nodes_of_present_reservation_once_and_until_its_end(is_own: bool) -> None:
    world = World({"north": 10})
    if is_own:
        world.step([ReservationChanged(create_reservation([("north", 4)], begins=0.0))])
    site = world.sites["north"]
    site.add_local_user(4)  # reserved nodes are reported as those of local users
    site.reservations = (NodeReservation(SITE_NAME, 4, 0, 0.0, ENDS),)
    site.send_report(site.current_report())
    world.advance(1)
    jobs = [world.submit(flexible(nodes), walltime=300.0, run_time=1000.0) for nodes in (6, 6, 10)]
    world.advance(5)
    first, second, wide = (forecast_world(world)[job] for job in jobs)
    assert first.ends is not None
    assert middle_start(second) == pytest.approx(first.ends.middle, abs=10.0)
    assert middle_start(wide) == pytest.approx(ENDS - world.now, abs=60.0)


def test_forecast_keeps_nodes_of_running_job_in_reservation() -> None:
    world = ReservingWorld(reports=True)
    world.wait_until(BEGINS)
    world.submit_reserved(5, walltime=500.0, run_time=500.0)
    jobs = [world.submit(fixed(north=nodes), walltime=300.0, run_time=1000.0) for nodes in (3, 3, 6)]
    world.wait_until(BEGINS + 5, step=1)
    assert world.sites["north"].current_report().idle == 0
    first, second, wide = (forecast_world(world)[job] for job in jobs)
    assert first.ends is not None
    assert middle_start(second) == pytest.approx(first.ends.middle, abs=10.0)
    assert middle_start(wide) == pytest.approx(ENDS - world.now, abs=60.0)


def test_forecast_places_no_component_of_a_size_that_its_cluster_rejects() -> None:
    world = World({"north": 8, "south": 8})
    world.sites["north"].job_sizes = (JobSizes(1, 4),)
    world.sites["north"].send_report(world.sites["north"].current_report())
    world.advance(1)
    first, second = (world.submit(flexible(8, max_components=1), walltime=600.0, run_time=1000.0) for _ in range(2))
    world.advance(5)
    assert world.state(second) is JobState.QUEUED
    expected = forecast_world(world)
    ends = expected[first].ends
    assert ends is not None
    assert middle_start(expected[second]) == pytest.approx(ends.middle, abs=10.0)


@pytest.mark.parametrize(("links", "use"), [(UNREACHABLE, LinkUse.ANY), ({}, LinkUse.ANY), ({}, LinkUse.RELAYED)])
def test_forecast_of_relayed_job_starts_once_the_hub_has_streams(links: Any, use: LinkUse) -> None:
    world = world_of(12, *BOTH, links=links)
    world.queries.grid["north"].uplink.bandwidth = 1e8
    spec: dict[str, Any] = {"processes_per_node": 1, "walltime": 600.0, "run_time": 1000.0}
    jobs = [world.submit(fixed(north=2, south=2), links=use, **spec) for _ in range(2)]
    world.advance(5)
    assert [world.state(job) for job in jobs] == [JobState.RUNNING, JobState.QUEUED]
    first, second = (forecast_world(world)[job] for job in jobs)
    assert first.ends is not None
    assert middle_start(second) == pytest.approx(first.ends.middle, abs=10.0)
    north = moment_of(world.queries, People(), world.now).beginning.clusters[0]
    assert (north.name, north.uplink_bandwidth) == ("north", 1e8)


def test_forecast_in_child_process_has_the_relays() -> None:
    world = world_of(12, *BOTH, uses={BOTH: LinkUse.RELAYED})
    for _ in range(2):
        world.submit(fixed(north=2, south=2), processes_per_node=1, walltime=600.0)
    question = Question(moment_of(world.queries, People(), world.now), Change(), builtin_policies, max_draws=2)
    values = iter(json.loads(json.dumps(list(write_question(question)))))
    answer = read_answer(answer_question(builtin_policies, values, report=ignore_progress))
    assert answer == answer_what_if(question)
    middle_start(answer.as_it_is.jobs[1])


def test_forecast_of_direct_job_does_not_start_on_cluster_that_is_relayed_only() -> None:
    world = world_of(12, *BOTH, only=("south",))
    job = world.submit(fixed(north=2, south=2), links=LinkUse.DIRECT, walltime=600.0)
    assert forecast_world(world)[job].starts is None
