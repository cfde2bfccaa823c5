"""The routes of clusters, their use and background load, and of placement policies."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import WithJsonSchema

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import GivenReason, Input, Output, Positive, Reason, Seconds, Timestamp
from koalapy.api.problems import problem, problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.agents.questions import NodeLists, NodeRow, Questions, list_visible_nodes
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.cluster import Drain
from koalapy.model.errors import ProblemCode, reject
from koalapy.model.identity import Identity, Role
from koalapy.model.reports import MAX_LISTED_NODES, LrmOperation
from koalapy.scheduler.queries import Queries
from koalapy.store.records import ClusterRecord

Name = Annotated[fields.Cluster, Path(description="the cluster's name")]


OPERATIONS_WITHOUT_JOB = frozenset({LrmOperation.OPEN, LrmOperation.SNAPSHOT, LrmOperation.VERSION})
"""Operations with errors that users may see. Errors of other operations may reveal a job's owner and command."""


def may_see_errors(caller: Identity, operation: str) -> bool:
    """Return whether a caller may see the errors of an operation of the resource manager."""
    return caller.has_role(Role.OPERATOR) or operation in OPERATIONS_WITHOUT_JOB


def record_for(caller: Identity, record: ClusterRecord) -> ClusterRecord:
    """Return a cluster as the caller may see it."""
    all_calls: Any = record.details.get("calls", ())
    calls = [call if may_see_errors(caller, call["operation"]) else call | {"last_error": ""} for call in all_calls]
    return replace(record, details={**record.details, "calls": calls}) if calls else record


class DrainOrder(Input):
    """The reason for a drain, its time, and what becomes of the cluster's jobs."""

    reason: GivenReason
    requeue: bool = False
    """Whether running jobs are stopped at the begin, after the warning that they requested, and queued again."""
    begin: fields.PointInTime | None = None
    """By default now. Until then jobs are placed there if they end before."""
    end: fields.PointInTime | None = None
    """When the cluster is used again; by default when it is resumed."""


class ResumeOrder(Input):
    """The drains that are withdrawn."""

    planned: bool = False
    """Whether the planned drains are withdrawn, in place of the one in force."""
    begin: fields.PointInTime | None = None
    """Only the planned drain that begins in this minute is withdrawn."""
    ordered: fields.PointInTime | None = None
    """Of several drains that begin then, only the one ordered in this second (its field `at`)."""


class LossOrder(Input):
    """The reason for which a cluster is declared lost."""

    reason: Reason = ""


DrainView = view_model("DrainView", Drain)
ClusterView = view_model(
    "ClusterView", ClusterRecord, without={"note"}, elements={"drained": DrainView, "planned_drains": DrainView}
)


class ClusterList(Output):
    clusters: list[ClusterView]  # type: ignore[valid-type]


class PolicyView(Output):
    name: str
    serves: list[str]
    summary: str


class PolicyList(Output):
    policies: list[PolicyView]


class CalendarResponse(PlainTextResponse):
    media_type = "text/calendar"


def clusters_router(service: Jobs) -> APIRouter:
    """Return the routes that show clusters, their use and the policies, and those by which operators change them."""
    router = api_router("clusters")

    @router.get("/clusters", response_model=ClusterList)
    async def list_clusters(caller: Caller) -> Any:
        """List all clusters with their nodes and state."""
        return {"clusters": [record_for(caller, record) for record in service.list_clusters()]}

    @router.get("/drains.ics", response_class=CalendarResponse)
    async def show_calendar() -> CalendarResponse:
        """Return the drains of all clusters as a calendar (iCalendar, RFC 5545)."""
        return CalendarResponse(_format_calendar(service.list_clusters()))

    @router.get("/clusters/{name}", response_model=ClusterView)
    async def show_cluster(name: Name, caller: Caller) -> Any:
        """Show one cluster. Only operators see the resource manager's errors about jobs."""
        return record_for(caller, service.get_cluster(name))

    _add_orders(router, service)

    @router.get("/policies", response_model=PolicyList)
    async def list_policies() -> Any:
        """List the placement policies."""
        return {"policies": service.list_policies()}

    return router


