"""The services of a daemon, which routes, pages, agents and duties call."""

import asyncio
import os
from functools import partial
from pathlib import Path
from shlex import quote
from time import monotonic

import structlog

from koalapy.daemon.access import build_identities, load_provider, login_rules, reserved_names
from koalapy.daemon.agents.agent_messages import AgentMessages, TransferFeedback
from koalapy.daemon.agents.embedded import make_agent_tokens
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.agents.questions import NodeLists, Questions
from koalapy.daemon.agents.streams import CHECK_INTERVAL, Attendance, Streams
from koalapy.daemon.agents.wire import is_replica_needed
from koalapy.daemon.alerts.alerts import LOOK_INTERVAL as ALERTS_INTERVAL
from koalapy.daemon.alerts.alerts import Alerts, Check
from koalapy.daemon.alerts.cluster_checks import (
    BlackHoleCheck,
    ClusterChecks,
    FlappingCheck,
    check_clocks,
    check_disks,
    check_versions,
)
from koalapy.daemon.alerts.daemon_checks import (
    check_certificate,
    check_database,
    check_links,
    check_record,
    check_relays,
    check_replicas,
    check_start,
)
from koalapy.daemon.alerts.health import DISK_INTERVAL, HealthMonitor
from koalapy.daemon.alerts.job_checks import JobChecks
from koalapy.daemon.alerts.notifications import LOOK_INTERVAL as NOTIFICATIONS_INTERVAL
from koalapy.daemon.auth.identities import LAST_USE_INTERVAL
from koalapy.daemon.auth.login import Logins
from koalapy.daemon.core import Core
from koalapy.daemon.engine.duties import Duty
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import ResultInputs, Results
from koalapy.daemon.forecast.advisor import Advisor
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.jobs.history import History
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import Outputs
from koalapy.daemon.jobs.quota import LimitsInUse, StorageLimits
from koalapy.daemon.jobs.record import FLUSH_INTERVAL
from koalapy.daemon.jobs.retention import HOUSEKEEPING_INTERVAL, Housekeeping, Retention, removal_clock
from koalapy.daemon.jobs.share_weights import ShareWeights
from koalapy.daemon.listener.certificate import LOOK_INTERVAL, Certificate
from koalapy.daemon.network.network import DUE_CHECK_INTERVAL, Network
from koalapy.daemon.observability.audit import MERGE_INTERVAL
from koalapy.daemon.observability.figures import Samples
from koalapy.daemon.observability.instruments import HUB_INTERVAL, SIZE_INTERVAL
from koalapy.daemon.reservations import CHECK_INTERVAL as RESERVATIONS_INTERVAL
from koalapy.daemon.reservations import Reservations
from koalapy.model.alert import Alert
from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.model.history import SAMPLE_INTERVAL_S
from koalapy.model.identity import Identity
from koalapy.model.job_spec import JobSpec
from koalapy.policies.registry import load_policies as installed
from koalapy.protocol.messages import Welcome
from koalapy.store.engine import file_of
from koalapy.store.job_numbers import LOSS_ALERT_S
from koalapy.validation.permissions import SubmissionRules

log = structlog.get_logger()

KEYS_INTERVAL = 300.0
"""Seconds between two downloads of the provider's keys; a revoked key is accepted until the next download."""
SQLITE_REMEDY = (
    "find the process besides the daemon (process {pid}) that holds the file, and end it: fuser -v {file}; if it is "
    "only slow, move it to a disk of this machine, or to PostgreSQL"
)
SERVER_REMEDY = "see what it does: psql -c 'select pid, state, wait_event, query from pg_stat_activity'"


