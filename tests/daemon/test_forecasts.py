"""Forecasts of jobs, computed in a subprocess and cached for a minute."""

import asyncio
from dataclasses import replace

import pytest

from koalapy.daemon.forecast.forecasts import FRESH_S, MAX_SUBMISSIONS, Forecasts, IfSubmitted
from koalapy.model.errors import BusyError, NotFoundError, UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import load_policies
from koalapy.scheduler.queries import Queries
from koalapy.simulation.record.format import People
from koalapy.simulation.simulation import Simulation
from koalapy.simulation.twin import Answer, Change, Question, answer_what_if, forecast_jobs
from tests.simulation.test_simulation import create_grid
from tests.simulation.test_twin import crowd_of_jobs


def queries_at(until: float) -> Queries:
    simulation = Simulation(create_grid(), until=until)
    simulation.run(crowd_of_jobs(12, walltime=500.0))
    return simulation.scheduler.queries


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.processes
async def test_forecast_is_computed_in_subprocess() -> None:
    answer = await Forecasts(queries_at(50.0), People(), Clock(), load_policies).what_if(Change(add={"new": 12}))
    assert answer.changed is not None
    assert answer.as_it_is.mean_wait
    assert answer.changed.mean_wait
    assert answer.changed.mean_wait.middle < answer.as_it_is.mean_wait.middle


async def test_preview_of_drain_lists_running_and_delayed_jobs() -> None:
    async def work(question: Question) -> Answer:
        return answer_what_if(question)

    queries = queries_at(50.0)
    forecasts = Forecasts(queries, People(), Clock(), load_policies, work)
    used = {cluster.name: sum(cluster.nodes.live.values()) for cluster in queries.grid.clusters()}
    name = max(used, key=used.__getitem__)
    reports: list[tuple[int, int]] = []
    preview = await forecasts.preview_drain(name, lambda completed, total: reports.append((completed, total)))
    assert reports == [(completed, 10) for completed in range(11)], "five simulations with and without the drain"
    facts = forecasts.describe_drain(name)
    assert facts == replace(preview, delayed=None, horizon=facts.horizon)
    assert all(job.ends_within is not None and 0 <= job.ends_within <= 500 for job in facts.running)
    assert sum(job.nodes for job in preview.running) == used[name] > 0
    assert [job.job for job in preview.running] == sorted({job.job for job in preview.running})
    assert 0 < len(preview.delayed) <= preview.waiting
    ends = [job.changed.middle - job.starts.middle if job.changed else 1e9 for job in preview.delayed]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] >= 1.0
    assert queries.grid[name].drained is None
    assert forecasts.latest_forecast is None, "the simulated span was too short to reuse"
    with pytest.raises(NotFoundError):
        await forecasts.preview_drain("nowhere")


async def test_preview_of_planned_drain_lists_jobs_that_run_at_its_begin() -> None:
    async def work(question: Question) -> Answer:
        return answer_what_if(question)

    queries = queries_at(50.0)
    forecasts = Forecasts(queries, People(), Clock(), load_policies, work)
    used = {cluster.name: sum(cluster.nodes.live.values()) for cluster in queries.grid.clusters()}
    name = max(used, key=used.__getitem__)
    now = await forecasts.preview_drain(name)
    soon = await forecasts.preview_drain(name, begin=51.0)
    assert soon.running == now.running
    late = await forecasts.preview_drain(name, begin=5000.0, end=6000.0)
    assert (late.running, forecasts.describe_drain(name, 5000.0).running) == ((), ()), "each walltime is 500 s"
    assert (late.delayed, late.horizon) == ((), now.horizon + 4950.0)
    assert forecasts.describe_drain(name, 51.0).running == now.running
    assert queries.grid[name].planned_drains == ()
    with pytest.raises(UsageError, match="begins too late"):
        await forecasts.preview_drain(name, begin=3e6)


async def test_forecast_is_reused_for_a_minute() -> None:
    calls: list[float] = []
    clock = Clock()

    async def work(question: Question) -> Answer:
        calls.append(question.moment.now)
        return answer_what_if(question)

    forecasts = Forecasts(queries_at(50.0), People(), clock, load_policies, work)
    ready, expected = await forecasts.forecast_job(12, 60.0)
    assert ready
    assert expected is not None
    assert expected.starts is not None
    clock.now += FRESH_S - 1
    assert await forecasts.forecast_job(12, 0.0) == (True, expected)
    assert await forecasts.forecast_job(999, 0.0) == (True, None)
    clock.now += 2
    assert (await forecasts.forecast_job(12, 60.0))[1] is not None
    assert calls == [50.0, 111.0]


async def test_forecast_after_patience_is_available_later() -> None:
    calls, may_go_on = 0, asyncio.Event()

    async def work(question: Question) -> Answer:
        nonlocal calls
        calls += 1
        await may_go_on.wait()
        return answer_what_if(question)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    assert await forecasts.forecast_job(12, 0.01) == (False, None)
    assert await forecasts.forecast_job(12, 0.01) == (False, None)
    may_go_on.set()
    ready, expected = await forecasts.forecast_job(12, 60.0)
    assert (ready, calls) == (True, 1)
    assert expected is not None


