"""The routes of clusters, their use and background load, and of placement policies."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from pydantic import WithJsonSchema

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import Input, Output, Positive, Reason, Seconds, Timestamp
from koalapy.api.problems import problem, problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.jobs import jobs
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.model.cluster import Drain
from koalapy.model.errors import ProblemCode, UsageError
from koalapy.model.job import FINAL_STATES, MAX_DURATION, Priority
from koalapy.ports import ClusterRecord, MeanTimes

MIN_SPAN = 0.001
"""Seconds: a shorter span ends where it begins, as far as clocks can tell."""
Name = Annotated[fields.Cluster, Path(description="the cluster's name")]
Since = Annotated[float, Query(ge=MIN_SPAN, le=MAX_DURATION, allow_inf_nan=False, description="seconds until now")]


class DrainOrder(Input):
    """Why nothing more is to be placed on a cluster."""

    reason: Reason = ""
    requeue: bool = False
    """Whether the jobs there are stopped, with the warning that they asked for, and queue again."""


class LossOrder(Input):
    """Why nothing of koalapy's runs on a cluster any more."""

    reason: Reason = ""


class ClusterUsage(Output):
    """How a cluster was used in a span of time, and its nodes now."""

    name: str
    total: int
    used: int
    background: int
    idle: int
    node_seconds: float
    """What components of this scheduler had in that span."""
    utilisation: float | None
    """The same as a fraction of all its nodes; null where these are not known."""


class Metrics(Output):
    """The grid over a span of time; ``queued``, ``active`` and the clusters' nodes are those of now."""

    start: Timestamp
    end: Timestamp
    clusters: list[ClusterUsage]
    priorities: dict[Priority, MeanTimes]
    ended: dict[str, int]
    """Jobs that ended in that span, by state."""
    restarts: int
    """How often these were tried again after failures of the infrastructure."""
    queued: int
    active: int


ClusterView = view_model(
    "ClusterView", ClusterRecord, without={"note"}, elements={"drained": view_model("DrainView", Drain)}
)


class ClusterList(Output):
    clusters: list[ClusterView]  # type: ignore[valid-type]


class PolicyView(Output):
    name: str
    serves: list[str]
    summary: str


class PolicyList(Output):
    policies: list[PolicyView]


def _metrics_view(metrics: jobs.Metrics) -> dict[str, Any]:
    usage, span = metrics.usage, metrics.end - metrics.start
    return {
        "start": metrics.start,
        "end": metrics.end,
        "clusters": [
            {name: getattr(cluster, name) for name in ("name", "total", "used", "background", "idle")}
            | {
                "node_seconds": round(seconds := usage.node_seconds.get(cluster.name, 0.0), 3),
                "utilisation": round(seconds / (cluster.total * span), 6) if cluster.total else None,
            }
            for cluster in metrics.clusters
        ],
        "priorities": usage.mean_times,
        "ended": {state: usage.ended.get(state, 0) for state in sorted(FINAL_STATES)},
        "restarts": usage.restarts,
        "queued": metrics.queued,
        "active": metrics.active,
    }


def clusters_router(service: Jobs) -> APIRouter:
    router = api_router("clusters")

    @router.get("/clusters", response_model=ClusterList)
    async def list_clusters() -> Any:
        """Every cluster with its nodes and state."""
        return {"clusters": service.clusters()}

    @router.get("/clusters/{name}", response_model=ClusterView)
    async def show_cluster(name: Name) -> Any:
        """One cluster."""
        return service.cluster(name)

    _add_orders(router, service)

    @router.get("/metrics", response_model=Metrics)
    async def show_metrics(since: Since = 3600.0) -> Any:
        """How well the clusters were used over the last ``since`` seconds, and how long jobs waited; of more than two
        days from the beginning of the day on (UTC)."""
        return _metrics_view(await service.metrics(since))

    @router.get("/policies", response_model=PolicyList)
    async def list_policies() -> Any:
        """The placement policies."""
        return {"policies": service.policies()}

    return router


