"""Measure scans and steps while the start of a job is planned, since jobs have waited for hours.

On a wide grid of 1,000 clusters, running jobs with walltimes have all nodes but those of ``IDLE["scattered"]``. A
saturated grid of ten clusters has a queue of 4,000 jobs.
"""

import gc
import random
from collections.abc import Sequence
from statistics import fmean
from time import process_time

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import InventoryReceived, PeriodicScan, Reported
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from tests.benchmarks.waiting_jobs import IDLE, TOTAL, fill, specs
from tests.benchmarks.whole_life import CLUSTERS, LASTS, NODES, Arrival, SimulatedGrid, Step, replay

WIDE_GRID = [f"cluster-{number:03}" for number in range(1000)]
WALLTIMES = (600.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
HOUR = 3600.0
SHAPES = [(size, walltime) for size in range(1, 41) for walltime in range(600, 6600, 600)]
"""The 400 shapes of the jobs on the saturated grid: their nodes and walltimes."""
MEASURED_FROM, MEASURED_UNTIL = 1.5 * HOUR, 2.5 * HOUR


def wide_scheduler(jobs: int, shapes: int) -> Scheduler:
    """Return a scheduler of 1,000 clusters with waiting jobs that would fit if no job ran."""
    rules = Rules(placement_queue_limit=1_000_000, high_scans_per_low=1)
    clusters = [ClusterStatus(name) for name in WIDE_GRID]
    scheduler = Scheduler(SchedulerState(rules, builtin_policies(), clusters), str)
    idle = IDLE["scattered"] + [0] * (len(WIDE_GRID) - len(IDLE["scattered"]))
    running = [_running_job(ident, WIDE_GRID[ident - 1], TOTAL - nodes) for ident, nodes in enumerate(idle, 1)]
    scheduler.restore(running, 0.5)
    for job, name, nodes in zip(running, WIDE_GRID, idle, strict=True):
        status = ComponentStatus(job.token(0), ComponentState.RUNNING, lrm_job="1")
        report = ClusterReport(TOTAL, nodes, holding=frozenset({job.token(0)}))
        scheduler.step([InventoryReceived(name, Inventory((status,))), Reported(name, report)], 0.5)
    fill(scheduler, specs(jobs, shapes, WALLTIMES))
    assert scheduler.queries.queued == jobs
    return scheduler


def _running_job(ident: JobId, cluster: str, nodes: int) -> Job:
    request, walltime = NonFixedRequest((ComponentRequest(nodes),)), 100 * HOUR + 60.0 * ident
    spec = JobSpec(request, ("program",), priority=Priority.HIGH, walltime=walltime)
    component = Component(
        0, cluster, nodes, ComponentState.RUNNING, request_index=0, lrm_job="1", submitted_at=0.1, claimed_at=0.1,
        hosts=tuple(f"{cluster}-{number}" for number in range(nodes)),
    )  # fmt: skip
    attempt = Attempt(1, (component,), 0.1, 0.1, 0.1, barrier_at=0.1, launched_at=0.1, nonce=f"{ident:016x}")
    return Job(ident, spec, 0.0, JobState.RUNNING, generation=1, attempt=attempt, placed_at=0.1, started_at=0.1)


def wide_scan_times(jobs: int, shapes: int, rounds: int) -> list[float]:
    """Return the CPU seconds of periodic scans, from two hours after the submission of the jobs."""
    scheduler, times = wide_scheduler(jobs, shapes), []
    gc.collect()
    for number in range(rounds + 1):
        now = 2 * HOUR + 30.0 * number
        began = process_time()
        scheduler.step([PeriodicScan()], now)
        times.append(process_time() - began)
    assert scheduler.queries.queued == jobs
    return times[1:]


def saturated_steps(jobs: int) -> list[Step]:
    """Return the steps of a saturated grid, in which about so many jobs wait all the time."""
    draws, steps = random.Random(1), list[Step]()
    gap = fmean(size for size, _ in SHAPES) * fmean(LASTS) / (len(CLUSTERS) * NODES)
    times = [0] * jobs + [int(gap * number) for number in range(int(MEASURED_UNTIL / gap))]
    arrivals = []
    for time_s in times:
        size, walltime = draws.choice(SHAPES)
        arrivals.append(Arrival(time_s, (size,), min(draws.randint(*LASTS), walltime), walltime))
    SimulatedGrid(arrivals, steps).run(MEASURED_UNTIL)
    return steps


def saturated_step_times(steps: Sequence[Step]) -> list[float]:
    """Return the CPU seconds of each step from ``MEASURED_FROM`` on, without clusters and agents."""
    times, began = [], process_time()
    for (_, now), _ in zip(steps, replay(steps), strict=True):
        if now >= MEASURED_FROM:
            times.append(process_time() - began)
        began = process_time()
    return times
