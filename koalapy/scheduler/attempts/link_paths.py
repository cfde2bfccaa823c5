"""Learn from measurements and starts of jobs whether nodes of clusters reach each other directly.

This only orders the tries of the next starts: direct connections first, or relays at once. After some minutes direct
connections are tried first again.
"""

from collections.abc import Collection

from koalapy.model.cluster import ClusterPair, LinkUse, RelayedSince, pair_of
from koalapy.model.job import Job
from koalapy.model.job_spec import Launcher
from koalapy.model.request import ClusterName
from koalapy.scheduler.events import LinkMeasured
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import Deadline, SchedulerState

DIRECT_RETRY = 600.0
"""Seconds after which a link that was found to be relayed is tried directly again. A try costs a start 5 s at most."""


class LinkPaths:
    """The paths of messages between clusters, as they were last shown."""

    def __init__(self, state: SchedulerState) -> None:
        self._grid, self._timers, self._relayed = state.grid, state.timers, state.relayed

    def restore(self, now: float) -> None:
        """Plan to try those links directly that an earlier daemon run has measured as not direct."""
        for pair in self._grid.indirect_pairs():
            self._set_relayed(pair, "a measurement before the daemon's start", now)

    def apply_measurement(self, event: LinkMeasured, now: float) -> None:
        """Store a measured link."""
        pair = pair_of(event.one, event.other)
        self._grid.set_link(event.one, event.other, event.link)
        if event.link.direct:
            self._relayed.pop(pair, None)
        elif event.link.relayed or event.link.unreachable:
            self._set_relayed(pair, "its measurement", now)

    def learn_from_report(
        self, job: Job, cluster: ClusterName, pairs: Collection[ClusterPair], now: float
    ) -> list[ClusterPair]:
        """Store which pairs of clusters a job's head node has joined by relays, as direct connections failed.

        A cluster reports about its own links only: return the pairs of other clusters, which are ignored.
        """
        view = self._grid.view()
        for pair in pairs:
            link = view.link_between(*pair)
            was_tried = job.spec.links is LinkUse.ANY and not view.relays.must_relay(*pair)
            if cluster in pair and was_tried and (link.is_retried or not link.relayed):
                self._grid.learn_relayed(pair)
                reason = f"nodes of job {job.id} did not reach each other directly, by the report of {cluster}"
                self._set_relayed(pair, reason, now)
        return [pair for pair in pairs if cluster not in pair]

    def learn_from_launch(self, job: Job) -> None:
        """Store that the head node of a launched program reaches the other clusters directly, except by relays.

        A script is launched before its programs.
        """
        attempt = live(job)
        if job.spec.launcher is Launcher.OPENMPI and not job.spec.script:
            head = attempt.head.cluster
            for cluster in {component.cluster for component in attempt.gang} - {head}:
                pair = pair_of(head, cluster)
                if pair not in attempt.relayed:
                    self._grid.learn_direct(pair)
                    self._relayed.pop(pair, None)

    def learn_from_failed_start(self, job: Job, cluster: ClusterName, now: float) -> None:
        """Doubt the direct links of a cluster on which a job has failed between its barrier and its launch."""
        attempt = live(job)
        if job.spec.launcher is not Launcher.OPENMPI or attempt.barrier_at is None or attempt.launched_at is not None:
            return
        for peer in {component.cluster for component in attempt.gang} - {cluster}:
            pair = pair_of(cluster, peer)
            link = self._grid.known_link(pair)
            if link.direct or link.is_retried:
                self._grid.doubt_path(pair, is_retried=False)
            if (relayed := self._relayed.get(pair)) is not None and link.is_retried:
                self._set_relayed(pair, relayed.reason, now)

    def retry_direct(self, now: float) -> None:
        """Try those links directly again that were last found to be relayed long ago.

        Without a hub a start could not fall back on relays, so that only a measurement tries them.
        """
        for pair, relayed in self._relayed.items():
            is_due = relayed.retry_at is not None and relayed.retry_at <= now and self._grid.relays.streams > 0
            if is_due and not self._grid.known_link(pair).is_retried:
                self._grid.doubt_path(pair, is_retried=True)

    def _set_relayed(self, pair: ClusterPair, reason: str, now: float) -> None:
        """Store why a link is relayed from now on, unless it was before, and plan the next direct try."""
        former = self._relayed.get(pair)
        since, retry_at = now if former is None else former.since, now + DIRECT_RETRY
        self._relayed[pair] = RelayedSince(since, reason, retry_at)
        self._timers.add(retry_at, Deadline.DIRECT_RETRY)
