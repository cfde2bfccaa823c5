"""Puts a daemon together: its stores and what they remember, the scheduler, and the services around it."""

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import structlog
from fastapi import APIRouter, FastAPI

from koalapy.agent.core.handover import write_handover
from koalapy.agent.core.settings import of_agents
from koalapy.agent.main import replica_directory
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
from koalapy.config.settings import ClusterSection, Settings
from koalapy.daemon.agents.agent_messages import TransferFeedback
from koalapy.daemon.agents.embedded import AgentProcess, EmbeddedAgents
from koalapy.daemon.agents.hub import Hub, Terms
from koalapy.daemon.alerts.alerts import LOOK_INTERVAL as LOOK_INTERVAL_OF_ALERTS
from koalapy.daemon.alerts.alerts import Check
from koalapy.daemon.alerts.checks.data import CertificateCheck
from koalapy.daemon.alerts.configured import alerts_of
from koalapy.daemon.alerts.health import DISK_INTERVAL, HealthMonitor
from koalapy.daemon.alerts.notifications.configured import notifications_of
from koalapy.daemon.alerts.notifications.outgoing import LOOK_INTERVAL as NOTIFICATIONS_INTERVAL
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login_codes import LoginCodes
from koalapy.daemon.auth.pace import AgentAttempts, Pace
from koalapy.daemon.beginning import beginning_of
from koalapy.daemon.engine.daemon import Daemon
from koalapy.daemon.engine.duties import Duty
from koalapy.daemon.engine.engine import Engine, WorkItem
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
    check_reserved_names,
    known_identities,
    logins,
    note_impostors,
    openid_provider,
    own_access,
    own_identity,
    provider_logins,
    reserved_names,
    token_duties,
)
from koalapy.dashboard.app import add_dashboard
from koalapy.dashboard.login import WaysIn
from koalapy.model.replica import Catalogue
from koalapy.policies.installed import policies as installed
from koalapy.policies.registry import Registry
from koalapy.ports import ClusterRecord
from koalapy.record.beginning import Beginning, People
from koalapy.record.recorder import RecordedScheduler
from koalapy.scheduler.events import AgentFailed
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.scheduler import Scheduler
from koalapy.store.engine import file_of
from koalapy.store.job_numbers import NUMBERS_FILE, JobNumbers
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import FileOutput
from koalapy.system.limits import raise_limit
from koalapy.system.systemd import ServiceManager
from koalapy.validation.permissions import SubmissionRules

log = structlog.get_logger()

Describe = Callable[[str], ClusterRecord]


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
    links = LinkTable(settings.clusters, configured, stores.measurements.latest())
    catalogue = Catalogue(stores.files.replicas())
    beginning = beginning_of(settings, policies, stores, links, catalogue)
    record = (
        Record(data_dir / "record", settings.record, settings.disks, beginning) if settings.record.enabled else None
    )
    scheduler = _scheduler(beginning, policies, record)
    describe = _describer(settings, scheduler.queries.grid, data_dir)
    epoch = stores.jobs.epoch
    outbox = Outbox(stores.saved.outbox, epoch)
    engine = Engine(scheduler, stores.jobs, outbox, epoch=epoch, describe=describe, catalogue=catalogue)
    engine.observers.append(log_change)
    outputs = Outputs(engine, stores.jobs, stores.output)
    hub = _hub(settings, stores, engine, outputs)
    provider = openid_provider(settings)
    identities = known_identities(settings, stores, engine.clock, provider)
    rules = SubmissionRules(settings.high_priority, identities.role_of, reserved_names())
    told = (settings, stores, engine, hub, outputs, links, describe, data_dir, record, beginning.people, rules)
    services = _services(*told)
    if certificate is not None:
        services.alerts.add_check(CertificateCheck(certificate))
    for check in more_checks:
        services.alerts.add_check(check)
    notifications = notifications_of(settings, stores, engine, services.alerts)
    hub.number_above(services.jobs.number_above)
    hub.learn_from_transfers(
        TransferFeedback(services.network.transferred, services.files.spoiled, engine.instruments.moved)
    )
    tokens = {
        name: section.token or (secrets.token_urlsafe(24) if section.is_embedded else None)
        for name, section in settings.clusters.items()
    }
    connections = Connections(raise_limit(FILES_WANTED))
    agents = _embedded_agents(settings, tokens, data_dir, umask, engine, certificate)
    audit = Audit(stores.audit, engine.clock)
    with traced(settings, engine, stores.jobs.instance), own_access(data_dir, listener, certificate) as own:
        identities.admit_daemon(own, own_identity())
        vouched = logins(settings, identities, engine.clock, audit)
        await vouched.end_what_is_over()
        hub.log_in_with(vouched)
        hub.note_impostors(note_impostors(audit))
        routers = [*_routers(settings, services, hub, tokens, engine), record_router(record, engine.clock)]
        app = _application(settings, host, services, engine, identities, routers, audit, connections.max_requests)
        services.network.start()
        notifications.start()
        try:
            await services.health.look_at_disks()
            look_at_size = partial(engine.instruments.look_at_size, stores.history.size)
            await look_at_size()
            duties = [*_duties(settings, services, engine, certificate), *token_duties(identities, provider)]
            duties.append(Duty("notifications", NOTIFICATIONS_INTERVAL, notifications.look))
            duties.append(Duty("audit", MERGE_INTERVAL, lambda: audit.tidy(settings.audit_keep)))
            duties.append(Duty("size", SIZE_INTERVAL, look_at_size))
            if record is not None:
                duties.append(Duty("record", FLUSH_INTERVAL, record.flush))
            way_in = behind_proxies(app, settings, certificate)
            parts = (engine, stores.jobs, hub, way_in, listener, connections, agents, announce, duties, certificate)
            await Daemon(*parts, manager, lambda: services.health.readiness().status, audit.give_up).run()
        finally:
            await services.network.stop()
            await notifications.stop()
            await audit.end()
            if record is not None:
                await record.close()
            stores.jobs.close()


