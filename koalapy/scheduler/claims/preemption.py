"""Choose the jobs to preempt for another job (docs/scheduling.md; step 3 of a claiming try) at the least cost."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import NamedTuple

from koalapy.model.job import Job, JobId, Token
from koalapy.model.job_spec import Priority
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes, format_three_digits
from koalapy.scheduler.attempts.facts import is_program_over, walltime_ends
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState

PREEMPTED = "preempted"
RECLAIMED = "reclaimed"
HOUR = 3600
STOP_DURATION_S = 5.0
"""Seconds from the stop command until the nodes are released: two between the program's signals, the others for its
runner and the resource manager."""

Held = Mapping[JobId, Counter[ClusterName]]
"""Nodes of jobs, by cluster."""


# Choosing victims

MAX_STEPS = 20_000
"""Maximum number of combinations that the exact search visits, which takes about 30 ms."""


class PreemptionCost(NamedTuple):
    """The cost of preempting one or several jobs, compared part by part."""

    work: int
    """Lost work in node-seconds."""
    attempts: int
    """Number of times that the jobs have been placed."""
    width: int
    """Number of clusters that the jobs use. Wider jobs are harder to place again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may be preempted; ``frees`` are the nodes that it releases, by cluster."""

    job: JobId
    frees: Mapping[ClusterName, int]
    cost: PreemptionCost


def total_cost(candidates: Iterable[Candidate]) -> PreemptionCost:
    """Return the sum of the candidates' costs."""
    harms = [candidate.cost for candidate in candidates]
    return PreemptionCost(*(sum(part) for part in zip(*harms, strict=True))) if harms else PreemptionCost(0, 0, 0)


def choose_victims(
    candidates: Sequence[Candidate], lacking: Mapping[ClusterName, int], max_steps: int = MAX_STEPS
) -> list[Candidate] | None:
    """Return the cheapest jobs to preempt for the lacking nodes; None if all of them together are too few.

    No victim is superfluous, and of equally expensive jobs the youngest is taken. After ``max_steps`` the best set so
    far is returned.
    """
    lacks = {cluster: count for cluster, count in lacking.items() if count > 0}
    victims = _relevant_victims(_price_candidates(candidates, lacks), tuple(lacks.values()))
    chosen = _choose_greedily(victims, tuple(lacks.values()))
    if chosen is None:
        return None
    chosen = _choose_exactly(victims, tuple(lacks.values()), chosen, max_steps)
    return [victim.candidate for victim in sorted(chosen, key=lambda victim: (victim.price, -victim.candidate.job))]


Nodes = tuple[int, ...]
"""Node counts on each cluster that lacks some."""


class _Victim(NamedTuple):
    candidate: Candidate
    frees: Nodes
    helps: int
    """The number of freed nodes that are lacking."""
    price: int
    """Its cost as one number."""


def _price_candidates(candidates: Sequence[Candidate], lacks: Mapping[ClusterName, int]) -> Iterable[_Victim]:
    """Yield the candidates that free lacking nodes, with their costs as single numbers."""
    # Encode costs as numbers with bases that no sum reaches, so that sums compare as costs do.
    total = total_cost(candidates)
    for candidate in candidates:
        frees = tuple(candidate.frees.get(cluster, 0) for cluster in lacks)
        if helps := sum(map(min, frees, lacks.values())):
            cost = candidate.cost
            price = (cost.work * (total.attempts + 1) + cost.attempts) * (total.width + 1) + cost.width
            yield _Victim(candidate, frees, helps, price)


