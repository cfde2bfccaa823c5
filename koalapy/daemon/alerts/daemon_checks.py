"""Checks of the daemon: its database, certificate, record, links and replica catalogue."""

import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from datetime import UTC, datetime
from shlex import quote

from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.jobs.record import Record
from koalapy.daemon.listener.certificate import EXPIRY_WARNING, Certificate
from koalapy.daemon.network.links import LinkMeasurements
from koalapy.daemon.network.network import LinkRecord
from koalapy.daemon.network.relays import Relays
from koalapy.daemon.observability.timings import Timings
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.replica import Catalogue, Replica
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_bytes, format_list

WINDOW = 60.0
"""Seconds of the window of transactions by which the database is judged slow."""

_DISK_FULL = re.compile("disk is full|no space left", re.IGNORECASE)
"""What SQLite and PostgreSQL say if they cannot write for lack of space."""


async def check_database(
    database: DatabaseMonitor, writes: Timings, remedy: str, full_remedy: str, rules: AlertRules, now: float
) -> AsyncIterator[Alert]:
    """Check for a database that rejects writes or is slow.

    ``writes``: the engine's transactions; ``remedy``: the alert's hint for this kind of database; ``full_remedy``: the
    hint if its disk is full.
    """
    cause, duration = database.problem, writes.recent_median(WINDOW)
    severity, state, since = Severity.CRITICAL, "rejects writes: jobs and actions are rejected", now
    if cause:
        since = now - database.unavailable_for
    elif duration is not None and duration >= rules.database_slow:
        severity, state = Severity.WARNING, "is slow, and so are requests to the daemon"
        cause = f"the median transaction of the last minute took {duration:.2g} s"
    else:
        return
    remedy = full_remedy if _DISK_FULL.search(cause) else remedy
    yield Alert(AlertKind.DATABASE, severity, "database", f"the database {state}", cause, remedy, since)


async def check_start(alerts: Collection[Alert], duration_s: float, now: float) -> AsyncIterator[Alert]:
    """Report problems of the stored data at the start of the daemon, for a limited time."""
    for alert in alerts:
        if now < alert.since + duration_s:
            yield alert


