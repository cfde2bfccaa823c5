"""The services of a daemon, which routes, pages, agents and duties call, and how they are built."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from koalapy.daemon.access import make_rejected_runner_recorder, make_traffic_recorder, reserved_names
from koalapy.daemon.agents.agent_messages import AgentMessages, TransferFeedback
from koalapy.daemon.agents.budgets import Use
from koalapy.daemon.agents.hub import Hub, Terms
from koalapy.daemon.agents.questions import NodeLists, Questions
from koalapy.daemon.agents.streams import CHECK_INTERVAL, Attendance, Streams
from koalapy.daemon.agents.wire import is_replica_needed
from koalapy.daemon.alerts.alerts import LOOK_INTERVAL as ALERTS_INTERVAL
from koalapy.daemon.alerts.alerts import Alerts, Check, build_alerts
from koalapy.daemon.alerts.daemon_checks import check_certificate, check_record, check_relays, check_start
from koalapy.daemon.alerts.health import DISK_INTERVAL, HealthMonitor
from koalapy.daemon.alerts.notifications import LOOK_INTERVAL as NOTIFICATIONS_INTERVAL
from koalapy.daemon.alerts.notifications import Notifications
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import Logins
from koalapy.daemon.core import Core
from koalapy.daemon.engine.duties import Duty
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import ResultInputs, Results
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.forecast.track_record import COUNT_INTERVAL, Advisor, TrackRecord
from koalapy.daemon.jobs.history import History
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.jobs.quota import LimitsInUse, StorageLimits
from koalapy.daemon.jobs.record import FLUSH_INTERVAL
from koalapy.daemon.jobs.retention import HOUSEKEEPING_INTERVAL, Housekeeping, Retention, RetentionTimes, removal_clock
from koalapy.daemon.listener.certificate import LOOK_INTERVAL, Certificate
from koalapy.daemon.network.network import DUE_CHECK_INTERVAL, Network
from koalapy.daemon.observability.audit import MERGE_INTERVAL, Audit
from koalapy.daemon.observability.figures import Samples
from koalapy.daemon.observability.instruments import HUB_INTERVAL, SIZE_INTERVAL
from koalapy.model.history import SAMPLE_INTERVAL_S
from koalapy.model.identity import Identity
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.policies.registry import load_policies as installed
from koalapy.store.engine import file_of
from koalapy.store.job_numbers import LOSS_ALERT_S
from koalapy.validation.permissions import SubmissionRules


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one daemon."""

    jobs: Jobs
    bundles: Bundles
    files: Files
    results: Results
    result_inputs: ResultInputs
    network: Network
    advisor: Advisor
    health: HealthMonitor
    retention: Retention
    limits: LimitsInUse
    alerts: Alerts
    history: History
    forecasts: Forecasts
    track_record: TrackRecord
    hub: Hub
    questions: Questions
    node_lists: NodeLists
    streams: Streams
    attendance: Attendance
    samples: Samples
    notifications: Notifications
    certificate: Certificate | None
    """The daemon's certificate, which agents check; None without TLS."""


def build_services(
    core: Core,
    identities: Identities,
    logins: Logins,
    audit: Audit,
    certificate: Certificate | None,
    more_checks: Sequence[Check],
) -> Services:
    """Build the parts of the daemon that serve requests and agents, from the core and the login parts."""
    settings, data_dir, stores, sessions = core.settings, core.data_dir, core.stores, core.sessions
    engine, queries, clock = core.engine, core.queries, core.clock
    owners, outputs = queries.owner_use.limits, Outputs(engine, queries, stores.jobs, stores.output)

    def is_needed(cluster: ClusterName, source: ClusterName, path: str) -> bool:
        return is_replica_needed(queries.jobs(), cluster, source, path, engine.catalogue)

    questions = Questions(
        sessions.offer_message, is_needed, lambda cluster: sessions.budgets.try_to_spend(cluster, Use.LOG_LINES)
    )
    streams = Streams(queries, sessions)
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
    next_job = max(stores.saved.next_job, settings.first_job_number)
    reachable = settings.notifications.reachable
    attendance = Attendance(engine, queries, monotonic)

    async def resolve_spec(spec: JobSpec, caller: Identity) -> JobSpec:
        return await files.resolve_spec(await result_inputs.resolve_spec(spec, caller), caller)

    jobs = Jobs(engine, queries, stores.jobs, outputs, next_job, core.describe, resolve_spec, rules, reachable)
    result_limits = StorageLimits(settings.collect_limit, settings.results_quota)
    results = Results(
        stores.files,
        data_dir / "results",
        result_limits,
        clock=clock,
        attempts=jobs.list_attempts,
        owners=owners,
        needed=queries.result_sources,
    )
    result_inputs = ResultInputs(results, jobs.get)
    network = Network(engine, queries, jobs, stores.measurements, core.links, settings.network)
    feedback = TransferFeedback(network.record_transfer, files.mark_spoiled, engine.instruments.count_transfer)
    hub = _build_hub(core, outputs, questions, streams, feedback, logins, audit, jobs)
    health = _build_health_monitor(core)
    checks = [*_build_checks(core, audit, certificate), *more_checks]
    notify, marks = core.notifications.alert_changed, stores.alert_marks
    alerts = build_alerts(settings, engine, queries, hub, sessions, health, network, data_dir, checks, notify, marks)
    track_record = TrackRecord(stores.predictions, stores.advice, clock)
    return Services(
        jobs,
        bundles,
        files,
        results,
        result_inputs,
        network,
        Advisor(queries.experience, stores.advice, track_record),
        health,
        _build_retention(core, outputs, results),
        LimitsInUse(queries.owner_use, bundles.size_of, results.size_of, clock),
        alerts,
        History(stores.history, clock, queries.jobs, settings.jobs_keep),
        Forecasts(queries, core.people, clock, installed, track_record=track_record),
        track_record,
        hub,
        questions,
        NodeLists(questions, clock),
        streams,
        attendance,
        Samples(engine, stores.samples, clock),
        core.notifications,
        certificate,
    )


