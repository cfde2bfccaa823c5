"""What a daemon begins with: its configuration, and what one before it left."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from koalapy.agent.main import replica_directory
from koalapy.config.settings import ClusterSection, Settings
from koalapy.daemon.jobs.advisor import MAX_LEARNED_RUNS
from koalapy.daemon.network.links import LinkTable
from koalapy.model.limits import DAY, Limits
from koalapy.model.profile import ClusterProfile
from koalapy.model.replica import Catalogue
from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.ports import ClusterRecord, Saved
from koalapy.record.beginning import Beginning, KnownCluster, People
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.owner_use import HOURS
from koalapy.store.opening import Stores


def beginning_of(
    settings: Settings, policies: Registry, stores: Stores, links: LinkTable, catalogue: Catalogue
) -> Beginning:
    """All that is known now, with every job that is not over."""
    saved, now = stores.saved, time.time()
    # A file of which nothing is left in the catalogue is to be known as such.
    names = {*catalogue.names(), *(file.name for job in saved.jobs for file in job.spec.all_inputs)}
    return Beginning(
        settings.rules,
        tuple(policies.names()),
        tuple(known_clusters(settings, saved)),
        tuple((one, other, link) for (one, other), link in links.links().items()),
        tuple(stores.advice.runs(MAX_LEARNED_RUNS)),
        known_people(settings, stores, now),
        {name: catalogue.sites(name) for name in sorted(names)},
        saved.jobs,
        saved.scans,
        now,
    )


def known_people(settings: Settings, stores: Stores, now: float) -> People:
    """Who has which accounts, what they may have, and have had of that in jobs that are over; the others are taken up
    later."""
    users, counts_hours = settings.known_users(), Limits(settings.limits).has_any(HOURS)
    return People(
        users.named,
        tuple(sorted(users.unmapped)),
        settings.known_domains(),
        settings.limits,
        settings.limits_contact,
        tuple(stores.history.node_use(now - DAY)) if counts_hours else (),
    )


def known_clusters(settings: Settings, saved: Saved) -> list[KnownCluster]:
    """Each configured cluster, with the errors it had counted before."""
    known = {record.name: record for record in saved.clusters}
    clusters = []
    for name, section in settings.clusters.items():
        profile = _profile(section, settings.lease)
        cluster = KnownCluster(name, section.speed, profile, uplink_bandwidth=section.uplink_bandwidth)
        if (before := known.get(name)) is not None:
            cluster = replace(
                cluster,
                total=before.total,
                drained=before.drained,
                errors=before.errors,
                unusable=before.unusable,
                note=before.note,
                trials=before.trials,
            )
        clusters.append(cluster)
    # A cluster that left the configuration may still have jobs: it stays known, never to be placed on.
    gone = {c.cluster for job in saved.jobs if job.attempt for c in job.attempt.components} - settings.clusters.keys()
    return clusters + [KnownCluster(name) for name in sorted(gone)]


def _profile(section: ClusterSection, lease: float) -> ClusterProfile:
    """Return the section with what follows from its defaults.

    Where the nodes are this host, their home is this account's; without a lease of its own it has the one of all.
    """
    home = str(Path.home()) if section.home is None and section.lrm.on_this_host else section.home
    return replace(section, home=home, lease=lease if section.lease is None else section.lease)


def describer(settings: Settings, grid: GridStatus, data_dir: Path) -> Callable[[ClusterName], ClusterRecord]:
    """Return a function that tells all that is known of a cluster by its name."""

    def describe(name: str) -> ClusterRecord:
        cluster = grid[name]
        section = settings.clusters.get(name, ClusterSection(kind="drmaa"))
        details: dict[str, object] = {}
        if section.lrm.on_this_host:
            directory = agent_directory(data_dir, name)
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


def agent_directory(data_dir: Path, cluster: str) -> Path:
    """Return the directory of an embedded cluster's agent."""
    clusters = data_dir / "clusters"
    with contextlib.suppress(OSError):  # of which its agent tells more
        clusters.mkdir(mode=0o700, exist_ok=True)
    return clusters / cluster