# What a daemon before this one left


def _open_stores(settings: Settings, data_dir: Path) -> Stores:
    """The database as this version has it; ``KoalaError`` when another daemon holds it."""
    output = FileOutput(data_dir / "output", settings.output_limit)
    numbers = JobNumbers(data_dir / NUMBERS_FILE, (data_dir / "output", data_dir / "results"))
    return open_stores(settings.database or f"sqlite:///{data_dir / 'koala.db'}", output, time.time, numbers)


def _scheduler(beginning: Beginning, policies: Registry, record: Record | None) -> Scheduler | RecordedScheduler:
    """One that knows what was known, and has taken up every job that is not over."""
    if record is None:
        return beginning.scheduler(policies, _nonce, time.monotonic)
    return RecordedScheduler(beginning, policies, _nonce, time.monotonic, record.keep)


def _nonce() -> str:
    return secrets.token_hex(8)


def _describer(settings: Settings, grid: GridStatus, data_dir: Path) -> Describe:
    def describe(name: str) -> ClusterRecord:
        cluster = grid[name]
        section = settings.clusters.get(name, ClusterSection(kind="drmaa"))
        details: dict[str, object] = {}
        if section.lrm.on_this_host:
            directory = _agent_directory(data_dir, name)
            details["directory"] = str(directory / "lrm")
            details["replica_directories"] = section.replica_directories or [str(replica_directory(directory))]
        if classes := cluster.node_classes:
            details["node_classes"] = [asdict(each) for each in classes]
        if (uplink := grid.uplinks.get(name)) is not None:
            details["uplink"] = asdict(uplink)
        if cluster.disks:
            details["disks"] = [asdict(disk) for disk in cluster.disks]
        if cluster.reported_at is not None:
            details["reported_at"] = cluster.reported_at
            details["versions"] = asdict(cluster.versions) if cluster.versions else None
            details["calls"] = [asdict(calls) for calls in cluster.calls]
        return ClusterRecord(
            name=name,
            kind=section.kind,
            state=str(cluster.state),
            total=cluster.total,
            idle=cluster.idle,
            used=cluster.used,
            background=cluster.background,
            down=cluster.down,
            errors=cluster.health.errors,
            reason=cluster.said,
            last_heard=cluster.contact.last_heard,
            processes_per_node=section.processes_per_node,
            speed=section.speed,
            unusable=cluster.health.unusable,
            note=cluster.health.note,
            trials=cluster.health.trials,
            drained=cluster.drained,
            details=details,
        )

    return describe


# What goes on around the scheduler


def _hub(settings: Settings, stores: Stores, engine: Engine, outputs: Outputs) -> Hub:
    """The agents' connections, through which the engine sends its commands."""
    terms = Terms(stores.jobs.instance, _nonce(), settings.output_limit, settings.public_url or "")
    hub = Hub(engine, outputs, terms, unreachable_after=engine.queries.rules.unreachable_after)
    engine.dispatcher = hub
    return hub


def _services(
    settings: Settings,
    stores: Stores,
    engine: Engine,
    hub: Hub,
    outputs: Outputs,
    links: LinkTable,
    describe: Describe,
    data_dir: Path,
    record: Record | None,
    people: People,
    rules: SubmissionRules,
) -> Services:
    clock, owners = engine.clock, engine.queries.owner_use.limits
    bundles = Bundles(
        stores.files,
        data_dir / "bundles",
        StorageLimits(settings.bundle_limit, settings.bundles_quota),
        clock=clock,
        needed=lambda: {job.spec.bundle.id for job in engine.queries.jobs() if job.spec.bundle},
        owners=owners,
    )
    files = Files(engine, stores.files, hub.questions, bundles)
    next_job, reachable = stores.saved.next_job, settings.notifications.reachable
    jobs = Jobs(engine, stores.jobs, outputs, next_job, describe, files.resolve, rules, reachable)
    results = Results(
        stores.files,
        data_dir / "results",
        StorageLimits(settings.collect_limit, settings.results_quota),
        clock=clock,
        attempts=jobs.attempts,
        owners=owners,
    )
    network = Network(engine, jobs, stores.measurements, links, settings.network)
    health = HealthMonitor(engine, _folders(settings, data_dir), settings.disks)
    track_record = TrackRecord(stores.predictions, stores.advice, clock)
    advisor = Advisor(engine.queries.experience, stores.advice, track_record)
    times = RetentionTimes(settings.jobs_keep, settings.internal_jobs_keep)
    retention = Retention(stores.history, outputs, results, times, removal_clock(clock), lambda: engine.draining)
    limits = LimitsInUse(engine, bundles, results)
    history = History(stores.history, clock, engine.queries.jobs, settings.jobs_keep)
    alerts = alerts_of(settings, engine, hub, health, network, data_dir, record)
    forecasts = Forecasts(engine.queries, people, clock, installed, track_record=track_record)
    return Services(
        jobs,
        bundles,
        files,
        results,
        network,
        advisor,
        health,
        retention,
        limits,
        alerts,
        history,
        Sharing(stores.history, engine.queries, clock),
        forecasts,
        track_record,
    )