def _format_calendar(clusters: Sequence[ClusterRecord]) -> str:
    """Return the drains in force and the planned ones as a calendar; lines are folded at 75 bytes."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//koalapy//drains//EN"]
    for cluster in clusters:
        for drain in filter(None, (cluster.drained, *cluster.planned_drains)):
            until = ", until it is resumed" if drain.ends_at is None else ""
            text = re.sub(r"([\\;,])", r"\\\1", f"{cluster.name} is drained {drain.author}{until}")
            lines += ["BEGIN:VEVENT", f"UID:{cluster.name}-{drain.at:.3f}-{drain.since:.0f}@koalapy"]
            lines += [f"DTSTAMP:{_calendar_time(drain.at)}", f"DTSTART:{_calendar_time(drain.since)}"]
            lines.append("DURATION:P1D" if drain.ends_at is None else f"DTEND:{_calendar_time(drain.ends_at)}")
            lines += [f"SUMMARY:{text}", "END:VEVENT"]
    return "".join(f"{_fold(line)}\r\n" for line in [*lines, "END:VCALENDAR"])


def _calendar_time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y%m%dT%H%M%SZ")


def _fold(line: str) -> str:
    """Return a line of a calendar in parts of at most 75 bytes, each of which but the first begins with a blank."""
    parts = [""]
    for character in line:
        if len((parts[-1] + character).encode()) > 75:
            parts.append(" ")
        parts[-1] += character
    return "\r\n".join(parts)


def _add_orders(router: APIRouter, service: Jobs) -> None:
    """Add the routes by which operators drain, resume and clear clusters, or declare them lost."""

    @router.post("/clusters/{name}/clear", response_model=ClusterView)
    async def clear_cluster(name: Name) -> Any:
        """Reset a cluster's error count, and place jobs on it again."""
        return await service.clear_cluster(name)

    @router.post("/clusters/{name}/drain", response_model=ClusterView)
    async def drain_cluster(name: Name, caller: Caller, order: DrainOrder) -> Any:
        """Place no more jobs on a cluster; its running jobs continue, or are queued again. A second drain replaces the
        first, unless it begins later."""
        return await service.drain_cluster(name, caller, **order.model_dump())

    @router.post("/clusters/{name}/resume", response_model=ClusterView, responses=problem_responses(409))
    async def resume_cluster(name: Name, order: ResumeOrder | None = None) -> Any:
        """Place jobs on a drained cluster again, or withdraw planned drains."""
        order = order or ResumeOrder()
        return await service.resume_cluster(name, **order.model_dump())

    @router.post("/clusters/{name}/lost", response_model=ClusterView, responses=problem_responses(409))
    async def declare_cluster_lost(name: Name, caller: Caller, order: LossOrder | None = None) -> Any:
        """Declare that no components run any more on an unreachable cluster, so that its jobs are retried at once.
        Programs that still run there run twice until their leases expire."""
        return await service.declare_cluster_lost(name, caller, (order or LossOrder()).reason)


NodeView = view_model("NodeView", NodeRow)
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED_NODES, description="maximum number of nodes")]
NodeStates = Annotated[
    list[fields.Name], Query(max_length=20, description="only nodes in these states, such as `down`; default: all")
]


class NodePage(Output):
    nodes: list[NodeView]  # type: ignore[valid-type]
    """In the order of the resource manager, those that are down first."""
    total: int
    """Number of nodes in these states."""
    next: str | None
    """The path of the next page; null on the last one."""
    known_at: Timestamp | None
    """When the resource manager listed its nodes; null if it did not, or for users."""
    problem: str
    """Why the agent did not answer; empty if it did."""


