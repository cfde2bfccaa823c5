"""Checks of clusters: agents, resource managers, disks, versions, and jobs that fail as soon as they start."""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from shlex import quote
from types import MappingProxyType

from koalapy import __version__
from koalapy.daemon.agents.hub import Rejection, compare_versions
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.cluster import ClusterState
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.job import Job, JobState, parse_token
from koalapy.model.job_spec import Launcher
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_duration, format_list, format_nodes, format_time
from koalapy.scheduler.clusters import NO_REPORT_YET, ClusterStatus

REJECTION_WINDOW = 600.0
"""Seconds for which a rejected connection is reported as the cause of an absent agent."""
Clusters = Callable[[], Collection[ClusterStatus]]
CONNECT_GRACE = 30.0
"""Seconds for agents to connect after the daemon's start, and to report their components once connected. Agents retry
at least every 5 seconds, and one that starts with the daemon takes up to 20 seconds on a busy machine."""


def cluster_alert(
    kind: AlertKind,
    cluster: ClusterName,
    summary: str,
    cause: str,
    remedy: str,
    since: float,
    severity: Severity = Severity.CRITICAL,
) -> Alert:
    """Return an alert about a cluster."""
    return Alert(kind, severity, f"cluster {cluster}", summary, cause, remedy, since, cluster=cluster)


COMMON_LOSS_S = 20.0
"""Seconds within which agents are lost by one cause: the time between two of their messages and to notice a loss."""
MIN_COMMON_LOSS = 3
CommonLoss = tuple[str, str]
"""The likely cause of the loss of several agents together, and its remedy."""


class ClusterChecks:
    """A check for absent agents, failing resource managers, and clusters marked unusable after errors.

    A drained cluster is reported only while jobs hold nodes there.
    """

    def __init__(
        self,
        clusters: Clusters,
        embedded: Collection[ClusterName],
        rejections: Mapping[ClusterName, Rejection] = MappingProxyType({}),
        started_at: float | None = None,
    ) -> None:
        """``embedded``: the clusters with agents that the daemon starts itself; ``rejections``: the last connection
        that was rejected as the agent of a cluster; ``started_at``: the daemon's start, by default the first check."""
        self._clusters, self._embedded, self._rejections = clusters, embedded, rejections
        self._started_at = started_at
        self._silent_since: dict[ClusterName, float] = {}
        """When the agent of a cluster was first seen connected without a report."""

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        self._started_at = now if self._started_at is None else self._started_at
        losses = self._find_common_losses(now)
        for cluster in self._clusters():
            if not cluster.has_agent or cluster.last_report.problem or cluster.contact.connected:
                self._silent_since.pop(cluster.name, None)
            if cluster.drained is not None and not cluster.nodes.live:
                continue
            if not cluster.has_agent:
                last_heard = cluster.contact.last_heard  # of an earlier run of the daemon, or of this one
                has_connected = last_heard is not None and last_heard >= self._started_at
                is_expected = not has_connected and cluster.name not in self._rejections
                if is_expected and now - self._started_at < CONNECT_GRACE:
                    continue  # The daemon has just started.
                yield self._absent_agent_alert(cluster, now, losses.get(cluster.name))
            elif (problem := cluster.last_report.problem) and not {*problem.split("; ")} <= {
                str(disk) for disk in cluster.last_report.disks
            }:  # nothing starts there, and not only since disks of its agent are full
                yield _resource_manager_alert(cluster, now)
            elif (
                not cluster.contact.connected
                and now - self._silent_since.setdefault(cluster.name, now) >= CONNECT_GRACE
            ):
                yield self._agent_alert(
                    cluster, "has not reported yet", NO_REPORT_YET, _restart_remedy(cluster.name), now
                )
            if cluster.health.unusable:
                yield _unusable_alert(cluster, now)
            if cluster.last_report.lost_records:
                yield _lost_records_alert(cluster, now)

    def _find_common_losses(self, now: float) -> dict[ClusterName, CommonLoss]:
        """Return the losses of several agents within seconds, by cluster; embedded and rejected agents have others."""
        absent = [
            cluster
            for cluster in self._clusters()
            if not cluster.has_agent and cluster.contact.losses and cluster.drained is None
            if cluster.name not in self._embedded and not self._is_rejected(cluster.name, now)
        ]
        absent.sort(key=lambda cluster: cluster.contact.last_heard or 0.0)
        losses: dict[ClusterName, CommonLoss] = {}
        while absent:
            end = (absent[0].contact.last_heard or 0.0) + COMMON_LOSS_S
            together = [cluster for cluster in absent if (cluster.contact.last_heard or 0.0) <= end]
            del absent[: len(together)]
            if len(together) >= MIN_COMMON_LOSS:
                loss = describe_common_loss(together, self._clusters(), now)
                losses |= dict.fromkeys((cluster.name for cluster in together), loss)
        return losses

    def _is_rejected(self, name: ClusterName, now: float) -> bool:
        rejected = self._rejections.get(name)
        return rejected is not None and now - rejected.rejected_at < REJECTION_WINDOW

    def _absent_agent_alert(self, cluster: ClusterStatus, now: float, loss: CommonLoss | None) -> Alert:
        """Return the alert for a cluster without a connected agent, with the likeliest cause and its remedy."""
        name, cause, remedy, problem = cluster.name, cluster.absence, _restart_remedy(cluster.name), "is absent"
        if name in self._embedded:
            remedy = f"the daemon restarts it; if it hangs, kill it: pkill -f 'agent {name} --embedded'"
        elif self._is_rejected(name, now):
            rejected = self._rejections[name]
            cause = f"{cause}; a connection in its name was rejected: {rejected.reason}"
            problem = "is rejected"
            if rejected.remedy:
                remedy = f"{rejected.remedy}; then restart it on the head node: systemctl restart koala-agent@{name}"
        elif loss is not None:
            cause, remedy = loss
        return self._agent_alert(cluster, problem, cause, remedy, now)

    def _agent_alert(self, cluster: ClusterStatus, problem: str, cause: str, remedy: str, now: float) -> Alert:
        """Return a critical alert about a cluster's agent.

        It says what becomes of the jobs there, and starts when the agent was last heard.
        """
        name, last_heard = cluster.name, cluster.contact.last_heard
        effect = f"; jobs hold {format_nodes(sum(cluster.nodes.live.values()))} there" if cluster.nodes.live else ""
        if (lost_by := cluster.contact.lost_by) is not None:
            if isfinite(lost_by):
                effect += f" and restart by {format_time(lost_by, now, exact=True)} UTC, when their leases expire"
            else:
                effect += " and do not restart before it is back, since they have no lease"
            remedy += f"; only if nothing runs on {name} any more, restart its jobs now: "
            remedy += f"koala clusters lost {name}"
        return cluster_alert(
            AlertKind.AGENT_AWAY,
            name,
            f"the agent of {name} {problem}: no jobs are placed there{effect}",
            cause,
            remedy,
            now if last_heard is None else min(now, last_heard),
        )