def _folders(settings: Settings, data_dir: Path) -> dict[str, Path]:
    """Where the daemon writes."""
    folders = {"data directory": data_dir} | {name: data_dir / name for name in ("bundles", "results", "output")}
    if (file := file_of(settings.database)) is not None:
        folders["database"] = file.parent
    return folders


def _duties(settings: Settings, services: Services, engine: Engine, certificate: Certificate | None) -> list[Duty]:
    housekeeping = Housekeeping(
        services.bundles, services.results, services.retention, settings.results_keep, removal_clock(engine.clock)
    )
    look_at_predictions = partial(engine.instruments.look_at_predictions, services.track_record.counts)
    return [
        Duty("tidy", HOUSEKEEPING_INTERVAL, housekeeping.tidy, by_calendar=True),
        Duty("alerts", LOOK_INTERVAL_OF_ALERTS, services.alerts.look),
        Duty("disks", DISK_INTERVAL, services.health.look_at_disks),
        Duty("network", DUE_CHECK_INTERVAL, services.network.measure_what_is_due),
        Duty("predictions", COUNT_INTERVAL, look_at_predictions),
        *([Duty("forecast", interval, services.forecasts.watch)] if (interval := settings.forecast_interval) else []),
        *([Duty("certificate", LOOK_INTERVAL, partial(asyncio.to_thread, certificate.look))] if certificate else []),
    ]


def _application(
    settings: Settings,
    host: str,
    services: Services,
    engine: Engine,
    identities: Identities,
    routers: list[APIRouter],
    audit: Audit,
    max_requests: int,
) -> FastAPI:
    """All that is served by HTTP: REST, what agents connect to, metrics, and the dashboard."""
    hosts, pace, codes = Hosts([host, *settings.allowed_hosts]), Pace(services.limits.limits), LoginCodes()
    app = create_app(services.jobs, services.health, identities, routers, hosts, max_requests, pace, audit, codes)
    add_metrics(app, engine, services.health, services.alerts, is_open=settings.open_metrics)
    at_provider = provider_logins(settings, identities)
    ways = WaysIn(identities, ShownTokens(identities, pace), codes, at_provider, settings.login_lifetime)
    add_dashboard(app, services, engine, ways, audit)
    return app


def _routers(settings: Settings, services: Services, hub: Hub, tokens: Tokens, engine: Engine) -> list[APIRouter]:
    bundles, files, results = services.bundles, services.files, services.results
    attempts = AgentAttempts()
    return [
        agents_router(hub, tokens, attempts),
        background_router(services.jobs, hub.questions, settings.background_load),
        files_router(files, bundles, results),
        agent_files_router(bundles, results, tokens, engine.queries.is_sent_to, attempts),
        network_router(services.network),
        advisor_router(services.advisor),
        limits_router(services.limits),
        alerts_router(services.alerts),
        history_router(services.history),
        sharing_router(services.sharing, services.history),
        forecasts_router(services.forecasts, services.jobs),
        changes_router(engine.changes),
    ]


# Embedded agents


def _embedded_agents(
    settings: Settings, tokens: Tokens, data_dir: Path, umask: int, engine: Engine, certificate: Certificate | None
) -> EmbeddedAgents:
    def tell(cluster: str, why: str) -> None:
        engine.post(WorkItem(events=(AgentFailed(cluster, f"its agent {why}"),)))

    processes = []
    for name in (name for name, section in settings.clusters.items() if section.is_embedded):
        handover = write_handover(name, settings, tokens[name] or "", umask, certificate.shown if certificate else None)
        command = [sys.executable, "-m", "koalapy.cli.main", "agent", name, "--embedded"]
        command += ["--directory", str(_agent_directory(data_dir, name))]
        processes.append(AgentProcess(name, command, of_agents(), handover))
    return EmbeddedAgents(processes, tell)


def _agent_directory(data_dir: Path, cluster: str) -> Path:
    clusters = data_dir / "clusters"
    with contextlib.suppress(OSError):  # of which its agent tells more
        clusters.mkdir(mode=0o700, exist_ok=True)
    return clusters / cluster
