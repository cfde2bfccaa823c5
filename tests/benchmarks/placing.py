"""A grid that comes back while 10,000 jobs wait, all of different shapes, with room for all of them."""

import random
from collections.abc import Iterator
from itertools import combinations
from time import process_time

from koalapy.model.cluster import Link
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduler.events import ReplicasChanged
from koalapy.scheduler.grid import Links
from koalapy.scheduler.scheduler import Scheduler
from tests.benchmarks.waiting_jobs import CLUSTERS, empty_scheduler, fill, report

POLICIES = ("worst-fit", "close-to-files", "cluster-minimization", "communication-aware", "adaptive", "auto")
FILES = 100
"""Input files of jobs that go close to them, each on three clusters."""


def links() -> Links:
    """Every two clusters are linked, each in its own way, and each has a network of its own."""
    draws = random.Random(1)
    between = {pair: Link(draws.uniform(1e-3, 30e-3), draws.uniform(1e8, 1e9)) for pair in combinations(CLUSTERS, 2)}
    return between | {(name, name): Link(draws.uniform(1e-5, 1e-4), 1e9) for name in CLUSTERS}


def requests(policy: str, jobs: int) -> Iterator[Request]:
    """Of 1, 2, 3 … nodes, mixed: each is a shape of its own."""
    sizes = list(range(1, jobs + 1))
    random.Random(1).shuffle(sizes)
    for size in sizes:
        if policy == "worst-fit":
            yield NonFixedRequest((ComponentRequest(size),))
        elif policy == "close-to-files":
            file = InputFile(f"file-{size % FILES}", 1_000_000_000)
            yield NonFixedRequest((ComponentRequest(size, inputs=(file,)),))
        else:
            yield FlexibleRequest(size)


def waiting(policy: str, jobs: int) -> Scheduler:
    """They wait, since no cluster has an idle node."""
    scheduler = empty_scheduler([0] * len(CLUSTERS), total(jobs), links())
    sites = [tuple(random.Random(number).sample(CLUSTERS, 3)) for number in range(FILES)]
    scheduler.step([ReplicasChanged(f"file-{number}", where) for number, where in enumerate(sites)], 0.0)
    fill(scheduler, (JobSpec(request, ("program",), policy) for request in requests(policy, jobs)))
    assert scheduler.queries.queued == jobs
    return scheduler


def total(jobs: int) -> int:
    """Nodes of each cluster: with these there is room for all jobs, wherever the others are."""
    return jobs * (jobs + 1) // 2 // len(CLUSTERS) + jobs


def placements_per_s(policy: str, jobs: int) -> float:
    """All clusters tell at one moment that their nodes are idle."""
    scheduler = waiting(policy, jobs)
    nodes = total(jobs)
    began = process_time()
    scheduler.step([report(name, nodes, nodes) for name in CLUSTERS], 2.0)
    while scheduler.queries.queued and (at := scheduler.next_wakeup()) is not None and at <= 2.0:
        scheduler.step([], 2.0)
    took = process_time() - began
    assert not scheduler.queries.queued
    return jobs / took
