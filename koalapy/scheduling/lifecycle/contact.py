"""Contact with clusters: what follows when one is silent, and that nobody's silence is our own sleep."""

from collections.abc import Iterator

from koalapy.model.job import Token
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.lifecycle.cluster_health import ClusterHealth
from koalapy.scheduling.lifecycle.components import Components
from koalapy.scheduling.lifecycle.confirmations import Confirmations
from koalapy.scheduling.state import SchedulerState
from koalapy.scheduling.timers import MIN_RETRY_PAUSE, Deadline, Timer

MAX_LATENESS = 1.0
"""Called so many seconds later than it had asked for, the scheduler was not listening meanwhile."""


class Contact:
    """Knows for how long clusters have been silent, and gives up their components when that is too long."""

    def __init__(
        self, state: SchedulerState, confirmations: Confirmations, components: Components, health: ClusterHealth
    ) -> None:
        self._rules, self._grid, self._timers = state.rules, state.grid, state.timers
        self._confirmations, self._components, self._health = confirmations, components, health

    def made(self, cluster: ClusterStatus, now: float) -> None:
        """A cluster has reported everything; whether that was still so when it did is another question."""
        cluster.contact.connected = cluster.contact.has_agent = True
        cluster.contact.last_heard = cluster.contact.silent_since = now
        self._confirmations.reconnected(cluster, now)

    def lost(self, cluster: ClusterStatus, heard: float, now: float) -> None:
        """A cluster was last heard of at that time."""
        cluster.contact.losses += cluster.contact.connected
        cluster.contact.connected, cluster.contact.confirmation_requested = False, False
        cluster.contact.last_heard = cluster.contact.silent_since = heard
        if cluster.outdated_since is None:
            cluster.outdated_since = heard
        self._watch(cluster, now)

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
                    self._watch(cluster, now)

    def is_overdue(self, timer: Timer, now: float) -> Iterator[Token]:
        """Give up components of a cluster that is silent: their tokens, whose jobs may have to be settled."""
        cluster = self._grid[timer.cluster]
        if self._confirmations.has_timed_out(cluster.contact, now):
            self._confirmations.retry_deadlines(cluster.name)
        heard = cluster.contact.last_heard
        span = self._rules.lost_after if timer.kind is Deadline.LOST else self._rules.unreachable_after
        if heard is None or not self._is_silent_for(cluster, span, now):
            return
        if timer.kind is Deadline.LOST:
            cluster.contact.unconfirmed_since = None  # whatever of it is asked about next is new
        with self._health.one_event(cluster.name):
            for token in cluster.awaited:
                if timer.kind is Deadline.LOST:
                    self._components.lose(token, f"not heard of for {self._rules.lost_after:g} s", now)
                else:
                    self._components.lose_sight(token, heard, now)
                yield token
        self._confirmations.retry_deadlines(cluster.name)
        if timer.kind is Deadline.UNREACHABLE and not self._is_silent_for(cluster, self._rules.lost_after, now):
            # Be woken while it is away, so that it shows when we were not.
            at = now + max(self._rules.unreachable_after, MIN_RETRY_PAUSE)
            self._timers.add(at, Deadline.UNREACHABLE, cluster=cluster.name)

    def _is_silent_for(self, cluster: ClusterStatus, span: float, now: float) -> bool:
        """Whether a cluster has been out of reach for so many seconds, as far as we listened."""
        contact = cluster.contact
        if contact.connected or contact.silent_since is None:
            return False
        return now >= max(contact.silent_since + span, contact.silence_ignored_until)

    def _watch(self, cluster: ClusterStatus, now: float) -> None:
        contact = cluster.contact
        since = now if contact.silent_since is None else contact.silent_since
        for kind, span in (
            (Deadline.UNREACHABLE, self._rules.unreachable_after),
            (Deadline.LOST, self._rules.lost_after),
        ):
            self._timers.add(max(now, since + span, contact.silence_ignored_until), kind, cluster=cluster.name)
