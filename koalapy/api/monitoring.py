"""The routes of health checks, alerts and Prometheus metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import Caller, identity_of
from koalapy.api.derived import view_model
from koalapy.api.fields import Input, Output, Problem, Reason, Seconds, Text, Timestamp
from koalapy.api.problems import RETRY_AFTER_S, problem, problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import Check, HealthMonitor, HealthReport
from koalapy.daemon.alerts.notifications import DeliveryResult, Notifications
from koalapy.daemon.engine.engine import Engine, Outbox
from koalapy.daemon.observability.audit import describe_request
from koalapy.daemon.observability.figures import JobFigures, count_jobs
from koalapy.daemon.observability.instruments import Instruments, Requests
from koalapy.daemon.observability.timings import BUCKETS, Timings
from koalapy.model.alert import Alert, AlertKind, AlertMark, MarkAction, Severity
from koalapy.model.cluster import ClusterState
from koalapy.model.errors import ProblemCode
from koalapy.model.identity import Identity
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.notification import Channel
from koalapy.model.placement import RefusalKind
from koalapy.model.reports import LrmOperation
from koalapy.model.wording import format_duration, format_list
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure

Health = view_model("Health", HealthReport)


HUB_METRICS = {
    "relay_streams": "Open streams of the hub of relays.",
    "relay_streams_limit": "Maximum open streams of the hub.",
    "relay_children": "Relays of sites that are connected to the hub.",
    "relay_open_files": "Open files of the hub.",
    "relay_open_files_limit": "Maximum open files of the hub.",
}
"""Metrics that the hub itself reports, with their descriptions."""


class ReadinessView(Output):
    """Whether the daemon accepts jobs and actions, and the checks behind that."""

    ready: bool
    checks: list[Check]


class NotReady(Problem):
    """A problem with the failed checks; its ``detail`` lists the reasons."""

    ready: Literal[False] = False
    checks: list[Check] = []


class Liveness(Output):
    """The response of a live daemon."""

    status: Literal["alive"] = "alive"


def health_router(
    health: HealthMonitor, operation: str = "health", ready: str = "ready", live: str = "live"
) -> APIRouter:
    """Return the routes of health checks; ``operation``, ``ready`` and ``live`` are their operation ids."""
    router = APIRouter()

    @router.get("/healthz", response_model=Health, tags=["health"], operation_id=operation)
    async def healthz(request: Request) -> Any:
        """Report the daemon's health: ``degraded`` if a check of the daemon fails, or a cluster is neither usable nor
        drained. Callers without a token get ``status`` and ``ready`` only; other fields are empty."""
        report = health.make_report()
        return report.for_strangers() if identity_of(request.scope) is None else report

    @router.get("/livez", response_model=Liveness, tags=["health"], operation_id=live)
    async def livez() -> Any:
        """Report that the daemon is alive; 503 if it hangs and should be restarted."""
        return Liveness()

    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/NotReady"}}}
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "Not ready", "model": NotReady, "content": content}
    }

    @router.get("/readyz", response_model=ReadinessView, tags=["health"], operation_id=ready, responses=not_ready)
    async def readyz(
        request: Request,
        clusters: bool = Query(False, description="return 503 also if an agent or a resource manager does not respond"),
    ) -> Any:
        """Report whether the daemon accepts jobs and actions, with a reason for each failed check; 503 if it does
        not."""
        readiness = health.check_readiness(of_clusters=clusters)
        if identity_of(request.scope) is None:
            readiness = readiness.for_strangers()
        if readiness.ready:
            return readiness
        return problem(
            ProblemCode.NOT_READY,
            "; ".join(readiness.reasons),
            hint="see GET /healthz for details",
            headers={"Retry-After": f"{RETRY_AFTER_S:.0f}"},
            fields={"ready": False, "checks": [asdict(check) for check in readiness.checks]},
        )

    return router


DEFAULT_MARK_S = 4 * 3600.0
MAX_MARK_S = 30 * 86400.0
"""Maximum duration of an acknowledgement or silence."""


AlertMarkView = view_model("AlertMarkView", AlertMark, elements={"until": Timestamp})
AlertView = view_model("AlertView", Alert, elements={"mark": AlertMarkView})


class AlertList(Output):
    alerts: list[AlertView]  # type: ignore[valid-type]
    """Most urgent first."""
    looked_at: Timestamp | None
    """Time of the last check; null before the first one."""


class AlertSelection(Input):
    """Current alerts of a kind: all, or those of some targets."""

    kind: AlertKind
    targets: Annotated[list[Annotated[Text, Field(max_length=300)]], Field(max_length=10_000)] = []
    """Empty: all current alerts of the kind."""


class MarkOrder(AlertSelection):
    """Alerts to acknowledge or to silence."""

    action: MarkAction
    reason: Reason = ""
    duration: Annotated[Seconds, Field(gt=0, le=MAX_MARK_S)] = DEFAULT_MARK_S
    """Seconds until the mark expires."""


async def mark_alerts(alerts: Alerts, caller: Identity, order: MarkOrder) -> Sequence[Alert]:
    """Acknowledge or silence current alerts for a user, with an audit entry; return them."""
    description = f"{order.action} {order.kind} for {format_duration(order.duration)}: {order.reason}"
    describe_request(format_list(order.targets) or order.kind, description)
    selected = alerts.select(order.kind, order.targets)
    return await alerts.mark(selected, order.action, caller.user, order.reason, order.duration)


async def unmark_alerts(alerts: Alerts, selection: AlertSelection) -> Sequence[Alert]:
    """Remove the acknowledgements and silences of current alerts, with an audit entry; return the alerts."""
    describe_request(format_list(selection.targets) or selection.kind, f"unmark {selection.kind}")
    return await alerts.unmark(alerts.select(selection.kind, selection.targets))


class NotificationTest(Input):
    """The channel to test."""

    channel: Channel


class NotificationTestResults(Output):
    results: list[view_model("DeliveryResultView", DeliveryResult)]  # type: ignore[valid-type]


async def send_test(notifications: Notifications, caller: Identity, channel: Channel) -> list[DeliveryResult]:
    """Send a test notification to the operators' recipients of a channel, with an audit entry; return the results."""
    results = await notifications.send_test(channel, caller.user)
    delivered = sum(result.delivered for result in results)
    describe_request(channel, f"delivered to {delivered} of {len(results)} recipients")
    return results


