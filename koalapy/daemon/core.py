"""The core of a daemon: its stores, the scheduler with all unfinished jobs, and the engine around it."""

import secrets
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from koalapy.agent.main import replica_directory
from koalapy.config.settings import ClusterSection, Settings
from koalapy.daemon.access import check_reserved_names
from koalapy.daemon.agents.embedded import agent_directory
from koalapy.daemon.agents.session import Sessions
from koalapy.daemon.agents.wire import plan_nodes
from koalapy.daemon.alerts.notifications import build_notifications
from koalapy.daemon.engine.engine import Engine, Outbox, WorkItem, steady_clock
from koalapy.daemon.forecast.advisor import MAX_LEARNED_RUNS
from koalapy.daemon.jobs.record import Record
from koalapy.daemon.jobs.share_weights import merge_weights
from koalapy.daemon.network.links import LinkTable
from koalapy.daemon.network.relays import Relays
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.cluster import ClusterStanding
from koalapy.model.limits import DAY, Limits
from koalapy.model.replica import Catalogue
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.scheduler.fair_share import CHARGED_HALF_LIVES
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.owner_use import HOURS
from koalapy.scheduler.queue.promises import MAX_PAST_STARTS
from koalapy.scheduler.scheduler import Scheduler
from koalapy.simulation.record.format import Beginning, KnownCluster, People
from koalapy.simulation.record.recorder import RecordedScheduler
from koalapy.store.database import Claim
from koalapy.store.job_numbers import NUMBERS_FILE, JobNumbers
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import ClusterRecord, Saved
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.local_token import load_or_make_token

RELAY_SECRET_FILE = "relay.key"
"""File in the data directory with the secret from which the keys of relayed links are derived."""


class Core:
    """The parts of a daemon that its services share."""

    def __init__(
        self, settings: Settings, policies: Registry, data_dir: Path, claim: Claim | None, machine: Clock = SYSTEM_CLOCK
    ) -> None:
        """Open the database and build the engine. Raise ``KoalaError`` if another daemon holds the database.

        Without a ``claim`` the database is only read, and the engine may not be run.
        """
        self.settings, self.data_dir = settings, data_dir
        self.run_id = make_nonce()
        """Identifies this daemon run among those of the same database."""
        output = OutputStore(data_dir / "output", settings.output_limit)
        numbers = JobNumbers(data_dir / NUMBERS_FILE, (data_dir / "output", data_dir / "results"))
        database = settings.database or f"sqlite:///{data_dir / 'koala.db'}"
        self.stores = stores = open_stores(database, output, machine.now, numbers, claim)
        self.start_alerts = numbers.alerts
        """Problems of the stored data at the start of the daemon."""
        self.clock = clock = steady_clock(machine)
        self.links = LinkTable(settings.clusters, settings.known_links(), stores.measurements.latest())
        catalogue = Catalogue(stores.files.replicas())
        beginning = collect_beginning(settings, policies, stores, self.links, catalogue, machine.now())
        self.people = beginning.people
        self.record: Record | None = None
        scheduler: Scheduler | RecordedScheduler
        if settings.record.enabled and claim is not None:
            self.record = Record(data_dir / "record", settings.record, settings.disks, beginning)
            scheduler = RecordedScheduler(beginning, policies, make_nonce, machine.monotonic, self.record.queue_step)
        else:
            scheduler = beginning.make_scheduler(policies, make_nonce, machine.monotonic)
        self.queries = queries = scheduler.queries
        self.describe = partial(describe_cluster, settings, queries.grid, data_dir)
        self.sessions, self.audit, instruments = Sessions(clock), Audit(stores.audit, clock), Instruments()
        self.notifications = build_notifications(settings.notifications, stores.notifications, clock, queries.jobs)
        profiles = {cluster.name: cluster.profile for cluster in queries.grid.clusters()}
        self.relays = Relays(
            settings.relay.control,
            settings.link_uses(),
            load_or_make_token(data_dir, RELAY_SECRET_FILE)[0].encode() if settings.relay.control is not None else b"",
            lambda job: plan_nodes(job, profiles),
            self.sessions.offer_message,
            queries.link_paths,
            report=lambda changed: self.engine.post(WorkItem(events=(changed,))),
            audit=self.audit,
            instruments=instruments,
            may_log=self.sessions.budgets.may_log,
        )
        self.engine = Engine(
            scheduler,
            stores.jobs,
            Outbox(stores.saved.outbox, stores.jobs.epoch),
            epoch=stores.jobs.epoch,
            describe=self.describe,
            clock=clock,
            catalogue=catalogue,
            sessions=self.sessions,
            notifications=self.notifications,
            find_relay=self.relays.plan_job,
            instruments=instruments,
        )
        self.engine.database.is_lease_shared = not stores.jobs.database.is_sqlite
        self.engine.subscribe(self.relays.note_job)