def _add_orders(router: APIRouter, service: Jobs) -> None:
    @router.post("/clusters/{name}/clear", response_model=ClusterView)
    async def clear_cluster(name: Name) -> Any:
        """Count a cluster's errors from zero again, and use it again."""
        return await service.clear_cluster(name)

    @router.post("/clusters/{name}/drain", response_model=ClusterView)
    async def drain_cluster(name: Name, caller: Caller, order: DrainOrder | None = None) -> Any:
        """Place nothing more on a cluster; its running jobs go on, or queue again. Drained again, it has the newer
        order."""
        given = order or DrainOrder()
        return await service.drain_cluster(name, caller, given.reason, requeue=given.requeue)

    @router.post("/clusters/{name}/resume", response_model=ClusterView, responses=problem_responses(409))
    async def resume_cluster(name: Name) -> Any:
        """Use a drained cluster again."""
        return await service.resume_cluster(name)

    @router.post("/clusters/{name}/lost", response_model=ClusterView, responses=problem_responses(409))
    async def declare_cluster_lost(name: Name, caller: Caller, order: LossOrder | None = None) -> Any:
        """Declare that nothing of koalapy's runs any more on a cluster that is out of reach: its jobs are tried again
        at once. Programs that do run there after all then run twice, until their leases end."""
        return await service.declare_cluster_lost(name, caller, (order or LossOrder()).reason)


ANSWER_TIMEOUT = 30.0
"""Seconds that a cluster has to answer."""


MAX_SECONDS = 600.0
"""Seconds that one background job may run."""


class BackgroundOrder(Input):
    """A job to be handed straight to a cluster's resource manager: that many nodes, busy for that many seconds."""

    nodes: Positive
    seconds: Annotated[
        Seconds,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
                    {"type": "string", "format": "duration-of-load"},
                ],
                "description": "seconds, or 5m",
            }
        ),
    ]


class BackgroundStarted(Output):
    """The job, as the resource manager knows it; it may have to wait for its nodes."""

    name: str
    lrm_job: str


class BackgroundStopped(Output):
    stopped: int
    """How many jobs were told to end."""


def background_router(service: Jobs, questions: Questions, allowed: bool) -> APIRouter:
    """``allowed``: the daemon's setting ``background_load``."""
    router = api_router("clusters", "/clusters/{name}/background")

    @router.post("", status_code=201, response_model=BackgroundStarted, responses=problem_responses(502))
    async def start_background(name: Name, order: BackgroundOrder) -> Any:
        """Keep nodes of a cluster busy as its local users do, for a while; only where the daemon allows it."""
        if not allowed:
            return _forbidden()
        total = service.cluster(name).total  # 0 while nothing is known of it: then its agent tells what is wrong
        if order.nodes < 1 or order.nodes > total > 0:
            hint = f"give 1 to {total}" if total else "give 1 or more"
            raise UsageError(f"nodes is {order.nodes}", field="nodes", value=order.nodes, hint=hint)
        if not 0 < order.seconds <= MAX_SECONDS:
            hint = f"give more than 0 and up to {MAX_SECONDS:g} seconds"
            raise UsageError(f"seconds is {order.seconds:g}", field="seconds", value=order.seconds, hint=hint)
        return await questions.ask(
            name, "background", {"nodes": order.nodes, "seconds": order.seconds}, timeout=ANSWER_TIMEOUT
        )

    @router.delete("", response_model=BackgroundStopped, responses=problem_responses(502))
    async def stop_background(name: Name) -> Any:
        """End the background load that was started on a cluster by this route."""
        if not allowed:
            return _forbidden()
        service.cluster(name)
        return await questions.ask(name, "background-stop", {}, timeout=ANSWER_TIMEOUT)

    return router


def _forbidden() -> JSONResponse:
    return problem(
        ProblemCode.BACKGROUND_LOAD_DISABLED,
        "this daemon starts no background load",
        field="background_load",
        hint="set background_load: true in its configuration",
    )
