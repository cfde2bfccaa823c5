"""A grid of 100 clusters on which no job fits, and long queues of waiting jobs.

On the ``full`` grid the number of idle nodes is enough to reject a job. On the ``scattered`` one, three of four shapes
pass that check and need their policy.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, product
from typing import Any

from koalapy.api.job_views import JobSubmission
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ClusterReport, Inventory
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import InventoryReceived, JobSubmitted, Reported
from koalapy.scheduler.grid import Links
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState

CLUSTERS = [f"cluster-{number:03}" for number in range(100)]
TOTAL = 64
IDLE = {"full": [0] * 100, "scattered": [number % 8 for number in range(100)]}

Request = dict[str, Any]


def too_large() -> Iterator[Request]:
    """Yield requests for more nodes than are idle."""
    return ({"type": "flexible", "total_size": total} for total in count(360))


def too_thin() -> Iterator[Request]:
    """Yield requests for enough nodes, but with too large least components."""
    for total in count(218):
        yield from ({"type": "flexible", "total_size": total, "min_component_size": min_size} for min_size in (5, 6, 7))


def too_many() -> Iterator[Request]:
    """Yield requests with one component of seven nodes too many, and different smaller ones."""
    for other_sizes in product(range(1, 7), repeat=5):
        sizes = [*[7] * 13, *other_sizes]
        yield {"type": "nonfixed", "components": [{"size": size} for size in sizes]}


def elsewhere() -> Iterator[Request]:
    """Yield requests for given clusters with too few nodes."""
    for size, cluster in product(range(9, TOTAL + 1), CLUSTERS):
        yield {"type": "fixed", "components": [{"size": size, "cluster": cluster}, {"size": 2, "cluster": cluster}]}


def shapes(number: int) -> list[Request]:
    kinds = (too_large(), too_thin(), too_many(), elsewhere())
    return [
        request for requests in zip(*(islice(kind, number // 4) for kind in kinds), strict=True) for request in requests
    ]


def specs(jobs: int, number: int, walltimes: Sequence[float | None] = (None,)) -> Iterator[JobSpec]:
    """Yield job specifications as the API creates them, without shared objects; one of ten has high priority.

    The shapes of requests have the ``walltimes`` in turn.
    """
    requests = shapes(number)
    for n in range(jobs):
        fields = {
            "request": requests[n % number],
            "command": ["python", "-m", "program", f"--input=case-{n}"],
            "name": f"case-{n}",
            "owner": f"user-{n % 30}",
            "priority": "low" if n // number % 10 else "high",
            "walltime": walltimes[n % number % len(walltimes)],
        }
        yield JobSubmission.model_validate_json(json.dumps(fields)).to_model()


def report(cluster: str, idle: int, total: int = TOTAL) -> Reported:
    """Return a cluster report in which local users occupy all other nodes."""
    return Reported(cluster, ClusterReport(total, idle, total - idle))


def empty_scheduler(idle: Sequence[int], total: int = TOTAL, links: Links | None = None) -> Scheduler:
    """Return a scheduler with 100 clusters and default rules, except for the limit of its queue."""
    rules = Rules(placement_queue_limit=1_000_000, high_scans_per_low=1)
    scheduler = Scheduler(
        SchedulerState(rules, builtin_policies(), [ClusterStatus(name) for name in CLUSTERS], links), str
    )
    for name, nodes in zip(CLUSTERS, idle, strict=True):
        scheduler.step([InventoryReceived(name, Inventory(())), report(name, nodes, total)], 0.0)
    return scheduler


def fill(scheduler: Scheduler, jobs: Iterable[JobSpec]) -> None:
    """Submit jobs in chunks; none of them may fit."""
    numbers, jobs = count(len(scheduler.queries.jobs()) + 1), iter(jobs)
    while chunk := [JobSubmitted(Job(next(numbers), spec, 0.0)) for spec in islice(jobs, 1000)]:
        scheduler.step(chunk, 1.0)