def _build_hub(
    core: Core,
    outputs: Outputs,
    questions: Questions,
    streams: Streams,
    feedback: TransferFeedback,
    logins: Logins,
    audit: Audit,
    jobs: Jobs,
) -> Hub:
    """Build the hub, to which agents connect, with the handlers of their messages."""
    settings, queries = core.settings, core.queries
    messages = AgentMessages(
        core.engine,
        queries,
        outputs,
        core.sessions,
        questions,
        streams,
        feedback,
        logins,
        make_rejected_runner_recorder(audit),
        core.relays.set_state,
    )
    return Hub(
        core.engine,
        queries.accounts,
        core.sessions,
        messages,
        questions,
        streams,
        Terms(core.stores.jobs.instance, core.run_id, settings.output_limit, settings.public_url or ""),
        unreachable_after=queries.rules.unreachable_after,
        number_above=jobs.raise_next_number,
        accepting_scripts={name for name, section in settings.clusters.items() if section.accepts_scripts},
        profiles=settings.clusters,
    )


def _build_health_monitor(core: Core) -> HealthMonitor:
    """Build the monitor of agents and of the disks with the daemon's files."""
    folders = {"data directory": core.data_dir}
    folders |= {name: core.data_dir / name for name in ("bundles", "results", "output")}
    if (database := file_of(core.settings.database)) is not None:
        folders["database"] = database.parent
    return HealthMonitor(core.engine, core.queries, folders, core.settings.disks)


def _build_retention(core: Core, outputs: Outputs, results: Results) -> Retention:
    times = RetentionTimes(core.settings.jobs_keep, core.settings.internal_jobs_keep)
    clock, sources = removal_clock(core.clock), core.queries.result_sources
    return Retention(core.stores.history, outputs, results, times, clock, lambda: core.engine.draining, sources)


def _build_checks(core: Core, audit: Audit, certificate: Certificate | None) -> list[Check]:
    """Return the checks of the parts that this daemon has by its settings, and record the traffic of its relays."""
    checks: list[Check] = [partial(check_start, core.start_alerts, LOSS_ALERT_S)]
    if core.record is not None:
        checks.append(partial(check_record, core.record))
    if core.relays.is_configured:
        core.relays.record_traffic = make_traffic_recorder(audit, core.engine.instruments)
        checks.append(partial(check_relays, core.relays))
    if certificate is not None:
        checks.append(partial(check_certificate, certificate))
    return checks


def build_duties(core: Core, services: Services, audit: Audit, certificate: Certificate | None) -> list[Duty]:
    """Return the periodic work of the services."""
    settings, instruments = core.settings, core.engine.instruments
    housekeeping = Housekeeping(
        services.bundles, services.results, services.retention, settings.results_keep, removal_clock(core.clock)
    )
    duties = [
        Duty("tidy", HOUSEKEEPING_INTERVAL, housekeeping.remove_expired, by_calendar=True),
        Duty("alerts", ALERTS_INTERVAL, services.alerts.run_checks),
        Duty("disks", DISK_INTERVAL, services.health.check_disks),
        Duty("attendance", CHECK_INTERVAL, services.attendance.cancel_unattended),
        Duty("network", DUE_CHECK_INTERVAL, services.network.measure_due_links),
        Duty(
            "predictions", COUNT_INTERVAL, partial(instruments.read_predictions, services.track_record.count_outcomes)
        ),
        Duty("notifications", NOTIFICATIONS_INTERVAL, core.notifications.notify_long_waits),
        Duty("audit", MERGE_INTERVAL, lambda: audit.write_and_prune(settings.audit_keep)),
        Duty("samples", SAMPLE_INTERVAL_S, services.samples.take),
        Duty("size", SIZE_INTERVAL, partial(instruments.measure_size, core.stores.history.size)),
    ]
    if settings.forecast_interval:
        duties.append(Duty("forecast", settings.forecast_interval, services.forecasts.forecast_periodically))
    if certificate is not None:
        duties.append(Duty("certificate", LOOK_INTERVAL, partial(asyncio.to_thread, certificate.reload_if_changed)))
    if core.relays.is_configured:
        duties.append(Duty("hub", HUB_INTERVAL, partial(instruments.read_hub, core.relays.read_hub_metrics)))
    if core.record is not None:
        duties.append(Duty("record", FLUSH_INTERVAL, core.record.flush))
    return duties
