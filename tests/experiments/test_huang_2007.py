"""Compare the grid of huang-2007 with a plain implementation of the paper's rules and with examples."""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.experiment import Experiment, Result
from experiments.huang_2007 import Figure1, Table3
from experiments.huang_2007_grid import ENTIRE, PROCESSORS, TRACE, Setting, jobs_of, mean_responses, site_name
from experiments.huang_2007_orders import Figure2, Figure2Whole, Figure3
from experiments.huang_2007_plain import mean_response
from experiments.traces import Traces, default_folder
from koalapy.model.users import SharingMode
from koalapy.simulation.jobs import Outcome
from koalapy.workload.swf import TraceJob
from tests.experiments.traces import a_trace, swf_line

SPEED, LOAD = (1, 2, 4, 4, 8), (5, 4, 5, 4, 1)
"""Powers of two, so that no time is rounded."""


def job(number: int, time: float, site: int, processors: int, ran: float) -> TraceJob:
    return TraceJob(number, time, ran, processors, 1, queue=site)


def ends(outcome: Outcome) -> dict[int, float]:
    return {job.ident: job.ended for job in outcome.jobs}


def by_the_rules(jobs: Sequence[TraceJob], sharing: SharingMode, policy: str, threshold: float) -> dict[int, float]:
    """Return the end of each job by the paper's rules.

    The narrowest job is first, no job passes the first of a queue, and all jobs that end at one moment end before any
    job starts.
    """
    sites = range(5)
    free, now = list(PROCESSORS), 0.0
    queues: dict[int, list[tuple[int, int]]] = {site: [] for site in (sites if sharing == "independent" else [0])}
    running: list[tuple[float, int, int]] = []
    ended: dict[int, float] = {}
    coming = list(enumerate(jobs, 1))[::-1]
    while coming or running:
        now = min([job.submitted for _, job in coming[-1:]] + [time for time, *_ in running[:1]])
        while running and running[0][0] <= now:
            time, number, site = heapq.heappop(running)
            free[site] += jobs[number - 1].processors
            ended[number] = time
        while coming and coming[-1][1].submitted <= now:
            number, job = coming.pop()
            insort(queues[job.queue - 1 if sharing == "independent" else 0], (job.processors, number))
        for place, queue in queues.items():
            while queue:
                processors, number = queue[0]
                home = jobs[number - 1].queue - 1
                may = [place] if sharing == "independent" else [s for s in sites if SPEED[s] >= threshold * SPEED[home]]
                room = [site for site in may if free[site] >= processors]
                if not room:
                    break
                fastest, tightest = max(room, key=lambda s: (SPEED[s], -s)), min(room, key=lambda s: (free[s], s))
                site = fastest if policy == "fastest-one" else tightest
                free[site] -= processors
                heapq.heappush(running, (now + jobs[number - 1].ran * LOAD[home] / SPEED[site], number, site))
                queue.pop(0)
    return ended


trace_jobs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 5), st.sampled_from([1, 4, 8, 30, 50, 100, 128]), st.integers(1, 60)),
    min_size=1,
    max_size=30,
).map(
    lambda some: [
        job(number, float(at), site, min(processors, PROCESSORS[site - 1]), float(ran))
        for number, (at, site, processors, ran) in enumerate(sorted(some, key=lambda each: each[0]), 1)
    ]
)


@given(trace_jobs, st.sampled_from(["fastest-one", "best-fit"]), st.sampled_from([0.0, 1.0]))
def test_huang_without_reclaiming_ends_jobs_by_the_rules(jobs: list[TraceJob], policy: str, threshold: float) -> None:
    for sharing in ("independent", "ordinary"):
        setting = Setting(SPEED, LOAD, policy, sharing=sharing, threshold=threshold)
        assert ends(setting.simulate_jobs(jobs)) == by_the_rules(jobs, sharing, policy, threshold)


@given(trace_jobs, st.sampled_from(["fastest-one", "best-fit", "adaptive"]), st.sampled_from([0.0, 1.0]))
def test_huang_plain_loop_equals_the_scheduler(jobs: list[TraceJob], policy: str, threshold: float) -> None:
    setting = Setting(SPEED, LOAD, policy, threshold=threshold)
    assert mean_response(jobs, setting) == pytest.approx(mean_responses(setting.simulate_jobs(jobs))[ENTIRE], rel=1e-12)


@given(trace_jobs, st.sampled_from(["place", "front"]))
def test_huang_with_reclaiming_ends_all_jobs_and_keeps_home_jobs(jobs: list[TraceJob], reclaimed: str) -> None:
    setting = Setting(SPEED, LOAD, sharing="feasible", threshold=1.0, reclaimed=reclaimed)  # type: ignore[arg-type]
    outcome = setting.simulate_jobs(jobs)
    assert len(outcome.jobs) == len(jobs)
    for job in outcome.jobs:
        [(site, _)] = job.gang
        lasts = job.planned.lasts / SPEED[int(site[-1]) - 1]
        assert job.started is not None
        assert job.ended == job.started + lasts, "it ran whole, as long as it takes there"
    fastest = [job for job in outcome.jobs if job.planned.spec.home_site == site_name(5)]
    alone = replace(setting, sharing="independent").simulate_jobs([each for each in jobs if each.queue == 5])
    assert sorted(job.ended for job in fastest) == sorted(job.ended for job in alone.jobs), (
        "to the users of the fastest site the others are not there"
    )


