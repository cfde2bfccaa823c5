"""Checks of clusters: agents, resource managers, disks, versions, and jobs that fail as soon as they start."""

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from shlex import quote
from types import MappingProxyType

from koalapy import __version__
from koalapy.daemon.agents.hub import Rejection
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.cluster import ClusterState
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.job import Attempt, Job, JobState, Launcher
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes, format_time
from koalapy.scheduler.clusters import NOTHING_TOLD, ClusterStatus

REJECTION_WINDOW = 600.0
"""Seconds for which a refused connection is told as the cause why an agent is away."""
Clusters = Callable[[], Collection[ClusterStatus]]
CONNECT_GRACE = 20.0
"""Seconds that agents have to connect once the daemon has begun, and to tell what runs there once connected."""


class ClusterChecks:
    """Agents that are away, resource managers that do not answer, clusters that were given up after errors.

    Of one that an operator has drained nothing is told unless jobs still have nodes there.
    """

    def __init__(
        self,
        clusters: Clusters,
        embedded: Collection[ClusterName],
        rejections: Mapping[ClusterName, Rejection] = MappingProxyType({}),
    ) -> None:
        """``embedded``: the clusters whose agents the daemon starts itself; ``rejections``: the last connection that
        was not let in as the agent of a cluster."""
        self._clusters, self._embedded, self._rejections = clusters, embedded, rejections
        self._began: float | None = None
        self._silent_since: dict[ClusterName, float] = {}
        """When the agent of a cluster was first seen connected without having told anything."""

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        self._began = now if self._began is None else self._began
        for cluster in self._clusters():
            if not cluster.has_agent or cluster.problem or cluster.contact.connected:
                self._silent_since.pop(cluster.name, None)
            if cluster.drained is not None and not cluster.live:
                continue
            if not cluster.has_agent:
                if cluster.contact.last_heard is None and now - self._began < CONNECT_GRACE:
                    continue  # the daemon has just begun
                yield self._agent_away(cluster, now)
            elif cluster.problem:
                yield _resource_manager(cluster, now)
            elif (
                not cluster.contact.connected
                and now - self._silent_since.setdefault(cluster.name, now) >= CONNECT_GRACE
            ):
                yield self._agent_alert(cluster, "has told nothing", NOTHING_TOLD, _restart(cluster.name), now)
            if cluster.health.unusable:
                yield _failing(cluster, now)
            if cluster.lost_records:
                yield _records_lost(cluster, now)

    def _agent_away(self, cluster: ClusterStatus, now: float) -> Alert:
        name, cause, remedy = cluster.name, cluster.absence, _restart(cluster.name)
        if name in self._embedded:
            hangs = f"one that hangs is to be killed: pkill -f 'agent {name} --embedded'"
            remedy = f"the daemon starts it again by itself; {hangs}"
        elif (rejected := self._rejections.get(name)) is not None and now - rejected.at < REJECTION_WINDOW:
            cause = f"{cause}; a connection in its name was refused: {rejected.reason}"
            remedy = rejected.remedy or remedy
        return self._agent_alert(cluster, "is not heard of", cause, remedy, now)

    def _agent_alert(self, cluster: ClusterStatus, what: str, cause: str, remedy: str, now: float) -> Alert:
        name, last_heard = cluster.name, cluster.contact.last_heard
        held = f"; jobs have {format_nodes(sum(cluster.live.values()))} there" if cluster.live else ""
        if (lost_by := cluster.contact.lost_by) is not None:
            held += f" and {_until(lost_by, now)}"
            remedy += f"; only if nothing runs on {name} any more, have its jobs started again now: "
            remedy += f"koala clusters lost {name}"
        return Alert(
            AlertKind.AGENT_AWAY,
            Severity.CRITICAL,
            f"cluster {name}",
            f"the agent of {name} {what}: nothing is placed there{held}",
            cause,
            remedy,
            now if last_heard is None else min(now, last_heard),
            cluster=name,
        )


def _restart(name: ClusterName) -> str:
    return f"see its log on the head of {name}, and start it: systemctl restart koala-agent@{name}"


def _until(lost_by: float, now: float) -> str:
    """Until when jobs of a silent cluster are not tried again."""
    if isfinite(lost_by):
        return (
            f"are tried again at {format_time(lost_by, now, exact=True)} UTC at the latest, when their leases are over"
        )
    return "are not tried again before it is back: they have no lease"


def _resource_manager(cluster: ClusterStatus, now: float) -> Alert:
    name = cluster.name
    return Alert(
        AlertKind.RESOURCE_MANAGER,
        Severity.CRITICAL,
        f"cluster {name}",
        f"nothing can be started on {name}: its resource manager does not answer, or takes no jobs",
        cluster.problem,
        f"mend it on the head of {name}, and until then let nothing wait for it: koala clusters drain {name} "
        "--reason 'its resource manager'",
        now,
        cluster=name,
    )


