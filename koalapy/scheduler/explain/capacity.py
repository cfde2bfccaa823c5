"""Compute the current capacity: the largest component and total for each policy, and when larger jobs would start.

Sizes are found by binary search, as if every smaller size started too; sums of idle nodes are tried in addition.
Policies are called often: generators yield between the calls so that other tasks run.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate

from koalapy.model.cluster import GridView
from koalapy.model.job import Job, JobId
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Placement
from koalapy.model.request import ClusterName, ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.policies.registry import DEFAULTS
from koalapy.scheduler.advisor.experience import Experience
from koalapy.scheduler.advisor.knowledge import expected_end
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.queries import Queries

MAX_ENDS = 200
"""Maximum number of expected ends that are considered, the next ones."""
MAX_SUMS = 12
"""Maximum number of sums of idle nodes that are tried in addition to the binary search."""

MAX_LOOKED_AT = 1000
"""Maximum number of components for policies that examine when each component ends. With more these are skipped."""

Splits = Callable[[int, GridView], Iterable[Request]]
"""Yields alternative requests for a number of nodes. They are tried until the policy places one."""
Answer = Generator[None, None, Placement | None]
"""Returns the placement of a number of nodes; yields between policy calls."""


@dataclass(frozen=True, slots=True)
class ExpectedEnd:
    """The expected end of a job, by its walltime or run-time statistics, and the nodes it releases."""

    job: JobId
    at: float
    priority: Priority
    nodes: Mapping[ClusterName, int]


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """The largest number of nodes that would start now, and on which clusters; 0 if none would."""

    nodes: int
    where: Mapping[ClusterName, int]
    larger_after: ExpectedEnd | None
    """The first expected end after which more nodes would start; None if unknown."""


@dataclass(frozen=True, slots=True)
class PolicyCapacity:
    """The largest jobs that one policy would place."""

    policy: str
    component: SizeEstimate | None
    """As one component; None if it was not computed."""
    total: SizeEstimate | None
    """As components on several clusters; None if the policy never combines clusters."""


def expected_end_of(job: Job, experience: Experience, now: float) -> ExpectedEnd | None:
    """Return the expected end of a job; None if it has no nodes or its end is unknown."""
    nodes: Counter[ClusterName] = Counter()
    if job.attempt is not None and job.state.is_active:
        for component in job.attempt.components:
            if not component.has_ended:
                nodes[component.cluster] += component.size
    end = expected_end(job, experience, now) if nodes else None
    return None if end is None else ExpectedEnd(job.id, end, job.spec.priority, dict(nodes))


def next_ends(ends: Iterable[ExpectedEnd]) -> list[ExpectedEnd]:
    """Return the next expected ends, ordered by time."""
    return nsmallest(MAX_ENDS, ends, key=lambda end: (end.at, end.job))


def estimate_capacities(
    queries: Queries, base: JobSpec, ends: Sequence[ExpectedEnd]
) -> Iterator[PolicyCapacity | None]:
    """Yield the capacity of each policy by name, and None whenever other tasks may run. ``base``: owner and
    priority."""
    dry_run, policies = DryRun(queries), queries.policies
    if dry_run.may_preempt(base):
        # The view already offers the nodes of jobs that such a job may preempt.
        ends = [end for end in ends if end.priority is Priority.HIGH]
    ahead = _FutureGrid(dry_run, base, ends)
    components = sum(len(cluster.nodes.live) for cluster in queries.grid.clusters())
    for policy in policies.names():
        capabilities = policies.capabilities(policy)
        if capabilities.learns and capabilities.expects_releases and components > MAX_LOOKED_AT:
            yield PolicyCapacity(policy, None, None)
            continue
        room = _PolicySearch(dry_run, replace(base, policy=policy), ahead)
        component = yield from room.find_largest(room.single_cluster_requests, ahead.largest)
        combined = room.find_largest(room.multi_cluster_requests, ahead.totals)
        total = (yield from combined) if capabilities.combines_clusters else None
        yield PolicyCapacity(policy, component, total)


class _FutureGrid:
    """The grid as offered to a job now, and after the expected ends."""

    def __init__(self, dry_run: DryRun, base: JobSpec, ends: Sequence[ExpectedEnd]) -> None:
        self._now, self.ends = dry_run.widest_view(base), ends
        usable, plan, freed = (
            {c.name: c for c in self._now.by_idle},
            dry_run.queries.queues.plan,
            Counter[ClusterName](),
        )
        is_late = plan.is_delayed_by(plan.duration_of(base))

        def idle_after(name: ClusterName) -> int:
            cluster, idle = dry_run.queries.grid[name], usable[name].idle
            # Nodes beyond promised, reserved and doubted ones; negative if others get the next released nodes.
            spare = idle or cluster.nodes.surplus - dry_run.reserved_nodes(name, base)
            max_nodes = cluster.last_report.total if cluster.health.limit is None else cluster.health.limit.size - 1
            return max(idle, min(spare + freed[name], plan.limit(base.priority, is_late, cluster, max_nodes)))

        self._larger: list[dict[ClusterName, int]] = [{}]
        """The idle nodes of the clusters that have more after each number of ends."""
        for end in ends:
            freed.update(end.nodes)
            self._larger.append(self._larger[-1] | {name: idle_after(name) for name in end.nodes if name in usable})
        largest, total = max((cluster.idle for cluster in usable.values()), default=0), self._now.usable_idle
        self.largest = [max([largest, *idle.values()]) for idle in self._larger]
        """The most idle nodes of a cluster after each number of ends, which no component exceeds."""
        self.totals = [total + sum(idle[name] - usable[name].idle for name in idle) for idle in self._larger]
        self._views: dict[int, GridView] = {0: self._now}

    def view(self, count: int) -> GridView:
        """Return the grid after the first ``count`` ends."""
        if count not in self._views:
            larger = self._larger[count]
            clusters = [cluster.with_idle(larger[cluster.name]) for cluster in self._now if cluster.name in larger]
            self._views[count] = self._now.with_clusters(clusters)
        return self._views[count]


class _PolicySearch:
    """A search for the largest sizes of one policy."""

    def __init__(self, dry_run: DryRun, spec: JobSpec, ahead: _FutureGrid) -> None:
        self._dry_run, self._spec, self._ahead = dry_run, spec, ahead
        self._serves = dry_run.queries.policies.get(spec.policy).serves

    def find_largest(self, splits: Splits, bounds: Sequence[int]) -> Generator[None, None, SizeEstimate]:
        """Return the largest size that starts now as one of the splits. ``bounds``: no placement exceeds them, by the
        number of ends that have passed."""
        now, answers = self._ahead.view(0), dict[int, Placement | None]()

        def starts(count: int) -> Answer:
            if count not in answers:
                answers[count] = yield from self._find_placement(splits, count, now)
            return answers[count]

        largest = yield from _largest(starts, now, bounds[0])
        placement = answers.get(largest)
        clusters = {} if placement is None else dict(placement.nodes)
        return SizeEstimate(largest, clusters, (yield from self._first_larger_end(splits, largest + 1, bounds)))

    def single_cluster_requests(self, count: int, view: GridView) -> Iterator[Request]:
        """Yield requests for all nodes on one cluster."""
        if "flexible" in self._serves:
            yield FlexibleRequest(count, max_components=1)
        elif "nonfixed" in self._serves:
            yield NonFixedRequest((ComponentRequest(count),))
        else:
            for cluster in view.by_idle:
                if cluster.idle >= count:
                    yield FixedRequest((ComponentRequest(count, cluster.name),))

    def multi_cluster_requests(self, count: int, view: GridView) -> Iterator[Request]:
        """Yield requests over as many clusters as needed; with sizes for policies that require them."""
        if "flexible" in self._serves:
            yield FlexibleRequest(count)
            return
        usual = replace(self._spec, policy=DEFAULTS["flexible"], request=FlexibleRequest(count))
        answer = self._dry_run.ask(usual, view)
        if isinstance(answer, Placement):
            is_fixed = "nonfixed" not in self._serves
            parts = tuple(ComponentRequest(c.size, c.cluster if is_fixed else None) for c in answer.components)
            yield FixedRequest(parts) if is_fixed else NonFixedRequest(parts)

    def _find_placement(self, splits: Splits, count: int, view: GridView) -> Answer:
        """Return the first placement among the alternative requests for ``count`` nodes; None if all are refused."""
        for request in splits(count, view) if count > 0 else ():
            spec = replace(self._spec, request=request)
            if self._dry_run.queries.over_limit(spec) is None:
                answer = self._dry_run.ask(spec, view)
                yield
                if isinstance(answer, Placement):
                    return answer
        return None

    def _first_larger_end(
        self, splits: Splits, count: int, bounds: Sequence[int]
    ) -> Generator[None, None, ExpectedEnd | None]:
        """Return the first expected end after which ``count`` nodes start; None if there is none."""
        ends = self._ahead.ends

        def start(end_count: int) -> Answer:
            return self._find_placement(splits, count, self._ahead.view(end_count))

        low = bisect_left(bounds, count, 1)
        # Mostly, the policy places as many nodes as there are.
        if low > len(ends) or not (yield from start(low)):
            if low >= len(ends) or not (yield from start(len(ends))):
                return None
            low = yield from _first(low + 1, len(ends), start)
        return ends[low - 1]


def _largest(starts: Callable[[int], Answer], view: GridView, top: int) -> Generator[None, None, int]:
    """Return the largest count up to ``top`` that starts, or 0."""
    if (yield from starts(top)):
        return top

    def does_not(count: int) -> Generator[None, None, bool]:
        return (yield from starts(count)) is None

    largest = (yield from _first(1, top, does_not)) - 1
    idle = [cluster.idle for cluster in view.by_idle]
    for count in sorted({*idle, *accumulate(idle)}, reverse=True)[:MAX_SUMS]:
        if largest < count < top and (yield from starts(count)):
            return (yield from _first(count + 1, top, does_not)) - 1
    return largest


def _first(low: int, high: int, holds: Callable[[int], Generator[None, None, object]]) -> Generator[None, None, int]:
    """Return the first number up to ``high`` for which ``holds``, assuming that it holds for all larger ones."""
    while low < high:
        middle = (low + high) // 2
        if (yield from holds(middle)):
            high = middle
        else:
            low = middle + 1
    return low