def nodes_router(service: Jobs, node_lists: NodeLists, queries: Queries) -> APIRouter:
    """Return the route that lists the nodes of a cluster one by one."""
    router = api_router("clusters", "/clusters/{name}/nodes")

    @router.get("", response_model=NodePage)
    async def list_nodes(
        name: Name,
        caller: Caller,
        state: NodeStates = [],  # noqa: B006 -- FastAPI copies it
        limit: Limit = 100,
        offset: Annotated[int, Query(ge=0, le=MAX_LISTED_NODES, description="number of nodes to leave out")] = 0,
    ) -> Any:
        """List the nodes of a cluster one by one, with their states and jobs. Operators see all nodes, up to 1,000.
        Other users see the nodes of jobs, without the names of nodes and owners of jobs that are not theirs."""
        service.get_cluster(name)
        rows, listing = await list_visible_nodes(node_lists, queries, name, caller)
        rows = [row for row in rows if not state or row.state in state]
        end = offset + limit
        query = urlencode({"state": state, "limit": limit, "offset": end}, doseq=True)
        return {
            "nodes": rows[offset:end],
            "total": len(rows),
            "next": f"/api/v1/clusters/{quote(name, safe='')}/nodes?{query}" if end < len(rows) else None,
            "known_at": listing.known_at,
            "problem": listing.problem,
        }

    return router


AGENT_TIMEOUT_S = 30.0
MAX_BACKGROUND_S = 600.0
"""Maximum run time of a background job."""


class BackgroundOrder(Input):
    """A job that is submitted directly to a cluster's resource manager, and keeps its nodes busy."""

    nodes: Positive
    seconds: Annotated[
        Seconds,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_BACKGROUND_S},
                    {"type": "string", "format": "duration-of-load"},
                ],
                "description": "seconds, or 5m",
            }
        ),
    ]


class BackgroundStarted(Output):
    """The submitted job, with its id in the resource manager; it may wait for its nodes."""

    name: str
    lrm_job: str


class BackgroundStopped(Output):
    stopped: int
    """Number of jobs that were cancelled."""


def background_router(service: Jobs, questions: Questions, allowed: bool) -> APIRouter:
    """Return the routes by which experiments load clusters as local users do.

    ``allowed``: the daemon's setting ``background_load``.
    """
    router = api_router("clusters", "/clusters/{name}/background")

    @router.post("", status_code=201, response_model=BackgroundStarted, responses=problem_responses(502))
    async def start_background(name: Name, order: BackgroundOrder) -> Any:
        """Occupy nodes of a cluster for a while, as its local users do; only if the daemon's configuration allows
        background load."""
        if not allowed:
            return _forbidden()
        total = service.get_cluster(name).total  # 0 before the first report: then the agent checks the number
        if order.nodes < 1 or order.nodes > total > 0:
            hint = f"give 1 to {total}" if total else "give 1 or more"
            reject("nodes", order.nodes, f"is {order.nodes}, which is out of range for cluster {name}", hint)
        if not 0 < order.seconds <= MAX_BACKGROUND_S:
            hint = f"give more than 0 and up to {MAX_BACKGROUND_S:g} seconds"
            reject("seconds", order.seconds, f"is {order.seconds:g}, which is out of range", hint)
        return await questions.ask_agent(
            name, "background", {"nodes": order.nodes, "seconds": order.seconds}, timeout=AGENT_TIMEOUT_S
        )

    @router.delete("", response_model=BackgroundStopped, responses=problem_responses(502))
    async def stop_background(name: Name) -> Any:
        """Cancel the background load that this route started on a cluster."""
        if not allowed:
            return _forbidden()
        service.get_cluster(name)
        return await questions.ask_agent(name, "background-stop", {}, timeout=AGENT_TIMEOUT_S)

    return router


def _forbidden() -> JSONResponse:
    """Return the problem for a daemon that is not configured to start background load."""
    return problem(
        ProblemCode.BACKGROUND_LOAD_DISABLED,
        "this daemon starts no background load",
        field="background_load",
        hint="set background_load: true in its configuration",
    )
