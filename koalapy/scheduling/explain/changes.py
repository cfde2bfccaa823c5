"""The smallest change of a request with which the job would be placed at once.

Candidates come in order of what they cost the user: the same nodes with fewer bounds, then a higher priority, then
fewer nodes. Each is held against the scheduler, and the first that it would place is the answer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from koalapy.model.cluster import GridView
from koalapy.model.explanation import Change, ChangeValue
from koalapy.model.job import JobSpec, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.model.wording import nodes
from koalapy.placement.registry import DEFAULTS
from koalapy.scheduling.explain.smaller import smaller
from koalapy.scheduling.explain.steps import Candidate, Steps, one
from koalapy.scheduling.explain.trial import Trial
from koalapy.scheduling.scheduler import Scheduler

MOST_ASKS = 200
FOR_FEWER_NODES = 90
"""Of these, what is left for asking for fewer nodes, which is what helps in the end."""
ONE_BY_ONE = 12
"""So many steps are tried one after the other, before the rest is searched by halves."""
MOST_MOVED = 8
MOST_SITES = 5
"""Of a fixed request: how many components are tried elsewhere, and on how many clusters each."""


def smallest_change(scheduler: Scheduler, spec: JobSpec, trial: Trial) -> Change | None:
    """The first candidate that would be placed; None if there is none, or none within ``MOST_ASKS`` questions."""
    same_nodes = _first_of(_with_the_same_nodes(scheduler, spec, trial), trial, MOST_ASKS - FOR_FEWER_NODES)
    return same_nodes or _with_fewer_nodes(spec, trial)


def _first_of(families: Iterable[Steps], trial: Trial, most: int) -> Change | None:
    for steps in families:
        change = _first(steps, trial, most)
        if change is not None or trial.asks >= most:
            return change
    return None


def _first(steps: Steps, trial: Trial, most: int) -> Change | None:
    """The first step that is placed; far steps are searched as if all that follow a placed one were placed, too."""
    for index in range(min(ONE_BY_ONE, len(steps))):
        if trial.asks >= most:
            return None
        if change := _tried(steps[index], trial):
            return change
    low, high = ONE_BY_ONE, len(steps) - 1
    found = _tried(steps[high], trial) if high >= low else None
    while found is not None and low < high and trial.asks < most:
        middle = (low + high) // 2
        nearer = _tried(steps[middle], trial)
        if nearer is not None:
            found, high = nearer, middle
        else:
            low = middle + 1
    return found


def _tried(candidate: Candidate, trial: Trial) -> Change | None:
    placement = trial.placed_at_once(candidate.spec)
    if placement is None:
        return None
    others = ": it would preempt others" if trial.preempts(candidate.spec, placement) else ""
    return Change(candidate.field, candidate.value, f"{candidate.text}{others}", candidate.spec, placement)


# The same nodes, with fewer bounds


def _with_the_same_nodes(scheduler: Scheduler, spec: JobSpec, trial: Trial) -> Iterator[Steps]:
    yield one("", None, "submit it again: a new job is tried at once", spec)
    if isinstance(spec.request, FlexibleRequest):
        yield from _looser(spec.request, spec, len(scheduler.grid.clusters()))
    elif isinstance(spec.request, FixedRequest):
        yield from _elsewhere(spec.request, spec, trial.view(spec.priority))
    yield from _other_policies(scheduler, spec)
    whole = as_flexible(spec)
    if whole is not None and not isinstance(spec.request, FlexibleRequest):
        yield one("request.type", "flexible", f"let the scheduler split the {nodes(whole.request.total_size)}", whole)
    yield from _other_combinations(scheduler, spec)
    if whole is not None:
        free = without_bounds(whole)
        yield one(
            "request",
            {"type": "flexible", "total_size": free.request.total_size},
            f"ask for {nodes(free.request.total_size)} without any bounds",
            free,
        )
    if spec.priority is Priority.LOW:
        yield one("priority", "high", "give it high priority", replace(spec, priority=Priority.HIGH))


def _elsewhere(request: FixedRequest, spec: JobSpec, view: GridView) -> Iterator[Steps]:
    """One component of those that are in the way on another cluster, then all of them wherever there is room."""
    wanted = Counter[str]()
    for component in request.components:
        wanted[component.cluster or ""] += component.size
    short = {name for name, size in wanted.items() if size > (there.usable_idle if (there := view.get(name)) else 0)}
    moved = [index for index, component in enumerate(request.components) if component.cluster in short]
    for index in moved[:MOST_MOVED]:
        component = request.components[index]
        which = f"component {index}" if len(request.components) > 1 else "it"
        roomy = [c.name for c in view.by_idle if c.idle >= component.size and c.name != component.cluster]
        for name in roomy[:MOST_SITES]:
            changed = _with_component(spec, request, index, replace(component, cluster=name))
            yield one(f"request.components[{index}].cluster", name, f"run {which} on {name}", changed)
    anywhere = NonFixedRequest(tuple(replace(component, cluster=None) for component in request.components))
    free = replace(spec, request=anywhere, policy="", policy_options=())
    yield one("request.type", "nonfixed", "let the scheduler choose the clusters", free)


def _with_component(spec: JobSpec, request: FixedRequest, index: int, component: ComponentRequest) -> JobSpec:
    components = (*request.components[:index], component, *request.components[index + 1 :])
    return replace(spec, request=FixedRequest(components))


def _looser(request: FlexibleRequest, spec: JobSpec, clusters: int) -> Iterator[Steps]:
    """Each bound of a flexible request alone, as little as will do."""
    if request.max_components is not None:
        more = range(request.max_components + 1, min(clusters, request.total_size) + 1)
        yield _steps(
            spec,
            "request.max_components",
            more,
            lambda n: f"allow {n} components",
            lambda n: replace(request, max_components=n),
        )
    less = range(request.min_component_size - 1, 0, -1)
    yield _steps(
        spec,
        "request.min_component_size",
        less,
        lambda n: f"allow components of {nodes(n)}",
        lambda n: replace(request, min_component_size=n),
    )
    if request.split_options:
        free = replace(spec, request=replace(request, split_options=()))
        yield one("request.split_options", [], "leave the split to the scheduler", free)


def _steps(
    spec: JobSpec,
    field: str,
    values: Sequence[int],
    text: Callable[[int], str],
    request: Callable[[int], FlexibleRequest],
) -> Steps:
    return Steps(values, lambda n: Candidate(field, n, text(n), replace(spec, request=request(n))))


def _other_policies(scheduler: Scheduler, spec: JobSpec) -> Iterator[Steps]:
    usual = DEFAULTS[spec.request.type]
    for name in sorted(scheduler.policies.names(), key=lambda name: (name != usual, name)):
        if name != (spec.policy or usual):
            yield one("policy", name, f"use the policy {name}", replace(spec, policy=name, policy_options=()))


def _other_combinations(scheduler: Scheduler, spec: JobSpec) -> Iterator[Steps]:
    """More clusters together, or less alike ones."""
    clusters = scheduler.grid.clusters()
    if spec.coallocation is not None:
        yield Steps(
            range(spec.coallocation + 1, len(clusters) + 1),
            lambda n: Candidate("coallocation", n, f"allow {n} clusters together", replace(spec, coallocation=n)),
        )
    if spec.speed_ratio_min is not None:
        speeds = {cluster.speed for cluster in clusters}
        ratios = {slow / fast for slow in speeds for fast in speeds if slow < fast}
        lower = sorted((ratio for ratio in ratios if ratio < spec.speed_ratio_min), reverse=True)
        yield Steps(lower, lambda r: _slower(spec, r))


def _slower(spec: JobSpec, ratio: float) -> Candidate:
    value: ChangeValue = ratio
    return Candidate(
        "speed_ratio_min", value, f"lower speed_ratio_min to {ratio:g}", replace(spec, speed_ratio_min=ratio)
    )


def as_flexible(spec: JobSpec) -> JobSpec | None:
    """The job with only its total given; None when its components are not alike."""
    request = spec.request
    if isinstance(request, FlexibleRequest):
        return spec
    if any(c.command or c.environment or c.output or c.inputs for c in request.components):
        return None
    return replace(spec, request=FlexibleRequest(request.total_size), policy="", policy_options=())


def without_bounds(spec: JobSpec) -> JobSpec:
    """Nothing but the nodes, in the default way."""
    request = FlexibleRequest(spec.request.total_size)
    return replace(spec, request=request, policy="", policy_options=(), coallocation=None, speed_ratio_min=None)


# Fewer nodes


def _with_fewer_nodes(spec: JobSpec, trial: Trial) -> Change | None:
    """As many as there is room for, in the request's own way or without its bounds; else with a higher priority."""
    whole = as_flexible(spec)
    free = without_bounds(whole) if whole is not None else None
    found = [_first_of(smaller(spec, trial.widest_view(spec)), trial, MOST_ASKS)]
    if free is not None:
        found.append(_first_of(smaller(free, trial.widest_view(free), " without any bounds"), trial, MOST_ASKS))
    if spec.priority is Priority.LOW and not any(found):
        high = replace(free or spec, priority=Priority.HIGH)
        found.append(_first_of(smaller(high, trial.widest_view(high), " with high priority"), trial, MOST_ASKS))
    return max((change for change in found if change), key=lambda c: c.spec.request.total_size, default=None)
