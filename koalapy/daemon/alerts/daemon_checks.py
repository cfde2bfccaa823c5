"""Checks of the daemon: its database, certificate, record, configuration, links and replica catalogue."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from koalapy.daemon.engine.database import DatabaseMonitor
from koalapy.daemon.jobs.record import Record
from koalapy.daemon.listener.certificate import EXPIRY_WARNING, Certificate
from koalapy.daemon.network.links import LinkMeasurements
from koalapy.daemon.network.network import LinkRecord
from koalapy.daemon.observability.timings import Timings
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.errors import UsageError
from koalapy.model.replica import Catalogue, Replica
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_bytes, format_list

WINDOW = 60.0
"""Seconds: whether the database is slow is judged by the transactions of the last ones."""


class DatabaseCheck:
    """Whether it takes what is written, and how fast."""

    def __init__(self, database: DatabaseMonitor, writes: Timings, remedy: str, rules: AlertRules) -> None:
        """``writes``: the engine's transactions; ``remedy``: what helps the kind of database that it is."""
        self._database, self._writes, self._remedy, self._rules = database, writes, remedy, rules

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        problem, took = self._database.problem, self._writes.middle(WINDOW)
        if problem:
            yield self._alert(Severity.CRITICAL, "takes nothing: jobs and actions are turned away", problem, now)
        elif took is not None and took >= self._rules.database_slow:
            cause = f"a transaction takes {took:.2g} s, in the middle of those of the last minute"
            yield self._alert(Severity.WARNING, "is slow, and all that is asked of the daemon with it", cause, now)

    def _alert(self, severity: Severity, what: str, cause: str, now: float) -> Alert:
        summary = f"the database {what}"
        return Alert(AlertKind.DATABASE, severity, "database", summary, cause, self._remedy, now)