async def test_forecast_failure_is_raised_and_not_cached() -> None:
    fails = True

    async def work(question: Question) -> Answer:
        if fails:
            raise BusyError("too long", retry_after=1.0)
        return answer_what_if(question)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    with pytest.raises(BusyError):
        await forecasts.forecast_job(12, 60.0)
    fails = False
    assert (await forecasts.forecast_job(12, 60.0))[0]


async def test_forecast_failure_without_waiting_caller_logs_nothing() -> None:
    may_go_on = asyncio.Event()

    async def work(question: Question) -> Answer:
        await may_go_on.wait()
        raise BusyError("too long", retry_after=1.0)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    assert await forecasts.forecast_job(12, 0.01) == (False, None)
    (under_way,) = asyncio.all_tasks() - {asyncio.current_task()}
    may_go_on.set()
    await asyncio.wait([under_way])
    await asyncio.sleep(0)
    assert not under_way._log_traceback  # type: ignore[attr-defined]  # else asyncio writes to the log, once it is gone


WIDE = JobSpec(FlexibleRequest(12), ("./wave",), policy="cluster-minimization", walltime=60.0)


async def test_forecast_submission_shares_equal_requests() -> None:
    calls: list[int] = []

    async def work(question: Question) -> Answer:
        calls.append(max(job.id for job in question.moment.beginning.jobs))
        return answer_what_if(question)

    queries = queries_at(50.0)
    forecasts = Forecasts(queries, People(), Clock(), load_policies, work)
    answers = await asyncio.gather(*(forecasts.forecast_submission(WIDE, 60.0) for _ in range(50)))
    assert len({id(answer.expected) for answer in answers}) == len(calls) == 1
    assert answers[0].expected is not None
    assert answers[0].expected.starts is not None
    assert answers[0].expected.basis == "its walltime"
    assert calls[0] not in {job.id for job in queries.jobs()}
    assert await forecasts.forecast_submission(replace(WIDE, request=FlexibleRequest(1000)), 60.0) != answers[0]


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ("", "it started in no simulation of the next 0:10"),
        ("only some are simulated", "it does not surely start in the next 0:10, and only some are simulated"),
    ],
)
async def test_forecast_submission_without_start_gives_the_reason(note: str, reason: str) -> None:
    async def work(question: Question) -> Answer:
        return Answer(replace(forecast_jobs(question.moment, horizon=10.0), note=note), None)

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    assert (await forecasts.forecast_submission(WIDE, 60.0)).reason == reason


async def test_forecast_submission_timeout_and_limit_give_reasons() -> None:
    calls, may_go_on = 0, asyncio.Event()

    async def work(question: Question) -> Answer:
        nonlocal calls
        calls += 1
        await may_go_on.wait()
        raise RuntimeError("broken")

    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    specs = [replace(WIDE, name=f"{number}") for number in range(100)]
    answers = await asyncio.gather(*(forecasts.forecast_submission(spec, 0.01) for spec in specs))
    assert [answer.reason.startswith("to work it out takes longer than 0.01 s") for answer in answers].count(
        True
    ) == MAX_SUBMISSIONS
    assert [answer.reason.startswith("too many predictions are requested") for answer in answers].count(
        True
    ) == 100 - MAX_SUBMISSIONS
    may_go_on.set()
    assert (await forecasts.forecast_submission(specs[0], 60.0)).reason.startswith("it could not be worked out")
    assert calls <= MAX_SUBMISSIONS


async def test_forecast_submission_without_worker_process_gives_the_reason() -> None:
    async def work(question: Question) -> Answer:
        raise BusyError("the worker process was killed", retry_after=60.0, hint="ask again with more free memory")

    forecast = await Forecasts(queries_at(50.0), People(), Clock(), load_policies, work).forecast_submission(WIDE, 60.0)
    assert forecast.reason == "the worker process was killed: ask again with more free memory"


async def test_forecast_submission_with_free_nodes_starts_at_once() -> None:
    async def work(question: Question) -> Answer:
        raise AssertionError("nothing is to be simulated")

    forecasts = Forecasts(queries_at(1e9), People(), Clock(), load_policies, work)
    assert await forecasts.forecast_submission(WIDE, 60.0) == IfSubmitted(at_once=True)


async def test_forecast_periodically_without_waiting_jobs_does_nothing() -> None:
    calls: list[float] = []

    async def work(question: Question) -> Answer:
        calls.append(question.moment.now)
        return answer_what_if(question)

    await Forecasts(queries_at(1e9), People(), Clock(), load_policies, work).forecast_periodically()
    assert calls == []
    forecasts = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    for _ in range(2):
        await forecasts.forecast_periodically()
    assert calls == [50.0]
    assert forecasts.latest_forecast is not None
