"""Puts a daemon together: its stores and what they remember, the scheduler, and the services around it."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from fastapi import APIRouter, FastAPI

from koalapy.agent.core.handover import write_handover
from koalapy.agent.core.settings import of_agents
from koalapy.api.advisor import advisor_router
from koalapy.api.agents import Tokens, agents_router
from koalapy.api.app import create_app
from koalapy.api.background import background_router
from koalapy.api.files import agent_files_router, files_router
from koalapy.api.forecasts import forecasts_router
from koalapy.api.guard import Hosts, ShownTokens
from koalapy.api.health import alerts_router
from koalapy.api.history import history_router, record_router, sharing_router
from koalapy.api.jobs import changes_router
from koalapy.api.metrics import add_metrics
from koalapy.api.network import network_router
from koalapy.api.tokens import limits_router
from koalapy.config.settings import Settings
from koalapy.daemon.agents.agent_messages import AgentMessages, TransferFeedback
from koalapy.daemon.agents.embedded import AgentProcess, EmbeddedAgents
from koalapy.daemon.agents.hub import Hub, Terms
from koalapy.daemon.agents.questions import Questions
from koalapy.daemon.agents.session import Sessions
from koalapy.daemon.agents.wire import is_brought
from koalapy.daemon.alerts.alerts import LOOK_INTERVAL as ALERTS_INTERVAL
from koalapy.daemon.alerts.alerts import Check, build_alerts
from koalapy.daemon.alerts.checks.data import CertificateCheck, RecordCheck
from koalapy.daemon.alerts.health import DISK_INTERVAL, HealthMonitor
from koalapy.daemon.alerts.notifications.outgoing import LOOK_INTERVAL as NOTIFICATIONS_INTERVAL
from koalapy.daemon.alerts.notifications.outgoing import Notifications, build_notifications
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import Logins
from koalapy.daemon.auth.login_codes import LoginCodes
from koalapy.daemon.auth.pace import AgentAttempts, Pace
from koalapy.daemon.beginning import agent_directory, beginning_of, describer
from koalapy.daemon.engine.daemon import Daemon
from koalapy.daemon.engine.duties import Duty
from koalapy.daemon.engine.engine import Engine, WorkItem, steady_clock
from koalapy.daemon.engine.outbox import Outbox
from koalapy.daemon.engine.services import Services
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import Results
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.forecast.track_record import COUNT_INTERVAL, TrackRecord
from koalapy.daemon.jobs.advisor import Advisor
from koalapy.daemon.jobs.history import History
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.limits import LimitsInUse
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.daemon.jobs.record import FLUSH_INTERVAL, Record
from koalapy.daemon.jobs.retention import HOUSEKEEPING_INTERVAL, Housekeeping, Retention, RetentionTimes, removal_clock
from koalapy.daemon.listener.certificate import LOOK_INTERVAL, Certificate
from koalapy.daemon.listener.connections import FILES_WANTED, Connections
from koalapy.daemon.listening import behind_proxies, certificate_of, listen
from koalapy.daemon.network.links import LinkTable
from koalapy.daemon.network.network import DUE_CHECK_INTERVAL, Network
from koalapy.daemon.observability.audit import MERGE_INTERVAL, Audit
from koalapy.daemon.observability.instruments import SIZE_INTERVAL
from koalapy.daemon.observability.job_log import log_change
from koalapy.daemon.observability.traced_app import traced
from koalapy.daemon.people import (
    build_identities,
    build_logins,
    check_reserved_names,
    note_impostors,
    openid_provider,
    own_access,
    provider_logins,
    reserved_names,
    token_duties,
)
from koalapy.dashboard.app import add_dashboard
from koalapy.dashboard.login import WaysIn
from koalapy.model.cluster import ClusterPair, Link
from koalapy.model.replica import Catalogue
from koalapy.model.request import ClusterName
from koalapy.policies.installed import policies as installed
from koalapy.policies.registry import Registry
from koalapy.ports import ClusterRecord
from koalapy.record.beginning import Beginning, People
from koalapy.record.recorder import RecordedScheduler
from koalapy.scheduler.events import AgentFailed
from koalapy.scheduler.queries import Queries
from koalapy.scheduler.scheduler import Scheduler
from koalapy.store.engine import file_of
from koalapy.store.job_numbers import NUMBERS_FILE, JobNumbers
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import FileOutput
from koalapy.system.limits import raise_limit
from koalapy.system.systemd import ServiceManager
from koalapy.validation.permissions import SubmissionRules

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Core:
    """What the parts of a daemon are built from."""

    settings: Settings
    data_dir: Path
    stores: Stores
    links: LinkTable
    people: People
    record: Record | None
    queries: Queries
    clock: Callable[[], float]
    describe: Callable[[ClusterName], ClusterRecord]
    sessions: Sessions
    notifications: Notifications
    engine: Engine


async def run(
    settings: Settings,
    policies: Registry,
    host: str,
    port: int,
    data_directory: Callable[[], Path],
    umask: int,
    announce: Callable[[str], None],
    manager: ServiceManager,
    more_checks: Sequence[Check] = (),
) -> None:
    """Be a daemon until told to end; ``umask`` is that of the agents. The directory is made once we may serve.

    ``more_checks``: further checks for alerts.
    """
    configured = settings.known_links()
    settings.check_people()
    settings.check_coallocation()
    settings.local_networks()
    check_reserved_names(settings)
    listener = listen(host, port, settings)
    data_dir = data_directory()
    certificate = certificate_of(settings, data_dir)
    stores = _open_stores(settings, data_dir)
    core = _build_core(settings, policies, data_dir, stores, configured)
    engine, clock = core.engine, core.clock
    provider, audit = openid_provider(settings), Audit(stores.audit, clock)
    connections = Connections(raise_limit(FILES_WANTED))
    tokens = {
        name: section.token or (secrets.token_urlsafe(24) if section.is_embedded else None)
        for name, section in settings.clusters.items()
    }
    agents = _embedded_agents(settings, tokens, data_dir, umask, engine, certificate)
    with traced(settings, engine, stores.jobs.instance), own_access(data_dir, listener, certificate) as own_token:
        identities = build_identities(settings, stores.tokens, clock, provider, own_token)
        logins = build_logins(settings, identities, clock, audit)
        await logins.end_what_is_over()
        if certificate is not None:
            more_checks = (CertificateCheck(certificate), *more_checks)
        services, hub, questions = _build_services(core, identities, logins, audit, more_checks)
        routers = _routers(core, services, hub, questions, tokens)
        app = _application(core, host, services, identities, routers, audit, connections.max_requests)
        services.network.start()
        core.notifications.start()
        try:
            await services.health.look_at_disks()
            await engine.instruments.look_at_size(stores.history.size)
            duties = [*_duties(core, services, audit, certificate), *token_duties(identities, provider)]
            await Daemon(
                engine,
                stores.jobs,
                hub,
                behind_proxies(app, settings, certificate),
                listener,
                connections,
                agents,
                announce,
                duties,
                certificate,
                manager,
                lambda: services.health.readiness().status,
                audit.give_up,
            ).run()
        finally:
            await services.network.stop()
            await core.notifications.stop()
            await audit.end()
            if core.record is not None:
                await core.record.close()
            stores.jobs.close()


def _open_stores(settings: Settings, data_dir: Path) -> Stores:
    """The database as this version has it; ``KoalaError`` when another daemon holds it."""
    output = FileOutput(data_dir / "output", settings.output_limit)
    numbers = JobNumbers(data_dir / NUMBERS_FILE, (data_dir / "output", data_dir / "results"))
    return open_stores(settings.database or f"sqlite:///{data_dir / 'koala.db'}", output, time.time, numbers)


def _build_core(
    settings: Settings, policies: Registry, data_dir: Path, stores: Stores, configured: Mapping[ClusterPair, Link]
) -> Core:
    """Build the engine, with a scheduler that has taken up every job that is not over."""
    clock = steady_clock()
    links = LinkTable(settings.clusters, configured, stores.measurements.latest())
    catalogue = Catalogue(stores.files.replicas())
    beginning = beginning_of(settings, policies, stores, links, catalogue)
    is_recorded = settings.record.enabled
    record = Record(data_dir / "record", settings.record, settings.disks, beginning) if is_recorded else None
    scheduler = _scheduler(beginning, policies, record)
    queries = scheduler.queries
    describe = describer(settings, queries.grid, data_dir)
    sessions, epoch = Sessions(clock), stores.jobs.epoch
    notifications = build_notifications(settings.notifications, stores.notifications, clock, queries.jobs)
    engine = Engine(
        scheduler,
        stores.jobs,
        Outbox(stores.saved.outbox, epoch),
        epoch=epoch,
        describe=describe,
        clock=clock,
        catalogue=catalogue,
        dispatcher=sessions,
        notifier=notifications,
    )
    engine.subscribe(log_change)
    return Core(
        settings,
        data_dir,
        stores,
        links,
        beginning.people,
        record,
        queries,
        clock,
        describe,
        sessions,
        notifications,
        engine,
    )


def _scheduler(beginning: Beginning, policies: Registry, record: Record | None) -> Scheduler | RecordedScheduler:
    """Return a scheduler that knows what the daemon before this one knew."""
    if record is None:
        return beginning.scheduler(policies, _nonce, time.monotonic)
    return RecordedScheduler(beginning, policies, _nonce, time.monotonic, record.keep)


def _nonce() -> str:
    return secrets.token_hex(8)


def _build_services(
    core: Core, identities: Identities, logins: Logins, audit: Audit, more_checks: Sequence[Check]
) -> tuple[Services, Hub, Questions]:
    """Build what routes, pages, duties and agents call."""
    settings, data_dir, stores = core.settings, core.data_dir, core.stores
    engine, queries, clock = core.engine, core.queries, core.clock
    owners, outputs = queries.owner_use.limits, Outputs(engine, queries, stores.jobs, stores.output)

    def is_wanted(cluster: ClusterName, source: ClusterName, path: str) -> bool:
        return is_brought(queries.jobs(), cluster, source, path, engine.catalogue)

    questions = Questions(core.sessions.offer, is_wanted)
    bundles = Bundles(
        stores.files,
        data_dir / "bundles",
        StorageLimits(settings.bundle_limit, settings.bundles_quota),
        clock=clock,
        needed=lambda: {job.spec.bundle.id for job in queries.jobs() if job.spec.bundle},
        owners=owners,
    )
    files = Files(engine, stores.files, questions, bundles)
    rules = SubmissionRules(settings.high_priority, identities.role_of, reserved_names())
    next_job, reachable = stores.saved.next_job, settings.notifications.reachable
    jobs = Jobs(engine, queries, stores.jobs, outputs, next_job, core.describe, files.resolve, rules, reachable)
    result_limits = StorageLimits(settings.collect_limit, settings.results_quota)
    results = Results(
        stores.files, data_dir / "results", result_limits, clock=clock, attempts=jobs.attempts, owners=owners
    )
    network = Network(engine, queries, jobs, stores.measurements, core.links, settings.network)
    feedback = TransferFeedback(network.transferred, files.spoiled, engine.instruments.moved)
    sessions = core.sessions
    terms = Terms(stores.jobs.instance, _nonce(), settings.output_limit, settings.public_url or "")
    messages = AgentMessages(engine, queries, outputs, sessions, questions, feedback, logins, note_impostors(audit))
    hub = Hub(
        engine,
        queries.accounts,
        sessions,
        messages,
        questions,
        terms,
        unreachable_after=queries.rules.unreachable_after,
        number_above=jobs.number_above,
    )
    health = HealthMonitor(engine, queries, _folders(settings, data_dir), settings.disks)
    if core.record is not None:
        more_checks = (RecordCheck(core.record), *more_checks)
    changed = core.notifications.alert_changed
    alerts = build_alerts(settings, engine, queries, hub, sessions, health, network, data_dir, more_checks, changed)
    track_record = TrackRecord(stores.predictions, stores.advice, clock)
    times = RetentionTimes(settings.jobs_keep, settings.internal_jobs_keep)
    services = Services(
        jobs,
        bundles,
        files,
        results,
        network,
        Advisor(queries.experience, stores.advice, track_record),
        health,
        Retention(stores.history, outputs, results, times, removal_clock(clock), lambda: engine.draining),
        LimitsInUse(queries.owner_use, bundles, results, clock),
        alerts,
        History(stores.history, clock, queries.jobs, settings.jobs_keep),
        Sharing(stores.history, queries, clock),
        Forecasts(queries, core.people, clock, installed, track_record=track_record),
        track_record,
    )
    return services, hub, questions


def _folders(settings: Settings, data_dir: Path) -> dict[str, Path]:
    """Where the daemon writes."""
    folders = {"data directory": data_dir} | {name: data_dir / name for name in ("bundles", "results", "output")}
    if (file := file_of(settings.database)) is not None:
        folders["database"] = file.parent
    return folders


def _duties(core: Core, services: Services, audit: Audit, certificate: Certificate | None) -> list[Duty]:
    settings, instruments = core.settings, core.engine.instruments
    housekeeping = Housekeeping(
        services.bundles, services.results, services.retention, settings.results_keep, removal_clock(core.clock)
    )
    duties = [
        Duty("tidy", HOUSEKEEPING_INTERVAL, housekeeping.tidy, by_calendar=True),
        Duty("alerts", ALERTS_INTERVAL, services.alerts.look),
        Duty("disks", DISK_INTERVAL, services.health.look_at_disks),
        Duty("network", DUE_CHECK_INTERVAL, services.network.measure_what_is_due),
        Duty("predictions", COUNT_INTERVAL, partial(instruments.look_at_predictions, services.track_record.counts)),
        Duty("notifications", NOTIFICATIONS_INTERVAL, core.notifications.look),
        Duty("audit", MERGE_INTERVAL, lambda: audit.tidy(settings.audit_keep)),
        Duty("size", SIZE_INTERVAL, partial(instruments.look_at_size, core.stores.history.size)),
    ]
    if settings.forecast_interval:
        duties.append(Duty("forecast", settings.forecast_interval, services.forecasts.watch))
    if certificate is not None:
        duties.append(Duty("certificate", LOOK_INTERVAL, partial(asyncio.to_thread, certificate.look)))
    if core.record is not None:
        duties.append(Duty("record", FLUSH_INTERVAL, core.record.flush))
    return duties


def _application(
    core: Core,
    host: str,
    services: Services,
    identities: Identities,
    routers: list[APIRouter],
    audit: Audit,
    max_requests: int,
) -> FastAPI:
    """Return all that is served by HTTP: REST, what agents connect to, metrics, and the dashboard."""
    settings, engine = core.settings, core.engine
    hosts, pace, codes = Hosts([host, *settings.allowed_hosts]), Pace(services.limits.limits), LoginCodes()
    app = create_app(services.jobs, services.health, identities, routers, hosts, max_requests, pace, audit, codes)
    add_metrics(app, engine, services.health, services.alerts, is_open=settings.open_metrics)
    at_provider = provider_logins(settings, identities)
    ways = WaysIn(identities, ShownTokens(identities, pace), codes, at_provider, settings.login_lifetime)
    add_dashboard(app, services, engine, ways, audit)
    return app


def _routers(core: Core, services: Services, hub: Hub, questions: Questions, tokens: Tokens) -> list[APIRouter]:
    bundles, results, attempts = services.bundles, services.results, AgentAttempts()
    return [
        agents_router(hub, tokens, attempts),
        background_router(services.jobs, questions, core.settings.background_load),
        files_router(services.files, bundles, results),
        agent_files_router(bundles, results, tokens, core.queries.is_sent_to, attempts),
        network_router(services.network),
        advisor_router(services.advisor),
        limits_router(services.limits),
        alerts_router(services.alerts),
        history_router(services.history),
        sharing_router(services.sharing, services.history),
        forecasts_router(services.forecasts, services.jobs),
        changes_router(core.engine.changes),
        record_router(core.record, core.clock),
    ]


def _embedded_agents(
    settings: Settings, tokens: Tokens, data_dir: Path, umask: int, engine: Engine, certificate: Certificate | None
) -> EmbeddedAgents:
    def tell(cluster: str, why: str) -> None:
        engine.post(WorkItem(events=(AgentFailed(cluster, f"its agent {why}"),)))

    processes = []
    for name in (name for name, section in settings.clusters.items() if section.is_embedded):
        handover = write_handover(name, settings, tokens[name] or "", umask, certificate.shown if certificate else None)
        command = [sys.executable, "-m", "koalapy.cli.main", "agent", name, "--embedded"]
        command += ["--directory", str(agent_directory(data_dir, name))]
        processes.append(AgentProcess(name, command, of_agents(), handover))
    return EmbeddedAgents(processes, tell)