def check_settings(settings: Settings) -> None:
    """Raise ``UsageError`` for settings that contradict each other."""
    settings.known_links()
    settings.check_people()
    settings.check_coallocation()
    settings.check_relays()
    settings.local_networks()
    check_reserved_names(settings)


def make_nonce() -> str:
    return secrets.token_hex(8)


def collect_beginning(
    settings: Settings, policies: Registry, stores: Stores, links: LinkTable, catalogue: Catalogue, now: float
) -> Beginning:
    """Return the initial state of the scheduler: the configuration, and the state that the previous daemon stored."""
    saved, users, counts_hours = stores.saved, settings.known_users(), Limits(settings.limits).has_any(HOURS)
    has_shares = settings.rules.queue_order == "fair-share"
    charged_since = now - CHARGED_HALF_LIVES * settings.fair_share.half_life
    # Input files without any replica are listed too, as files that are on no cluster.
    file_names = {*catalogue.names(), *(file.name for job in saved.jobs for file in job.spec.all_inputs)}
    return Beginning(
        settings.rules,
        tuple(policies.names()),
        tuple(collect_clusters(settings, saved)),
        tuple((first, second, link) for (first, second), link in links.known_links().items()),
        tuple(stores.advice.runs(MAX_LEARNED_RUNS)),
        People(
            users.configured,
            tuple(sorted(users.unmapped)),
            settings.known_domains(),
            settings.limits,
            settings.limits_contact,
            tuple(stores.history.node_use(now - DAY, now)) if counts_hours else (),
            merge_weights(settings.fair_share, stores.share_weights.load()) if has_shares else None,
            tuple(stores.history.charges(charged_since, now)) if has_shares else (),
        ),
        {name: catalogue.good_sites(name) for name in sorted(file_names)},
        saved.jobs,
        saved.scans,
        now,
        settings.relay.streams if settings.relay.control is not None else 0,
        tuple((first, second, use) for (first, second), use in settings.link_uses().items()),
        tuple(stores.history.planned_starts(MAX_PAST_STARTS)),
        tuple(stores.reservations.load()),
    )


def collect_clusters(settings: Settings, saved: Saved) -> list[KnownCluster]:
    """Return the configured clusters with their stored health, and those that only unfinished jobs still use."""
    records = {record.name: record for record in saved.clusters}
    clusters = []
    for name, section in settings.clusters.items():
        # The home directory is that of this account if its nodes are this host.
        home = str(Path.home()) if section.home is None and section.lrm.on_this_host else section.home
        profile = replace(section, home=home, lease=settings.lease if section.lease is None else section.lease)
        cluster = KnownCluster(name, section.speed, profile, uplink_bandwidth=section.uplink_bandwidth)
        if (record := records.get(name)) is not None:
            standing = {field.name: getattr(record, field.name) for field in fields(ClusterStanding)}
            cluster = replace(cluster, total=record.total, errors=record.errors, **standing)
        clusters.append(cluster)
    used = {component.cluster for job in saved.jobs if job.attempt for component in job.attempt.components}
    return clusters + [KnownCluster(name) for name in sorted(used - settings.clusters.keys())]


def describe_cluster(settings: Settings, grid: GridStatus, data_dir: Path, name: ClusterName) -> ClusterRecord:
    """Return a cluster's state and node counts, with details that only some clusters have."""
    cluster = grid[name]
    section = settings.clusters.get(name, ClusterSection(kind="drmaa"))
    details: dict[str, object] = {}
    if section.lrm.on_this_host:
        directory = agent_directory(data_dir, name)
        details["directory"] = str(directory / "lrm")
        details["replica_directories"] = section.replica_directories or [str(replica_directory(directory))]
    if classes := cluster.nodes.node_classes:
        details["node_classes"] = [
            *map(asdict, classes),
            *(asdict(part) | {"is_part": True} for part in cluster.nodes.parts),
        ]
    if (uplink := grid.uplinks.get(name)) is not None:
        details["uplink"] = asdict(uplink)
    if cluster.last_report.disks:
        details["disks"] = [asdict(disk) for disk in cluster.last_report.disks]
    if cluster.reported_at is not None:
        details["reported_at"] = cluster.reported_at
        details["versions"] = asdict(cluster.last_report.versions) if cluster.last_report.versions else None
        details["calls"] = [asdict(calls) for calls in cluster.last_report.calls]
    use = cluster.node_use
    return ClusterRecord(
        name=name,
        kind=section.kind,
        state=str(cluster.state),
        total=cluster.last_report.total,
        idle=use.idle,
        used=use.used,
        background=use.local,
        down=use.down,
        errors=cluster.health.errors,
        reason=cluster.status_text,
        last_heard=cluster.contact.last_heard,
        processes_per_node=section.processes_per_node,
        speed=section.speed,
        unusable=cluster.health.unusable,
        note=cluster.health.note,
        trials=cluster.health.trials,
        drained=cluster.drained,
        planned_drains=cluster.planned_drains,
        withheld=use.withheld,
        unknown=use.unknown,
        details=details,
    )