def _records_lost(cluster: ClusterStatus, now: float) -> Alert:
    name, tokens = cluster.name, cluster.lost_records
    count = "1 component" if len(tokens) == 1 else f"{len(tokens)} components"
    return Alert(
        AlertKind.RECORDS_LOST,
        Severity.WARNING,
        f"cluster {name}",
        f"the agent of {name} has lost the records of {count}: it ended them, and their jobs are tried again",
        f"files in its directory were removed or damaged: {format_list(tokens)}",
        f"see what writes to its directory, and whether the disk fails: journalctl -u koala-agent@{name}; dmesg",
        now,
        cluster=name,
    )


def _failing(cluster: ClusterStatus, now: float) -> Alert:
    name = cluster.name
    tried = "it is tried with one component at a time" if cluster.health.probation else "nothing is placed there"
    return Alert(
        AlertKind.BLACK_HOLE,
        Severity.CRITICAL,
        f"cluster {name}",
        f"{name} was given up after errors: {tried}",
        cluster.health.note,
        f"mend what its errors say, and then use it again: koala clusters clear {name}",
        now,
        cluster=name,
    )


@dataclass(slots=True)
class Contact:
    """How often a cluster was lost, by what was seen of it last."""

    up: bool
    losses: int
    at: deque[float] = field(default_factory=lambda: deque(maxlen=1000))


class FlappingCheck:
    """Clusters that are lost and come back again and again, whatever of them it is."""

    def __init__(self, clusters: Clusters, rules: AlertRules) -> None:
        self._clusters, self._rules = clusters, rules
        self._contacts: dict[ClusterName, Contact] = {}

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for cluster in self._clusters():
            up = cluster.contact.connected and cluster.state is not ClusterState.UNREACHABLE
            known = self._contacts.setdefault(cluster.name, Contact(up, cluster.contact.losses))
            # Its agent may have gone and come between two looks; what else it was lost by shows at one of them.
            lost = max(cluster.contact.losses - known.losses, int(known.up and not up))
            known.up, known.losses = up, cluster.contact.losses
            known.at.extend([now] * min(lost, self._rules.flapping_changes))
            while known.at and now - known.at[0] > self._rules.flapping_window:
                known.at.popleft()
            if cluster.drained is not None:
                known.at.clear()  # what an operator has seen to begins anew
            if len(known.at) >= self._rules.flapping_changes:
                yield self._flapping(cluster, known, now)

    def _flapping(self, cluster: ClusterStatus, known: Contact, now: float) -> Alert:
        name, contact = cluster.name, cluster.contact
        last = cluster.why or cluster.absence or contact.disconnected_because
        return Alert(
            AlertKind.CLUSTER_FLAPPING,
            Severity.WARNING,
            f"cluster {name}",
            f"{name} comes and goes: lost {len(known.at)} times in {(now - known.at[0]) / 60:.0f} minutes",
            f"the last time: {last}",
            f"keep jobs from it until it stays: koala clusters drain {name} --reason flapping",
            known.at[0],
            cluster=name,
        )


class DiskCheck:
    """Disks that are low, of the daemon and of the agents."""

    def __init__(self, own: Callable[[], Collection[Disk]], clusters: Clusters, limits: DiskLimits) -> None:
        self._own, self._clusters, self._limits = own, clusters, limits

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for disk in self._own():
            if self._limits.is_low(disk):
                remedy = f"see what fills it: {_fills(disk)}; less is kept by results_quota, "
                yield self._alert(disk, f"disk {disk.what}", remedy + "bundles_quota and jobs_keep", "", now)
        for cluster in self._clusters():
            for disk in cluster.disks:
                if self._limits.is_low(disk):
                    remedy = f"see on the head of {cluster.name} what fills it: {_fills(disk)}"
                    yield self._alert(disk, f"disk {disk.what} of {cluster.name}", remedy, cluster.name, now)

    def _alert(self, disk: Disk, target: str, remedy: str, cluster: ClusterName, now: float) -> Alert:
        full = self._limits.is_full(disk)
        what = "full: nothing more can be taken" if full else "nearly full"
        return Alert(
            AlertKind.DISK,
            Severity.CRITICAL if full else Severity.WARNING,
            target,
            f"the disk of the {disk.what}{f' on {cluster}' if cluster else ''} is {what}",
            str(disk),
            remedy,
            now,
            cluster=cluster,
        )


def _fills(disk: Disk) -> str:
    return f"du -xh {quote(disk.path)} | sort -h | tail"


