"""Find the smallest change of a request with which the job would be placed now.

Candidates are ordered by their cost for the user: the same nodes with fewer bounds, then high priority, then fewer
nodes. The first that the scheduler would place is the answer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from koalapy.model.cluster import GridView, LinkUse
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Change, ChangeValue
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, has_settings
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.registry import DEFAULTS
from koalapy.scheduler.explain.dry_run import DryRun, select_nodes
from koalapy.scheduler.grid import GridStatus

MAX_QUESTIONS = 200
RESERVED_FOR_FEWER_NODES = 90
"""Number of these policy calls reserved for requests with fewer nodes, which usually help."""
MIN_WALLTIME_S = 1.0
LINEAR_STEPS = 12
"""Number of steps that are tried one by one, before the binary search for the others."""
MAX_MOVED_COMPONENTS = 8
MAX_SITES_PER_COMPONENT = 5
"""Maximum number of components of a fixed request that are tried on other clusters, and of clusters for each."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of a request that may suffice."""

    field: str
    value: ChangeValue
    text: str
    spec: JobSpec


class Steps:
    """A change in steps, the smallest first. Steps are created on access, as there may be thousands."""

    def __init__(self, values: Sequence[Any], candidate: Callable[[Any], Candidate]) -> None:
        self._values = values
        self._candidate = candidate

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Candidate:
        return self._candidate(self._values[index])


def single_step(field: str, value: ChangeValue, text: str, spec: JobSpec) -> Steps:
    """Return a change with a single step."""
    return Steps((spec,), lambda changed: Candidate(field, value, text, changed))


def smallest_change(spec: JobSpec, dry_run: DryRun) -> Change | None:
    """Return the first candidate that would be placed; None if none is found in ``MAX_QUESTIONS`` policy calls."""
    same_nodes = _first_of(_same_node_changes(spec, dry_run), dry_run, MAX_QUESTIONS - RESERVED_FOR_FEWER_NODES)
    return same_nodes or _find_fewer_nodes(spec, dry_run)


def _first_of(families: Iterable[Steps], dry_run: DryRun, max_calls: int) -> Change | None:
    """Return the first change that would be placed; None if there is none within ``max_calls`` policy calls."""
    for steps in families:
        change = _first(steps, dry_run, max_calls)
        if change is not None or dry_run.asks >= max_calls:
            return change
    return None


def _first(steps: Steps, dry_run: DryRun, max_calls: int) -> Change | None:
    """Return the first step that is placed. Distant steps are found by binary search."""
    for index in range(min(LINEAR_STEPS, len(steps))):
        if dry_run.asks >= max_calls:
            return None
        if change := _tried(steps[index], dry_run):
            return change
    low, high = LINEAR_STEPS, len(steps) - 1
    nearest = _tried(steps[high], dry_run) if high >= low else None
    while nearest is not None and low < high and dry_run.asks < max_calls:
        middle = (low + high) // 2
        nearer = _tried(steps[middle], dry_run)
        if nearer is not None:
            nearest, high = nearer, middle
        else:
            low = middle + 1
    return nearest


def _tried(candidate: Candidate, dry_run: DryRun) -> Change | None:
    """Return a candidate as a change with its placement; None if it would not be placed now."""
    placement = dry_run.placed_at_once(candidate.spec)
    if placement is None:
        return None
    victims = f": {dry_run.victims_text(candidate.spec)}" if dry_run.preempts(candidate.spec, placement) else ""
    text, dry_run_job = f"{candidate.text}{victims}", dry_run.job
    return Change(candidate.field, candidate.value, text, candidate.spec, placement, dry_run_job)


# The same nodes, with fewer bounds


def _same_node_changes(spec: JobSpec, dry_run: DryRun) -> Iterator[Steps]:
    """Yield changes of a request that keep its number of nodes, the least costly for the user first."""
    queries, job = dry_run.queries, dry_run.job
    if job is not None and job.retry_at is None:
        yield single_step("", None, "try it now, unchanged", spec)
    if isinstance(spec.request, FlexibleRequest):
        yield from _relaxed_bounds(spec.request, spec, len(queries.grid.clusters()))
    elif isinstance(spec.request, FixedRequest):
        yield from _other_clusters(spec.request, spec, dry_run)
    usual = DEFAULTS[spec.request.type]
    for name in sorted(queries.policies.names(), key=lambda name: (name != usual, name)):
        if name != (spec.policy or usual):
            yield single_step("policy", name, f"use the policy {name}", replace(spec, policy=name, policy_options=()))
    flexible = as_flexible(spec)
    if flexible is not None and not isinstance(spec.request, FlexibleRequest):
        yield single_step(
            "request.type",
            "flexible",
            f"let the scheduler split the {format_nodes(flexible.request.total_size)}",
            flexible,
        )
    yield from _other_combinations(spec, queries.grid)
    if flexible is not None:
        free = without_bounds(flexible)
        yield single_step(
            "request",
            {"type": "flexible", "total_size": free.request.total_size},
            f"ask for {format_nodes(free.request.total_size)} without any bounds",
            free,
        )
    if dry_run.may_raise_priority(spec):
        yield single_step("priority", "high", "give it high priority", replace(spec, priority=Priority.HIGH))


