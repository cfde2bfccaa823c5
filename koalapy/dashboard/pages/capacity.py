"""The page Capacity: the largest jobs that would start now under each policy, and the next expected ends of jobs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from koalapy.api.access import Caller
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.model.job import Job, JobId
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.explain.capacity import (
    ExpectedEnd,
    PolicyCapacity,
    SizeEstimate,
    estimate_capacities,
    expected_end_of,
    next_ends,
)
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.queries import Queries

MAX_ENDS_SHOWN = 20
TIME_SLICE_S = 0.003
"""Computing time after which other tasks of the event loop run."""
EXPECTED_END_LIFETIME_S = 30.0
"""Age after which the expected end of an unchanged job is computed again."""
MAX_CACHED_VIEWS = 200
VIEW_LIFETIME_S = 5.0


@dataclass(frozen=True, slots=True)
class ComingFree:
    """An expected end of a job, and the nodes that are idle after it."""

    end: ExpectedEnd
    nodes: int
    """Nodes that the job releases."""
    idle: int
    """Total of idle nodes, unless other jobs take nodes that earlier ends release."""


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """Policies with the same result."""

    policies: Sequence[str]
    component: SizeEstimate | None
    total: SizeEstimate | None


@dataclass(frozen=True, slots=True)
class CapacityView:
    """The capacity for jobs that the caller submits now with one priority."""

    priority: Priority
    priorities: Sequence[Priority]
    """Priorities that the caller may use."""
    preempts: bool
    """Whether such a job may preempt other jobs."""
    idle: int
    """Nodes that such a job is offered."""
    nodes: int
    policies: Sequence[PolicyGroup]
    coming: Sequence[ComingFree]
    unknown: int
    """Active jobs without an expected end."""
    behind_others: bool
    """Whether a new job has to wait for jobs that were submitted before it."""


class ExpectedEnds:
    """A cache of the expected ends of active jobs."""

    def __init__(self, time_slice_s: float = TIME_SLICE_S) -> None:
        self._time_slice_s = time_slice_s
        self._ends: dict[JobId, tuple[Job, float, ExpectedEnd | None]] = {}

    async def load(self, queries: Queries, now: float) -> list[ExpectedEnd | None]:
        """Return the expected ends of all active jobs, None for a job with an unknown end.

        Concurrent requests may call this method: each fills a separate dictionary.
        """
        ends: dict[JobId, tuple[Job, float, ExpectedEnd | None]] = {}
        slice_start = time.thread_time()
        for job in queries.active_jobs():
            entry = self._ends.get(job.id)
            if entry is None or entry[0] is not job or now - entry[1] > EXPECTED_END_LIFETIME_S:
                entry = job, now, expected_end_of(job, queries.experience, now)
            ends[job.id] = entry
            if time.thread_time() - slice_start > self._time_slice_s:
                await asyncio.sleep(0)
                slice_start = time.thread_time()
        self._ends = ends
        return [end for _, _, end in ends.values()]


def group_policies(rooms: Sequence[PolicyCapacity]) -> list[PolicyGroup]:
    """Merge policies with equal capacities, so that the page shows each capacity once."""
    groups: list[tuple[SizeEstimate | None, SizeEstimate | None, list[str]]] = []
    for room in rooms:
        group = next((group for group in groups if group[:2] == (room.component, room.total)), None)
        if group is None:
            groups.append((room.component, room.total, [room.policy]))
        else:
            group[2].append(room.policy)
    return [PolicyGroup(policies, component, total) for component, total, policies in groups]


async def capacity_view(queries: Queries, ends: ExpectedEnds, spec: JobSpec, now: float) -> CapacityView:
    """Compute the capacity for jobs with the owner and the priority of ``spec``."""
    all_ends = await ends.load(queries, now)
    next_known_ends = next_ends(end for end in all_ends if end is not None)
    rooms: list[PolicyCapacity] = []
    slice_start = time.thread_time()
    for room in estimate_capacities(queries, spec, next_known_ends):
        if room is not None:
            rooms.append(room)
        if time.thread_time() - slice_start > TIME_SLICE_S:
            await asyncio.sleep(0)
            slice_start = time.thread_time()
    dry_run = DryRun(queries)
    idle = queries.view(spec.priority).usable_idle
    coming = []
    for end in next_known_ends[:MAX_ENDS_SHOWN]:
        freed = sum(end.nodes.values())
        idle += freed
        coming.append(ComingFree(end, freed, idle))
    return CapacityView(
        priority=spec.priority,
        priorities=(Priority.LOW, Priority.HIGH),
        preempts=dry_run.may_preempt(spec),
        idle=dry_run.widest_view(spec).usable_idle,
        nodes=sum(cluster.last_report.total for cluster in queries.grid.clusters()),
        policies=group_policies(rooms),
        coming=coming,
        unknown=sum(end is None for end in all_ends),
        behind_others=not dry_run.is_tried_at_once(spec),
    )


def add_capacity(dashboard: Dashboard, services: Services) -> None:
    """Add the page that shows how large a job could be placed now. Views are cached by user and priority."""
    engine, ends, rules = dashboard.engine, ExpectedEnds(), services.jobs.rules
    views: dict[tuple[str, Priority], tuple[str, float, asyncio.Task[CapacityView]]] = {}

    @dashboard.page("/capacity", "capacity.html", operation="list_clusters", title="Capacity", key="r")
    async def capacity(caller: Caller, priority: Priority = Priority.LOW) -> CapacityView:
        """Return the capacity for jobs of the caller, from the cache if it is recent and nothing changed."""
        key, version, now = (caller.user, priority), engine.changes.version, engine.clock()
        cached = views.get(key)
        if cached is None or cached[0] != version or now - cached[1] > VIEW_LIFETIME_S:
            if len(views) >= MAX_CACHED_VIEWS:
                views.clear()
            spec = JobSpec(FlexibleRequest(1), owner=caller.user, priority=priority)
            cached = views[key] = version, now, asyncio.ensure_future(capacity_view(engine.queries, ends, spec, now))
        view = await asyncio.shield(cached[2])
        return view if rules.high_priority.is_allowed_to(caller) else replace(view, priorities=(Priority.LOW,))