def alerts_router(alerts: Alerts, notifications: Notifications) -> APIRouter:
    """Return the routes that list active alerts, mark them, and test their notifications."""
    router = api_router("health", "/alerts")

    @router.get("", response_model=AlertList)
    async def list_alerts(caller: Caller) -> Any:
        """List active alerts with their causes and remedies. Operators see all, users those of clusters and of their
        own jobs."""
        return {"alerts": alerts.visible_to(caller), "looked_at": alerts.looked_at}

    @router.post("/mark", response_model=AlertList, responses=problem_responses(404))
    async def mark_alert(caller: Caller, order: MarkOrder) -> Any:
        """Acknowledge or silence current alerts. A silenced alert sends no notifications; an acknowledgement ends with
        its alert."""
        return {"alerts": await mark_alerts(alerts, caller, order), "looked_at": alerts.looked_at}

    @router.post("/unmark", response_model=AlertList, responses=problem_responses(404))
    async def unmark_alert(selection: AlertSelection) -> Any:
        """Remove the acknowledgements and silences of current alerts."""
        return {"alerts": await unmark_alerts(alerts, selection), "looked_at": alerts.looked_at}

    @router.post("/test", response_model=NotificationTestResults, responses=problem_responses(409))
    async def test_notification(caller: Caller, order: NotificationTest) -> Any:
        """Send a test notification to the mail addresses or webhooks that the configuration names for operators, and
        return the answer of each. A channel is tested at most once in 30 seconds."""
        return {"results": await send_test(notifications, caller, order.channel)}

    return router


