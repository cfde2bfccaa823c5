"""The page Forecast: the largest jobs that would start now, the next ends of jobs, and starts under a change."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Query
from pydantic import Field

from koalapy.api.access import Caller
from koalapy.api.fields import MAX_ID, Name, Text
from koalapy.api.forecasts import MAX_CHANGES, Horizon, WhatIf
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, Simulate, View, parse_body
from koalapy.dashboard.rendering import with_query
from koalapy.model.identity import Role
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.explain import capacity
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.queries import Queries
from koalapy.simulation.twin import HORIZON, Answer, Report, ignore_progress
from koalapy.system.event_loop import iterate_in_slices

MAX_ENDS_SHOWN = 20
TIME_SLICE_S = 0.003
"""Computing time after which other tasks of the event loop run."""
JOBS_PER_SLICE = 100
MAX_CACHED_VIEWS = 200
VIEW_LIFETIME_S = 5.0
MAX_LINES = 200
"""Maximum number of displayed jobs; the REST API returns all."""
HORIZONS_S = 3600.0, 86_400.0, 7 * 86_400.0, HORIZON
"""Horizons that the form offers; a link may contain any other."""
Names = Annotated[list[Name], Query(max_length=MAX_CHANGES)]
Pairs = Annotated[
    list[Annotated[Text, Field(max_length=10_000)]],
    Query(max_length=MAX_CHANGES, description="NAME=VALUE, separated by blanks"),
]


def overdue_end(job: Job, now: float) -> capacity.ExpectedEnd | None:
    """Return the end of a running job by its walltime if that has passed, else None."""
    attempt, walltime = job.attempt, job.spec.walltime
    if attempt is None or attempt.barrier_at is None or walltime is None or attempt.barrier_at + walltime >= now:
        return None
    nodes = {component.cluster: component.size for component in attempt.gang}
    return capacity.ExpectedEnd(job.id, attempt.barrier_at + walltime, job.spec.priority, nodes)


def group_policies(capacities: Sequence[capacity.PolicyCapacity]) -> list[View]:
    """Merge policies with equal capacities, so that the page shows each capacity once."""
    groups: list[View] = []
    for entry in capacities:
        sizes: View = {"component": entry.component, "total": entry.total}
        group = next((group for group in groups if sizes.items() <= group.items()), None)
        if group is None:
            groups.append(group := {"policies": [], **sizes})
        group["policies"].append(entry.policy)
    return groups


async def capacity_view(queries: Queries, spec: JobSpec, now: float) -> View:
    """Compute the capacity for jobs with the owner and the priority of ``spec``."""
    all_ends, offered = list[tuple[Job, capacity.ExpectedEnd | None]](), queries.offer(spec).view
    async for jobs in iterate_in_slices(list(queries.active_jobs()), JOBS_PER_SLICE):
        all_ends += [(job, capacity.expected_end_of(job, queries.experience, now)) for job in jobs]
    usable = {cluster.name for cluster in offered.by_idle}
    next_known_ends = capacity.next_ends(
        end for _, end in all_ends if end is not None and not usable.isdisjoint(end.nodes)
    )
    capacities: list[capacity.PolicyCapacity] = []
    slice_start = time.thread_time()
    for estimate in capacity.estimate_capacities(queries, spec, next_known_ends):
        if estimate is not None:
            capacities.append(estimate)
        if time.thread_time() - slice_start > TIME_SLICE_S:
            await asyncio.sleep(0)
            slice_start = time.thread_time()
    overdue = [end for job, ends_at in all_ends if ends_at is None and (end := overdue_end(job, now)) is not None]
    dry_run = DryRun(queries)
    idle, coming = offered.usable_idle, []
    for end in next_known_ends[:MAX_ENDS_SHOWN]:
        freed = sum(nodes for cluster, nodes in end.nodes.items() if cluster in usable)
        idle += freed  # unless other jobs take nodes that earlier ends release
        coming.append({"end": end, "nodes": freed, "idle": idle})
    return {
        "priority": spec.priority,
        "priorities": (Priority.LOW, Priority.HIGH),
        "preempts": dry_run.may_preempt(spec),
        "idle": dry_run.widest_view(spec).usable_idle,
        "nodes": sum(cluster.last_report.total for cluster in queries.grid.clusters()),
        "policies": group_policies(capacities),
        "coming": coming,
        "overdue": sorted(overdue, key=lambda end: end.at),
        "unknown": sum(end is None for _, end in all_ends) - len(overdue),
        # Whether a new job has to wait for jobs that were submitted before it
        "behind_others": not dry_run.is_tried_at_once(spec),
    }


def lines_of(answer: Answer) -> list[View]:
    """Return the waiting jobs in the order of their expected starts.

    A start is in seconds from now, None if it is in no simulation before the horizon.
    """
    changed_jobs = {} if answer.changed is None else {job.job: job.starts for job in answer.changed.jobs}
    waiting = [job for job in answer.as_it_is.jobs if job.state is JobState.QUEUED]
    waiting.sort(key=lambda job: (job.starts is None, job.starts.middle if job.starts else 0.0, job.job))
    return [
        {
            "job": job.job,
            "starts": job.starts,
            "changed": changed_jobs.get(job.job),
            # Whether the simulation of the changes has the job
            "is_changed_too": job.job in changed_jobs,
            "basis": job.basis,
        }
        for job in waiting
    ]


def result_of(answer: Answer) -> View:
    """Return what the page shows of an answer."""
    lines = lines_of(answer)
    intervals = [interval for line in lines[:MAX_LINES] for interval in (line["starts"], line["changed"]) if interval]
    outcomes = [
        (name, replace(forecast, jobs=()), sum(j.state is JobState.QUEUED and j.starts is None for j in forecast.jobs))
        for name, forecast in (("current", answer.as_it_is), ("changed", answer.changed))
        if forecast is not None
    ]
    longest = max((interval.high for interval in intervals), default=0.0)
    return {
        # By state: its name, the forecast without jobs, and the waiting jobs that start in no simulation
        "outcomes": outcomes,
        "lines": lines[:MAX_LINES],
        "more": max(0, len(lines) - MAX_LINES),
        "most": longest,
    }


async def read_form(
    policy: Name = "",
    rules: Pairs = [],  # noqa: B006 -- FastAPI copies it
    drain: Names = [],  # noqa: B006
    resume: Names = [],  # noqa: B006
    add: Pairs = [],  # noqa: B006
    first: Annotated[str, Query(max_length=len(str(MAX_ID)), pattern="^[0-9]*$")] = "",
    walltimes: Pairs = [],  # noqa: B006
    horizon: Horizon = HORIZON,
) -> WhatIf:
    """Return the hypothetical changes in the query of a request, in which a field has pairs separated by blanks."""
    pairs = {
        name: " ".join(texts).split() for name, texts in (("rules", rules), ("add", add), ("walltimes", walltimes))
    }
    values = {"policy": policy, "drain": drain, "resume": resume, "first": int(first) if first else None, **pairs}
    return parse_body(WhatIf, values | {"horizon": horizon})


Asked = Annotated[WhatIf, Depends(read_form)]


def add_forecast(dashboard: Dashboard, services: Services) -> None:
    """Add the page of capacity and the page of simulated changes. Capacities are cached by user and priority."""
    engine, rules, forecasts = dashboard.engine, services.jobs.rules, services.forecasts
    views: dict[tuple[str, Priority], tuple[str, float, asyncio.Task[View]]] = {}

    def make_form(question: WhatIf) -> View:
        clusters = engine.queries.grid.clusters()
        return {
            "asked": question,
            "policies": engine.queries.policies.names(),
            "horizons": sorted({*HORIZONS_S, question.horizon}),
            "drained": [cluster.name for cluster in clusters if cluster.drained is not None],
            "open": [cluster.name for cluster in clusters if cluster.drained is None],
            "waiting": sum(job.state is JobState.QUEUED for job in engine.queries.jobs()),
        }

    @dashboard.page("/forecast", "forecast.html", operation="list_clusters", title="Forecast", key="r")
    async def show(caller: Caller, priority: Priority = Priority.LOW) -> View:
        """Return the capacity for jobs of the caller, from the cache if it is recent and nothing changed."""
        key, version, now = (caller.user, priority), engine.changes.version, engine.clock()
        cached = views.get(key)
        if cached is None or cached[0] != version or now - cached[1] > VIEW_LIFETIME_S:
            if len(views) >= MAX_CACHED_VIEWS:
                views.clear()
            spec = JobSpec(FlexibleRequest(1), owner=caller.user, priority=priority)
            cached = views[key] = version, now, asyncio.ensure_future(capacity_view(engine.queries, spec, now))
        view = await asyncio.shield(cached[2])
        if not rules.high_priority.is_allowed_to(caller):
            view = view | {"priorities": (Priority.LOW,)}
        return view | {"form": make_form(WhatIf()) if caller.has_role(Role.OPERATOR) else None}

    @dashboard.simulation("/forecast/what-if/result", "what_if_result.html", operation="ask_what_if")
    async def prepare(question: Asked) -> Simulate:
        """Return the simulation of the changes. Raise ``UsageError`` or ``NotFoundError`` if they are invalid."""
        change = question.to_change()
        forecasts.check_change(change)

        async def simulate(report: Report) -> View:
            return result_of(await forecasts.what_if(change, question.horizon, report))

        return simulate

    @dashboard.page("/forecast/what-if", "what_if.html", operation="ask_what_if", title="What if", live=False)
    async def what_if(question: Asked, ask: bool = False, complete: bool = False) -> View:
        """Return the form, and the path of the results if there are changes or the form was sent. ``complete``: wait
        for the results, for browsers without scripts."""
        is_asked = ask or question.model_copy(update={"horizon": HORIZON}) != WhatIf()
        simulate = await prepare(question) if is_asked else None
        values = question.model_dump() | {"horizon": f"{question.horizon:.15g}s"}
        return {
            "form": make_form(question),
            # The path of the results; empty if none were requested, or if they are in ``result``
            "simulation": with_query("/forecast/what-if/result", **values) if simulate and not complete else "",
            "result": await simulate(ignore_progress) if simulate and complete else None,
        }