class VersionCheck:
    """Agents of another version than the daemon, and those that are turned away for it."""

    def __init__(
        self, agents: Callable[[], Mapping[ClusterName, str]], turned_away: Callable[[], Mapping[ClusterName, str]]
    ) -> None:
        """``agents``: the versions of those that are connected; ``turned_away``: why others are not let in."""
        self._agents, self._turned_away = agents, turned_away

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        versions = dict(self._agents())
        if newer := {name: version for name, version in versions.items() if is_older(__version__, version)}:
            yield Alert(
                AlertKind.OLD_VERSION,
                Severity.WARNING,
                "daemon",
                f"the daemon is of version {__version__}, older than the agents of {format_list(sorted(newer))}",
                f"agents are of version {format_list(sorted(set(newer.values())))}: the daemon is to be updated first",
                "update koalapy where the daemon runs, and start it anew: systemctl restart koala-serve",
                now,
            )
        for name, version in versions.items():
            if is_older(version, __version__):
                yield _old_agent(name, f"is of version {version}, the daemon of {__version__}", "", now)
        for name, reason in self._turned_away().items():
            yield _old_agent(name, "is not let in", reason, now)


def _old_agent(name: ClusterName, what: str, reason: str, now: float) -> Alert:
    return Alert(
        AlertKind.OLD_VERSION,
        Severity.CRITICAL if reason else Severity.WARNING,
        f"cluster {name}",
        f"the agent of {name} {what}",
        reason or "it was not updated with the daemon, or not started anew since",
        f"update koalapy on the head of {name}, and start its agent anew: systemctl restart koala-agent@{name}",
        now,
        cluster=name,
    )


def is_older(one: str, other: str) -> bool:
    """Whether a version comes before another, by their numbers."""
    return list(_numbers(one)) < list(_numbers(other))


def _numbers(version: str) -> Iterator[int]:
    for part in version.partition("+")[0].split(".")[:10]:
        number = re.match(r"\d{1,9}", part)
        if number is None:
            return
        yield int(number.group())


MAX_ENDINGS = 1000
"""Endings of one cluster that are kept, the last ones."""
MOST = 0.8
"""Such a part of what ended on a black hole failed soon."""
ELSEWHERE = 3
"""So many endings elsewhere, of which at most half as large a part failed, show that it is not the jobs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended on a cluster."""

    at: float
    failed_soon: bool
    exit_code: int
    owner: str


def _to_blame(attempt: Attempt, launcher: Launcher) -> set[ClusterName]:
    """Where a program ended: where each node has its own that failed, only the clusters of those that did."""
    failed = {component.cluster for component in attempt.gang if component.exit_code}
    return failed if failed and launcher is Launcher.PROCESSES else {component.cluster for component in attempt.gang}


class BlackHoleCheck:
    """Remembers how jobs ended where; of what operators have drained, nothing."""

    def __init__(
        self, clusters: Callable[[], Collection[ClusterStatus]], rules: AlertRules, clock: Callable[[], float]
    ) -> None:
        self._clusters, self._rules, self._clock = clusters, rules, clock
        self._endings: dict[ClusterName, deque[Ending]] = {}

    def changed(self, job: Job, before: JobState | None) -> None:
        """A program that has come to an end of its own, on each of its clusters."""
        del before
        if job.attempt is None or job.exit_code is None or job.started_at is None or job.spec.internal:
            return
        if job.state not in (JobState.SUCCEEDED, JobState.FAILED):
            return
        now = self._clock()
        took = (now if job.ended_at is None else job.ended_at) - job.started_at
        failed_soon = job.state is JobState.FAILED and took <= self._rules.black_hole_soon
        ending = Ending(now, failed_soon, job.exit_code, job.spec.owner)
        for cluster in _to_blame(job.attempt, job.spec.launcher):
            self._endings.setdefault(cluster, deque(maxlen=MAX_ENDINGS)).append(ending)

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for endings in self._endings.values():
            while endings and now - endings[0].at > self._rules.black_hole_window:
                endings.popleft()
        for cluster in self._clusters():
            here = self._endings.get(cluster.name, ())
            if cluster.drained is not None:
                self._endings.pop(cluster.name, None)
            elif alert := self._alert(cluster.name, here):
                yield alert

    def _alert(self, name: ClusterName, here: Collection[Ending]) -> Alert | None:
        failed = [ending for ending in here if ending.failed_soon]
        if len(failed) < self._rules.black_hole_failures or len(failed) < MOST * len(here):
            return None
        there = [ending for other, endings in self._endings.items() if other != name for ending in endings]
        failed_there = sum(ending.failed_soon for ending in there)
        better_there = len(there) >= ELSEWHERE and failed_there / len(there) <= len(failed) / len(here) / 2
        if not better_there and len({ending.owner for ending in failed}) < 2:
            return None  # one user's jobs, that fail wherever they come: it is these
        soon, minutes = self._rules.black_hole_soon, self._rules.black_hole_window / 60
        return Alert(
            AlertKind.BLACK_HOLE,
            Severity.CRITICAL,
            f"cluster {name}",
            f"jobs fail on {name} as soon as they start",
            f"{len(failed)} of {len(here)} that ended there in {minutes:g} minutes failed within {soon:g} s of their "
            f"start, {failed_there} of {len(there)} elsewhere; the last with exit code {failed[-1].exit_code}",
            f"keep jobs from it until that is mended: koala clusters drain {name} --reason 'jobs fail there'",
            failed[0].at,
            cluster=name,
        )