def describe_common_loss(
    lost: Collection[ClusterStatus], clusters: Collection[ClusterStatus], now: float
) -> CommonLoss:
    """Return the likely cause of the loss of several agents within seconds, with its impact and remedy."""
    times = [cluster.contact.last_heard or 0.0 for cluster in lost]
    number = "all" if len(lost) == len(clusters) else f"{len(lost)} of {len(clusters)}"
    cause, remedy = "a network or a power supply that they share is the likely cause", "ask their sites about these"
    if 2 * len(lost) > len(clusters):
        cause = "the daemon's network is the likely cause"
        remedy = "look at the network of the daemon's host: its routes and firewall, and whether head nodes reach it"
    summary = f"{number} agents were lost within {max(1, ceil(max(times) - min(times)))} s: {cause}"
    jobs = {parse_token(token).job for cluster in lost for token in cluster.nodes.live}
    if not jobs:
        return f"{summary}; no jobs have nodes there", remedy
    nodes = format_nodes(sum(sum(cluster.nodes.live.values()) for cluster in lost))
    stake = f"1 job holds {nodes} there" if len(jobs) == 1 else f"{len(jobs)} jobs hold {nodes} there"
    ends = [end for cluster in lost if (end := cluster.contact.lost_by) is not None]
    until = ""
    if ends and isfinite(max(ends)):
        until = f"; all restart by {format_time(max(ends), now)} UTC, when their leases and walltimes are over"
    return f"{summary}; {stake}{until}", remedy


def _restart_remedy(name: ClusterName) -> str:
    return f"read its log on the head node of {name}, and restart it: systemctl restart koala-agent@{name}"


