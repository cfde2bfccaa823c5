"""How old the news is: no deadline says anything of what it has not been told, and nobody's silence is our own sleep.

A deadline that has passed waits until every cluster that it concerns has told all that it knew at that moment: what it
waits for may have happened in time, and the word of it be on its way.
"""

from collections import defaultdict

from koalapy.model.job import Component, ComponentState, Job
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import ClusterName
from koalapy.scheduling.claiming.claiming import telling
from koalapy.scheduling.grid import ClusterStatus
from koalapy.scheduling.ledger import live
from koalapy.scheduling.state import SchedulerState
from koalapy.scheduling.timers import SHORTEST_PAUSE, Deadline, Timer

NEEDS_NEWS = (Deadline.CLAIM_GRACE, Deadline.BARRIER, Deadline.LAUNCH, Deadline.WALLTIME, Deadline.STOP)
"""Deadlines that say that something has not happened."""
EVEN_OUT_OF_REACH = (Deadline.BARRIER, Deadline.STOP)
"""Those of them that need not wait for a cluster that counts as out of reach: nothing of value is lost."""
NAP = 1.0
"""Called so many seconds later than it had asked for, the scheduler was not listening meanwhile."""


class Confirmations:
    """What clusters have confirmed, which deadlines wait for that, and for how long clusters have been silent."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid, self._timers = state.rules, state.ledger, state.grid, state.timers
        self._waiting: defaultdict[ClusterName, list[Timer]] = defaultdict(list)

    # What was known when

    def is_old_for(self, timer: Timer, job: Job, now: float) -> bool:
        """Whether a deadline that has passed must wait for news; then it comes again when there is some."""
        if timer.kind not in NEEDS_NEWS:
            return False
        missing = sorted({c.cluster for c in _concerned(timer, job) if not self._has_told(timer, c, now)})
        if not missing:
            return False
        self._waiting[missing[0]].append(timer)
        for cluster in missing:
            self._ask(cluster, now)
        return True

    def confirmed(self, cluster: ClusterName, as_of: float) -> None:
        """A cluster has told all that it knew at a moment."""
        status = self._grid[cluster]
        status.asked, status.asked_in_vain_since = False, None
        status.confirmed_at = max(status.confirmed_at, as_of)
        self.look_again(cluster)

    def look_again(self, cluster: ClusterName) -> None:
        """Deadlines that wait for a cluster's news are due once more: it spoke, or is out of reach, or lost."""
        for timer in self._waiting.pop(cluster, ()):
            self._timers.postpone(timer, timer.at)

    def has_given_up_asking(self, cluster: ClusterStatus, now: float) -> bool:
        """Whether a cluster is heard of, maybe, but has not once confirmed what it knows for as long as a silent one
        is waited for; one that comes back at the end of that has some time more."""
        since, patience = cluster.asked_in_vain_since, self._rules.lost_after + self._rules.unreachable_after
        return since is not None and now >= since + patience

    def _has_told(self, timer: Timer, component: Component, now: float) -> bool:
        cluster = self._grid[component.cluster]
        if cluster.confirmed_at >= timer.at or self.has_given_up_asking(cluster, now):
            return True
        return timer.kind in EVEN_OUT_OF_REACH and not cluster.connected and component.unknown_since is not None

    def _ask(self, cluster: ClusterName, now: float) -> None:
        status = self._grid[cluster]
        if status.connected and not status.asked:
            status.asked = True
            self._ledger.confirm(cluster)
            if status.asked_in_vain_since is None:
                status.asked_in_vain_since = now
                self._watch_answer(status)

    def _watch_answer(self, cluster: ClusterStatus) -> None:
        """Be woken when it has been asked in vain for too long."""
        if cluster.asked_in_vain_since is not None:
            at = cluster.asked_in_vain_since + self._rules.lost_after + self._rules.unreachable_after
            self._timers.add(at, Deadline.LOST, cluster=cluster.name)

    # What is on its way

    def told(self, cluster: ClusterName, status: ComponentStatus) -> None:
        """A cluster has told of a component."""
        if status.over and status.token in self._grid[cluster].live:
            self._grid[cluster].over.add(status.token)

    def is_over(self, job: Job) -> bool:
        """Whether a job's program has ended, though its exit code is still on the way, after all its output."""
        return all(c.exit_code is not None or job.token(c.index) in self._grid[c.cluster].over for c in telling(job))

    # Contact

    def contact_made(self, cluster: ClusterStatus, now: float) -> None:
        """A cluster has told everything; whether that was still so when it did is another question."""
        cluster.connected, cluster.asked = True, False
        cluster.last_heard = cluster.silent_since = now
        self.look_again(cluster.name)
        if cluster.asked_in_vain_since is not None:
            self._ask(cluster.name, now)  # else it would have been asked in vain for ever, with nothing to wait for

    def contact_lost(self, cluster: ClusterStatus, heard: float, now: float) -> None:
        """A cluster was last heard of at that time."""
        cluster.connected, cluster.asked = False, False
        cluster.last_heard = cluster.silent_since = heard
        self._watch(cluster, now)

    def slept(self, now: float, before: float) -> None:
        """Called at last, after ``before``: what we did not hear while we slept is nobody's silence.

        What was said meanwhile is read first, for as long as a cluster may take to be heard of.
        """
        wakeup = self._timers.next_at()
        late = 0.0 if wakeup is None else now - max(wakeup, before)
        if late > NAP:
            for cluster in self._grid.clusters():
                if cluster.asked_in_vain_since is not None:
                    cluster.asked_in_vain_since += late
                    self._watch_answer(cluster)
                if not cluster.connected and cluster.silent_since is not None:
                    cluster.silent_since += late
                    cluster.patience_until = now + self._rules.unreachable_after
                    self._watch(cluster, now)

    def is_silent_for(self, cluster: ClusterStatus, span: float, now: float) -> bool:
        """Whether a cluster has been out of reach for so many seconds, as far as we listened."""
        if cluster.connected or cluster.silent_since is None:
            return False
        return now >= max(cluster.silent_since + span, cluster.patience_until)

    def go_on_watching(self, cluster: ClusterStatus, now: float) -> None:
        """Be woken while a cluster is away, so that it shows when we were not."""
        if not cluster.connected and not self.is_silent_for(cluster, self._rules.lost_after, now):
            at = now + max(self._rules.unreachable_after, SHORTEST_PAUSE)
            self._timers.add(at, Deadline.UNREACHABLE, cluster=cluster.name)

    def _watch(self, cluster: ClusterStatus, now: float) -> None:
        since = now if cluster.silent_since is None else cluster.silent_since
        for kind, span in (
            (Deadline.UNREACHABLE, self._rules.unreachable_after),
            (Deadline.LOST, self._rules.lost_after),
        ):
            self._timers.add(max(now, since + span, cluster.patience_until), kind, cluster=cluster.name)


def _concerned(timer: Timer, job: Job) -> tuple[Component, ...]:
    """The components whose news a deadline hangs on: those that may still say something."""
    components = live(job).components
    if timer.kind is Deadline.CLAIM_GRACE:
        components = (components[timer.component],)
    return tuple(c for c in components if c.state is not ComponentState.PLACED and not c.has_ended)