def _other_clusters(request: FixedRequest, spec: JobSpec, dry_run: DryRun) -> Iterator[Steps]:
    """Yield one blocking component on another cluster, then all components on any cluster."""
    needed = Counter[str]()
    for component in request.components:
        needed[component.cluster or ""] += component.size
    views = [select_nodes(spec, dry_run.view(spec), index) for index in range(len(request.components))]
    moved = [
        index
        for index, (component, view) in enumerate(zip(request.components, views, strict=True))
        if (cluster := view.get(component.cluster or "")) is None
        or needed[component.cluster or ""] > cluster.usable_idle
    ]
    for index in moved[:MAX_MOVED_COMPONENTS]:
        component = request.components[index]
        component_text = f"component {index}" if len(request.components) > 1 else "it"
        roomy = [c.name for c in views[index].by_idle if c.idle >= component.size and c.name != component.cluster]
        for name in roomy[:MAX_SITES_PER_COMPONENT]:
            components = list(request.components)
            components[index] = replace(component, cluster=name)
            changed = replace(spec, request=FixedRequest(tuple(components)))
            yield single_step(f"request.components[{index}].cluster", name, f"run {component_text} on {name}", changed)
    anywhere = NonFixedRequest(tuple(replace(component, cluster=None) for component in request.components))
    free = replace(spec, request=anywhere, policy="", policy_options=())
    yield single_step("request.type", "nonfixed", "let the scheduler choose the clusters", free)


def _relaxed_bounds(request: FlexibleRequest, spec: JobSpec, clusters: int) -> Iterator[Steps]:
    """Yield each bound of a flexible request relaxed in steps."""

    def bound(field: str, value: int, text: str) -> Candidate:
        changed = replace(request, **{field: value})  # type: ignore[arg-type]
        return Candidate(f"request.{field}", value, text, replace(spec, request=changed))

    if request.max_components is not None:
        component_counts = range(request.max_components + 1, min(clusters, request.total_size) + 1)
        yield Steps(component_counts, lambda n: bound("max_components", n, f"allow {n} components"))
    less = range(request.min_component_size - 1, 0, -1)
    yield Steps(less, lambda n: bound("min_component_size", n, f"allow components of {format_nodes(n)}"))
    if request.split_options:
        free = replace(spec, request=replace(request, split_options=()))
        yield single_step("request.split_options", [], "leave the split to the scheduler", free)


def _other_combinations(spec: JobSpec, grid: GridStatus) -> Iterator[Steps]:
    """Yield more clusters together, and clusters with larger differences in speed."""
    clusters = grid.clusters()
    if spec.coallocation is not None:
        yield Steps(
            range(spec.coallocation + 1, len(clusters) + 1),
            lambda n: Candidate("coallocation", n, f"allow {n} clusters together", replace(spec, coallocation=n)),
        )
    if spec.links is not LinkUse.ANY:
        excluded_links = "relayed" if spec.links is LinkUse.DIRECT else "direct"
        yield single_step("links", "any", f"allow {excluded_links} links too", replace(spec, links=LinkUse.ANY))
    if grid.relays.streams and spec.processes_per_node is not None:
        yield Steps(
            range(spec.processes_per_node - 1, 0, -1),
            lambda n: Candidate(
                "processes_per_node",
                n,
                f"run {n} {'process' if n == 1 else 'processes'} on each node, with fewer streams over relays",
                replace(spec, processes_per_node=n),
            ),
        )
    if spec.speed_ratio_min is not None:
        speeds = {cluster.speed for cluster in clusters}
        ratios = {slow / fast for slow in speeds for fast in speeds if slow < fast}
        lower = sorted((ratio for ratio in ratios if ratio < spec.speed_ratio_min), reverse=True)
        yield Steps(
            lower,
            lambda r: Candidate(
                "speed_ratio_min", r, f"lower speed_ratio_min to {r:g}", replace(spec, speed_ratio_min=r)
            ),
        )