def test_huang_reclaims_from_the_youngest_job() -> None:
    jobs = [
        job(1, 0, 3, 100, 80),  # to site 5? it has 50 only: to site 3
        job(2, 1, 4, 30, 160),  # the fastest: site 5, until 1 + 160 · 4 / 8 = 81
        job(3, 2, 4, 20, 160),  # the same, until 82
        job(4, 10, 5, 15, 40),  # at home: job 3 makes room, and begins again elsewhere
    ]
    outcome = Setting(SPEED, LOAD, sharing="feasible", threshold=1.0).simulate_jobs(jobs)
    assert ends(outcome) == {1: 100.0, 2: 81.0, 3: 10.0 + 160 * 4 / 4, 4: 10.0 + 40 / 8}
    assert {job.ident: job.attempts for job in outcome.jobs} == {1: 1, 2: 1, 3: 2, 4: 1}


def test_huang_split_job_is_slower_by_the_penalty() -> None:
    jobs = [job(1, 0, 2, 128, 1000), job(2, 1, 3, 128, 1000), job(3, 2, 4, 100, 1000), job(4, 3, 2, 60, 8)]
    setting = Setting((1, 2, 4, 4, 8), policy="faster-first", p=2.0)
    *_, split = sorted(setting.simulate_jobs(jobs).jobs, key=lambda job: job.ident)
    assert len(split.gang) > 1
    slowest = min(SPEED[int(site[-1]) - 1] for site, _ in split.gang)
    assert split.started is not None
    assert split.ended == split.started + 3 * 8 / slowest


def test_huang_permutations_count_the_best_policy() -> None:
    figure = Figure2()
    cells = [cell for cell in figure.list_cells(1) if cell["speeds"] in (0, 1)]
    times = {"best-fit": 30.0, "fastest-one": 20.0, "adaptive": 20.0}
    results = [Result(cell, {ENTIRE: times[str(cell["policy"])]}) for cell in cells]
    rows = {row.label: row for row in figure.build_rows(results)}
    crowded = "load 12, threshold 1"
    for policy in ("adaptive", "fastest-one"):
        assert rows[f"{crowded}: {policy}: best in so many of 2"].ours == 2
    assert rows[f"{crowded}: best-fit: last in so many"].ours == 2
    assert rows[f"{crowded}: best-fit: time over that of the best, at most"].ours == 1.5
    assert rows[f"{crowded}: adaptive: last in so many"].paper == 0


def test_huang_whole_trace_simulates_half_of_the_readings() -> None:
    cells = Figure2Whole().list_cells(1)
    orders = Counter((cell["load"], cell["threshold"]) for cell in cells if cell["policy"] == "adaptive")
    assert sorted(orders.values()) == [12] * 3 + [120] * 3
    assert {reading for reading, number in orders.items() if number == 120} == set(Figure2Whole.all_of)
    assert len({cell.key for cell in cells}) == len(cells) == 3 * sum(orders.values())


@pytest.mark.parametrize(
    "experiment", [Table3(), Figure1(), Figure2(), Figure2Whole(), Figure3()], ids=lambda one: one.name
)
def test_huang_experiments_run_on_a_small_trace(experiment: Experiment, tmp_path: Path) -> None:
    lines = [swf_line(n, submitted=5 * n, queue=n % 5 + 1, processors=1 + n % 8, ran=100 + n) for n in range(1, 41)]
    traces = a_trace(tmp_path, TRACE, lines)
    cells = experiment.list_cells(1)
    cells = [*cells[:8], *cells[-4:]] if len(cells) > 12 else cells
    results = [Result(cell, experiment.simulate_cell(cell, traces)) for cell in cells]
    assert experiment.simulate_cell(cells[0], traces) == results[0].values
    if len(cells) < 12:
        assert experiment.build_rows(results)
        assert experiment.write_remarks(results)
        assert experiment.draw_figure(results) is not None


@pytest.mark.skipif(not Traces(default_folder()).has(TRACE), reason="needs the trace")
def test_huang_no_site_loses_in_the_paper_setting() -> None:
    jobs = jobs_of(Traces(default_folder()))[:2000]
    alone, feasible = (
        mean_responses(Setting(Table3.speed, Table3.load, sharing=sharing, threshold=1.0).simulate_jobs(jobs))
        for sharing in ("independent", "feasible")
    )
    assert {name: feasible[name] <= alone[name] * (1 + 1e-9) for name in alone} == dict.fromkeys(alone, True)
