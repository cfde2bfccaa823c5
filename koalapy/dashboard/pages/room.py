"""The page Room: what would start now, by policy, and after which expected end more would."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from koalapy.api.access import Caller
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard
from koalapy.model.job import Job, JobId, JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.explain.room import ExpectedEnd, Most, PolicyRoom, expected_end_of, next_ends, policy_rooms
from koalapy.scheduler.queries import Queries

ENDS_SHOWN = 20
AT_ONCE = 0.003
"""Seconds of work after which others go on."""
GOOD_FOR = 30.0
"""Seconds for which it is not asked again when a job that has not changed is expected to end."""
MAX_KEPT = 200
"""Answers for so many users and priorities are kept while nothing changes, each for a moment."""
KEPT_FOR = 5.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class ComingFree:
    """An expected end, and what there would be then."""

    end: ExpectedEnd
    nodes: int
    """That it gives back."""
    idle: int
    """In all, with those of the ends before it; others may have taken them."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Policies that would place as much in the same places."""

    policies: Sequence[str]
    component: Most | None
    total: Most | None


@dataclass(frozen=True, slots=True)
class RoomView:
    """What would start now for one of a priority."""

    priority: Priority
    priorities: Sequence[Priority]
    """Those that the caller may submit with."""
    preempts: bool
    """Whether such a job may preempt others."""
    idle: int
    """Nodes that such a job is offered."""
    nodes: int
    policies: Sequence[Alike]
    coming: Sequence[ComingFree]
    unknown: int
    """Jobs that have nodes, and of which nobody knows when they end."""
    behind_others: bool
    """Whether a new job is not tried before those that wait already."""


@dataclass(slots=True)
class _Ends:
    """When jobs are expected to end, asked again for each only once in a while, and as soon as it has changed."""

    known: dict[JobId, tuple[Job, float, ExpectedEnd | None]] = field(default_factory=dict)

    async def take(self, queries: Queries, now: float) -> list[ExpectedEnd | None]:
        """Of all jobs that have nodes."""
        before, self.known = self.known, {}
        began = time.thread_time()
        for job in queries.jobs():
            if not job.state.is_active:
                continue
            found = before.get(job.id)
            if found is None or found[0] is not job or now - found[1] > GOOD_FOR:
                found = job, now, expected_end_of(job, queries.experience, now)
            self.known[job.id] = found
            if time.thread_time() - began > AT_ONCE:
                await asyncio.sleep(0)
                began = time.thread_time()
        return [end for _, _, end in self.known.values()]


def together(rooms: Sequence[PolicyRoom]) -> list[Alike]:
    found: list[tuple[Most | None, Most | None, list[str]]] = []
    for room in rooms:
        known = next((each for each in found if each[:2] == (room.component, room.total)), None)
        if known is None:
            found.append(known := (room.component, room.total, []))
        known[2].append(room.policy)
    return [Alike(policies, component, total) for component, total, policies in found]


async def room_of(queries: Queries, ends: _Ends, base: JobSpec, now: float) -> RoomView:
    all_ends = await ends.take(queries, now)
    coming = next_ends(end for end in all_ends if end is not None)
    policies: list[PolicyRoom] = []
    began = time.thread_time()
    for step in policy_rooms(queries, base, coming):
        if step is not None:
            policies.append(step)
        if time.thread_time() - began > AT_ONCE:
            await asyncio.sleep(0)
            began = time.thread_time()
    dry_run = DryRun(queries)
    idle = dry_run.widest_view(base).usable_idle
    then, shown = queries.view(base.priority).usable_idle, []
    for end in coming[:ENDS_SHOWN]:
        then += (given := sum(end.nodes.values()))
        shown.append(ComingFree(end, given, then))
    return RoomView(
        priority=base.priority,
        priorities=(Priority.LOW, Priority.HIGH),
        preempts=dry_run.may_preempt(base),
        idle=idle,
        nodes=sum(cluster.total for cluster in queries.grid.clusters()),
        policies=together(policies),
        coming=shown,
        unknown=sum(end is None for end in all_ends),
        behind_others=not dry_run.is_tried_at_once(base),
    )


def add_room(dashboard: Dashboard, services: Services) -> None:
    engine, ends, rules = dashboard.engine, _Ends(), services.jobs.rules
    kept: dict[tuple[str, Priority], tuple[str, float, asyncio.Task[RoomView]]] = {}

    @dashboard.page("/room", "room.html", operation="show_metrics", title="Room", key="r")
    async def room(caller: Caller, priority: Priority = Priority.LOW) -> RoomView:
        key, version, now = (caller.user, priority), engine.changes.version, engine.clock()
        known = kept.get(key)
        if known is None or known[0] != version or now - known[1] > KEPT_FOR:
            if len(kept) >= MAX_KEPT:
                kept.clear()
            base = JobSpec(FlexibleRequest(1), owner=caller.user, priority=priority)
            looking = asyncio.ensure_future(room_of(engine.queries, ends, base, now))
            known = kept[key] = version, now, looking
        view = await asyncio.shield(known[2])
        return view if rules.high_priority.is_allowed_to(caller) else replace(view, priorities=(Priority.LOW,))
