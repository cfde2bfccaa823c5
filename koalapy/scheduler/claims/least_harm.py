"""Which jobs to stop so that others get the nodes that they lack and the least is lost: a choice, and nothing else.

It is a covering knapsack, solved exactly: job by job, in the order of the harm for each node that helps, the least
harmful way is kept to each number of nodes that still lack, as long as it may become less harmful than the best that
is known. That one is greedy at first. Where looking for the best would take too long, the best found until then is it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName

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
    """Return the jobs to stop for the lacking nodes of each cluster, the least harmful first; None if all are too few.

    None of them is superfluous. Of equally harmful jobs the youngest is taken. After ``max_steps`` ways to stop one job
    more, the best set found until then is returned.
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
