"""Contact with clusters: what follows when one is silent, and that nobody's silence is our own sleep.

A component of a silent cluster may run on. It counts as lost, so that its job may be tried again, only once it is
certainly over: when its lease or its walltime has passed on its nodes, or an operator has declared the cluster lost
(docs/adr/0030-a-lease-for-each-component.md).
"""

from collections.abc import Iterator
from math import inf

from koalapy.model.errors import ConflictError
from koalapy.model.job import Component, Job, Token
from koalapy.model.lease import WALLTIME_ALLOWANCE, with_margin
from koalapy.scheduler.attempts.attempt_facts import walltime_ends
from koalapy.scheduler.attempts.cluster_health import ClusterHealth
from koalapy.scheduler.attempts.components import Components
from koalapy.scheduler.attempts.confirmations import Confirmations
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.events import ClusterLost
from koalapy.scheduler.ledger import Ledger
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import MIN_RETRY_PAUSE, Deadline, Timer

MAX_LATENESS = 1.0
"""Called so many seconds later than it had asked for, the scheduler was not listening meanwhile."""


class Contact:
    """Knows for how long clusters have been silent, and gives up their components once these are certainly over."""

    def __init__(
        self, state: SchedulerState, confirmations: Confirmations, components: Components, health: ClusterHealth
    ) -> None:
        self._rules, self._grid, self._timers = state.rules, state.grid, state.timers
        self._ledger: Ledger = state.ledger
        self._confirmations, self._components, self._health = confirmations, components, health
        self.began = -inf
        """When this daemon took up the jobs of one before it, whose clock may have been another."""

    def made(self, cluster: ClusterStatus, now: float) -> None:
        """A cluster has reported everything; whether that was still so when it did is another question."""
        if not cluster.contact.connected and cluster.contact.silent_since is not None:
            self._confirmations.extend(cluster, now - cluster.contact.silent_since)
        cluster.contact.connected = cluster.contact.has_agent = True
        cluster.contact.last_heard = cluster.contact.silent_since = now
        cluster.contact.check_at = cluster.contact.lost_by = None
        self._confirmations.reconnected(cluster, now)

    def lost(self, cluster: ClusterStatus, heard: float, now: float) -> None:
        """A cluster was last heard of at that time."""
        cluster.contact.losses += cluster.contact.connected
        cluster.contact.connected, cluster.contact.confirmation_requested = False, False
        cluster.contact.last_heard = cluster.contact.silent_since = heard
        if cluster.outdated_since is None:
            cluster.outdated_since = heard
        self._check_at(cluster, max(now, heard + self._rules.unreachable_after))

    def slept(self, now: float, before: float) -> None:
        """Called at last, after ``before``: what we did not hear while we slept is nobody's silence.

        What was sent meanwhile is read first, for as long as a cluster may take to be heard of.
        """
        wakeup = self._timers.next_at()
        late = 0.0 if wakeup is None else now - max(wakeup, before)
        if late > MAX_LATENESS:
            for cluster in self._grid.clusters():
                self._confirmations.extend(cluster, late)
                contact = cluster.contact
                if not contact.connected and contact.silent_since is not None:
                    contact.silent_since += late
                    contact.silence_ignored_until = now + self._rules.unreachable_after
                    self._check_at(cluster, contact.silence_ignored_until)

    def is_overdue(self, timer: Timer, now: float) -> Iterator[Token]:
        """Give up the components of a silent cluster that are certainly over, and lose sight of the others: their
        tokens, whose jobs may have to be settled."""
        cluster = self._grid[timer.cluster]
        contact = cluster.contact
        if timer.kind is Deadline.LOST:
            if self._confirmations.has_timed_out(contact, now):
                self._confirmations.retry_deadlines(cluster.name)
            return
        if contact.check_at != timer.at or contact.last_heard is None or not self._is_silent(cluster, now):
            return
        ends: list[float] = []
        with self._health.one_event(cluster.name):
            for token in cluster.awaited:
                lost_at, why = self._lost_at(cluster, token)
                if now >= lost_at:
                    silence = now - contact.last_heard
                    self._components.lose(token, f"not heard of for {silence:.0f} s, and {why}", now)
                else:
                    self._components.lose_sight(token, contact.last_heard, None if lost_at == inf else lost_at, now)
                    ends.append(lost_at)
                yield token
        contact.lost_by = max(ends, default=None)
        self._confirmations.retry_deadlines(cluster.name)
        # Be woken while it is away, so that it shows when we were not.
        if ends:
            self._check_at(cluster, min(now + max(self._rules.unreachable_after, MIN_RETRY_PAUSE), *ends))

    def declare_lost(self, event: ClusterLost, now: float) -> Iterator[Token]:
        """Take an operator's word that nothing of ours runs on a cluster any more; ``ConflictError`` while its agent
        is connected, whose word counts."""
        cluster = self._grid[event.cluster]
        if cluster.contact.connected:
            raise ConflictError(
                f"the agent of {cluster.name} is connected, and says what runs there",
                field="cluster",
                value=cluster.name,
                hint=f"to have its jobs run elsewhere, use koala clusters drain {cluster.name} --requeue",
            )
        told = f"{cluster.name} was declared lost" + (f": {event.reason}" if event.reason else "")
        with self._health.one_event(cluster.name):
            for token in cluster.awaited:
                self._components.lose(token, told, now)
                yield token
        cluster.contact.lost_by = None
        self._confirmations.retry_deadlines(cluster.name)

    def _lost_at(self, cluster: ClusterStatus, token: Token) -> tuple[float, str]:
        """When a component of a silent cluster is certainly over, and why; infinite where no time says so."""
        found, since = self._ledger.find(token), cluster.contact.silent_since
        if found is None or since is None:
            return inf, ""
        ends = (
            (_lease_over_at(*found, since), "its lease is over"),
            (self._walltime_over_at(found[0]), "its walltime is over"),
        )
        at, why = min(ends)
        return max(at, since + self._rules.unreachable_after, cluster.contact.silence_ignored_until), why

    def _walltime_over_at(self, job: Job) -> float:
        """When every runner has counted the walltime to its end. Times of the daemon before this one count as of the
        moment at which this one began: its clock may have been set."""
        ends = walltime_ends(job)
        if ends is None or job.spec.walltime is None:
            return inf
        launched_at = max(ends - job.spec.walltime, self.began)
        return launched_at + with_margin(job.spec.walltime + WALLTIME_ALLOWANCE)

    def _is_silent(self, cluster: ClusterStatus, now: float) -> bool:
        """Whether a cluster has been out of reach for ``unreachable_after``, as far as we listened."""
        contact = cluster.contact
        if contact.connected or contact.silent_since is None:
            return False
        return now >= max(contact.silent_since + self._rules.unreachable_after, contact.silence_ignored_until)

    def _check_at(self, cluster: ClusterStatus, at: float) -> None:
        """Look at a silent cluster then, and not when it was to be looked at before."""
        cluster.contact.check_at = at
        self._timers.add(at, Deadline.UNREACHABLE, cluster=cluster.name)


def _lease_over_at(job: Job, component: Component, silent_since: float) -> float:
    """When a component's runners have ended it, which count their lease from no later a moment than this."""
    if component.lease is None:
        return inf
    grace = job.spec.warning.grace if job.spec.warning is not None else 0.0
    return silent_since + with_margin(component.lease + grace)
