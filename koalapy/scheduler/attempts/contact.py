"""Contact with clusters: silence, and confirmations of what a cluster knows.

A component of a silent cluster may continue. It is lost, so that its job may be tried again, only once it has certainly
ended: its lease or walltime has passed on its nodes, or an operator has declared the cluster lost
(docs/adr/0030-component-leases.md).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from koalapy.model.errors import ConflictError
from koalapy.model.job import WALLTIME_ALLOWANCE, Component, ComponentState, Job, Token, with_margin
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.components import Components
from koalapy.scheduler.attempts.facts import walltime_ends
from koalapy.scheduler.attempts.health import ClusterHealth
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import ClusterLost
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import MIN_RETRY_PAUSE, Deadline, SchedulerState, Timer

MAX_LATENESS = 1.0
"""Seconds by which the scheduler may be called late. Beyond that it was suspended and received nothing."""

RETURN_TIME = 15.0
"""Seconds that agents have to connect with a daemon that has just started, before they count as out of reach."""
NEED_CONFIRMATION = (
    *(Deadline.CLAIM_GRACE, Deadline.BARRIER, Deadline.LAUNCH, Deadline.WALLTIME, Deadline.DEADLINE, Deadline.STOP),
)
"""Deadlines that mean that something has not happened."""
CONFIRMATION_TIMEOUT = 600.0
"""Seconds for which deadlines wait for a connected cluster to confirm, in addition to ``unreachable_after``."""
NOT_FROM_UNREACHABLE = (Deadline.BARRIER, Deadline.STOP)
"""Deadlines among them that do not wait for an unreachable cluster, since no result can be lost."""


class Confirmations:
    """The confirmations requested from clusters, and the deadlines that wait for them."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._waiting: defaultdict[ClusterName, list[Timer]] = defaultdict(list)

    def is_awaited(self, timer: Timer, job: Job, now: float) -> bool:
        """Return whether a passed deadline must wait for confirmations. If so, it is due again once they arrive."""
        if timer.kind not in NEED_CONFIRMATION:
            return False
        components = live(job).components
        if timer.kind is Deadline.CLAIM_GRACE:
            components = (components[timer.component],)
        concerned = [c for c in components if c.state is not ComponentState.PLACED and not c.has_ended]
        missing = sorted({c.cluster for c in concerned if not self._has_confirmed(timer, c, now)})
        if not missing:
            return False
        self._waiting[missing[0]].append(timer)
        for name in missing:
            self._request_confirmation(self._grid[name], now)
        return True

    def _has_confirmed(self, timer: Timer, component: Component, now: float) -> bool:
        """Return whether a deadline of a component need not wait for its cluster, which has confirmed or will not."""
        contact = self._grid[component.cluster].contact
        if contact.confirmed_at >= timer.at or self.has_timed_out(contact, now):
            return True
        return timer.kind in NOT_FROM_UNREACHABLE and not contact.connected and component.unknown_since is not None

    def record_confirmation(self, name: ClusterName, as_of: float) -> None:
        """Store that a cluster has reported everything it knew at a time."""
        contact = self._grid[name].contact
        contact.confirmation_requested, contact.unconfirmed_since = False, None
        contact.confirmed_at = max(contact.confirmed_at, as_of)
        self.retry_deadlines(name)

    def retry_deadlines(self, name: ClusterName) -> None:
        """Make the deadlines that wait for a cluster due again: it confirmed, timed out, or is out of reach."""
        for timer in self._waiting.pop(name, ()):
            self._timers.postpone(timer, timer.at)

    def has_timed_out(self, contact: ContactStatus, now: float) -> bool:
        """Return whether a connected cluster has not confirmed for ``CONFIRMATION_TIMEOUT``."""
        since = contact.unconfirmed_since
        return contact.connected and since is not None and now >= since + self._timeout

    def resume_requests(self, cluster: ClusterStatus, now: float) -> None:
        """Request the confirmation again after a reconnect, as the earlier request may be lost."""
        cluster.contact.confirmation_requested = False
        self.retry_deadlines(cluster.name)
        if cluster.contact.unconfirmed_since is not None:
            self._request_confirmation(cluster, now)  # otherwise it would stay unconfirmed, with no event to wait for

    def extend_timeout(self, cluster: ClusterStatus, seconds: float) -> None:
        """Extend the timeout by seconds in which no confirmation could be received."""
        if cluster.contact.unconfirmed_since is not None:
            cluster.contact.unconfirmed_since += seconds
            self._set_timeout(cluster, cluster.contact.unconfirmed_since)

    def _request_confirmation(self, cluster: ClusterStatus, now: float) -> None:
        """Ask a connected cluster to confirm that it has reported everything, unless a request is pending.

        Set the time by which it must answer, unless it already owes a confirmation.
        """
        contact = cluster.contact
        if contact.connected and not contact.confirmation_requested:
            contact.confirmation_requested = True
            self._ledger.request_confirmation(cluster.name)
            if contact.unconfirmed_since is None:
                contact.unconfirmed_since = now
                self._set_timeout(cluster, now)

    def _set_timeout(self, cluster: ClusterStatus, since: float) -> None:
        self._timers.add(since + self._timeout, Deadline.LOST, cluster=cluster.name)

    @property
    def _timeout(self) -> float:
        return CONFIRMATION_TIMEOUT + self._rules.unreachable_after


