"""The routes of health checks, alerts and Prometheus metrics."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import Caller, identity_of
from koalapy.api.derived import view_model
from koalapy.api.fields import Output, Problem, Timestamp
from koalapy.api.problems import RETRY_AFTER, problem
from koalapy.api.routes import api_router
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import Check, HealthMonitor, HealthReport, Readiness
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.observability.figures import ClusterFigures, Figures, figures_of
from koalapy.daemon.observability.instruments import Instruments, Requests
from koalapy.daemon.observability.timings import BUCKETS, Timings
from koalapy.model.alert import Alert, AlertKind, Severity
from koalapy.model.cluster import ClusterState
from koalapy.model.errors import ProblemCode
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobState, Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.prediction import Outcome, PredictionKind
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure

Health = view_model("Health", HealthReport)


class ReadinessView(Output):
    """Whether jobs and actions are taken, and what that was seen by."""

    ready: bool
    checks: list[Check]


class NotReady(Problem):
    """The same as a problem, whose ``detail`` has the reasons."""

    ready: Literal[False] = False
    checks: list[Check] = []


class Liveness(Output):
    """That the daemon answers."""

    status: Literal["alive"] = "alive"


def health_router(
    health: HealthMonitor, operation: str = "health", ready: str = "ready", live: str = "live"
) -> APIRouter:
    """The daemon's health; ``operation``, ``ready`` and ``live`` are the names of its operations in OpenAPI."""
    router = APIRouter()

    @router.get("/healthz", response_model=Health, tags=["health"], operation_id=operation)
    async def healthz() -> Any:
        """Whether the daemon is well; ``degraded`` when something is wrong with it, or a cluster is neither usable nor
        drained."""
        return health.report()

    @router.get("/livez", response_model=Liveness, tags=["health"], operation_id=live)
    async def livez() -> Any:
        """Whether the daemon's loop moves; 503 when it hangs, so that it should be started again."""
        return Liveness()

    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/NotReady"}}}
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "Not ready", "model": NotReady, "content": content}
    }

    @router.get("/readyz", response_model=ReadinessView, tags=["health"], operation_id=ready, responses=not_ready)
    async def readyz(
        request: Request,
        clusters: bool = Query(False, description="503 also while an agent or a resource manager does not answer"),
    ) -> Any:
        """Whether jobs and actions are taken, with a reason for each check that fails; 503 while they are not."""
        readiness = health.readiness(of_clusters=clusters)
        if identity_of(request.scope) is None:
            readiness = readiness.for_strangers()
        return readiness if readiness.ready else _refusal(readiness)

    return router


def _refusal(readiness: Readiness) -> Any:
    checks = [asdict(check) for check in readiness.checks]
    return problem(
        ProblemCode.NOT_READY,
        "; ".join(readiness.reasons),
        hint="GET /healthz tells more",
        headers={"Retry-After": f"{RETRY_AFTER:.0f}"},
        more={"ready": False, "checks": checks},
    )


AlertView = view_model("AlertView", Alert)


class AlertList(Output):
    alerts: list[AlertView]  # type: ignore[valid-type]
    """The most urgent first."""
    looked_at: Timestamp | None
    """When it was last looked for them; null before the first time."""


def alerts_router(alerts: Alerts) -> APIRouter:
    router = api_router("health", "/alerts")

    @router.get("", response_model=AlertList)
    async def list_alerts(caller: Caller) -> Any:
        """What is wrong now, why, and what helps: operators are told all, others what concerns the clusters and their
        own jobs."""
        return {"alerts": alerts.visible_to(caller), "looked_at": alerts.looked_at}

    return router