async def check_certificate(
    certificate: Certificate, now: float, wall_clock: Callable[[], float] = time.time
) -> AsyncIterator[Alert]:
    """Check for a certificate that has expired or expires soon, and for new certificate files that are unusable."""
    seconds_left = certificate.expires_at - wall_clock()
    end = datetime.fromtimestamp(certificate.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    remedy = f"replace {certificate.path} and its key by new ones; the daemon loads them without a restart"
    severity, cause = Severity.WARNING, ""
    if seconds_left <= 0:
        severity = Severity.CRITICAL
        summary = "the daemon's certificate has expired: agents and commands refuse to connect"
        cause = f"it expired {end}"
    elif seconds_left < EXPIRY_WARNING:
        summary = "the daemon's certificate expires soon: agents and commands will refuse to connect"
        cause = f"it expires {end}"
    elif certificate.complaint:
        summary = "the daemon's new certificate files are unusable"
        remedy = f"correct the files; until then the old certificate is used, which expires {end}"
    else:
        return
    cause = "; ".join(filter(None, (cause, certificate.complaint)))
    yield Alert(AlertKind.CERTIFICATE, severity, "certificate", summary, cause, remedy, now)


async def check_record(record: Record, now: float) -> AsyncIterator[Alert]:
    """Check for a recording of the scheduler's inputs that has failed."""
    if problem := record.problem:
        summary = "the scheduler's inputs are no longer recorded: later decisions cannot be replayed"
        remedy = "free disk space, or raise record.size, and restart the daemon to record again"
        since = min(now, record.failed_at)
        yield Alert(AlertKind.RECORD, Severity.WARNING, "record", summary, problem, remedy, since)


async def check_relays(relays: Relays, now: float) -> AsyncIterator[Alert]:
    """Check for a hub that cannot be reached, or a site's relay that is not connected to it."""
    if problem := relays.hub_problem:
        summary = "the hub of relayed links is not reachable: jobs that need relayed links fail or wait"
        remedy = "start it: systemctl start koala-relay-hub; or see why not: journalctl -u koala-relay-hub"
        yield Alert(AlertKind.RELAY, Severity.CRITICAL, "relay hub", summary, problem, remedy, now)
        return  # the relays of all sites have lost it, too
    for cluster, problem in relays.site_problems().items():
        yield Alert(
            AlertKind.RELAY,
            Severity.WARNING,
            f"relay of {cluster}",
            f"{cluster} has no relayed links: jobs that need them do not start there",
            problem,
            f"on its head node, see koala check {cluster} and journalctl -u koala-relay-head@{cluster}",
            now,
            cluster=cluster,
        )


async def check_links(
    list_links: Callable[[], Collection[LinkRecord]], rules: AlertRules, now: float
) -> AsyncIterator[Alert]:
    """Check for links that are unreachable or much slower than before or configured.

    An alert starts at the newest measurement.
    """
    for record in list_links():
        measurements, (first, second) = record.measurements, record.pair
        if measurements.unreachable:
            problem, newest = "do not reach each other", measurements.failed
            cause = measurements.error or "in a measurement, their nodes could not connect"
        elif slow := _slow_bandwidths(measurements, rules):
            (current, usual), newest = slow, measurements.newest
            problem = f"have {current / usual:.0%} of their bandwidth"
            cause = f"the last measurement was {format_bytes(current)}/s, the usual one is {format_bytes(usual)}/s"
        else:
            continue
        yield Alert(
            AlertKind.SLOW_LINK,
            Severity.WARNING,
            f"link {first}-{second}",
            f"{first} and {second} {problem}" if first != second else f"nodes within {first} {problem}",
            cause,
            f"when the network is repaired, measure again: koala network measure {first} {second}; until then, jobs "
            "avoid the link with --policy communication-aware",
            now if newest is None else min(now, newest.at),
            cluster=first,
        )


def _slow_bandwidths(measurements: LinkMeasurements, rules: AlertRules) -> tuple[float, float] | None:
    """Return the current and the usual bandwidth of the slower direction; None if it is not slow or unknown."""
    newest = measurements.newest
    if newest is None:
        return None
    current = [value for value in (newest.bandwidth, newest.back) if value is not None]
    earlier = [
        m.bandwidth for m in (*measurements.pingpongs, measurements.moved, measurements.moved_back) if m is not None
    ]
    usual = max((value for value in earlier if value is not None), default=0.0)
    if measurements.configured is not None and measurements.configured.bandwidth is not None:
        usual = measurements.configured.bandwidth
    return (min(current), usual) if current and min(current) < rules.slow_link_share * usual else None


async def check_replicas(catalogue: Catalogue, now: float) -> AsyncIterator[Alert]:
    """Check for replicas that differ from the catalogue, with one alert for each cluster.

    It is critical if one of them has no good copy elsewhere.
    """
    by_cluster: defaultdict[ClusterName, list[Replica]] = defaultdict(list)
    for replica in catalogue.bad_replicas():
        by_cluster[replica.cluster].append(replica)
    for cluster, replicas in by_cluster.items():
        bad = sorted(replicas, key=lambda replica: replica.name)
        lost = [replica.name for replica in bad if not catalogue.good_sites(replica.name)]
        no_copies = f"; no cluster has a good copy of {format_list(lost)}" if lost else ""
        states = [f"{replica.name} is {replica.state}" for replica in bad]
        count = "1 replica" if len(bad) == 1 else f"{len(bad)} replicas"
        yield Alert(
            AlertKind.REPLICAS_GONE,
            Severity.CRITICAL if lost else Severity.WARNING,
            f"replicas on {cluster}",
            f"{count} on {cluster} cannot be used any more{no_copies}",
            f"{format_list(states)}: {bad[0].reason or 'differs from the catalogue'}",
            f"restore the files, and verify them: koala replicas verify --cluster {cluster}; or remove the entries: "
            f"koala replicas remove {quote(bad[0].name)} --cluster {cluster}",
            min([now, *(replica.verified_at for replica in bad if replica.verified_at)]),
            cluster=cluster,
        )
