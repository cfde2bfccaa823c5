"""What the scheduler alone takes: scans over long queues, a wake-up that helps nobody, memory per waiting job.

The grid of 100 clusters is ``full``, where a glance at the number of idle nodes is enough to refuse, or ``scattered``,
so that three of four shapes pass that glance and their policy has to be asked.
"""

import gc
import json
import tracemalloc
from collections.abc import Iterator
from itertools import count, islice, product, repeat
from typing import Any

import pytest

from koalapy.api.submission import JobSubmission
from koalapy.model.job import Job, JobSpec
from koalapy.model.reports import ClusterReport, Inventory
from koalapy.placement.registry import builtin
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.events import Event, InventoryReceived, JobSubmitted, PeriodicScan, Reported
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.scheduler import Scheduler
from koalapy.scheduling.state import SchedulerState

CLUSTERS = [f"cluster-{number:03}" for number in range(100)]
TOTAL = 64
IDLE = {"full": [0] * 100, "scattered": [number % 8 for number in range(100)]}
ROUNDS = 20

Request = dict[str, Any]


def too_large() -> Iterator[Request]:
    """More nodes in all than are idle."""
    return ({"type": "flexible", "total_size": total} for total in count(360))


def too_thin() -> Iterator[Request]:
    """Nodes enough, but not in clusters that have enough of them."""
    for total in count(218):
        yield from ({"type": "flexible", "total_size": total, "min_component_size": least} for least in (5, 6, 7))


def too_many() -> Iterator[Request]:
    """One component of seven nodes more than there are clusters that have them, and different others beside."""
    for others in product(range(1, 7), repeat=5):
        sizes = [*[7] * 13, *others]
        yield {"type": "nonfixed", "components": [{"size": size} for size in sizes]}


def elsewhere() -> Iterator[Request]:
    """On a cluster of the user's own choice, which has too few."""
    for size, cluster in product(range(9, TOTAL + 1), CLUSTERS):
        yield {"type": "fixed", "components": [{"size": size, "cluster": cluster}, {"size": 2, "cluster": cluster}]}


def shapes(number: int) -> list[Request]:
    kinds = (too_large(), too_thin(), too_many(), elsewhere())
    return [request for each in zip(*(islice(kind, number // 4) for kind in kinds), strict=True) for request in each]


def specs(jobs: int, number: int) -> Iterator[JobSpec]:
    """As they come from the API: each of its own objects; one of ten is of high priority."""
    requests = shapes(number)
    for n in range(jobs):
        told = {
            "request": requests[n % number],
            "command": ["python", "-m", "program", f"--input=case-{n}"],
            "name": f"case-{n}",
            "owner": f"user-{n % 30}",
            "priority": "low" if n // number % 10 else "high",
        }
        yield JobSubmission.model_validate_json(json.dumps(told)).to_model()


def report(cluster: str, idle: int) -> Reported:
    return Reported(cluster, ClusterReport(TOTAL, idle, TOTAL - idle))


def empty_scheduler(idle: list[int]) -> Scheduler:
    rules = Rules(placement_queue_limit=1_000_000, high_scans_per_low=1)
    scheduler = Scheduler(SchedulerState(rules, builtin(), [ClusterStatus(name) for name in CLUSTERS]), nonces=str)
    for name, nodes in zip(CLUSTERS, idle, strict=True):
        scheduler.step([InventoryReceived(name, Inventory(())), report(name, nodes)], 0.0)
    return scheduler


def fill(scheduler: Scheduler, jobs: Iterator[JobSpec]) -> None:
    numbers = count(len(scheduler.queries.jobs()) + 1)
    while some := [JobSubmitted(Job(next(numbers), spec, 0.0)) for spec in islice(jobs, 1000)]:
        scheduler.step(some, 1.0)


@pytest.fixture(params=list(IDLE))
def idle(request: pytest.FixtureRequest) -> list[int]:
    return IDLE[request.param]


def bench(benchmark: Any, scheduler: Scheduler, jobs: int, events: Iterator[tuple[Event | None, Event]]) -> None:
    """Time the steps for the second events, each after one for the first; every job must still wait at the end."""
    now = count(10)

    def prepare() -> tuple[tuple[Event], dict[str, Any]]:
        before, timed = next(events)
        if before is not None:
            scheduler.step([before], next(now))
        return (timed,), {}

    gc.collect()
    gc.freeze()
    try:
        benchmark.pedantic(lambda event: scheduler.step([event], next(now)), setup=prepare, rounds=ROUNDS)
    finally:
        gc.unfreeze()
    assert scheduler.queries.queued == jobs
    stats = benchmark.stats.stats
    benchmark.extra_info |= {"median_ms": 1000 * stats.median, "max_ms": 1000 * stats.max}
    print(benchmark.name, benchmark.extra_info)


@pytest.mark.parametrize(("jobs", "number"), [(100_000, 200), (10_000, 10_000)])
def test_a_full_scan(idle: list[int], jobs: int, number: int, benchmark: Any) -> None:
    """A periodic scan of both queues; wanted are 100 ms for 200 shapes, 1 s for 10,000."""
    scheduler = empty_scheduler(idle)
    fill(scheduler, specs(jobs, number))
    bench(benchmark, scheduler, jobs, repeat((None, PeriodicScan())))


def test_a_wake_up_that_helps_nobody(idle: list[int], benchmark: Any) -> None:
    """One node comes free with 100,000 jobs waiting that cannot use it; wanted is 1 ms."""
    jobs = 100_000
    scheduler = empty_scheduler(idle)
    fill(scheduler, specs(jobs, 200))

    name = CLUSTERS[0]
    bench(benchmark, scheduler, jobs, repeat((report(name, 0), report(name, 1))))


def test_memory_per_waiting_job(benchmark: Any) -> None:
    """All that a waiting job keeps alive; wanted is 1 KB."""
    jobs = 50_000
    scheduler = empty_scheduler(IDLE["scattered"])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        benchmark.pedantic(lambda: fill(scheduler, specs(jobs, 200)), rounds=1)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert scheduler.queries.queued == jobs
    benchmark.extra_info["bytes_per_job"] = (after - before) / jobs
    print(benchmark.name, benchmark.extra_info)