LIVE_STATES = (JobState.QUEUED, JobState.HELD, *sorted(ACTIVE_STATES))
Labels = tuple[str, ...]
Sample = tuple[Labels, float]


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics at one moment. What may change while they are encoded are counters only, each of which is right."""

    figures: Figures
    instruments: Instruments

    def collect(self) -> Iterator[Metric]:
        figures, instruments = self.figures, self.instruments
        yield from _daemon(figures)
        yield from _jobs(figures, instruments)
        yield from _engine(figures, instruments)
        yield from _decisions(figures, instruments)
        yield from _clusters(figures.clusters)
        yield from _resource_managers(figures.clusters)
        yield from _database(instruments)
        yield from _files(figures, instruments)
        yield from _requests(instruments.requests)


def _gauge(name: str, help: str, samples: Iterable[Sample] | float, *labels: str) -> Metric:
    return _with(GaugeMetricFamily(f"koala_{name}", help, labels=labels), samples)


def _counter(name: str, help: str, samples: Iterable[Sample] | float, *labels: str) -> Metric:
    return _with(CounterMetricFamily(f"koala_{name}", help, labels=labels), samples)


def _with(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample] | float) -> Metric:
    for values, value in [((), samples)] if isinstance(samples, int | float) else samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, help: str, of: Mapping[Labels, Timings], *labels: str) -> Metric:
    family = HistogramMetricFamily(f"koala_{name}", help, labels=labels)
    for values, timings in of.items():
        counts = [(str(limit), float(count)) for limit, count in zip(BUCKETS, timings.buckets, strict=True)]
        family.add_metric(values, [*counts, ("+Inf", float(timings.count))], timings.seconds)
    return family


def _of(counts: Mapping[Any, float], *kinds: Iterable[str]) -> list[Sample]:
    """Return the counts of all combinations, also those never seen: a query that finds no sample does not warn."""
    return [(key, float(counts.get(key if len(kinds) > 1 else key[0], 0))) for key in product(*kinds)]


def _seen(counts: Mapping[str, float]) -> list[Sample]:
    return [((kind,), float(count)) for kind, count in sorted(counts.items())]


def _daemon(figures: Figures) -> Iterator[Metric]:
    yield _gauge("info", "The daemon's version, always 1.", [((figures.version,), 1)], "version")
    yield _gauge("epoch", "Of the lease that the daemon holds; it rises with each that begins.", figures.epoch)
    yield _gauge("ready", "Whether jobs and actions are taken, as /readyz says.", figures.is_ready)
    yield _gauge("well", "Whether nothing is wrong with daemon and clusters, as /healthz says.", figures.is_well)
    alerts = _of(figures.alerts, AlertKind, Severity)
    yield _gauge("alerts", "What is wrong now, as koala alerts tells it.", alerts, "kind", "severity")
    checks = [((check.name, check.cluster or ""), float(check.ok)) for check in figures.checks]
    yield _gauge("check", "Each check of /readyz: 1 where all is well.", checks, "check", "cluster")


def _jobs(figures: Figures, instruments: Instruments) -> Iterator[Metric]:
    jobs = figures.jobs
    counts = _of(jobs.counts, LIVE_STATES, Priority)
    yield _gauge("jobs", "Users' jobs that are not over.", counts, "state", "priority")
    oldest = _of(jobs.oldest, LIVE_STATES)
    help = "How long the oldest job of a state has waited, been placed, or run."
    yield _gauge("oldest_job_seconds", help, oldest, "state")
    by_site = _of(jobs.by_site, [cluster.name for cluster in figures.clusters], LIVE_STATES)
    yield _gauge("site_jobs", "Users' jobs that are not over, by their home site.", by_site, "site", "state")
    yield _gauge("internal_jobs", "The daemon's own jobs that are not over: they measure the network.", jobs.internal)
    yield _counter("jobs_submitted", "Users' jobs that were taken.", _of(instruments.submitted, Priority), "priority")
    ended = _of(instruments.ended, sorted(FINAL_STATES), Priority)
    yield _counter("jobs_ended", "Users' jobs that ended.", ended, "state", "priority")
    yield _counter("job_requeues", "Attempts after which a user's job queued again.", instruments.requeued)


def _engine(figures: Figures, instruments: Instruments) -> Iterator[Metric]:
    rounds = instruments.rounds
    yield _histogram("round_seconds", "Rounds of the engine, with the writing to the database.", {(): rounds.whole})
    yield _histogram("step_seconds", "The part of each round in which the daemon does nothing else.", {(): rounds.step})
    yield _gauge("round_events", "What there was for the last round to take in.", rounds.waiting)
    yield _gauge("waiting_events", "What there is for the next round to take in.", figures.waiting_events)
    yield _counter("events", "Taken in by the scheduler, by kind.", _seen(rounds.events), "kind")
    yield _counter("events_refused", "Not taken in, as when a job that is over is cancelled.", rounds.refused)


def _decisions(figures: Figures, instruments: Instruments) -> Iterator[Metric]:
    placed = [
        ((policy, "yes" if several else "no"), float(count))
        for (policy, several), count in sorted(instruments.placements.items())
    ]
    help = "Users' jobs that were placed, by policy, and whether on several clusters."
    yield _counter("placements", help, placed, "policy", "coallocated")
    refusals = _of(instruments.refusals, RefusalKind)
    yield _counter("refusals", "Tries to place jobs that came to nothing, by what was in the way.", refusals, "reason")
    names = [cluster.name for cluster in figures.clusters]
    claims = _of(instruments.claims, names)
    yield _counter("claims", "Components all of whose nodes have reported.", claims, "cluster")
    failed = _of(instruments.claims_failed, names, ClaimFailure)
    yield _counter("claims_failed", "Components that did not get their nodes.", failed, "cluster", "cause")
    lost = _of(instruments.attempts_failed, names, AttemptFailure)
    yield _counter("attempts_failed", "Attempts that failed by no fault of their program.", lost, "cluster", "cause")
    yield _counter("preemptions", "Jobs of low priority that made room for others.", instruments.preemptions)
    yield _counter("reclaims", "Jobs that made room for one at its home site.", instruments.reclaims)
    foretold = [kind for kind in PredictionKind if kind is not PredictionKind.ADVISED]
    predictions = _of(instruments.predictions, foretold, Outcome)
    help = "What was foretold of users' jobs in the last seven days, by what it has come to."
    yield _gauge("predictions", help, predictions, "kind", "outcome")


CLUSTER_GAUGES = {
    "cluster_nodes": ("total", "All nodes of a cluster."),
    "nodes_doubted": ("doubted", "Nodes that are said to be idle, and that a claim was in vain for."),
    "cluster_errors": ("errors", "Errors of a cluster in a row."),
    "agent_connected": ("is_connected", "Whether a cluster's agent is connected."),
    "outbox": ("outbox", "Commands that a cluster's agent has not acknowledged."),
    "components": ("components", "Components of our jobs that may hold nodes of a cluster."),
    "lrm_problem": ("has_problem", "Whether a cluster's agent says that its resource manager starts nothing."),
}
"""The figure of each cluster that a metric tells, and what it means."""


def _clusters(clusters: Sequence[ClusterFigures]) -> Iterator[Metric]:
    nodes = [
        ((c.name, kind), float(count))
        for c in clusters
        for kind, count in (("idle", c.idle), ("ours", c.used), ("local", c.background), ("down", c.down))
    ]
    yield _gauge("nodes", "Nodes by what they do: idle, ours, local users', down.", nodes, "cluster", "kind")
    for name, (figure, help) in CLUSTER_GAUGES.items():
        yield _gauge(name, help, [((c.name,), float(getattr(c, figure))) for c in clusters], "cluster")
    states = [((c.name, state), float(c.state is state)) for c in clusters for state in ClusterState]
    yield _gauge("cluster_state", "1 for the state that a cluster is in.", states, "cluster", "state")
    heard = [((c.name,), c.reported_ago) for c in clusters if c.reported_ago is not None]
    yield _gauge("agent_report_age_seconds", "Age of what is known of a cluster's nodes.", heard, "cluster")
    versions = [((c.name, v.agent, v.lrm, v.open_mpi), 1.0) for c in clusters if (v := c.versions) is not None]
    yield _gauge("cluster_info", "What runs on a cluster, always 1.", versions, "cluster", "agent", "lrm", "open_mpi")


def _resource_managers(clusters: Sequence[ClusterFigures]) -> Iterator[Metric]:
    def calls(figure: str) -> list[Sample]:
        return [((c.name, call.operation), float(getattr(call, figure))) for c in clusters for call in c.calls]

    labels = "cluster", "operation"
    yield _counter("lrm_calls", "What an agent asked of its resource manager.", calls("count"), *labels)
    yield _counter("lrm_calls_failed", "Of these what was not answered or done.", calls("failures"), *labels)
    yield _counter("lrm_call_seconds", "What these took together.", calls("seconds"), *labels)
    yield _gauge("lrm_call_longest_seconds", "The longest of the last five to ten minutes.", calls("largest"), *labels)


def _database(instruments: Instruments) -> Iterator[Metric]:
    by_kind: dict[Labels, Timings] = {("write",): instruments.writes, ("read",): instruments.reads}
    yield _histogram("database_seconds", "Transactions of the engine, and questions.", by_kind, "kind")
    failed = [(kind, float(timings.failures)) for kind, timings in by_kind.items()]
    yield _counter("database_failures", "Of these what failed, or was not answered in time.", failed, "kind")
    size = instruments.database_size
    yield _gauge("database_bytes", "Size of the database.", [] if size is None else float(size))


def _files(figures: Figures, instruments: Instruments) -> Iterator[Metric]:
    yield _gauge("transfers", "Components that wait for files.", figures.jobs.staging)
    yield _gauge("transfer_missing_bytes", "What of these files has not come.", figures.jobs.missing)
    moved, labels = sorted(instruments.transferred.items()), ("source", "cluster")
    counts = [(pair, float(each.count)) for pair, each in moved]
    yield _counter("transfers_done", "Transfers from one cluster to another.", counts, *labels)
    sizes = [(pair, float(each.size)) for pair, each in moved]
    yield _counter("transferred_bytes", "What they brought.", sizes, *labels)
    seconds = [(pair, each.seconds) for pair, each in moved]
    yield _counter("transfer_seconds", "What they took together.", seconds, *labels)
    free = [((disk.what,), float(disk.free)) for disk in figures.disks]
    yield _gauge("disk_free_bytes", "Room on the disks that the daemon writes to.", free, "disk")
    totals = [((disk.what,), float(disk.size)) for disk in figures.disks]
    yield _gauge("disk_bytes", "The size of these disks.", totals, "disk")


def _requests(requests: Requests) -> Iterator[Metric]:
    answered = [
        ((route, method, str(status)), float(count))
        for (route, method, status), count in sorted(requests.answered.items())
    ]
    yield _counter("http_requests", "Requests that were answered, by route.", answered, "route", "method", "status")
    seconds: dict[Labels, Timings] = {(route,): timings for route, timings in sorted(requests.seconds.items())}
    yield _histogram("http_request_seconds", "Until an answer began.", seconds, "route")


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""A method that we do not know, and what is no route's."""
BELOW = "/api/v1"
"""What routes do not say that stand below it with others."""
KINDS = ("text/plain", "application/openmetrics-text")
MIN_INTERVAL_S = 1.0
"""Seconds in which the figures are computed once, however many requests ask for them."""