class Services:
    """The services of one daemon."""

    def __init__(self, core: Core, own_token: str, certificate: Certificate | None = None) -> None:
        """``own_token``: that of the daemon's account. ``certificate``: which agents check; None without TLS."""
        settings, data_dir, stores, sessions = core.settings, core.data_dir, core.stores, core.sessions
        engine, queries, clock = core.engine, core.queries, core.clock
        self._core, self.certificate, self.notifications = core, certificate, core.notifications
        self.agent_tokens = make_agent_tokens(settings)
        self.provider = load_provider(settings)
        self.identities = build_identities(settings, stores.tokens, clock, self.provider, own_token)
        may_log = sessions.budgets.may_log
        self.logins = Logins(login_rules(settings), self.identities, clock, audit=core.audit, may_log=may_log)
        owners, outputs = queries.owner_use.limits, Outputs(engine, queries, stores.jobs, stores.output)
        self.questions = Questions(
            sessions.offer_message,
            lambda cluster, source, path: is_replica_needed(queries.jobs(), cluster, source, path, engine.catalogue),
            may_log,
        )
        self.node_lists = NodeLists(self.questions, clock)
        self.reservations = Reservations(
            engine, stores.reservations, self.questions, sessions, stores.jobs.instance, settings.reservations
        )
        self.streams = Streams(queries, sessions)
        self.attendance = Attendance(engine, monotonic)
        self.bundles = Bundles(
            stores.files,
            data_dir / "bundles",
            StorageLimits(settings.bundle_limit, settings.bundles_quota),
            clock=clock,
            needed=lambda: {job.spec.bundle.id for job in queries.jobs() if job.spec.bundle},
            owners=owners,
        )
        self.files = Files(engine, stores.files, self.questions, self.bundles)
        self.jobs = Jobs(
            engine,
            queries,
            stores.jobs,
            outputs,
            max(stores.saved.next_job, settings.first_job_number),
            core.describe,
            self._resolve_spec,
            SubmissionRules(settings.high_priority, self.identities.role_of, reserved_names()),
            settings.notifications.reachable,
        )
        self.results = Results(
            stores.files,
            data_dir / "results",
            StorageLimits(settings.collect_limit, settings.results_quota),
            clock=clock,
            attempts=self.jobs.list_attempts,
            owners=owners,
            needed=queries.result_sources,
        )
        self.result_inputs = ResultInputs(self.results, self.jobs.get)
        self.network = Network(engine, self.jobs, stores.measurements, core.links, settings.network)
        feedback = TransferFeedback(
            self.network.record_transfer, self.files.mark_spoiled, engine.instruments.count_transfer
        )
        self.hub = Hub(
            engine,
            sessions,
            AgentMessages(
                engine,
                outputs,
                sessions,
                self.questions,
                self.streams,
                feedback,
                self.logins,
                core.audit,
                core.relays.set_state,
            ),
            self.questions,
            self.streams,
            Welcome(
                epoch=engine.epoch,
                instance=stores.jobs.instance,
                life=core.run_id,
                output_limit=settings.output_limit,
                users_url=settings.public_url or "",
                relays=True,
            ),
            unreachable_after=queries.rules.unreachable_after,
            number_above=self.jobs.submissions.raise_next_number,
            profiles=settings.clusters,
        )
        folders = {"data directory": data_dir}
        folders |= {name: data_dir / name for name in ("bundles", "results", "output")}
        if (database := file_of(settings.database)) is not None:
            folders["database"] = database.parent
        self.health = HealthMonitor(engine, queries, folders, settings.disks)
        self.alerts = build_alerts(core, self.hub, self.health, self.network, certificate)
        self.advisor = Advisor(queries.experience, stores.advice)
        self.forecasts = Forecasts(queries, core.people, clock, installed)
        self.retention = Retention(
            stores.history,
            outputs,
            self.results,
            settings.jobs_keep,
            settings.internal_jobs_keep,
            removal_clock(clock),
            lambda: engine.draining,
            queries.result_sources,
        )
        self.limits = LimitsInUse(
            queries.owner_use,
            self.bundles.size_of,
            self.results.size_of,
            clock,
            ShareWeights(engine, stores.share_weights, settings.fair_share),
        )
        self.history = History(stores.history, clock, queries.jobs, settings.jobs_keep)
        self.samples = Samples(engine, stores.samples, clock)

    async def _resolve_spec(self, spec: JobSpec, caller: Identity) -> JobSpec:
        spec = self.reservations.resolve_spec(spec)
        return await self.files.resolve_spec(await self.result_inputs.resolve_spec(spec, caller), caller)

    async def _remove_expired_tokens(self) -> None:
        try:
            await self.identities.remove_expired()
        except (StoreUnavailable, LeaseLost) as error:
            log.warning("some expired tokens could not be removed", action="token-not-stored", error=error.message)

    def list_duties(self) -> list[Duty]:
        """Return the periodic work of the services."""
        core, settings, instruments = self._core, self._core.settings, self._core.engine.instruments
        housekeeping = Housekeeping(
            self.bundles, self.results, self.retention, settings.results_keep, removal_clock(core.clock)
        )
        duties = [
            Duty("tidy", HOUSEKEEPING_INTERVAL, housekeeping.remove_expired, by_calendar=True),
            Duty("alerts", ALERTS_INTERVAL, self.alerts.run_checks),
            Duty("disks", DISK_INTERVAL, self.health.check_disks),
            Duty("reservations", RESERVATIONS_INTERVAL, self.reservations.check),
            Duty("attendance", CHECK_INTERVAL, self.attendance.cancel_unattended),
            Duty("network", DUE_CHECK_INTERVAL, self.network.measure_due_links),
            Duty("notifications", NOTIFICATIONS_INTERVAL, core.notifications.notify_long_waits),
            Duty("audit", MERGE_INTERVAL, partial(core.audit.write_and_prune, settings.audit_keep)),
            Duty("samples", SAMPLE_INTERVAL_S, self.samples.take),
            Duty("size", SIZE_INTERVAL, partial(instruments.measure_size, core.stores.history.size)),
            Duty("last uses of tokens", LAST_USE_INTERVAL, self.identities.store_last_uses),
            Duty("tokens", HOUSEKEEPING_INTERVAL, self._remove_expired_tokens),
        ]
        if self.provider is not None:
            duties.append(Duty("keys of the provider", KEYS_INTERVAL, self.provider.keys.refresh_keys))
        if settings.forecast_interval:
            duties.append(Duty("forecast", settings.forecast_interval, self.forecasts.forecast_periodically))
        if (certificate := self.certificate) is not None:
            duties.append(Duty("certificate", LOOK_INTERVAL, partial(asyncio.to_thread, certificate.reload_if_changed)))
        if core.relays.is_configured:
            duties.append(Duty("hub", HUB_INTERVAL, partial(instruments.read_hub, core.relays.read_hub_metrics)))
        if core.record is not None:
            duties.append(Duty("record", FLUSH_INTERVAL, core.record.flush))
        return duties


