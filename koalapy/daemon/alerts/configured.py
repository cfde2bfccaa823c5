"""Puts together what looks for trouble: every check, and what it looks at."""

from pathlib import Path
from shlex import quote

from koalapy.config.settings import Settings
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.alerts.alerts import Alerts, Check
from koalapy.daemon.alerts.checks.black_holes import BlackHoleCheck
from koalapy.daemon.alerts.checks.clusters import ClusterChecks, DiskCheck, FlappingCheck, VersionCheck
from koalapy.daemon.alerts.checks.data import DatabaseCheck, LinkCheck, RecordCheck, ReplicaCheck
from koalapy.daemon.alerts.checks.jobs import JobChecks
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.jobs.record import Record
from koalapy.daemon.network.network import Network

SQLITE_REMEDY = (
    "see who else holds the file, and that it lies on a disk of this machine: fuser -v {file}; many users are served "
    "better by PostgreSQL"
)
SERVER_REMEDY = "see what it does: psql -c 'select pid, state, wait_event, query from pg_stat_activity'"


def alerts_of(
    settings: Settings,
    engine: Engine,
    hub: Hub,
    health: HealthMonitor,
    network: Network,
    data_dir: Path,
    record: Record | None,
) -> Alerts:
    """All checks of a daemon; its database lies in ``data_dir`` where nothing else is said."""
    queries, rules = engine.queries, settings.alerts
    clusters = queries.grid.clusters
    embedded = [name for name, section in settings.clusters.items() if section.is_embedded]
    url = settings.database or f"sqlite:///{data_dir / 'koala.db'}"
    file = quote(url.partition(":///")[2].partition("?")[0])
    remedy = SQLITE_REMEDY.format(file=file) if url.startswith("sqlite") else SERVER_REMEDY
    engine.observers.append((black_holes := BlackHoleCheck(clusters, rules, engine.clock)).changed)
    checks: list[Check] = [
        ClusterChecks(clusters, embedded, hub.rejections),
        black_holes,
        FlappingCheck(clusters, rules),
        DiskCheck(lambda: health.disks, clusters, settings.disks),
        VersionCheck(hub.versions, lambda: hub.turned_away),
        DatabaseCheck(engine.database, engine.instruments.writes, remedy, rules),
        LinkCheck(network.links, rules),
        ReplicaCheck(engine.catalogue),
        JobChecks(queries, rules),
        *([RecordCheck(record)] if record is not None else []),
    ]
    return Alerts(checks, rules, engine.clock)