class _Whole:
    def __init__(self, own: Exposition, process: ProcessCollector) -> None:
        self._own, self._process = own, process

    def collect(self) -> "chain[Metric]":
        return chain(self._own.collect(), self._process.collect())


class MetricsCache:
    """Encode the metrics for scrapers, and compute them at most once per interval."""

    def __init__(self, engine: Engine, health: HealthMonitor, alerts: Alerts, min_interval_s: float) -> None:
        self._engine, self._health, self._alerts = engine, health, alerts
        self._min_interval_s = min_interval_s
        self._process = ProcessCollector(registry=None)
        self._made_at = float("-inf")
        self._made: dict[str, tuple[bytes, str]] = {}
        """By what was asked for, and of which type it is."""
        self._making = asyncio.Lock()

    async def told(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the form that is asked for, and what form that is."""
        encode, form = choose_encoder(accept)
        async with self._making:
            if time.monotonic() - self._made_at >= self._min_interval_s:
                self._made.clear()
            if form not in self._made:
                whole = _Whole(
                    Exposition(await figures_of(self._engine, self._health, self._alerts), self._engine.instruments),
                    self._process,
                )
                self._made_at = time.monotonic()
                self._made[form] = (await asyncio.to_thread(encode, whole), form)
            return self._made[form]


def add_metrics(
    app: FastAPI,
    engine: Engine,
    health: HealthMonitor,
    alerts: Alerts,
    *,
    is_open: bool,
    min_interval_s: float = MIN_INTERVAL_S,
) -> None:
    """Count requests from now on, and serve all counts and times; ``is_open``: to requests without a token, too."""
    app.include_router(_metrics_router(MetricsCache(engine, health, alerts, min_interval_s), is_open=is_open))
    app.add_middleware(RequestCounter, requests=engine.instruments.requests)


def _metrics_router(scrapes: MetricsCache, *, is_open: bool) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics",
        response_class=Response,
        tags=["health"],
        operation_id="scrape_openly" if is_open else "scrape",
        responses={200: {"content": {kind: {"schema": {"type": "string"}} for kind in KINDS}}},
    )
    async def metrics(request: Request) -> Response:
        """What the daemon counts and times of itself, as Prometheus reads it."""
        content, form = await scrapes.told(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": form})

    return router


class RequestCounter:
    """Counts what is answered, by route, method and status, and times it until the answer begins."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope, message["status"], time.monotonic() - began)
            await send(message)

        await self._app(scope, receive, counting)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        if route != OTHER and scope["path"].startswith(BELOW) and not route.startswith(BELOW):
            route = f"{BELOW}{route}"
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._requests.note(route, method, status, seconds)
