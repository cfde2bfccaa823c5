"""The whole daemon in this process, but for its clusters: their agents never connect."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.api.advisor import advisor_router
from koalapy.api.app import create_app
from koalapy.api.files import agent_files_router, files_router
from koalapy.api.forecasts import forecasts_router
from koalapy.api.history import history_router
from koalapy.api.limits import limits_router
from koalapy.api.metrics import add_metrics
from koalapy.api.network import network_router
from koalapy.api.record import record_router
from koalapy.api.sharing import sharing_router
from koalapy.api.workloads import workloads_router
from koalapy.bootstrap.policies import policies as installed
from koalapy.model.advice import Run, Size
from koalapy.model.alert import AlertRules
from koalapy.model.cluster import Link
from koalapy.model.disk import DiskLimits
from koalapy.model.identity import Identity
from koalapy.model.limits import Limits
from koalapy.model.measurement import Measuring
from koalapy.model.users import Accounts
from koalapy.placement.registry import builtin
from koalapy.ports import ClusterRecord
from koalapy.record.beginning import Beginning, KnownCluster, People
from koalapy.record.settings import Recording
from koalapy.scheduling.advisor.experience import Experience
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.owner_use import OwnerUse
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.scheduler import Scheduler
from koalapy.scheduling.state import SchedulerState
from koalapy.service.advisor import Advisor
from koalapy.service.alerts import Alerts
from koalapy.service.audit import Audit
from koalapy.service.bundles import Bundles
from koalapy.service.engine import Engine
from koalapy.service.files import Files
from koalapy.service.forecasts import Forecasts
from koalapy.service.health import HealthMonitor
from koalapy.service.history import History
from koalapy.service.identities import Identities
from koalapy.service.jobs import Jobs
from koalapy.service.limits import LimitsInUse
from koalapy.service.links import LinkTable
from koalapy.service.network import Network
from koalapy.service.outbox import Outbox
from koalapy.service.output import Outputs
from koalapy.service.quota import StorageLimits
from koalapy.service.record import Record
from koalapy.service.results import Results
from koalapy.service.sharing import Sharing
from koalapy.service.track_record import TrackRecord
from koalapy.service.workload_reports import WorkloadReports
from koalapy.simulation.twin import Answer, Question, answer
from koalapy.store.advice import SqlAdvice
from koalapy.store.audit import SqlAudit
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.files import SqlFiles
from koalapy.store.history import SqlHistory
from koalapy.store.measurements import SqlMeasurements
from koalapy.store.migrate import migrate
from koalapy.store.output import FileOutput
from koalapy.store.predictions import SqlPredictions
from koalapy.store.sql import SqlStore
from koalapy.store.tokens import SqlTokens
from koalapy.validation.permissions import SubmissionRules
from tests.identities import administrators
from tests.service.sites import Sites

Open = Callable[..., Any]

URL = "http://127.0.0.1:8642"
TOKEN = "a-token-for-tests"
"""Shown by clients whose test gives none."""
NO_PAGE = {"X-Requested-With": "koala"}
"""Shown by who posts without JSON."""
BUNDLE_LIMIT = 2 * 1024 * 1024
WORKLOADS_QUOTA = 200_000
AGENT_TOKENS = {"north": "north's", "south": "south's", "west": None}

LINKS = {("north", "north"): Link(2e-5, 1e9), ("north", "south"): Link(latency=5e-4)}


async def _at_once(question: Question) -> Answer:
    """In this process."""
    return answer(question)


@asynccontextmanager
async def serving(
    path: Path,
    tokens: list[str],
    rules: Rules,
    sites: Sites | None = None,
    *,
    people: Mapping[str, Identity] | None = None,
    submission_rules: SubmissionRules | None = None,
    limits: Limits | None = None,
    accounts: Accounts | None = None,
    open_metrics: bool = False,
) -> AsyncIterator[httpx2.AsyncClient]:
    migrate(tables := make_engine(f"sqlite:///{path}"))
    database = Database(tables)
    store = SqlStore(database)
    clusters = [ClusterStatus("north"), ClusterStatus("south")]
    for cluster in clusters:
        cluster.total = 4
    experience = Experience(runs=[Run("wave", Size(4), ("north",), 10.0)])
    scheduler = Scheduler(
        SchedulerState(
            rules, builtin(), clusters, experience=experience, owner_use=OwnerUse(limits), accounts=accounts
        ),
        nonces=str,
    )
    saved = store.load()
    scheduler.restore(saved.jobs, time.time(), saved.scans)

    def describe(name: str) -> ClusterRecord:
        cluster = scheduler.queries.grid[name]
        return ClusterRecord(
            name,
            "local",
            str(cluster.state),
            cluster.total,
            0,
            0,
            0,
            0,
            0,
            cluster.why,
            None,
            1,
            1.0,
            unusable=cluster.health.unusable,
            drained=cluster.drained,
        )

    engine = Engine(scheduler, store, Outbox((), store.epoch), epoch=store.epoch, describe=describe)
    file_store = SqlFiles(database)
    bundles = Bundles(
        file_store,
        path.parent / "bundles",
        StorageLimits(BUNDLE_LIMIT, 2 * BUNDLE_LIMIT),
        clock=engine.clock,
        needed=list,
        owners=limits,
    )
    files = Files(engine, file_store, sites or Sites(), bundles)
    outputs = Outputs(engine, store, FileOutput(path.parent / "output", 1000))
    jobs = Jobs(engine, store, outputs, saved.next_job, describe, files.resolve, submission_rules)
    results = Results(
        file_store,
        path.parent / "results",
        StorageLimits(BUNDLE_LIMIT, 2 * BUNDLE_LIMIT),
        clock=engine.clock,
        attempts=jobs.attempts,
        owners=limits,
    )
    measurements = SqlMeasurements(database)
    network = Network(engine, jobs, measurements, LinkTable(("north", "south"), LINKS), Measuring())
    history = History(SqlHistory(database), engine.clock, engine.queries.jobs)
    begun = Beginning(rules, tuple(builtin().names()), (KnownCluster("north"), KnownCluster("south")), now=1.0)
    record = Record(path.parent / "record", Recording(), DiskLimits(0, 0), begun)
    advice = SqlAdvice(database)
    track_record = TrackRecord(SqlPredictions(database), advice, engine.clock)
    forecasts = Forecasts(engine.queries, People(), engine.clock, installed, _at_once, track_record)
    routers = [
        network_router(network),
        files_router(files, bundles, results),
        agent_files_router(bundles, results, AGENT_TOKENS, lambda cluster, _: cluster == "north"),
        advisor_router(Advisor(experience, advice, track_record)),
        limits_router(LimitsInUse(engine, bundles, results)),
        history_router(history),
        sharing_router(Sharing(SqlHistory(database), engine.queries, engine.clock), history),
        forecasts_router(forecasts, jobs),
        workloads_router(WorkloadReports(path.parent / "workloads", WORKLOADS_QUOTA, engine.clock)),
        record_router(record, engine.clock),
    ]
    shown = NO_PAGE | ({} if tokens or people else {"Authorization": f"Bearer {TOKEN}"})
    kept = SqlTokens(database)
    identities = Identities(people, kept) if people else administrators(*(tokens or [TOKEN]), store=kept)
    audit = Audit(SqlAudit(database), engine.clock)
    health = HealthMonitor(engine, {}, DiskLimits())
    app = create_app(jobs, health, identities, routers, audit=audit)
    alerts = Alerts((), AlertRules(), engine.clock)
    add_metrics(app, engine, health, alerts, is_open=open_metrics)
    app.state.audit = audit
    loop = asyncio.create_task(engine.run())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=shown) as client:
        yield client
    await network.stop()
    engine.drain()
    engine.stop()
    await loop
    store.close()


@pytest_asyncio.fixture
async def open_api(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def start(
            tokens: list[str] | None = None, sites: Sites | None = None, limits: Limits | None = None, **rules: Any
        ) -> httpx2.AsyncClient:
            serve = serving(tmp_path / "koala.db", tokens or [], Rules(**rules), sites, limits=limits)
            return await stack.enter_async_context(serve)

        yield start


@pytest.fixture
def body() -> dict[str, Any]:
    return {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
