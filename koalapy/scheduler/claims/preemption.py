"""Which jobs make room for another (docs/scheduling.md; step 3 of a claiming try), with the least loss of work."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import NamedTuple

from koalapy.model.job import Job, JobId, Priority, Token
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes, format_three_digits
from koalapy.scheduler.attempts.facts import is_program_over, walltime_ends
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.reservation import is_promised
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import SchedulerState

PREEMPTED = "preempted"
RECLAIMED = "reclaimed"
HOUR = 3600
STOPPING_TAKES = 5.0
"""Seconds from the order to stop a job until its resource managers have its nodes back: a program has two of them
between the signals, and its runner and the resource manager need a moment, too."""

Held = Mapping[JobId, Counter[ClusterName]]
"""Nodes of jobs, by cluster."""


# Which jobs to stop

MAX_STEPS = 20_000
"""Ways to stop one more job that are looked at, which takes some 30 ms."""


class Harm(NamedTuple):
    """What is lost with a job, or with several: the first part counts, each further one between equals only."""

    work: int
    """Node-seconds."""
    attempts: int
    """How often it has been placed."""
    width: int
    """Clusters that it is on: the more, the harder it is to place again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may be stopped; ``frees`` are the nodes that it gives back, by cluster."""

    job: JobId
    frees: Mapping[ClusterName, int]
    harm: Harm


def harm_of(candidates: Iterable[Candidate]) -> Harm:
    """What is lost with them in all."""
    harms = [candidate.harm for candidate in candidates]
    return Harm(*(sum(part) for part in zip(*harms, strict=True))) if harms else Harm(0, 0, 0)


def least_harm(
    candidates: Sequence[Candidate], lacking: Mapping[ClusterName, int], max_steps: int = MAX_STEPS
) -> list[Candidate] | None:
    """Return the jobs to stop for the lacking nodes, the least harmful first; None if all of them are too few.

    None is superfluous, and of equally harmful jobs the youngest is taken. After ``max_steps`` the best set found is
    returned.
    """
    lacks = {cluster: count for cluster, count in lacking.items() if count > 0}
    victims = _worth_a_look(_priced(candidates, lacks), tuple(lacks.values()))
    chosen = _greedily(victims, tuple(lacks.values()))
    if chosen is None:
        return None
    chosen = _exactly(victims, tuple(lacks.values()), chosen, max_steps)
    return [victim.candidate for victim in sorted(chosen, key=lambda victim: (victim.price, -victim.candidate.job))]


Nodes = tuple[int, ...]
"""On each cluster where some lack."""


class _Victim(NamedTuple):
    candidate: Candidate
    frees: Nodes
    helps: int
    """Nodes of those that it frees that may be of use."""
    price: int
    """Its harm as one number."""


def _priced(candidates: Sequence[Candidate], lacks: Mapping[ClusterName, int]) -> Iterable[_Victim]:
    """The candidates that help."""
    # In a number system with bases that no sum reaches, sums compare as harms do.
    most = harm_of(candidates)
    for candidate in candidates:
        frees = tuple(candidate.frees.get(cluster, 0) for cluster in lacks)
        if helps := sum(map(min, frees, lacks.values())):
            harm = candidate.harm
            price = (harm.work * (most.attempts + 1) + harm.attempts) * (most.width + 1) + harm.width
            yield _Victim(candidate, frees, helps, price)


def _worth_a_look(victims: Iterable[_Victim], lacks: Nodes) -> list[_Victim]:
    """The lowest price for each node that helps first. Of those that free the same, as many as could all be needed."""
    alike = defaultdict[Nodes, list[_Victim]](list)
    for victim in victims:
        alike[victim.frees].append(victim)
    found: list[_Victim] = []
    for frees, some in alike.items():
        most = max(-(-count // freed) for count, freed in zip(lacks, frees, strict=True) if freed)
        found += sorted(some, key=lambda victim: (victim.price, -victim.candidate.job))[:most]
    return sorted(found, key=lambda victim: (Fraction(victim.price, victim.helps), -victim.candidate.job))


def _after(lacks: Nodes, frees: Nodes) -> Nodes:
    return tuple([max(0, count - freed) for count, freed in zip(lacks, frees, strict=True)])


def _greedily(victims: Sequence[_Victim], lacks: Nodes) -> list[_Victim] | None:
    """The first ones that do, without superfluous ones; None if all of them do not."""
    chosen: list[_Victim] = []
    left = lacks
    for victim in victims:
        if (after := _after(left, victim.frees)) != left:
            chosen.append(victim)
            left = after
    return None if any(left) else _needed(chosen, lacks)


def _needed(chosen: Sequence[_Victim], lacks: Nodes) -> list[_Victim]:
    """Without those that the others make superfluous, the dearest first."""
    spare = [sum(victim.frees[place] for victim in chosen) - count for place, count in enumerate(lacks)]
    needed: list[_Victim] = []
    for victim in sorted(chosen, key=lambda victim: -victim.price):
        rest = [count - freed for count, freed in zip(spare, victim.frees, strict=True)]
        if min(rest) < 0:
            needed.append(victim)
        else:
            spare = rest
    return needed


def _exactly(victims: Sequence[_Victim], lacks: Nodes, known: list[_Victim], max_steps: int) -> list[_Victim]:
    """The best of all, or of those that were looked at where all would be too many; no worse than the known one."""
    best, least = known, sum(victim.price for victim in known)
    ways: dict[Nodes, tuple[int, list[_Victim]]] = {lacks: (0, [])}
    """Of those that leave so many lacking the one of the lowest price."""
    steps = 0
    for victim in victims:
        # Each node that still lacks costs as much as one of this victim's at least: the later ones are dearer. What is
        # given up is so before any is added: a better way may come to leave as many as one that is not worth its price.
        ways = {left: way for left, way in ways.items() if (least - way[0]) * victim.helps > sum(left) * victim.price}
        for left, (price, chosen) in list(ways.items()):
            if (steps := steps + 1) > max_steps:
                return _needed(best, lacks)
            after, price = _after(left, victim.frees), price + victim.price
            if not any(after):
                if price < least:
                    best, least = [*chosen, victim], price
            elif after not in ways or price < ways[after][0]:
                ways[after] = price, [*chosen, victim]
    return best


# Preemption


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
    """Return the nodes that a job of high priority could have, if ``more`` were idle: idle, about to be, or held by
    low-priority jobs, less those kept for a job that was promised its turn."""
    return within_limit(cluster, cluster.expected + more + cluster.preemptible - cluster.reserved_for_others())


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
        """Choose victims for so many nodes on each cluster; none where all are too few, or need not be stopped."""
        lacking = {}
        for name, size in needed.items():
            expected, kept = self._grid[name].expected, self._grid[name].reserved_for_others()
            if (count := size - expected + min(kept, max(0, expected))) > 0:
                lacking[name] = count
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
        """Choose cluster by cluster in descending order of the JST, sparing the oldest superfluous ones."""
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
        victims = (Victim(self._ledger.jobs[each.job], format_list(sorted(each.frees)), why) for each in chosen)
        return Room(tuple(victims), tuple((self._ledger.jobs[job], about_to_end[job]) for job in awaited))

    def _about_to_end(self, held: Held, now: float) -> dict[JobId, float]:
        """Those that surely end by themselves as soon as if they were told to now, and when; the next first."""
        ends: dict[JobId, float] = {}
        for ident in held:
            job = self._ledger.jobs[ident]
            grace = job.spec.warning.grace if job.spec.warning else 0.0
            # Where a claim waits for less, as all times are short, so does this.
            if (end := self._surely_ends(job)) <= now + min(STOPPING_TAKES, self._rules.claim_grace) + grace:
                ends[ident] = max(now, end)
        return dict(sorted(ends.items(), key=lambda each: (each[1], each[0])))

    def _surely_ends(self, job: Job) -> float:
        """Return when a job ends by its walltime, or as its program is over; predictions are seldom right to the
        second."""
        if live(job).barrier_at is not None and is_program_over(job, self._grid):
            return 0.0
        end = walltime_ends(job)
        return inf if end is None else end


def _why(chosen: Sequence[Candidate]) -> str:
    work, jobs = harm_of(chosen).work, f" of {len(chosen)} jobs" if len(chosen) > 1 else ""
    if not work:
        return ", and no work is lost so"
    amount = f"{work} node-seconds" if work < HOUR else f"{format_three_digits(work / HOUR)} node-hours"
    return f", and the least work is lost so: {amount}{jobs}"


def _harm(job: Job, now: float) -> Harm:
    """What is lost if a job has to begin anew: all nodes have worked since the barrier opened."""
    attempt = live(job)
    lasted = 0.0 if attempt.barrier_at is None else max(0.0, now - attempt.barrier_at)
    width = len({component.cluster for component in attempt.gang})
    return Harm(round(lasted * sum(component.size for component in attempt.gang)), job.generation, width)


def taken_back(cluster: ClusterStatus, more: int = 0) -> int:
    """Return the nodes that a job could have on its home site, if ``more`` were idle: idle, about to be, or with
    low-priority jobs of other sites, less those kept for a job that was promised its turn."""
    return within_limit(cluster, cluster.expected + more + cluster.reclaimable - cluster.reserved_for_others())


class Reclaiming(Preemption):
    """The same for one site, and for its own users only: who makes room there are jobs of others."""

    event = RECLAIMED

    def __init__(self, state: SchedulerState, site: ClusterName, move_to_front: Callable[[Job], Job]) -> None:
        super().__init__(state)
        self._site, self._move_to_front = site, move_to_front

    def available(self, cluster: ClusterStatus) -> int:
        return taken_back(cluster) if cluster.name == self._site else 0

    def _stoppable(self, cluster: ClusterStatus) -> Mapping[Token, int]:
        return cluster.reclaimable_components

    def reason(self, where: str, job: Job) -> str:
        return f"{RECLAIMED}: {where} takes back its nodes for job {job.id} of its own users"

    def told(self, victims: Iterable[Victim]) -> str:
        jobs = [victim.job for victim in victims]
        freed = sum(c.size for job in jobs for c in live(job).components if c.cluster == self._site and not c.has_ended)
        preempted_jobs = format_list([f"job {job.id}" for job in jobs])
        return f"your site {self._site} reclaimed {format_nodes(freed)}, of {preempted_jobs}"

    def stopping(self, victim: Job) -> Job:
        return self._move_to_front(victim) if self._rules.reclaimed_position == "front" else victim