def _resource_manager_alert(cluster: ClusterStatus, now: float) -> Alert:
    """Return the alert for a resource manager that its agent reports as broken."""
    name = cluster.name
    state = "accepts no jobs" if cluster.lrm_silent_since is None else "does not answer"
    return cluster_alert(
        AlertKind.RESOURCE_MANAGER,
        name,
        f"no jobs can start on {name}: its resource manager {state}",
        cluster.last_report.problem,
        f"until it is repaired, drain the cluster: koala clusters drain {name} --reason 'its resource manager'; on its "
        f"head node, see what fails: koala check {name}",
        now if cluster.lrm_silent_since is None else min(now, cluster.lrm_silent_since),
    )


def _lost_records_alert(cluster: ClusterStatus, now: float) -> Alert:
    """Return the alert for components that ended because the agent lost its records of them."""
    name, tokens = cluster.name, cluster.last_report.lost_records
    count = "1 component" if len(tokens) == 1 else f"{len(tokens)} components"
    return cluster_alert(
        AlertKind.RECORDS_LOST,
        name,
        f"the agent of {name} has lost the records of {count}: it ended them, and their jobs restart",
        f"files in its directory were removed or damaged: {format_list(tokens)}",
        f"check what writes to its directory and whether the disk fails: journalctl -u koala-agent@{name}; dmesg",
        now,
        Severity.WARNING,
    )


def _unusable_alert(cluster: ClusterStatus, now: float) -> Alert:
    """Return the alert for a cluster that the scheduler avoids after repeated errors.

    The last error may name a job, so it is in the remedy, which only operators see.
    """
    name, error = cluster.name, cluster.health.last_error
    use = "one component at a time is placed there" if cluster.health.probation else "no jobs are placed there"
    return cluster_alert(
        AlertKind.BLACK_HOLE,
        name,
        f"{name} is unusable after repeated errors: {use}",
        cluster.health.summary,
        f"fix the cause of the errors{f' (the last: {error})' if error else ''}, then use the cluster again: "
        f"koala clusters clear {name}",
        now,
    )


@dataclass(slots=True)
class Contact:
    """The recent connection losses of a cluster."""

    up: bool
    losses: int
    loss_times: deque[float] = field(default_factory=lambda: deque(maxlen=1000))


class FlappingCheck:
    """A check for clusters that repeatedly become unreachable and return."""

    def __init__(self, clusters: Clusters, rules: AlertRules) -> None:
        self._clusters, self._rules = clusters, rules
        self._contacts: dict[ClusterName, Contact] = {}

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for cluster in self._clusters():
            up = cluster.contact.connected and cluster.state is not ClusterState.UNREACHABLE
            history = self._contacts.setdefault(cluster.name, Contact(up, cluster.contact.losses))
            # The agent may reconnect between two checks, so that only its counter of losses shows it.
            losses = max(cluster.contact.losses - history.losses, int(history.up and not up))
            history.up, history.losses = up, cluster.contact.losses
            history.loss_times.extend([now] * min(losses, self._rules.flapping_changes))
            while history.loss_times and now - history.loss_times[0] > self._rules.flapping_window:
                history.loss_times.popleft()
            if cluster.drained is not None:
                history.loss_times.clear()  # Count anew after an operator has intervened.
            if len(history.loss_times) >= self._rules.flapping_changes:
                name, minutes = cluster.name, (now - history.loss_times[0]) / 60
                yield cluster_alert(
                    AlertKind.CLUSTER_FLAPPING,
                    name,
                    f"{name} is unstable: lost {len(history.loss_times)} times in {minutes:.0f} minutes",
                    f"last loss: {cluster.state_reason or cluster.absence or cluster.contact.disconnected_because}",
                    f"place no jobs there until it is stable: koala clusters drain {name} --reason flapping",
                    history.loss_times[0],
                    Severity.WARNING,
                )


MAX_LOW_DISKS = 10
"""Maximum number of low disks of a cluster that are reported, so that a cluster hides no alerts of others."""


