"""Which low-priority jobs make room for a job of high priority (docs/scheduling.md; step 3 of a claiming try)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from koalapy.model.job import Job, JobId, Priority, Token
from koalapy.model.request import ClusterName
from koalapy.model.wording import listed, three_digits
from koalapy.scheduler.attempts.attempt_facts import is_program_over, walltime_ends
from koalapy.scheduler.claims.least_harm import Candidate, Harm, harm_of, least_harm
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.promise import is_promised
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import SchedulerState

PREEMPTED = "preempted"
HOUR = 3600
STOPPING_TAKES = 5.0
"""Seconds from the order to stop a job until its resource managers have its nodes back: a program has two of them
between the signals, and its runner and the resource manager need a moment, too."""

Held = Mapping[JobId, Counter[ClusterName]]
"""Nodes of jobs, by cluster."""


class Victim(NamedTuple):
    """A job that makes room."""

    job: Job
    where: str
    """The clusters where it does."""
    why: str
    """Why this one and no other, after a reason; may be empty."""


@dataclass(frozen=True, slots=True)
class Room:
    """What makes room for components that are about to start."""

    victims: tuple[Victim, ...] = ()
    awaited: tuple[tuple[Job, float], ...] = ()
    """Jobs that need not be stopped, for their nodes will be there as soon by themselves; and when."""


def is_preemptible(job: Job, rules: Rules, now: float) -> bool:
    """Whether the live attempt of a job makes room for jobs of high priority, as long as it does not end anyway."""
    return job.spec.priority is Priority.LOW and job.ending is None and not is_promised(job, rules, now)


def within_limit(cluster: ClusterStatus, count: int) -> int:
    """As many of these nodes as the resource manager takes of us."""
    return count if cluster.limit is None else min(count, cluster.limit.size - 1)


def with_preemption(cluster: ClusterStatus, more: int = 0) -> int:
    """Nodes that a job of high priority could have there, were so many ``more`` idle: idle, about to be, or held by
    low-priority jobs; as many of all these are left as are kept for who was promised its turn."""
    return within_limit(cluster, cluster.expected + more + cluster.preemptible - cluster.kept_from())


class Preemption:
    """Chooses victims; to end them is the claiming's business."""

    event = PREEMPTED
    """What a victim's timeline calls it."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid = state.rules, state.ledger, state.grid

    def available(self, cluster: ClusterStatus) -> int:
        """Nodes that a job could have there if others make room for it."""
        return with_preemption(cluster)

    def _stoppable(self, cluster: ClusterStatus) -> Mapping[Token, int]:
        """Components there whose jobs may be stopped, with their nodes."""
        return cluster.preemptible_components

    def reason(self, where: str, job: Job) -> str:
        """What a victim is told."""
        return f"{PREEMPTED}: {where} {'are' if ',' in where else 'is'} needed for job {job.id} of high priority"

    def told(self, victims: Iterable[Victim]) -> str:
        """What the job is told for which they made room; empty for nothing."""
        return ""

    def stopping(self, victim: Job) -> Job:
        """A victim is about to be stopped."""
        return victim

    def make_room(self, needed: Mapping[ClusterName, int], now: float) -> Room:
        """For so many nodes in all on each cluster; nobody makes room where nodes are about to be free anyway, or
        where all would not be enough."""
        lacking = {name: size - _spare(self._grid[name]) for name, size in needed.items()}
        lacking = {name: count for name, count in lacking.items() if count > 0}
        if not lacking:
            return Room()
        held = self._held(lacking)
        return (
            self._youngest(held, lacking)
            if self._rules.preemption_order == "jst"
            else self._least_harm(held, lacking, now)
        )

    def _held(self, clusters: Mapping[ClusterName, int]) -> defaultdict[JobId, Counter[ClusterName]]:
        """The nodes of each job there that may be stopped, and is not ending anyway."""
        held = defaultdict[JobId, Counter[ClusterName]](Counter)
        for name in clusters:
            for token, size in self._stoppable(self._grid[name]).items():
                if (found := self._ledger.find(token)) is not None:
                    held[found[0].id][name] += size
        return held

    # The order of M05

    def _youngest(self, held: Held, lacking: Mapping[ClusterName, int]) -> Room:
        """Cluster by cluster, in descending order of their JST, and no more than needed: those that turn out to be
        superfluous once the others are chosen are spared, the one that has run longest first."""
        chosen: dict[JobId, ClusterName] = {}
        for name, count in lacking.items():
            freed = sum(held[job][name] for job in chosen)
            others = {job: nodes[name] for job, nodes in held.items() if nodes[name] and job not in chosen}
            chosen |= dict.fromkeys(self._youngest_there(others, count - freed), name)
        return Room(tuple(Victim(self._ledger.jobs[job], name, "") for job, name in chosen.items()))

    def _youngest_there(self, held: Mapping[JobId, int], lacking: int) -> list[JobId]:
        if sum(held.values()) < lacking:
            return []
        chosen: list[JobId] = []
        for job in sorted(held, key=lambda job: (-(live(self._ledger.jobs[job]).start_estimate or 0.0), -job)):
            if lacking <= 0:
                break
            chosen.append(job)
            lacking -= held[job]
        for job in reversed(chosen):
            if lacking + held[job] <= 0:
                chosen.remove(job)
                lacking += held[job]
        return chosen

    # Least harm

    def _least_harm(self, held: Held, lacking: Mapping[ClusterName, int], now: float) -> Room:
        lacks, awaited = Counter(lacking), list[JobId]()
        about_to_end = self._about_to_end(held, now)
        for job in about_to_end:
            if any(lacks[name] > 0 for name in held[job]):
                awaited.append(job)
                lacks.subtract(held[job])
        others = [job for job in held if job not in about_to_end]
        chosen = least_harm([Candidate(job, held[job], _harm(self._ledger.jobs[job], now)) for job in others], lacks)
        if chosen is None:
            return Room()
        why = _why(chosen)
        victims = (Victim(self._ledger.jobs[each.job], listed(sorted(each.frees)), why) for each in chosen)
        return Room(tuple(victims), tuple((self._ledger.jobs[job], about_to_end[job]) for job in awaited))

    def _about_to_end(self, held: Held, now: float) -> dict[JobId, float]:
        """Those that surely end by themselves as soon as if they were told to now, and when; the next first."""
        ends: dict[JobId, float] = {}
        for ident in held:
            job = self._ledger.jobs[ident]
            if (end := self._surely_ends(job)) <= now + self._stopping_takes(job):
                ends[ident] = max(now, end)
        return dict(sorted(ends.items(), key=lambda each: (each[1], each[0])))

    def _surely_ends(self, job: Job) -> float:
        """By its walltime, or since its program is over. Predictions do not count: they are seldom right to the second,
        and a job of high priority would wait in vain."""
        if live(job).barrier_at is not None and is_program_over(job, self._grid):
            return 0.0
        end = walltime_ends(job)
        return inf if end is None else end

    def _stopping_takes(self, job: Job) -> float:
        """Until its nodes are there; no longer than a claim waits for local users, for where that is short all is."""
        return min(STOPPING_TAKES, self._rules.claim_grace) + (job.spec.warning.grace if job.spec.warning else 0.0)


def _spare(cluster: ClusterStatus) -> int:
    """Nodes that will be there without anybody's making room. Nobody makes room for whom nodes are kept for."""
    return cluster.expected - min(cluster.kept_from(), max(0, cluster.expected))


def _why(chosen: Sequence[Candidate]) -> str:
    work, jobs = harm_of(chosen).work, f" of {len(chosen)} jobs" if len(chosen) > 1 else ""
    if not work:
        return ", and no work is lost so"
    amount = f"{work} node-seconds" if work < HOUR else f"{three_digits(work / HOUR)} node-hours"
    return f", and the least work is lost so: {amount}{jobs}"


def _harm(job: Job, now: float) -> Harm:
    """What is lost if a job has to begin anew: all nodes have worked since the barrier opened."""
    attempt = live(job)
    lasted = 0.0 if attempt.barrier_at is None else max(0.0, now - attempt.barrier_at)
    width = len({component.cluster for component in attempt.gang})
    return Harm(round(lasted * sum(component.size for component in attempt.gang)), job.generation, width)