LIVE_STATES = (JobState.QUEUED, JobState.HELD, *sorted(ACTIVE_STATES))
Labels = tuple[str, ...]
Sample = tuple[Labels, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """What the metrics are computed from at the time ``now``: counts of jobs, and objects of the daemon."""

    now: float
    jobs: JobFigures
    clusters: Collection[ClusterStatus]
    outbox: Outbox
    health: HealthReport
    checks: Sequence[Check]
    alerts: Sequence[Alert]
    waiting_events: int
    instruments: Instruments


async def collect_metrics(engine: Engine, health: HealthMonitor, alerts: Alerts) -> list[Metric]:
    """Return the present metrics; with many jobs, they are of a few milliseconds. Runs in the engine's loop."""
    jobs = await count_jobs(engine.queries.jobs(), engine.clock())
    return list_metrics(
        Figures(
            engine.clock(),
            jobs,
            engine.queries.grid.clusters(),
            engine.outbox,
            health.make_report(),
            health.check_readiness().checks,
            alerts.current_alerts(),
            engine.pending_items,
            engine.instruments,
        )
    )


def list_metrics(figures: Figures) -> list[Metric]:
    """Return all metrics with their samples."""
    return [
        *_daemon(figures),
        *_jobs(figures),
        *_engine(figures),
        *_decisions(figures),
        *_clusters(figures),
        *_resource_managers(figures.clusters),
        *_database(figures.instruments),
        *_files(figures),
        *_requests(figures.instruments.requests),
    ]


def _gauge(name: str, help: str, samples: Iterable[Sample] | float, *labels: str) -> Metric:
    return _with(GaugeMetricFamily(f"koala_{name}", help, labels=labels), samples)


def _counter(name: str, help: str, samples: Iterable[Sample] | float, *labels: str) -> Metric:
    return _with(CounterMetricFamily(f"koala_{name}", help, labels=labels), samples)


def _with(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample] | float) -> Metric:
    """Add samples to a metric; a single number is a sample without labels."""
    for values, value in [((), samples)] if isinstance(samples, int | float) else samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, help: str, timings_by_label: Mapping[Labels, Timings], *labels: str) -> Metric:
    """Return a histogram in seconds, with the distribution of durations for each combination of label values."""
    family = HistogramMetricFamily(f"koala_{name}", help, labels=labels)
    for values, timings in timings_by_label.items():
        counts = [(str(limit), float(count)) for limit, count in zip(BUCKETS, timings.buckets, strict=True)]
        family.add_metric(values, [*counts, ("+Inf", float(timings.count))], timings.seconds)
    return family


def _all_samples(counts: Mapping[Any, float], *kinds: Iterable[str]) -> list[Sample]:
    """Return the counts of all combinations, including 0: an alert on a missing sample would never fire."""
    return [(key, float(counts.get(key if len(kinds) > 1 else key[0], 0))) for key in product(*kinds)]