class CertificateCheck:
    """Report a certificate of the daemon that has expired or expires soon, and new files that are refused."""

    def __init__(self, certificate: Certificate, wall_clock: Callable[[], float] = time.time) -> None:
        self._certificate, self._wall_clock = certificate, wall_clock

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        certificate, left = self._certificate, self._certificate.expires_at - self._wall_clock()
        end = datetime.fromtimestamp(certificate.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        renew = f"put a new certificate and its key in place of {certificate.path}: they are taken up without a restart"
        if left <= 0:
            summary = "the daemon's certificate has expired: agents and commands refuse to connect"
            yield self._alert(Severity.CRITICAL, summary, f"it ended {end}", renew, now)
        elif left < EXPIRY_WARNING:
            summary = "the daemon's certificate expires soon: agents and commands will refuse to connect"
            yield self._alert(Severity.WARNING, summary, f"it ends {end}", renew, now)
        elif certificate.complaint:
            summary = "the daemon's new certificate is not in use: its files are refused"
            remedy = f"correct the files; until then the old one is shown, which ends {end}"
            yield self._alert(Severity.WARNING, summary, certificate.complaint, remedy, now)

    def _alert(self, severity: Severity, summary: str, cause: str, remedy: str, now: float) -> Alert:
        cause = "; ".join(dict.fromkeys(filter(None, (cause, self._certificate.complaint))))
        return Alert(AlertKind.CERTIFICATE, severity, "certificate", summary, cause, remedy, now)


class RecordCheck:
    """Whether what the scheduler is told is still recorded."""

    def __init__(self, record: Record) -> None:
        self._record = record

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        if problem := self._record.problem:
            summary = "what the scheduler is told is not recorded any more: nothing since can be replayed"
            remedy = "make room, or raise record.size; the daemon records again from its next start on"
            since = min(now, self._record.failed_at)
            yield Alert(AlertKind.RECORD, Severity.WARNING, "record", summary, problem, remedy, since)


class LinkCheck:
    """Links that are much slower than they should be, or do not reach."""

    def __init__(self, links: Callable[[], Collection[LinkRecord]], rules: AlertRules) -> None:
        self._links, self._rules = links, rules

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for record in self._links():
            if record.known.unreachable:
                cause = record.known.error or "a measurement found no way between them"
                yield self._alert(record, "do not reach each other", cause, now)
            elif slow := self._slow(record.known):
                has, usual = slow
                cause = (
                    f"{format_bytes(has)}/s were measured last, and {format_bytes(usual)}/s before or by configuration"
                )
                yield self._alert(record, f"have {has / usual:.0%} of their bandwidth", cause, now)

    def _slow(self, known: LinkMeasurements) -> tuple[float, float] | None:
        """Bandwidth now, and what it should be, of the slower way; None where it is well, or nothing is known."""
        newest = known.newest
        if newest is None:
            return None
        found = [value for value in (newest.bandwidth, newest.back) if value is not None]
        before = [each.bandwidth for each in (*known.pingpongs, known.moved, known.moved_back) if each is not None]
        usual = max((value for value in before if value is not None), default=0.0)
        if known.configured is not None and known.configured.bandwidth is not None:
            usual = known.configured.bandwidth
        if not found or min(found) >= self._rules.slow_link_share * usual:
            return None
        return min(found), usual

    def _alert(self, record: LinkRecord, what: str, cause: str, now: float) -> Alert:
        one, other = record.pair
        newest = record.known.failed if record.known.unreachable else record.known.newest
        return Alert(
            AlertKind.SLOW_LINK,
            Severity.WARNING,
            f"link {one}-{other}",
            f"{one} and {other} {what}" if one != other else f"nodes within {one} {what}",
            cause,
            f"once the network is mended, measure it again: koala network measure {one} {other}; until then jobs keep "
            "clear of it by --policy communication-aware",
            now if newest is None else min(now, newest.at),
            cluster=one,
        )


class ReplicaCheck:
    """Replicas that are not what the catalogue says, cluster by cluster."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        by_cluster: defaultdict[ClusterName, list[Replica]] = defaultdict(list)
        for replica in self._catalogue.bad_replicas():
            by_cluster[replica.cluster].append(replica)
        for cluster, gone in by_cluster.items():
            yield self._alert(cluster, sorted(gone, key=lambda replica: replica.name), now)

    def _alert(self, cluster: ClusterName, gone: list[Replica], now: float) -> Alert:
        lost = [replica.name for replica in gone if not self._catalogue.good_sites(replica.name)]
        nowhere = f"; of {format_list(lost)} there is no good one anywhere" if lost else ""
        told = [f"{replica.name} is {replica.state}" for replica in gone]
        count = "1 replica" if len(gone) == 1 else f"{len(gone)} replicas"
        return Alert(
            AlertKind.REPLICAS_GONE,
            Severity.CRITICAL if lost else Severity.WARNING,
            f"replicas on {cluster}",
            f"{count} on {cluster} cannot be used any more{nowhere}",
            f"{format_list(told)}: {gone[0].reason or 'not what the catalogue says'}",
            f"put the files back, and look again: koala replicas verify --cluster {cluster}; or forget them: "
            f"koala replicas remove {quote(gone[0].name)} --cluster {cluster}",
            min([now, *(replica.verified_at for replica in gone if replica.verified_at)]),
            cluster=cluster,
        )


REMEDY = "start the daemon anew, as settings are read at its start only: systemctl restart koala-serve; jobs go on"
Values = Mapping[str, Any]


class ConfigurationCheck:
    """Report a configuration file that has other settings than the daemon was started with."""

    def __init__(self, path: Path, started_with: Values, read: Callable[[Path], Values]) -> None:
        """``read`` returns the settings in a file, and raises ``UsageError`` for one that cannot be read."""
        self._path, self._started_with, self._read = path, started_with, read
        self._stamp: tuple[int, ...] | None = None
        self._difference = ""

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        if difference := await asyncio.to_thread(self._compare):
            summary = f"the daemon does not run with what {self._path} says now"
            yield Alert(AlertKind.CONFIGURATION, Severity.WARNING, "configuration", summary, difference, REMEDY, now)

    def _compare(self) -> str:
        """Return what is different; the file is read only when it has changed."""
        try:
            status = self._path.stat()
            stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        except OSError as error:
            self._stamp = None
            return f"it cannot be read: {error.strerror}"
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._difference = difference_of(self._started_with, self._read(self._path))
            except UsageError as error:
                self._difference = f"the daemon would not start with it: {error.message}"
        return self._difference


def difference_of(old: Values, new: Values) -> str:
    """Return in words which settings differ, each cluster by its name; empty when none does."""
    settings = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    differences = [name for name in settings if name != "clusters"]
    if "clusters" in settings:
        differences += _cluster_differences(old.get("clusters") or {}, new.get("clusters") or {})
    return f"different: {', '.join(differences)}" if differences else ""


def _cluster_differences(old: object, new: object) -> list[str]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ["clusters"]
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    groups = {"added": new.keys() - old.keys(), "removed": old.keys() - new.keys(), "changed": changed}
    return [
        f"{'cluster' if len(names) == 1 else 'clusters'} {format_list(sorted(map(str, names)))} {change}"
        for change, names in groups.items()
        if names
    ]