def as_flexible(spec: JobSpec) -> JobSpec | None:
    """Return the job as a flexible request of the same total; None if its components differ."""
    request = spec.request
    if isinstance(request, FlexibleRequest):
        return spec
    if any(map(has_settings, request.components)):
        return None
    return replace(spec, request=FlexibleRequest(request.total_size), policy="", policy_options=())


def without_bounds(spec: JobSpec) -> JobSpec:
    """Return a job for the same number of nodes with the default policy and without bounds."""
    request = FlexibleRequest(spec.request.total_size)
    return replace(spec, request=request, policy="", policy_options=(), coallocation=None, speed_ratio_min=None)


# Fewer nodes


def _find_fewer_nodes(spec: JobSpec, dry_run: DryRun) -> Change | None:
    """Return the largest request that would be placed: with its bounds, without them, or with high priority."""
    flexible = as_flexible(spec)
    free = without_bounds(flexible) if flexible is not None else None
    changes = [_first_of(_smaller(spec, dry_run), dry_run, MAX_QUESTIONS)]
    if free is not None:
        changes.append(_first_of(_smaller(free, dry_run, " without any bounds"), dry_run, MAX_QUESTIONS))
    if dry_run.may_raise_priority(spec) and not any(changes):
        high = replace(free or spec, priority=Priority.HIGH)
        changes.append(_first_of(_smaller(high, dry_run, " with high priority"), dry_run, MAX_QUESTIONS))
    return max((change for change in changes if change), key=lambda c: c.spec.request.total_size, default=None)


def _smaller(spec: JobSpec, dry_run: DryRun, also: str = "") -> Iterator[Steps]:
    """Yield smaller requests that may fit now; ``also`` describes the other changes."""
    request = spec.request
    if isinstance(request, FlexibleRequest):
        # A smaller job may be expected to end before a planned start, and is then offered more nodes.
        widest = dry_run.widest_view(replace(spec, walltime=MIN_WALLTIME_S))
        yield _smaller_total(spec, request, select_nodes(spec, widest).usable_idle, also)
    elif isinstance(request, NonFixedRequest):
        yield _smaller_components(spec, request, also)
    else:
        yield from _idle_part(spec, request, dry_run.widest_view(spec), also)


def _smaller_total(spec: JobSpec, request: FlexibleRequest, usable: int, also: str) -> Steps:
    """Return steps that reduce the total of a flexible request node by node, from the number of usable nodes."""
    largest = min(request.total_size - 1, usable)

    def candidate(total: int) -> Candidate:
        min_size = min(request.min_component_size, total)
        changed = replace(request, total_size=total, min_component_size=min_size, split_options=())
        text = f"ask for {format_nodes(total)}{also}"
        return Candidate("request.total_size", total, text, replace(spec, request=changed))

    return Steps(range(largest, 0, -1), candidate)


def _smaller_components(spec: JobSpec, request: NonFixedRequest, also: str) -> Steps:
    """Return steps that cut the larger components down to one decreasing size."""

    def candidate(size: int) -> Candidate:
        components = tuple(replace(c, size=min(c.size, size)) for c in request.components)
        return _make_resized(spec, NonFixedRequest(components), also)

    return Steps(range(max(c.size for c in request.components) - 1, 0, -1), candidate)


def _make_resized(spec: JobSpec, request: NonFixedRequest | FixedRequest, also: str) -> Candidate:
    """Return the candidate with the components of ``request``, and the advice to the user that describes it."""
    is_fixed = isinstance(request, FixedRequest)
    sizes = [f"{c.size} on {c.cluster}" if c.cluster else str(c.size) for c in request.components]
    sizes_text = format_list(sizes, separator=" and " if is_fixed else "+")
    value: list[object] = [
        {"size": c.size, "cluster": c.cluster} if is_fixed else {"size": c.size} for c in request.components
    ]
    return Candidate("request.components", value, f"ask for {sizes_text} nodes{also}", replace(spec, request=request))


def _idle_part(spec: JobSpec, request: FixedRequest, view: GridView, also: str) -> Iterator[Steps]:
    """Yield the request with each component reduced to the idle nodes of its cluster, without empty ones."""
    assigned, components = Counter[str](), list[ComponentRequest]()
    for index, component in enumerate(request.components):
        cluster = select_nodes(spec, view, index).get(component.cluster or "")
        size = min(component.size, (cluster.usable_idle if cluster else 0) - assigned[component.cluster or ""])
        if size > 0:
            assigned[component.cluster or ""] += size
            components.append(replace(component, size=size))
        elif any(map(has_settings, request.components)):
            return  # without a component that differs from others, the job would be another
    if components and tuple(components) != request.components:
        yield Steps((tuple(components),), lambda fitting: _make_resized(spec, FixedRequest(fitting), also))
