"""A daemon in this process, without agents, and a client of its API."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import httpx2
from fastapi import APIRouter, FastAPI

from koalapy.api.agents import agents_router
from koalapy.api.app import create_app
from koalapy.api.clusters import background_router, nodes_router
from koalapy.api.files import agent_files_router, files_router
from koalapy.api.forecasts import advisor_router, forecasts_router
from koalapy.api.guard import TokenAuthenticator
from koalapy.api.history import history_router, record_router
from koalapy.api.monitoring import add_metrics, alerts_router
from koalapy.api.network import network_router
from koalapy.api.reservations import reservations_router
from koalapy.api.tokens import limits_router
from koalapy.config.notifications import MailSection, NotificationSection, OperatorsSection
from koalapy.daemon.agents.hub import AgentDetails, Rejection
from koalapy.daemon.agents.questions import NodeLists
from koalapy.daemon.alerts.alerts import Alerts, Check
from koalapy.daemon.alerts.cluster_checks import ClusterChecks, check_disks
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.alerts.job_checks import JobChecks
from koalapy.daemon.alerts.notification_channels import DeliveryFailed
from koalapy.daemon.alerts.notifications import Notifications
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import LoginCodes
from koalapy.daemon.auth.pace import Pace
from koalapy.daemon.engine.engine import Engine, Outbox
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import ResultInputs, Results
from koalapy.daemon.forecast.advisor import Advisor
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.jobs.history import History
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.jobs.quota import LimitsInUse, StorageLimits
from koalapy.daemon.jobs.record import Record
from koalapy.daemon.jobs.share_weights import ShareWeights
from koalapy.daemon.network.links import LinkTable
from koalapy.daemon.network.network import Network
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.observability.figures import Samples
from koalapy.daemon.reservations import Reservations
from koalapy.dashboard.app import build_dashboard
from koalapy.dashboard.login import LoginServices
from koalapy.model.advice import Run, Size
from koalapy.model.alert import AlertRules
from koalapy.model.cluster import Link
from koalapy.model.disk import DiskLimits
from koalapy.model.identity import Identity, Permission
from koalapy.model.job_spec import JobSpec
from koalapy.model.limits import FairShareSettings, Limits
from koalapy.model.measurement import MeasurementSettings
from koalapy.model.notification import Notification
from koalapy.model.reports import ClusterReport
from koalapy.model.users import Accounts
from koalapy.policies.registry import builtin_policies
from koalapy.policies.registry import load_policies as installed
from koalapy.protocol.messages import Hello
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.owner_use import OwnerUse
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.record.format import Beginning, KnownCluster, People
from koalapy.simulation.record.settings import Recording
from koalapy.simulation.twin import Answer, Question, answer_what_if
from koalapy.store.advice import AdviceStore
from koalapy.store.audit import AuditStore
from koalapy.store.database import Database
from koalapy.store.engine import SQLITE_BUSY_TIMEOUT
from koalapy.store.history import HistoryStore
from koalapy.store.output import OutputStore
from koalapy.store.records import ClusterRecord
from koalapy.store.service_tables import (
    AlertMarkStore,
    FileStore,
    MeasurementStore,
    ReservationStore,
    SampleStore,
    ShareWeightStore,
    TokenStore,
)
from koalapy.store.sql import JobStore
from koalapy.validation.permissions import SubmissionRules
from tests.daemon.sites import Sites
from tests.databases import open_database
from tests.identities import administrators
from tests.memory_stores import memory_stores

Open = Callable[..., Any]


class LocalClient(httpx2.AsyncClient):
    """A client of an application of this process."""

    def __init__(self, app: FastAPI, headers: Mapping[str, str]) -> None:
        super().__init__(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers)
        self.app = app


def app_of(client: httpx2.AsyncClient) -> FastAPI:
    """Return the application of a daemon of this process."""
    assert isinstance(client, LocalClient)
    return client.app


URL = "http://127.0.0.1:8642"
TOKEN = "a-token-for-tests"
"""The token of the client unless a test gives other tokens."""
CSRF_HEADER = {"X-Requested-With": "koala"}
"""The header by which a request without a JSON body shows that no web page of another site sent it."""
BUNDLE_LIMIT = 2 * 1024 * 1024
AGENT_TOKENS = {"north": "north's", "south": "south's", "west": None}

CLUSTER_NODES = {"north": 4, "south": 4}
LINKS = {("north", "north"): Link(2e-5, 1e9), ("north", "south"): Link(latency=5e-4)}


async def _answer_here(question: Question) -> Answer:
    return answer_what_if(question)


OPERATORS_MAIL = NotificationSection(
    MailSection("127.0.0.1:25", "koala@example.org", "none"), operators=OperatorsSection(["ops@example.org"])
)


HOSTILE_AGENT = AgentDetails(
    Hello(
        cluster="north",
        version='"><x-injected>',
        lrm="slurm",
        host="<x-injected>",
        pid=7,
        protocol=3,
        identity="<x-injected>",
    ),
    1.0,
    -7200.0,
)


class RefusingSender:
    """A mail server that rejects every mail with a hostile text."""

    async def deliver_notification(self, notification: Notification) -> str:
        raise DeliveryFailed(f"SMTP 550 <x-injected> {notification.to}")


class Deferred:
    """A proxy of an object that an application receives later: ``resolve`` returns it.

    ``resolve`` raises ``LookupError`` while there is none.
    """

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve = resolve

    def __getattr__(self, name: str) -> Any:
        try:
            target = self._resolve()
        except LookupError:
            return Deferred(lambda: getattr(self._resolve(), name))
        return getattr(target, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._resolve()(*arguments, **options)


def bare_application(identities: Identities, routers: Sequence[APIRouter] = (), **options: Any) -> FastAPI:
    """Return an application without services, for requests that are rejected before any service is called."""

    def no_service() -> NoReturn:
        raise LookupError("this application has no services")

    service: Any = Deferred(no_service)
    return create_app(service, service, identities, routers, **options)


class SharedApplication:
    """An application shared by tests with their own services, since creating routes takes longer than most tests.

    The middleware is created for each test.
    """

    def __init__(self, *, open_metrics: bool, has_agent_routes: bool) -> None:
        self._services: dict[str, Any] = {}
        bundles, engine, health, history, jobs, results = map(
            self._defer, ("bundles", "engine", "health", "history", "jobs", "results")
        )
        routers = [
            alerts_router(self._defer("alerts"), self._defer("notifications")),
            network_router(self._defer("network")),
            files_router(self._defer("files"), bundles, results),
            agent_files_router(
                bundles, results, self._defer("result_inputs"), AGENT_TOKENS, lambda cluster, _: cluster == "north"
            ),
            advisor_router(self._defer("advisor")),
            limits_router(self._defer("limits")),
            reservations_router(self._defer("reservations")),
            history_router(history),
            forecasts_router(self._defer("forecasts"), jobs),
            nodes_router(jobs, self._defer("node_lists"), engine.queries),
            record_router(self._defer("record"), engine.clock),
        ]
        if has_agent_routes:
            routers += [agents_router(None, AGENT_TOKENS), background_router(None, None, allowed=False)]  # type: ignore[arg-type]
        self._app = create_app(jobs, health, self._defer("identities"), routers, audit=self._defer("audit"))
        add_metrics(self._app, engine, health, self._defer("alerts"), is_open=open_metrics, min_interval_s=0.0)
        self._routes = list(self._app.router.routes)

    def _defer(self, name: str) -> Any:
        return Deferred(lambda: self._services[name])

    def begin(self, services: Mapping[str, Any]) -> FastAPI:
        self._services.update(services)
        return self._app

    def end(self) -> None:
        """Drop the services, and the routes that a test has added."""
        self._services.clear()
        self._app.middleware_stack = None
        self._app.state.error_page = None
        if self._app.router.routes != self._routes:
            self._app.router.routes[:] = self._routes
            self._app.openapi_schema = None


_idle: dict[tuple[bool, bool], list[SharedApplication]] = defaultdict(list)
"""Applications that no test uses, by their options."""


@contextmanager
def application(services: Mapping[str, Any], *, open_metrics: bool, has_agent_routes: bool) -> Iterator[FastAPI]:
    """Yield an application with these services from the pool."""
    idle = _idle[open_metrics, has_agent_routes]
    shared_application = (
        idle.pop() if idle else SharedApplication(open_metrics=open_metrics, has_agent_routes=has_agent_routes)
    )
    yield shared_application.begin(services)
    shared_application.end()
    idle.append(shared_application)


@asynccontextmanager
async def serving(
    path: Path,
    tokens: list[str],
    rules: Rules,
    sites: Sites | None = None,
    *,
    users: Mapping[str, Identity] | None = None,
    submission_rules: SubmissionRules | None = None,
    limits: Limits | None = None,
    shares: FairShares | None = None,
    accounts: Accounts | None = None,
    open_metrics: bool = False,
    has_agent_routes: bool = False,
    has_dashboard: bool = False,
    busy_timeout_ms: int = SQLITE_BUSY_TIMEOUT,
    cluster_nodes: Mapping[str, int] = CLUSTER_NODES,
    links: Mapping[tuple[str, str], Link] = LINKS,
    alert_rules: AlertRules | None = None,
    alert_checks: Sequence[Check] = (),
    rejections: Mapping[str, Rejection] = MappingProxyType({}),
    simulates_apart: bool = False,
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a daemon with clusters and no agents.

    ``has_agent_routes`` adds the routes of agents, without a hub, and of background load, which is not allowed;
    ``has_dashboard`` adds the pages of the dashboard. With ``alert_rules`` the alerts have the checks of jobs, those of
    clusters, whose agents had ``rejections``, and ``alert_checks``, which the test runs. ``simulates_apart``: forecasts
    are computed in child processes, as by the daemon.
    """
    database = Database(open_database(path, busy_timeout_ms))
    store = JobStore(database)
    clusters = [ClusterStatus(name) for name in cluster_nodes]
    for cluster in clusters:
        cluster.nodes.last_report = ClusterReport(cluster_nodes[cluster.name], 0)
    experience = Experience(runs=[Run("wave", Size(4), ("north",), 10.0)])
    scheduler = Scheduler(
        SchedulerState(
            rules,
            builtin_policies(),
            clusters,
            experience=experience,
            owner_use=OwnerUse(limits, shares=shares),
            accounts=accounts,
        ),
        nonces=str,
    )
    saved, reservation_store = store.load(), ReservationStore(database)
    scheduler.restore(saved.jobs, time.time(), saved.scans, reservation_store.load())

    def describe(name: str) -> ClusterRecord:
        cluster = scheduler.queries.grid[name]
        use = cluster.node_use
        return ClusterRecord(
            name,
            "local",
            str(cluster.state),
            cluster.last_report.total,
            use.idle,
            use.used,
            use.local,
            use.down,
            0,
            cluster.state_reason,
            None,
            1,
            1.0,
            unusable=cluster.health.unusable,
            drained=cluster.drained,
            planned_drains=cluster.planned_drains,
            withheld=use.withheld,
            unknown=use.unknown,
            details={"calls": [asdict(calls) for calls in cluster.last_report.calls]},
        )

    engine = Engine(scheduler, store, Outbox((), store.epoch), epoch=store.epoch, describe=describe)
    queries, file_store = scheduler.queries, FileStore(database)
    bundles = Bundles(
        file_store,
        path.parent / "bundles",
        StorageLimits(BUNDLE_LIMIT, 2 * BUNDLE_LIMIT),
        clock=engine.clock,
        needed=list,
        owners=limits,
    )
    sites = sites or Sites()
    files = Files(engine, file_store, sites, bundles)
    outputs = Outputs(engine, queries, store, OutputStore(path.parent / "output", 1000))

    reservations = Reservations(engine, reservation_store, sites, sites, store.instance, Permission(users=["bob"]))

    async def resolve_spec(spec: JobSpec, caller: Identity) -> JobSpec:
        spec = reservations.resolve_spec(spec)
        return await files.resolve_spec(await result_inputs.resolve_spec(spec, caller), caller)

    jobs = Jobs(engine, queries, store, outputs, saved.next_job, describe, resolve_spec, submission_rules)
    results = Results(
        file_store,
        path.parent / "results",
        StorageLimits(BUNDLE_LIMIT, 2 * BUNDLE_LIMIT),
        clock=engine.clock,
        attempts=jobs.list_attempts,
        owners=limits,
        needed=queries.result_sources,
    )
    result_inputs = ResultInputs(results, jobs.get)
    measurements = MeasurementStore(database)
    network = Network(engine, jobs, measurements, LinkTable(tuple(cluster_nodes), links), MeasurementSettings())
    history = History(HistoryStore(database), engine.clock, queries.jobs)
    begun = Beginning(rules, tuple(builtin_policies().names()), tuple(map(KnownCluster, cluster_nodes)), now=1.0)
    record = Record(path.parent / "record", Recording(), DiskLimits(0, 0), begun)
    advice = AdviceStore(database)
    forecasts = Forecasts(queries, People(), engine.clock, installed, None if simulates_apart else _answer_here)
    headers = CSRF_HEADER | ({} if tokens or users else {"Authorization": f"Bearer {TOKEN}"})
    clusters_of = queries.grid.clusters
    cluster_checks = ClusterChecks(clusters_of, (), rejections, started_at=0.0)
    checks = (cluster_checks, partial(check_disks, list, clusters_of, DiskLimits()), *alert_checks)
    mark_store = AlertMarkStore(database)
    if alert_rules is None:
        alerts = Alerts((), AlertRules(), engine.clock, mark_store=mark_store)
    else:
        alerts = Alerts((*checks, JobChecks(engine, alert_rules)), alert_rules, engine.clock, mark_store=mark_store)
    token_store = TokenStore(database)
    identities = Identities(users, token_store) if users else administrators(*(tokens or [TOKEN]), store=token_store)
    services = {
        "advisor": Advisor(experience, advice),
        "alerts": alerts,
        "audit": Audit(AuditStore(database), engine.clock),
        "bundles": bundles,
        "engine": engine,
        "files": files,
        "forecasts": forecasts,
        "health": HealthMonitor(engine, queries, {}, DiskLimits()),
        "history": history,
        "identities": identities,
        "jobs": jobs,
        "limits": LimitsInUse(
            queries.owner_use,
            bundles.size_of,
            results.size_of,
            engine.clock,
            ShareWeights(engine, ShareWeightStore(database), shares.settings if shares else FairShareSettings()),
        ),
        "network": network,
        "hub": SimpleNamespace(describe_agent=lambda name: HOSTILE_AGENT),
        "certificate": SimpleNamespace(fingerprint="ab" * 32, expires_at=2e9),
        "node_lists": NodeLists(sites, engine.clock),
        "notifications": Notifications(
            memory_stores().notifications, {"mail": RefusingSender()}, OPERATORS_MAIL, engine.clock, queries.jobs
        ),
        "record": record,
        "reservations": reservations,
        "samples": Samples(engine, SampleStore(database), engine.clock),
        "results": results,
        "result_inputs": result_inputs,
    }
    loop = asyncio.create_task(engine.run())
    with application(services, open_metrics=open_metrics, has_agent_routes=has_agent_routes) as app:
        app.state.audit, app.state.engine, app.state.jobs = services["audit"], engine, jobs
        app.state.alerts, app.state.reservations = alerts, reservations
        if has_dashboard:
            login_services = LoginServices(
                identities, TokenAuthenticator(identities, Pace()), LoginCodes(), None, 3600.0
            )
            page_services: Any = SimpleNamespace(**services)
            dashboard = build_dashboard(page_services, engine, login_services, services["audit"])
            app.include_router(dashboard.router)
            app.state.error_page = dashboard.render_problem
        async with LocalClient(app, headers) as client:
            yield client
    await network.stop()
    engine.drain()
    engine.stop()
    await loop
    store.close()
