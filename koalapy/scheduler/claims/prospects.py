"""What is to be expected of a job that cannot start yet: the figures that priced claiming weighs (``pricing.py``)."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from math import prod

from koalapy.model.job import Component, ComponentState, Job, parse_token
from koalapy.model.request import ClusterName
from koalapy.scheduler.advisor.knowledge import expected_end
from koalapy.scheduler.claims.pricing import Outlook, later_after_another_try, later_from_the_queue, waited_for
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.state import SchedulerState

MAX_EXPECTED_ENDS = 200
"""Components of ours on a cluster whose ends are looked at, those that have been there longest: many are not asked for
each claiming try."""
MAX_REQUESTS = 50
"""Waiting jobs, the first ones, whose requests tell how many nodes all of them ask for."""


class Prospects:
    """Works out outlooks from what claims have shown, and from when those who have the nodes will have ended."""

    def __init__(self, state: SchedulerState, queues: PlacementQueues) -> None:
        self._state, self._rules, self._grid, self._ledger = state, state.rules, state.grid, state.ledger
        self._queues = queues

    def until_next_try(
        self, job: Job, held: Sequence[Component], lacking: Sequence[Component], at: float, now: float
    ) -> Outlook:
        """Of a job that is claimed for again at a moment before its start time, whether it holds these components
        until then or not; ``lacking`` have no room at present."""
        left, seconds = max(0.0, (live(job).start_estimate or now) - now), at - now
        room = prod(self._chance_of_room(job, component, left, now) for component in lacking)
        sound, soon_sound = self._chance_sound(live(job).gang, now), self._chance_sound(held, now)
        lost, again = self._lost(held, seconds, now), self._again(job, now)
        later = room * later_after_another_try(sound, lost, again, 1.0 - soon_sound, seconds)
        return self._outlook(job, held, seconds * soon_sound, later, now)

    def beyond_start_time(
        self, job: Job, held: Sequence[Component], lacking: Sequence[Component], now: float
    ) -> Outlook:
        """Of a job that queues again if it lets go of these components, or else waits longer for those it lacks."""
        seconds = max((self._until_room(job, component, now) for component in lacking), default=0.0)
        attempt = live(job)
        planned = attempt.placed_at + max(component.transfer_time for component in attempt.gang)
        if now + seconds > planned + self._rules.barrier_timeout:
            return self._outlook(job, held, seconds, 0.0, now)
        room = prod(self._chance_of_room(job, component, seconds, now) for component in lacking)
        later = later_from_the_queue(room * self._chance_sound(attempt.gang, now), self._again(job, now), seconds)
        return self._outlook(job, held, seconds, later, now)

    def _outlook(self, job: Job, held: Sequence[Component], seconds: float, later: float, now: float) -> Outlook:
        nodes = sum(component.size for component in held)
        return Outlook(nodes, seconds, self._wanted(held, seconds, now), job.spec.request.total_size, later)

    def _again(self, job: Job, now: float) -> float:
        """Seconds by which the job starts later once it has given up."""
        return self._state.later_starts.expected(job.spec.request.total_size, now)

    def runner_wait(self, job: Job, now: float) -> float:
        """Seconds that the slowest of a job's runners is expected to take until its nodes have reported."""
        gang = live(job).gang
        return max(self._grid[c.cluster].evidence.runner_wait(c.size, now) for c in gang)

    def _wanted(self, held: Sequence[Component], seconds: float, now: float) -> float:
        """How much others want each of these nodes, on average: as many as wait for it, or, where no job that waits
        could be placed, as likely as nodes are lost there that nobody holds."""
        total = sum(component.size for component in held)
        if not total:
            return 0.0
        awaited = self._queues.awaited_clusters()
        backlog = waited_for(total, self._nodes_asked_for(), sum(cluster.total for cluster in self._grid.clusters()))
        return (
            sum(
                c.size * (backlog if c.cluster in awaited else self._evidence_lost(c.cluster, c.size, seconds, now))
                for c in held
            )
            / total
        )

    def _nodes_asked_for(self) -> float:
        """By all jobs that wait, as far as the first of them tell."""
        first = [request.total_size for request in islice(self._queues.requests(), MAX_REQUESTS)]
        return sum(first) * len(self._queues) / len(first) if first else 0.0

    def _lost(self, held: Sequence[Component], seconds: float, now: float) -> float:
        """The chance that room for some of these components is gone after so many seconds in which nobody holds it."""
        on: Counter[ClusterName] = Counter()
        for component in held:
            on[component.cluster] += component.size
        return 1.0 - prod(1.0 - self._evidence_lost(cluster, size, seconds, now) for cluster, size in on.items())

    def _evidence_lost(self, cluster: ClusterName, size: int, seconds: float, now: float) -> float:
        return self._grid[cluster].evidence.chance_lost(size, seconds, now)

    def _chance_sound(self, components: Sequence[Component], now: float) -> float:
        """That all runners of these that have not reported yet will, and are neither overtaken nor break."""
        awaited = (c for c in components if c.state is not ComponentState.CLAIMED)
        return prod(1.0 - self._grid[c.cluster].evidence.chance_in_vain(c.size, now) for c in awaited)

    def _chance_of_room(self, job: Job, component: Component, seconds: float, now: float) -> float:
        """That a component without room has some within so many seconds: not before enough of what runs there has
        ended, and then as often as such nodes have come back."""
        cluster = self._grid[component.cluster]
        if (end := self._end_that_suffices(job, cluster, component.size, now)) is not None and end > now + seconds:
            return 0.0
        return cluster.evidence.chance_returned(component.size, seconds, now)

    def _until_room(self, job: Job, component: Component, now: float) -> float:
        """Seconds until there is room for a component: by who ends there, or else as it was before."""
        cluster = self._grid[component.cluster]
        average = cluster.evidence.until_returned(component.size, now)
        end = self._end_that_suffices(job, cluster, component.size, now)
        return average if end is None else max(average, end - now)

    def _end_that_suffices(self, whose: Job, cluster: ClusterStatus, size: int, now: float) -> float | None:
        """When enough of our own components there are expected to have ended; None where that is not known, or where
        more is lacking than these have."""
        lacking = size - max(0, cluster.expected)
        if lacking <= 0:
            return now
        ends = []
        for token, freed in islice(cluster.live.items(), MAX_EXPECTED_ENDS):
            job = self._ledger.get(parse_token(token).job)
            if job is None or job.id == whose.id or job.ending is not None:
                continue  # its own nodes serve nothing, and those that are being given back count already
            end = expected_end(job, self._state.experience, now)
            if end is not None:
                ends.append((end, freed))
        for end, freed in sorted(ends):
            lacking -= freed
            if lacking <= 0:
                return end
        return None
