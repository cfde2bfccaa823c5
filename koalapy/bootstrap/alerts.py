"""Puts together what looks for trouble: every check, and what it looks at."""

from koalapy.service.alert_checks.black_holes import BlackHoleCheck
from koalapy.service.alert_checks.clusters import ClusterChecks, DiskCheck, FlappingCheck, VersionCheck
from koalapy.service.alert_checks.data import DatabaseCheck, LinkCheck, ReplicaCheck
from koalapy.service.alert_checks.jobs import JobChecks
from koalapy.service.alerts import Alerts, Check
from koalapy.service.engine import Engine
from koalapy.service.health import HealthMonitor
from koalapy.service.hub import Hub
from koalapy.service.network import Network
from koalapy.settings import Settings

SQLITE_REMEDY = (
    "see who else holds the file, and that it lies on a disk of this machine: fuser -v koala.db; many users are served "
    "better by PostgreSQL"
)
SERVER_REMEDY = "see what it does: psql -c 'select pid, state, wait_event, query from pg_stat_activity'"


def alerts_of(settings: Settings, engine: Engine, hub: Hub, health: HealthMonitor, network: Network) -> Alerts:
    """All checks of a daemon."""
    queries, rules = engine.queries, settings.alerts
    clusters = queries.grid.clusters
    embedded = [name for name, section in settings.clusters.items() if section.is_embedded]
    is_file = settings.database is None or settings.database.startswith("sqlite")
    remedy = SQLITE_REMEDY if is_file else SERVER_REMEDY
    engine.observers.append((black_holes := BlackHoleCheck(clusters, rules, engine.clock)).changed)
    checks: list[Check] = [
        ClusterChecks(clusters, embedded),
        black_holes,
        FlappingCheck(clusters, rules),
        DiskCheck(lambda: health.disks, clusters, settings.disks),
        VersionCheck(hub.versions, lambda: hub.turned_away),
        DatabaseCheck(engine.database, remedy, rules),
        LinkCheck(network.links, rules),
        ReplicaCheck(engine.catalogue),
        JobChecks(queries, rules),
    ]
    return Alerts(checks, rules, engine.clock)
