"""What clusters have confirmed: a deadline ends nothing before all is known that had happened when it passed.

A deadline that has passed waits until every cluster that it concerns has confirmed that it has reported all that it
knew at that moment: what is waited for may have happened in time, and the report of it be on its way.
"""

from collections import defaultdict

from koalapy.model.job import Component, ComponentState, Job
from koalapy.model.request import ClusterName
from koalapy.scheduler.cluster_conditions import ContactStatus
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState
from koalapy.scheduler.timers import Deadline, Timer

NEED_CONFIRMATION = (Deadline.CLAIM_GRACE, Deadline.BARRIER, Deadline.LAUNCH, Deadline.WALLTIME, Deadline.STOP)
"""Deadlines that say that something has not happened."""
CONFIRMATION_TIMEOUT = 600.0
"""Seconds for which deadlines wait for a cluster that is heard of and does not confirm what it knows, beside
``unreachable_after``."""
NOT_FROM_UNREACHABLE = (Deadline.BARRIER, Deadline.STOP)
"""Those of them that need not wait for a cluster that counts as out of reach: nothing of value is lost."""


class Confirmations:
    """Requests confirmations of clusters, and keeps the deadlines that wait for them."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._waiting: defaultdict[ClusterName, list[Timer]] = defaultdict(list)

    def is_awaited(self, timer: Timer, job: Job, now: float) -> bool:
        """Whether a deadline that has passed must wait for confirmations; then it comes again when there are some."""
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
            self._request(self._grid[name], now)
        return True

    def _has_confirmed(self, timer: Timer, component: Component, now: float) -> bool:
        contact = self._grid[component.cluster].contact
        if contact.confirmed_at >= timer.at or self.has_timed_out(contact, now):
            return True
        return timer.kind in NOT_FROM_UNREACHABLE and not contact.connected and component.unknown_since is not None

    def received(self, name: ClusterName, as_of: float) -> None:
        """A cluster has reported all that it knew at a moment."""
        contact = self._grid[name].contact
        contact.confirmation_requested, contact.unconfirmed_since = False, None
        contact.confirmed_at = max(contact.confirmed_at, as_of)
        self.retry_deadlines(name)

    def retry_deadlines(self, name: ClusterName) -> None:
        """Deadlines that wait for a cluster are due once more: it confirmed, or is out of reach, or lost."""
        for timer in self._waiting.pop(name, ()):
            self._timers.postpone(timer, timer.at)

    def has_timed_out(self, contact: ContactStatus, now: float) -> bool:
        """Whether a cluster is heard of, and has been for ``CONFIRMATION_TIMEOUT`` without confirming what it knows."""
        since = contact.unconfirmed_since
        return contact.connected and since is not None and now >= since + self._timeout

    def reconnected(self, cluster: ClusterStatus, now: float) -> None:
        """What it was asked for before may never have arrived."""
        cluster.contact.confirmation_requested = False
        self.retry_deadlines(cluster.name)
        if cluster.contact.unconfirmed_since is not None:
            self._request(cluster, now)  # else it would stay unconfirmed for ever, with nothing to wait for

    def extend(self, cluster: ClusterStatus, seconds: float) -> None:
        """Do not count seconds in which nobody could have heard its confirmation."""
        if cluster.contact.unconfirmed_since is not None:
            cluster.contact.unconfirmed_since += seconds
            self._set_timeout(cluster, cluster.contact.unconfirmed_since)

    def _request(self, cluster: ClusterStatus, now: float) -> None:
        contact = cluster.contact
        if contact.connected and not contact.confirmation_requested:
            contact.confirmation_requested = True
            self._ledger.confirm(cluster.name)
            if contact.unconfirmed_since is None:
                contact.unconfirmed_since = now
                self._set_timeout(cluster, now)

    def _set_timeout(self, cluster: ClusterStatus, since: float) -> None:
        self._timers.add(since + self._timeout, Deadline.LOST, cluster=cluster.name)

    @property
    def _timeout(self) -> float:
        return CONFIRMATION_TIMEOUT + self._rules.unreachable_after