async def check_disks(
    daemon_disks: Callable[[], Collection[Disk]], clusters: Clusters, limits: DiskLimits, now: float
) -> AsyncIterator[Alert]:
    """Check for full or nearly full disks of the daemon and of the agents. Only full ones are critical."""

    def make_alert(disk: Disk, remedy: str, cluster: ClusterName = "") -> Alert:
        full = limits.is_full(disk)
        state = "full: nothing more can be written" if full else "nearly full"
        return Alert(
            AlertKind.DISK,
            Severity.CRITICAL if full else Severity.WARNING,
            f"disk {disk.what}{f' of {cluster}' if cluster else ''}",
            f"the disk of the {disk.what}{f' on {cluster}' if cluster else ''} is {state}",
            str(disk),
            remedy,
            now,
            cluster=cluster,
        )

    for disk in daemon_disks():
        if limits.is_low(disk):
            usage = f"find what fills it: {_usage_command(disk)}"
            yield make_alert(disk, f"{usage}; to keep less, lower results_quota, bundles_quota or jobs_keep")
    for cluster in clusters():
        report = cluster.last_report
        low = [disk for disk in report.disks if limits.is_low(disk) or str(disk) in report.problem]
        for disk in low[:MAX_LOW_DISKS]:
            remedy = f"find what fills it, on the head node of {cluster.name}: {_usage_command(disk)}"
            yield make_alert(disk, remedy, cluster.name)


MAX_CLOCK_OFFSET = 30.0
"""Seconds by which clocks may differ: far more than messages take."""
CLOCK_REMEDY = "see whether it is synchronized, and make it so: timedatectl; timedatectl set-ntp true"


async def check_clocks(
    offsets: Callable[[], Mapping[ClusterName, float]],
    embedded: Collection[ClusterName],
    steady_clock: Callable[[], float],
    now: float,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Alert]:
    """Check whether the clock of the daemon's host was set since the start, and for agents with another time.

    ``offsets``: seconds by which the agents' clocks are ahead of the daemon's; those of ``embedded`` clusters are on
    its host. ``steady_clock``: the daemon's time, which ignores that its host's clock is set.
    """
    daemon_time = wall_clock()
    step = daemon_time - steady_clock()
    if was_set := abs(step) > MAX_CLOCK_OFFSET:
        remedy = f"on the daemon's host, {CLOCK_REMEDY}; then restart the daemon: systemctl restart koala-serve"
        yield Alert(
            AlertKind.CLOCK,
            Severity.WARNING,
            "daemon",
            "the clock of the daemon's host was set, and the daemon still counts by the earlier time",
            f"it was set {format_duration(abs(step))} {'forward' if step > 0 else 'back'} since the start",
            f"{remedy}{', which ends jobs whose walltime is over by the new time' if step > 0 else ''}",
            now,
        )
    for name, offset in offsets().items():
        if name in embedded or abs(offset) <= MAX_CLOCK_OFFSET or (was_set and abs(offset + step) <= MAX_CLOCK_OFFSET):
            continue
        yield cluster_alert(
            AlertKind.CLOCK,
            name,
            f"the clock of the head node of {name} is {_describe_offset(offset)} the daemon's: times of its logs "
            "and files are wrong, and certificates may be rejected",
            f"it shows {format_time(daemon_time + offset, daemon_time)} UTC, the daemon's "
            f"{format_time(daemon_time, daemon_time)}",
            f"on the head node of {name}, {CLOCK_REMEDY}; if the clocks of all clusters differ, on the daemon's host",
            now,
            Severity.WARNING,
        )


def _describe_offset(seconds: float) -> str:
    """Return an offset of a clock in hours and minutes: ``2:00:00 ahead of``."""
    return f"{format_duration(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"


def _usage_command(disk: Disk) -> str:
    return f"du -xh {quote(disk.path)} | sort -h | tail"


async def check_versions(
    agents: Callable[[], Mapping[ClusterName, str]], rejected: Callable[[], Mapping[ClusterName, str]], now: float
) -> AsyncIterator[Alert]:
    """Check for agents of another version than the daemon's, and agents rejected for their version.

    ``agents``: versions of the connected agents; ``rejected``: reasons why agents were rejected.
    """
    versions = dict(agents())
    if newer := {
        name: version for name, version in versions.items() if compare_versions(version, __version__) == "newer"
    }:
        yield Alert(
            AlertKind.OLD_VERSION,
            Severity.WARNING,
            "daemon",
            f"the daemon has version {__version__}, older than the agents of {format_list(sorted(newer))}",
            f"agents have version {format_list(sorted(set(newer.values())))}, but the daemon must be updated first",
            "update koalapy on the daemon's host, and restart the daemon: systemctl restart koala-serve",
            now,
        )
    for name, version in versions.items():
        if compare_versions(version, __version__) == "older":
            yield _old_agent(name, f"has version {version}, the daemon {__version__}", "", now)
    for name, reason in rejected().items():
        yield _old_agent(name, "is rejected", reason, now)


