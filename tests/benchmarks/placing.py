"""Measure the placement of 10,000 waiting jobs of different shapes, once the grid has capacity for all."""

import random
from collections.abc import Iterator
from itertools import combinations
from time import process_time

from koalapy.model.cluster import Link
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduler.events import ReplicasChanged
from koalapy.scheduler.grid import Links
from koalapy.scheduler.scheduler import Scheduler
from tests.benchmarks.waiting_jobs import CLUSTERS, empty_scheduler, fill, report

POLICIES = ("worst-fit", "close-to-files", "cluster-minimization", "communication-aware", "adaptive", "auto")
FILE_COUNT = 100
"""Number of input files of jobs under close-to-files, each on three clusters."""


def draw_links() -> Links:
    """Draw a link for each pair of clusters and a network for each cluster."""
    draws = random.Random(1)
    between = {pair: Link(draws.uniform(1e-3, 30e-3), draws.uniform(1e8, 1e9)) for pair in combinations(CLUSTERS, 2)}
    return between | {(name, name): Link(draws.uniform(1e-5, 1e-4), 1e9) for name in CLUSTERS}


def create_requests(policy: str, jobs: int) -> Iterator[Request]:
    """Yield requests of 1, 2, 3 … nodes in random order, each of another shape."""
    sizes = list(range(1, jobs + 1))
    random.Random(1).shuffle(sizes)
    for size in sizes:
        if policy == "worst-fit":
            yield NonFixedRequest((ComponentRequest(size),))
        elif policy == "close-to-files":
            file = InputFile(f"file-{size % FILE_COUNT}", 1_000_000_000)
            yield NonFixedRequest((ComponentRequest(size, inputs=(file,)),))
        else:
            yield FlexibleRequest(size)


def scheduler_with_waiting_jobs(policy: str, jobs: int) -> Scheduler:
    """Return a scheduler in which all jobs wait, since no cluster has an idle node."""
    scheduler = empty_scheduler([0] * len(CLUSTERS), nodes_per_cluster(jobs), draw_links())
    sites = [tuple(random.Random(number).sample(CLUSTERS, 3)) for number in range(FILE_COUNT)]
    scheduler.step([ReplicasChanged(f"file-{number}", clusters) for number, clusters in enumerate(sites)], 0.0)
    fill(scheduler, (JobSpec(request, ("program",), policy) for request in create_requests(policy, jobs)))
    assert scheduler.queries.queued == jobs
    return scheduler


def nodes_per_cluster(jobs: int) -> int:
    """Return the number of nodes by which every cluster has capacity for each job, wherever the other jobs are."""
    return jobs * (jobs + 1) // 2 // len(CLUSTERS) + jobs


def placements_per_s(policy: str, jobs: int) -> float:
    """Measure placements after all clusters report idle nodes at the same time."""
    scheduler = scheduler_with_waiting_jobs(policy, jobs)
    nodes = nodes_per_cluster(jobs)
    began = process_time()
    scheduler.step([report(name, nodes, nodes) for name in CLUSTERS], 2.0)
    while scheduler.queries.queued and (wakeup := scheduler.next_wakeup()) is not None and wakeup <= 2.0:
        scheduler.step([], 2.0)
    took = process_time() - began
    assert not scheduler.queries.queued
    return jobs / took