class Contact:
    """The contact with clusters: it measures their silence, and gives up components that have certainly ended."""

    def __init__(
        self, state: SchedulerState, confirmations: Confirmations, components: Components, health: ClusterHealth
    ) -> None:
        self._state, self._rules, self._grid = state, state.rules, state.grid
        self._timers, self._ledger = state.timers, state.ledger
        self._confirmations, self._components, self._health = confirmations, components, health
        self.began = -inf
        """When this daemon run restored its jobs; earlier timestamps may come from another clock."""

    def advance_clock(self, now: float) -> float:
        """Advance the scheduler's time and return it. It never goes back, even if the clock does."""
        state = self._state
        if now > state.now:
            self._discount_downtime(now, state.now)
            state.now = now
        return state.now

    def mark_connected(self, cluster: ClusterStatus, now: float) -> None:
        """Mark a cluster as connected after it has reported everything."""
        if not cluster.contact.connected and cluster.contact.silent_since is not None:
            self._confirmations.extend_timeout(cluster, now - cluster.contact.silent_since)
        cluster.contact.connected = cluster.contact.has_agent = True
        cluster.contact.last_heard = cluster.contact.silent_since = now
        cluster.contact.check_at = cluster.contact.lost_by = None
        self._confirmations.resume_requests(cluster, now)

    def await_return(self, cluster: ClusterStatus, now: float) -> None:
        """Mark a cluster as disconnected at the start of the daemon. Its agent may connect until ``return_by``."""
        cluster.contact.silence_ignored_until = self.return_by(now)
        self.mark_disconnected(cluster, now, now)
        self._check_at(cluster, cluster.contact.silence_ignored_until)

    def return_by(self, now: float) -> float:
        """Return until when agents may connect with a daemon that starts now, before they count as out of reach."""
        return now + max(RETURN_TIME, self._rules.unreachable_after)

    def mark_disconnected(self, cluster: ClusterStatus, heard: float, now: float) -> None:
        """Mark a cluster as disconnected since ``heard``: nothing is placed there, and its components become unknown
        soon."""
        cluster.contact.losses += cluster.contact.connected
        cluster.contact.connected, cluster.contact.confirmation_requested = False, False
        cluster.contact.last_heard = cluster.contact.silent_since = heard
        if cluster.outdated_since is None:
            cluster.outdated_since = heard
        self._check_at(cluster, max(now, heard + self._rules.unreachable_after))
        self._ledger.mark_cluster_changed(cluster.name)

    def disconnect(self, cluster: ClusterStatus, reason: str, heard: float | None, now: float) -> None:
        """Record that a cluster's agent has disconnected; ``heard``: the time of its last message, default now."""
        contact, problem = cluster.contact, cluster.last_report.problem
        if contact.has_agent or contact.connected or problem:
            contact.has_agent, contact.disconnected_because = False, reason
            self._ledger.mark_cluster_changed(cluster.name)
        if contact.connected or problem:
            cluster.nodes.last_report = replace(cluster.last_report, problem="")
            self.mark_disconnected(cluster, now if heard is None else min(heard, now), now)

    def _discount_downtime(self, now: float, last_call: float) -> None:
        """Do not count the time in which the scheduler was not called as silence."""
        wakeup = self._timers.next_at()
        late = 0.0 if wakeup is None else now - max(wakeup, last_call)
        if late > MAX_LATENESS:
            for cluster in self._grid.clusters():
                self._confirmations.extend_timeout(cluster, late)
                contact = cluster.contact
                if not contact.connected and contact.silent_since is not None:
                    contact.silent_since += late
                    contact.silence_ignored_until = now + self._rules.unreachable_after
                    self._check_at(cluster, contact.silence_ignored_until)

    def handle_silence(self, timer: Timer, now: float) -> Iterator[Token]:
        """Give up components of a silent cluster that have certainly ended, mark others unknown; yield all tokens."""
        cluster = self._grid[timer.cluster]
        contact = cluster.contact
        if timer.kind is Deadline.LOST:
            if self._confirmations.has_timed_out(contact, now):
                self._confirmations.retry_deadlines(cluster.name)
            return
        if contact.check_at != timer.at or contact.last_heard is None or not self._is_silent(cluster, now):
            return
        ends: list[float] = []
        with self._health.group_errors(cluster.name):
            for token in cluster.nodes.awaited_components:
                lost_at, reason = self._lost_at(cluster, token)
                if now >= lost_at:
                    silence = now - contact.last_heard
                    error = f"not heard of for {silence:.0f} s, and {reason}"
                    self._components.mark_lost(token, error, now, lost_at)
                else:
                    self._components.mark_unknown(token, contact.last_heard, None if lost_at == inf else lost_at, now)
                    ends.append(lost_at)
                yield token
        contact.lost_by = max(ends, default=None)
        self._confirmations.retry_deadlines(cluster.name)
        # Wake the scheduler during the silence, so that it can detect its own suspension.
        if ends:
            self._check_at(cluster, min(now + max(self._rules.unreachable_after, MIN_RETRY_PAUSE), *ends))

    def declare_lost(self, event: ClusterLost, now: float) -> Iterator[Token]:
        """Give up all components of a cluster for an operator. Raise ``ConflictError`` if its agent is connected."""
        cluster = self._grid[event.cluster]
        if cluster.contact.connected:
            raise ConflictError(
                f"cluster {cluster.name} cannot be declared lost while its agent is connected",
                field="cluster",
                value=cluster.name,
                hint=f"to have its jobs run elsewhere, use koala clusters drain {cluster.name} --requeue --reason WHY",
            )
        error = f"{cluster.name} was declared lost" + (f": {event.reason}" if event.reason else "")
        with self._health.group_errors(cluster.name):
            for token in cluster.nodes.awaited_components:
                self._components.mark_lost(token, error, now)
                yield token
        cluster.contact.lost_by = None
        self._confirmations.retry_deadlines(cluster.name)

    def _lost_at(self, cluster: ClusterStatus, token: Token) -> tuple[float, str]:
        """Return when a component of a silent cluster has certainly ended, and why; infinite if no time is known."""
        match, since = self._ledger.find(token), cluster.contact.silent_since
        if match is None or since is None:
            return inf, ""
        ends = (
            (_lease_over_at(*match, since), "its lease is over"),
            (self._walltime_over_at(match[0]), "its walltime is over"),
        )
        end, reason = min(ends)
        return max(end, since + self._rules.unreachable_after, cluster.contact.silence_ignored_until), reason

    def _walltime_over_at(self, job: Job) -> float:
        """Return when every runner has counted the walltime down; timestamps of an earlier daemon run count as now."""
        ends = walltime_ends(job)
        if ends is None or job.spec.walltime is None:
            return inf
        launched_at = max(ends - job.spec.walltime, self.began)
        return launched_at + with_margin(job.spec.walltime + WALLTIME_ALLOWANCE)

    def _is_silent(self, cluster: ClusterStatus, now: float) -> bool:
        """Return whether a cluster has been out of reach for ``unreachable_after``, without the daemon's downtime."""
        contact = cluster.contact
        if contact.connected or contact.silent_since is None:
            return False
        return now >= max(contact.silent_since + self._rules.unreachable_after, contact.silence_ignored_until)

    def _check_at(self, cluster: ClusterStatus, due_at: float) -> None:
        """Check a silent cluster at a time, instead of the time set before."""
        cluster.contact.check_at = due_at
        self._timers.add(due_at, Deadline.UNREACHABLE, cluster=cluster.name)


def _lease_over_at(job: Job, component: Component, silent_since: float) -> float:
    """Return when a component's runners have ended it by their lease, counted from its last possible renewal."""
    if component.lease is None:
        return inf
    grace = job.spec.warning.grace if job.spec.warning is not None else 0.0
    return silent_since + with_margin(component.lease + grace)