def _old_agent(name: ClusterName, problem: str, reason: str, now: float) -> Alert:
    """Return the alert for an agent older than the daemon: critical with the ``reason`` of its rejection."""
    return cluster_alert(
        AlertKind.OLD_VERSION,
        name,
        f"the agent of {name} {problem}",
        reason or "it was not updated with the daemon, or not restarted since",
        f"update koalapy on the head node of {name}, and restart its agent: systemctl restart koala-agent@{name}",
        now,
        Severity.CRITICAL if reason else Severity.WARNING,
    )


MAX_ENDINGS = 1000
"""Maximum number of program exits that are kept for each cluster."""
BLACK_HOLE_SHARE = 0.8
"""Share of quick failures among a cluster's program exits from which it is a black hole."""
MIN_EXITS_ELSEWHERE = 3
"""Minimum number of exits on other clusters for a comparison.

If the share of failures there is at most half as large, the cluster and not the jobs is the cause.
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """The exit of a job's program on a cluster."""

    ended_at: float
    failed_soon: bool
    exit_code: int
    owner: str


class BlackHoleCheck:
    """A check for clusters where jobs fail soon after their start; it forgets the exits of drained clusters.

    Such a cluster is idle again soon, and therefore receives ever more jobs.
    """

    def __init__(
        self, clusters: Callable[[], Collection[ClusterStatus]], rules: AlertRules, clock: Callable[[], float]
    ) -> None:
        self._clusters, self._rules, self._clock = clusters, rules, clock
        self._endings: dict[ClusterName, deque[Ending]] = {}

    def record_exit(self, job: Job, previous_state: JobState | None) -> None:
        """Record the exit of a job's program on each of its clusters."""
        del previous_state
        if job.attempt is None or job.exit_code is None or job.started_at is None or job.spec.internal:
            return
        if job.state not in (JobState.SUCCEEDED, JobState.FAILED):
            return
        now = self._clock()
        run_time = (now if job.ended_at is None else job.ended_at) - job.started_at
        failed_soon = job.state is JobState.FAILED and run_time <= self._rules.black_hole_soon
        ending = Ending(now, failed_soon, job.exit_code, job.spec.owner)
        # Separate processes fail by themselves, so only the clusters of the failed ones count, if any failed.
        failed = {component.cluster for component in job.attempt.gang if component.exit_code}
        if not failed or job.spec.launcher is not Launcher.PROCESSES:
            failed = {component.cluster for component in job.attempt.gang}
        for cluster in failed:
            self._endings.setdefault(cluster, deque(maxlen=MAX_ENDINGS)).append(ending)

    async def __call__(self, now: float) -> AsyncIterator[Alert]:
        for endings in self._endings.values():
            while endings and now - endings[0].ended_at > self._rules.black_hole_window:
                endings.popleft()
        for cluster in self._clusters():
            if cluster.drained is not None:
                self._endings.pop(cluster.name, None)
            elif alert := self._make_alert(cluster.name, self._endings.get(cluster.name, ())):
                yield alert

    def _make_alert(self, name: ClusterName, endings: Collection[Ending]) -> Alert | None:
        """Return the alert for a cluster where most jobs fail soon. Return None if the jobs may be the cause."""
        failed = [ending for ending in endings if ending.failed_soon]
        if len(failed) < self._rules.black_hole_failures or len(failed) < BLACK_HOLE_SHARE * len(endings):
            return None
        elsewhere = [ending for cluster, group in self._endings.items() if cluster != name for ending in group]
        failed_elsewhere = sum(ending.failed_soon for ending in elsewhere)
        share = len(failed) / len(endings)
        is_better_elsewhere = len(elsewhere) >= MIN_EXITS_ELSEWHERE and failed_elsewhere / len(elsewhere) <= share / 2
        if not is_better_elsewhere and len({ending.owner for ending in failed}) < 2:
            return None  # The jobs of one user that fail on every cluster are themselves the cause.
        soon, minutes = self._rules.black_hole_soon, self._rules.black_hole_window / 60
        return cluster_alert(
            AlertKind.BLACK_HOLE,
            name,
            f"jobs fail on {name} as soon as they start",
            f"{len(failed)} of {len(endings)} jobs that ended there in {minutes:g} minutes failed within {soon:g} s of "
            f"their start, {failed_elsewhere} of {len(elsewhere)} elsewhere; last exit code: {failed[-1].exit_code}",
            f"place no jobs there until that is fixed: koala clusters drain {name} --reason 'jobs fail there'",
            failed[0].ended_at,
        )
