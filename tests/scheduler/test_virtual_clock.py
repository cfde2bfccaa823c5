"""Many jobs on a virtual clock, without files, network or threads."""

import subprocess
import sys
from itertools import count
from random import Random

import pytest

from koalapy.model.job import JobState
from koalapy.model.job_spec import Launcher, Priority
from koalapy.model.request import Request
from koalapy.scheduler.rules import Rules
from tests.scheduler import invariants
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

SIZES = {"delft": 32, "leiden": 32, "utrecht": 64}
MEAN_RUNTIME = 120.0
REQUESTS: list[Request] = [
    flexible(1),
    flexible(2),
    flexible(4),
    flexible(8),
    flexible(16),
    flexible(48, 8, 3),
    nonfixed(2, 2),
    nonfixed(8, 4),
    nonfixed(16, 16),
    fixed(delft=4, leiden=4),
    fixed(utrecht=8),
]
MEAN_SIZE = sum(request.total_size for request in REQUESTS) / len(REQUESTS)


class Load:
    """A Poisson process of jobs and local users with exponential durations."""

    def __init__(self, world: World, jobs: int, utilisation: float, background: float) -> None:
        self.world = world
        self.random = Random(42)
        nodes = sum(SIZES.values())
        self.pause = MEAN_SIZE * MEAN_RUNTIME / (utilisation * nodes)
        self.local_pause = 4 * MEAN_RUNTIME / (background * nodes)
        self.node_seconds = 0.0
        self.local_node_seconds = 0.0
        self.left = jobs

    def submit_next(self) -> None:
        request, run_time = self.random.choice(REQUESTS), self.random.expovariate(1 / MEAN_RUNTIME)
        self.node_seconds += request.total_size * run_time
        self.world.submit(
            request,
            run_time=run_time,
            priority=self.random.choice(list(Priority)),
            launcher=self.random.choice(list(Launcher)),
        )
        self.left -= 1
        if self.left:
            self.world.schedule(self.random.expovariate(1 / self.pause), self.submit_next)

    def add_local_user(self) -> None:
        site = self.random.choice(list(self.world.sites.values()))
        size, stay_s = self.random.randint(1, 7), self.random.expovariate(1 / MEAN_RUNTIME)
        name = site.add_local_user(size)
        self.local_node_seconds += size * stay_s
        self.world.schedule(stay_s, lambda: site.remove_local_user(name))
        if self.left:
            self.world.schedule(self.random.expovariate(1 / self.local_pause), self.add_local_user)


@pytest.mark.parametrize("count_of_jobs", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_world_with_many_jobs_finishes_all_with_short_waits(count_of_jobs: int) -> None:
    nonces = count(1)
    world = World(SIZES, Rules(preemption="claiming"), strict=False, nonces=lambda: f"{next(nonces):x}")
    load = Load(world, count_of_jobs, utilisation=0.5, background=0.2)
    load.submit_next()
    load.add_local_user()
    while load.left or world.queries.jobs():
        world.advance(1000)
    jobs = list(world.jobs.values())
    assert len(jobs) == count_of_jobs
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert sum(job.restarts for job in jobs) == 0
    invariants.check_nothing_remains(world)
    invariants.check_counts(world)
    spans = [((job.started_at or 0) - job.submitted_at, (job.ended_at or 0) - job.submitted_at) for job in jobs]
    mean_wait = sum(wait for wait, _ in spans) / count_of_jobs
    busy = load.node_seconds / (sum(SIZES.values()) * world.now)
    assert 0.4 < busy < 0.6
    # At a utilisation of 70 % the mean wait is a small part of the run time.
    assert 0.125 <= mean_wait < MEAN_RUNTIME / 2
    high, low = ([w for job, (w, _) in zip(jobs, spans, strict=True) if job.spec.priority is p] for p in Priority)
    assert sum(high) / len(high) < sum(low) / len(low), "high-priority jobs wait less"
    claims = sum(job.claiming_tries for job in jobs)
    assert count_of_jobs <= claims < 1.1 * count_of_jobs, "few claims are lost to local users"


@pytest.mark.processes
@pytest.mark.parametrize("module", ["koalapy.scheduler.scheduler", "koalapy.policies.registry"])
def test_scheduler_imports_no_io_modules(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(completed.stdout.split())
    assert module in loaded
    assert not loaded & {"asyncio", "socket", "sqlalchemy", "pydantic", "structlog", "subprocess", "threading"}