def build_alerts(
    core: Core, hub: Hub, health: HealthMonitor, network: Network, certificate: Certificate | None
) -> Alerts:
    """Return the alerts of a daemon with all its checks."""
    settings, engine, sessions, rules = core.settings, core.engine, core.sessions, core.settings.alerts
    clusters = core.queries.grid.clusters
    embedded = [name for name, section in settings.clusters.items() if section.is_embedded]
    url = settings.database or f"sqlite:///{core.data_dir / 'koala.db'}"
    remedy, full_remedy = SERVER_REMEDY, "free space on the disk of the database server: df -h"
    if url.startswith("sqlite"):
        file = Path(url.partition(":///")[2].partition("?")[0])
        remedy = SQLITE_REMEDY.format(pid=os.getpid(), file=quote(str(file)))
        full_remedy = f"free space on its disk; find what fills it: du -xh {quote(str(file.parent))} | sort -h | tail"
    engine.subscribe((black_holes := BlackHoleCheck(clusters, rules, engine.clock)).record_exit)
    checks: list[Check] = [
        ClusterChecks(clusters, embedded, hub.rejections),
        black_holes,
        FlappingCheck(clusters, rules),
        sessions.budgets.check_overruns,
        partial(check_disks, lambda: health.disks, clusters, settings.disks),
        partial(check_clocks, sessions.clock_offsets, embedded, engine.clock),
        partial(check_versions, sessions.agent_versions, lambda: hub.incompatible),
        partial(check_database, engine.database, engine.instruments.writes, remedy, full_remedy, rules),
        partial(check_links, network.list_known_links, rules),
        partial(check_replicas, engine.catalogue),
        JobChecks(engine, rules),
        partial(check_start, core.start_alerts, LOSS_ALERT_S),
    ]
    if core.record is not None:
        checks.append(partial(check_record, core.record))
    if core.relays.is_configured:
        checks.append(partial(check_relays, core.relays))
    if certificate is not None:
        checks.append(partial(check_certificate, certificate))

    def signal_change(alert: Alert, begins: bool) -> None:
        del begins
        engine.changes.note_change("clusters")

    return Alerts(checks, rules, engine.clock, signal_change, core.notifications.alert_changed, core.stores.alert_marks)