def _daemon(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of the daemon as a whole: version, health, alerts and checks."""
    yield _gauge("info", "The daemon's version, always 1.", [((figures.health.version,), 1)], "version")
    yield _gauge("epoch", "Epoch of the daemon's lease, which increases with each daemon run.", figures.health.epoch)
    yield _gauge("ready", "Whether the daemon accepts jobs and actions, as in /readyz.", figures.health.ready)
    yield _gauge("well", "Whether daemon and clusters are healthy, as in /healthz.", figures.health.status == "ok")
    alerts = _all_samples(Counter((alert.kind, alert.severity) for alert in figures.alerts), AlertKind, Severity)
    yield _gauge("alerts", "Active alerts, as in koala alerts.", alerts, "kind", "severity")
    checks = [((check.name, check.cluster or ""), float(check.ok)) for check in figures.checks]
    yield _gauge("check", "Checks of /readyz: 1 if the check passes.", checks, "check", "cluster")


def _jobs(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of jobs: how many are in each state, were submitted, ended or were queued again."""
    jobs, instruments = figures.jobs, figures.instruments
    counts = _all_samples(jobs.counts, LIVE_STATES, Priority)
    yield _gauge("jobs", "Unfinished jobs of users.", counts, "state", "priority")
    oldest = _all_samples(jobs.oldest, LIVE_STATES)
    help = "Time that the oldest job in a state has spent in it."
    yield _gauge("oldest_job_seconds", help, oldest, "state")
    by_site = _all_samples(jobs.by_site, [cluster.name for cluster in figures.clusters], LIVE_STATES)
    yield _gauge("site_jobs", "Unfinished jobs of users, by home site.", by_site, "site", "state")
    yield _gauge("internal_jobs", "Unfinished internal jobs, which measure the network.", jobs.internal)
    yield _counter(
        "jobs_submitted", "Submitted jobs of users.", _all_samples(instruments.submitted, Priority), "priority"
    )
    ended = _all_samples(instruments.ended, sorted(FINAL_STATES), Priority)
    yield _counter("jobs_ended", "Finished jobs of users.", ended, "state", "priority")
    yield _counter("job_requeues", "Attempts after which a user's job was queued again.", instruments.requeued)


def _engine(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of the engine, which processes events in cycles: durations and numbers of events."""
    rounds = figures.instruments.cycles
    yield _histogram("round_seconds", "Duration of engine cycles, including database writes.", {(): rounds.total})
    yield _histogram("step_seconds", "Part of each engine cycle that blocks the event loop.", {(): rounds.step})
    yield _gauge("round_events", "Events that the last engine cycle processed.", rounds.waiting)
    yield _gauge("waiting_events", "Events that wait for the next engine cycle.", figures.waiting_events)
    yield _counter(
        "events",
        "Events that the scheduler processed, by kind.",
        [((kind,), float(count)) for kind, count in sorted(rounds.events.items())],
        "kind",
    )
    yield _counter(
        "events_refused", "Events that the scheduler rejected, such as cancelling a finished job.", rounds.refused
    )


def _decisions(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of placements.

    A claim obtains the nodes of a placed component from its cluster.
    """
    instruments = figures.instruments
    placements = [
        ((policy, "yes" if is_coallocated else "no"), float(count))
        for (policy, is_coallocated), count in sorted(instruments.placements.items())
    ]
    help = "Placed jobs of users, by policy and whether on several clusters."
    yield _counter("placements", help, placements, "policy", "coallocated")
    refusals = _all_samples(instruments.refusals, RefusalKind)
    yield _counter("refusals", "Failed placement tries, by reason.", refusals, "reason")
    names = [cluster.name for cluster in figures.clusters]
    claims = _all_samples(instruments.claims, names)
    yield _counter("claims", "Successful claims: components whose nodes have all reported.", claims, "cluster")
    failed = _all_samples(instruments.claims_failed, names, ClaimFailure)
    yield _counter(
        "claims_failed", "Failed claims: components that did not get their nodes.", failed, "cluster", "cause"
    )
    lost = _all_samples(instruments.attempts_failed, names, AttemptFailure)
    yield _counter("attempts_failed", "Attempts that failed without fault of their program.", lost, "cluster", "cause")
    yield _counter("preemptions", "Preempted low-priority jobs.", instruments.preemptions)
    yield _counter("reclaims", "Jobs preempted for a job at its home site.", instruments.reclaims)


CLUSTER_GAUGES: Mapping[str, tuple[Callable[[ClusterStatus], float], str]] = {
    "cluster_nodes": (lambda c: c.last_report.total, "Nodes of a cluster."),
    "nodes_doubted": (lambda c: c.nodes.doubted, "Nodes that are reported idle although a claim for them failed."),
    "cluster_errors": (lambda c: c.health.errors, "Consecutive errors of a cluster."),
    "agent_connected": (lambda c: c.has_agent, "Whether a cluster's agent is connected."),
    "components": (lambda c: len(c.nodes.live), "Components that may hold nodes of a cluster."),
    "lrm_problem": (
        lambda c: bool(c.last_report.problem),
        "Whether a cluster's agent reports that its resource manager starts no jobs.",
    ),
}
"""Values and help texts by metric."""
OPERATIONS = frozenset(str(operation) for operation in LrmOperation)


def _clusters(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of each cluster: nodes by use, state, age of its last report, and versions."""
    clusters, now = figures.clusters, figures.now
    nodes = [
        ((c.name, kind), float(count))
        for c in clusters
        for use in (c.node_use,)
        for kind, count in (
            ("idle", use.idle),
            ("ours", use.used),
            ("local", use.local),
            ("down", use.down),
            ("withheld", use.withheld),
            ("unknown", use.unknown),
        )
    ]
    kinds = "idle, ours (this scheduler), local (local users), down, withheld, unknown (no current report)"
    yield _gauge("nodes", f"Nodes by use: {kinds}.", nodes, "cluster", "kind")
    for name, (value_of, help) in CLUSTER_GAUGES.items():
        yield _gauge(name, help, [((c.name,), float(value_of(c))) for c in clusters], "cluster")
    commands = [((c.name,), float(figures.outbox.count_open(c.name))) for c in clusters]
    yield _gauge("outbox", "Commands that a cluster's agent has not acknowledged.", commands, "cluster")
    states = [((c.name, state), float(c.state is state)) for c in clusters for state in ClusterState]
    yield _gauge("cluster_state", "1 for the current state of a cluster.", states, "cluster", "state")
    ages = [((c.name,), max(0.0, now - c.reported_at)) for c in clusters if c.reported_at is not None]
    yield _gauge("agent_report_age_seconds", "Age of the last report about a cluster's nodes.", ages, "cluster")
    versions = [
        ((c.name, v.agent, v.lrm, v.open_mpi), 1.0) for c in clusters if (v := c.last_report.versions) is not None
    ]
    yield _gauge(
        "cluster_info", "Software versions of a cluster, always 1.", versions, "cluster", "agent", "lrm", "open_mpi"
    )


def _resource_managers(clusters: Collection[ClusterStatus]) -> Iterator[Metric]:
    """Yield the metrics of the calls that agents make to resource managers, by cluster and operation."""

    def calls(figure: str) -> list[Sample]:
        return [
            ((c.name, call.operation), float(getattr(call, figure)))
            for c in clusters
            for call in c.last_report.calls
            if call.operation in OPERATIONS
        ]

    labels = "cluster", "operation"
    yield _counter("lrm_calls", "Calls of the resource manager by a cluster's agent.", calls("count"), *labels)
    yield _counter("lrm_calls_failed", "Failed calls of the resource manager.", calls("failures"), *labels)
    yield _counter("lrm_call_seconds", "Total time of calls of the resource manager.", calls("seconds"), *labels)
    yield _gauge(
        "lrm_call_longest_seconds",
        "Longest call of the resource manager in the last five to ten minutes.",
        calls("largest"),
        *labels,
    )


def _database(instruments: Instruments) -> Iterator[Metric]:
    """Yield the metrics of the database: durations and failures of access, and its size if known."""
    by_kind: dict[Labels, Timings] = {("write",): instruments.writes, ("read",): instruments.reads}
    yield _histogram("database_seconds", "Duration of database writes of the engine, and of reads.", by_kind, "kind")
    failed = [(kind, float(timings.failures)) for kind, timings in by_kind.items()]
    yield _counter("database_failures", "Database writes and reads that failed or timed out.", failed, "kind")
    size = instruments.database_size
    yield _gauge("database_bytes", "Size of the database.", [] if size is None else float(size))


def _files(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics of transfers and relayed links between clusters, and of the daemon's disks."""
    instruments = figures.instruments
    yield _gauge("transfers", "Components that wait for files.", figures.jobs.staging)
    yield _gauge("transfer_missing_bytes", "Bytes that these components still wait for.", figures.jobs.missing)
    moved, labels = sorted(instruments.transferred.items()), ("source", "cluster")
    counts = [(pair, float(transfer.count)) for pair, transfer in moved]
    yield _counter("transfers_done", "Finished transfers between clusters.", counts, *labels)
    sizes = [(pair, float(transfer.size)) for pair, transfer in moved]
    yield _counter("transferred_bytes", "Bytes of finished transfers.", sizes, *labels)
    seconds = [(pair, transfer.seconds) for pair, transfer in moved]
    yield _counter("transfer_seconds", "Total time of finished transfers.", seconds, *labels)
    relayed = [(pair, float(size)) for pair, size in sorted(instruments.relayed.items())]
    yield _counter("relayed_bytes", "Bytes of ended attempts that went through the hub of relays.", relayed, *labels)
    for name, text in HUB_METRICS.items():
        yield _gauge(name, text, [((), value) for value in [instruments.hub.get(f"koala_{name}")] if value is not None])
    free = [((disk.what,), float(disk.free)) for disk in figures.health.disks]
    yield _gauge("disk_free_bytes", "Free space on the disks that the daemon writes to.", free, "disk")
    totals = [((disk.what,), float(disk.size)) for disk in figures.health.disks]
    yield _gauge("disk_bytes", "Size of the disks that the daemon writes to.", totals, "disk")


def _requests(requests: Requests) -> Iterator[Metric]:
    """Yield the metrics of HTTP requests: numbers and durations by route."""
    answered = [
        ((route, method, str(status)), float(count))
        for (route, method, status), count in sorted(requests.answered.items())
    ]
    yield _counter("http_requests", "HTTP requests by route, method and status.", answered, "route", "method", "status")
    seconds: dict[Labels, Timings] = {(route,): timings for route, timings in sorted(requests.seconds.items())}
    yield _histogram("http_request_seconds", "Time from a request to the beginning of its response.", seconds, "route")


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""Label of unknown methods, and of requests that match no route."""
API_PREFIX = "/api/v1"
"""Prefix that the paths of included routers may lack."""
MEDIA_TYPES = ("text/plain", "application/openmetrics-text")
MIN_INTERVAL_S = 1.0
"""Interval in which the metrics are computed at most once."""


class MetricsCache:
    """Encoded metrics for scrapers, computed at most once per interval."""

    def __init__(self, engine: Engine, health: HealthMonitor, alerts: Alerts, min_interval_s: float) -> None:
        self._engine, self._health, self._alerts = engine, health, alerts
        self._min_interval_s = min_interval_s
        self._process = ProcessCollector(registry=None)
        self._computed_at = float("-inf")
        self._encoded: dict[str, bytes] = {}
        """Encoded metrics by media type."""
        self._lock = asyncio.Lock()

    async def encode(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in a format of an ``Accept`` header, and its media type."""
        encode, media_type = choose_encoder(accept)
        async with self._lock:
            if time.monotonic() - self._computed_at >= self._min_interval_s:
                self._encoded.clear()
            if media_type not in self._encoded:
                metrics = await collect_metrics(self._engine, self._health, self._alerts)
                registry = SimpleNamespace(collect=lambda: chain(metrics, self._process.collect()))
                self._computed_at = time.monotonic()
                self._encoded[media_type] = await asyncio.to_thread(encode, registry)
            return self._encoded[media_type], media_type


def add_metrics(
    app: FastAPI,
    engine: Engine,
    health: HealthMonitor,
    alerts: Alerts,
    *,
    is_open: bool,
    min_interval_s: float = MIN_INTERVAL_S,
) -> None:
    """Count requests and serve ``/metrics``. ``is_open``: serve it without a token."""
    metrics_cache = MetricsCache(engine, health, alerts, min_interval_s)

    @app.get(
        "/metrics",
        response_class=Response,
        tags=["health"],
        operation_id="scrape_openly" if is_open else "scrape",
        responses={200: {"content": {kind: {"schema": {"type": "string"}} for kind in MEDIA_TYPES}}},
    )
    async def metrics(request: Request) -> Response:
        """Return the daemon's metrics in the format of Prometheus."""
        content, media_type = await metrics_cache.encode(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": media_type})

    app.add_middleware(RequestCounter, requests=engine.instruments.requests)


class RequestCounter:
    """The middleware that counts requests by route, method and status, and measures the time to their response."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()

        async def count_and_send(message: Message) -> None:
            """Count the request by its route and status when the response begins; pass the message on."""
            if message["type"] == "http.response.start":
                seconds = time.monotonic() - start
                route = getattr(scope.get("route"), "path", OTHER)
                if route != OTHER and scope["path"].startswith(API_PREFIX) and not route.startswith(API_PREFIX):
                    route = f"{API_PREFIX}{route}"
                method = scope["method"] if scope["method"] in METHODS else OTHER
                self._requests.note_request(route, method, message["status"], seconds)
            await send(message)

        await self._app(scope, receive, count_and_send)