def _relevant_victims(victims: Iterable[_Victim], lacks: Nodes) -> list[_Victim]:
    """Return the victims by price per useful node. Of those that free the same nodes, keep as many as could
    be needed."""
    alike = defaultdict[Nodes, list[_Victim]](list)
    for victim in victims:
        alike[victim.frees].append(victim)
    relevant: list[_Victim] = []
    for frees, group in alike.items():
        needed = max(-(-count // freed) for count, freed in zip(lacks, frees, strict=True) if freed)
        relevant += sorted(group, key=lambda victim: (victim.price, -victim.candidate.job))[:needed]
    return sorted(relevant, key=lambda victim: (Fraction(victim.price, victim.helps), -victim.candidate.job))


def _subtract(lacks: Nodes, frees: Nodes) -> Nodes:
    return tuple([max(0, count - freed) for count, freed in zip(lacks, frees, strict=True)])


def _choose_greedily(victims: Sequence[_Victim], lacks: Nodes) -> list[_Victim] | None:
    """Return the first victims that suffice, without superfluous ones; None if all do not suffice."""
    chosen: list[_Victim] = []
    lacking = lacks
    for victim in victims:
        if (reduced := _subtract(lacking, victim.frees)) != lacking:
            chosen.append(victim)
            lacking = reduced
    return None if any(lacking) else _drop_superfluous(chosen, lacks)


def _drop_superfluous(chosen: Sequence[_Victim], lacks: Nodes) -> list[_Victim]:
    """Return the victims without those that the others make superfluous, the most expensive dropped first."""
    spare = [sum(victim.frees[place] for victim in chosen) - count for place, count in enumerate(lacks)]
    needed: list[_Victim] = []
    for victim in sorted(chosen, key=lambda victim: -victim.price):
        remaining = [count - freed for count, freed in zip(spare, victim.frees, strict=True)]
        if min(remaining) < 0:
            needed.append(victim)
        else:
            spare = remaining
    return needed


def _choose_exactly(victims: Sequence[_Victim], lacks: Nodes, initial: list[_Victim], max_steps: int) -> list[_Victim]:
    """Return the cheapest set of victims, or the cheapest one visited within ``max_steps``."""
    best, lowest_price = initial, sum(victim.price for victim in initial)
    combinations: dict[Nodes, tuple[int, list[_Victim]]] = {lacks: (0, [])}
    """For each vector of nodes still lacking: the price and the victims of the cheapest combination."""
    steps = 0
    for victim in victims:
        # Victims are sorted by price per node: each lacking node costs at least as much as a node of this victim. Drop
        # hopeless combinations before adding others, since a better one may leave the same nodes lacking.
        combinations = {
            lacking: combination
            for lacking, combination in combinations.items()
            if (lowest_price - combination[0]) * victim.helps > sum(lacking) * victim.price
        }
        for lacking, (price, chosen) in list(combinations.items()):
            if (steps := steps + 1) > max_steps:
                return _drop_superfluous(best, lacks)
            reduced, price = _subtract(lacking, victim.frees), price + victim.price
            if not any(reduced):
                if price < lowest_price:
                    best, lowest_price = [*chosen, victim], price
            elif reduced not in combinations or price < combinations[reduced][0]:
                combinations[reduced] = price, [*chosen, victim]
    return best


# Preemption


class Victim(NamedTuple):
    """A job that is preempted."""

    job: Job
    cluster_names: str
    """The clusters on which its nodes are needed."""
    choice_reason: str
    """Why this job was chosen, appended to the reason; may be empty."""


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """The jobs that release nodes for components that are about to start."""

    victims: tuple[Victim, ...] = ()
    awaited: tuple[tuple[Job, float], ...] = ()
    """Jobs that need not be preempted, since they end by themselves as soon; and when."""


def is_preemptible(job: Job) -> bool:
    """Return whether jobs of high priority may preempt the live attempt of a job."""
    return job.spec.priority is Priority.LOW and job.ending is None


def within_limit(cluster: ClusterStatus, count: int) -> int:
    """Return the node count, reduced to what the resource manager's limit allows."""
    return count if cluster.health.limit is None else min(count, cluster.health.limit.size - 1)


def capacity_with_preemption(cluster: ClusterStatus, extra_idle: int = 0) -> int:
    """Return the nodes that a job of high priority could have, if ``extra_idle`` more were idle: nodes that are idle,
    about to be, or held by low-priority jobs."""
    return within_limit(cluster, cluster.nodes.expected + extra_idle + cluster.nodes.preemptible)


class Preemption:
    """The choice of jobs that a job of high priority preempts."""

    event = PREEMPTED
    """The name of the timeline entry of a victim."""

    def __init__(self, state: SchedulerState) -> None:
        self._rules, self._ledger, self._grid = state.rules, state.ledger, state.grid

    def available(self, cluster: ClusterStatus) -> int:
        """Return the nodes that a job could have on a cluster with preemption."""
        return capacity_with_preemption(cluster)

    def _stoppable(self, cluster: ClusterStatus) -> Mapping[Token, int]:
        """Return the components on a cluster that may be preempted, with their nodes."""
        return cluster.nodes.preemptible_components

    def victim_reason(self, clusters: str, job: Job) -> str:
        """Return the reason for the timeline of a victim."""
        return f"{PREEMPTED}: {clusters} {'are' if ',' in clusters else 'is'} needed for job {job.id} of high priority"

    def beneficiary_text(self, victims: Iterable[Victim]) -> str:
        """Return the timeline entry of the job that gets the nodes; empty for none."""
        return ""

    def prepare_victim(self, victim: Job) -> Job:
        """Change a victim's record before it is stopped."""
        return victim

    def plan_preemption(self, needed: Mapping[ClusterName, int], now: float) -> PreemptionPlan:
        """Choose victims for the needed nodes per cluster. The plan is empty if they are too few or none is needed."""
        lacking = {}
        for name, size in needed.items():
            if (count := size - self._grid[name].nodes.expected) > 0:
                lacking[name] = count
        if not lacking:
            return PreemptionPlan()
        stoppable = self._stoppable_nodes(lacking)
        return (
            self._youngest_victims(stoppable, lacking)
            if self._rules.preemption_order == "jst"
            else self._cheapest_victims(stoppable, lacking, now)
        )

    def _stoppable_nodes(self, clusters: Mapping[ClusterName, int]) -> defaultdict[JobId, Counter[ClusterName]]:
        """Return the nodes of each job on the clusters that may be preempted."""
        stoppable = defaultdict[JobId, Counter[ClusterName]](Counter)
        for name in clusters:
            for token, size in self._stoppable(self._grid[name]).items():
                if (match := self._ledger.find(token)) is not None:
                    stoppable[match[0].id][name] += size
        return stoppable

    # The order of M05

    def _youngest_victims(self, stoppable: Held, lacking: Mapping[ClusterName, int]) -> PreemptionPlan:
        """Choose victims cluster by cluster, latest estimated start (JST) first, and drop superfluous ones (M05)."""
        chosen: dict[JobId, ClusterName] = {}
        for name, count in lacking.items():
            freed = sum(stoppable[job][name] for job in chosen)
            remaining = {job: nodes[name] for job, nodes in stoppable.items() if nodes[name] and job not in chosen}
            chosen |= dict.fromkeys(self._youngest_on_cluster(remaining, count - freed), name)
        return PreemptionPlan(tuple(Victim(self._ledger.jobs[job], name, "") for job, name in chosen.items()))

    def _youngest_on_cluster(self, stoppable: Mapping[JobId, int], lacking: int) -> list[JobId]:
        """Return the jobs to stop for ``lacking`` nodes on one cluster, the latest estimated start first.

        ``stoppable``: the nodes that each job would free there. Return an empty list if all of them are too few.
        """
        if sum(stoppable.values()) < lacking:
            return []
        chosen: list[JobId] = []
        for job in sorted(stoppable, key=lambda job: (-(live(self._ledger.jobs[job]).start_estimate or 0.0), -job)):
            if lacking <= 0:
                break
            chosen.append(job)
            lacking -= stoppable[job]
        for job in reversed(chosen):
            if lacking + stoppable[job] <= 0:
                chosen.remove(job)
                lacking += stoppable[job]
        return chosen

    # Least cost

    def _cheapest_victims(self, stoppable: Held, lacking: Mapping[ClusterName, int], now: float) -> PreemptionPlan:
        """Choose the jobs to stop that lose the least work. Jobs that are about to end are awaited instead.

        The plan is empty if all the jobs together would free too few nodes.
        """
        lacks, awaited = Counter(lacking), list[JobId]()
        about_to_end = self._certain_ends(stoppable, now)
        for job in about_to_end:
            if any(lacks[name] > 0 for name in stoppable[job]):
                awaited.append(job)
                lacks.subtract(stoppable[job])
        candidates = [job for job in stoppable if job not in about_to_end]
        chosen = choose_victims(
            [Candidate(job, stoppable[job], _preemption_cost(self._ledger.jobs[job], now)) for job in candidates], lacks
        )
        if chosen is None:
            return PreemptionPlan()
        note = _victim_note(chosen)
        victims = (Victim(self._ledger.jobs[victim.job], format_list(sorted(victim.frees)), note) for victim in chosen)
        return PreemptionPlan(tuple(victims), tuple((self._ledger.jobs[job], about_to_end[job]) for job in awaited))

    def _certain_ends(self, stoppable: Held, now: float) -> dict[JobId, float]:
        """Return the jobs that certainly end by themselves as soon as a preempted one would, and when, the
        next first."""
        ends: dict[JobId, float] = {}
        for ident in stoppable:
            job = self._ledger.jobs[ident]
            grace = job.spec.warning.grace if job.spec.warning else 0.0
            # With a shorter ``claim_grace`` a claim waits less, so use the shorter limit here too.
            if (end := self._certain_end(job)) <= now + min(STOP_DURATION_S, self._rules.claim_grace) + grace:
                ends[ident] = max(now, end)
        return dict(sorted(ends.items(), key=lambda item: (item[1], item[0])))

    def _certain_end(self, job: Job) -> float:
        """Return when a job ends by its walltime, or 0 if its program has ended; infinite if unknown. Predictions are
        too inexact here."""
        if live(job).barrier_at is not None and is_program_over(job, self._grid):
            return 0.0
        end = walltime_ends(job)
        return inf if end is None else end


def _victim_note(chosen: Sequence[Candidate]) -> str:
    """Return what the preemption costs, as text to append to the reason of each victim."""
    work, jobs = total_cost(chosen).work, f" of {len(chosen)} jobs" if len(chosen) > 1 else ""
    if not work:
        return ", and no work is lost so"
    amount = f"{work} node-seconds" if work < HOUR else f"{format_three_digits(work / HOUR)} node-hours"
    return f", and the least work is lost so: {amount}{jobs}"


def _preemption_cost(job: Job, now: float) -> PreemptionCost:
    """Return the cost of restarting a job: the node-seconds used since its program was released to start."""
    attempt = live(job)
    lasted = 0.0 if attempt.barrier_at is None else max(0.0, now - attempt.barrier_at)
    width = len({component.cluster for component in attempt.gang})
    return PreemptionCost(round(lasted * sum(component.size for component in attempt.gang)), job.generation, width)


def capacity_with_reclaiming(cluster: ClusterStatus, extra_idle: int = 0) -> int:
    """Return the nodes that a job could have on its home site, if ``extra_idle`` more were idle: nodes that are idle,
    about to be, or held by low-priority jobs of other sites."""
    return within_limit(cluster, cluster.nodes.expected + extra_idle + cluster.nodes.reclaimable)


class Reclaiming(Preemption):
    """The choice of guest jobs that a home site stops for a job of its users."""

    event = RECLAIMED

    def __init__(self, state: SchedulerState, site: ClusterName, move_to_front: Callable[[Job], Job]) -> None:
        super().__init__(state)
        self._site, self._move_to_front = site, move_to_front

    def available(self, cluster: ClusterStatus) -> int:
        return capacity_with_reclaiming(cluster) if cluster.name == self._site else 0

    def _stoppable(self, cluster: ClusterStatus) -> Mapping[Token, int]:
        return cluster.nodes.reclaimable_components

    def victim_reason(self, clusters: str, job: Job) -> str:
        return f"{RECLAIMED}: {clusters} takes back its nodes for job {job.id} of its own users"

    def beneficiary_text(self, victims: Iterable[Victim]) -> str:
        jobs = [victim.job for victim in victims]
        freed = sum(c.size for job in jobs for c in live(job).components if c.cluster == self._site and not c.has_ended)
        preempted_jobs = format_list([f"job {job.id}" for job in jobs])
        return f"your site {self._site} reclaimed {format_nodes(freed)}, of {preempted_jobs}"

    def prepare_victim(self, victim: Job) -> Job:
        return self._move_to_front(victim) if self._rules.reclaimed_position == "front" else victim
