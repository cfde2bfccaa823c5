"""Keep components within the sizes that resource managers accept. Policies may be unaware of these."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_sizes import (
    Barred,
    accepts_size,
    count_peak,
    describe_sizes,
    exclude_sizes,
    limit_sizes,
    select_partition,
)
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_requirement import NO_REQUIREMENT, NodeRequirement
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FlexibleRequest, InputFile, Request
from koalapy.model.wording import MAX_LISTED
from koalapy.policies.network import Transfer, estimate_transfer
from koalapy.policies.policy import Policy
from koalapy.scheduler.queue.policy_answers import call_policy

Requirements = tuple[NodeRequirement | None, ...]
"""What the nodes of each component must have; one entry for all components, or none if any node serves."""
NO_DELAYS: Mapping[ClusterName, float] = {}


def exclude_barred(view: GridView, barred: Barred) -> GridView:
    """Return the view without sizes that were rejected, and without clusters that then accept none."""
    return view.compute_once(("barred", barred), lambda view: _exclude_barred(view, barred)) if barred else view


def _exclude_barred(view: GridView, barred: Barred) -> GridView:
    changed: dict[ClusterName, ClusterView] = {}
    closed = set[ClusterName]()
    for entry in sorted(barred):
        cluster = changed.get(entry.cluster) or view.get(entry.cluster)
        if cluster is not None and entry.cluster not in closed:
            remaining = exclude_sizes(cluster.job_sizes, entry.least, entry.most)
            changed[entry.cluster] = replace(cluster, job_sizes=remaining)
            if not remaining:
                closed.add(entry.cluster)
    view = view.select_clusters(frozenset(cluster.name for cluster in view if cluster.name not in closed))
    return view.with_clusters([cluster for name, cluster in changed.items() if name not in closed])


def exclude_reserved(
    view: GridView, walltime: float | None, now: float, delays: Mapping[ClusterName, float] = NO_DELAYS
) -> tuple[GridView, str]:
    """Return the view without idle nodes that are reserved before a job with this walltime would end.

    The job starts ``delays`` seconds from now on a cluster, when its files are there.

    Reservations at different times count as the same nodes (``count_peak``). Also return which these are, as text to
    append; empty if there are none.
    """
    if not view.has_reservations:
        return view, ""
    changed, texts = [], []
    for cluster in view:
        delay = delays.get(cluster.name, 0.0)
        barring = [entry for entry in cluster.reservations if entry.idle and entry.bars(walltime, now, delay)]
        if barring:
            reserved = count_peak((entry.begins, entry.ends, entry.idle) for entry in barring)
            parts = () if any(entry.is_drain for entry in barring) else cluster.parts
            changed.append(replace(cluster.with_idle(max(0, cluster.idle - reserved)), parts=parts))
            texts += [f"; {cluster.name} has {reservation.describe(now)}" for reservation in barring]
    return view.with_clusters(changed), "".join(texts[:MAX_LISTED])


def transfer_times(spec: JobSpec, view: GridView, assumed: float | None) -> dict[ClusterName, set[float]]:
    """Return for each cluster the estimated seconds of the transfers of inputs of each component that may be there."""
    inputs: dict[ClusterName | None, set[tuple[InputFile, ...]]] = {None: set()}
    for index, request in enumerate((None,) if isinstance(spec.request, FlexibleRequest) else spec.request.components):
        inputs.setdefault(request.cluster if request else None, set()).add(spec.inputs_of(index))
    seconds: dict[ClusterName, set[float]] = {}
    for name in (cluster.name for cluster in view):
        estimates = (estimate_transfer(name, files, view, assumed) for files in inputs[None] | inputs.get(name, set()))
        seconds[name] = {estimate.seconds for estimate in estimates if estimate is not None}
    return seconds


def transfer_of(spec: JobSpec, placed: PlacedComponent, view: GridView, assumed: float | None) -> Transfer:
    """Return the transfer of a component's inputs, estimated if its policy has chosen no sources for them."""
    files = () if placed.sources else spec.inputs_of(placed.request_index)
    estimate = estimate_transfer(placed.cluster, files, view, assumed) if files else None
    return estimate or Transfer(placed.transfer_time, placed.sources)


def exclude_by_size(requirements: Requirements, spec: JobSpec, view: GridView) -> Requirements:
    """Return the requirements with the clusters excluded that do not accept the size of a component.

    Return them as they are for a flexible request: the sizes of its components are not known.
    """
    if isinstance(spec.request, FlexibleRequest):
        return requirements
    limited = [cluster for cluster in view if cluster.job_sizes]
    extended: dict[tuple[int, ClusterName | None, NodeRequirement | None], NodeRequirement | None] = {}
    result = []
    for index, component in enumerate(spec.request.components):
        size, requested = component.size, component.cluster
        requirement = requirements[index % len(requirements)] if requirements else None
        key = size, requested, requirement
        if key not in extended:
            partition = requirement.partition if requirement is not None else ""
            names = [
                cluster.name
                for cluster in limited
                if requested in (None, cluster.name)
                and not accepts_size(select_partition(cluster.job_sizes, partition), size)
            ]
            base = requirement or NO_REQUIREMENT
            extended[key] = replace(base, exclude=(*base.exclude, *names)) if names else requirement
        result.append(extended[key])
    if len(set(result)) == 1:
        return (result[0],) if result[0] is not None else ()
    return tuple(result)


def describe_excluded(cluster: ClusterView, requirement: NodeRequirement, spec: JobSpec) -> str:
    """Return why a requirement excludes a cluster: the job names it, or its size is not accepted there."""
    components = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    if cluster.name in chain(spec.exclude, *(component.exclude for component in components)):
        return f"{cluster.name} is excluded by the job"
    return describe_sizes(cluster.name, select_partition(cluster.job_sizes, requirement.partition))


def place_within_sizes(policy: Policy, request: Request, view: GridView) -> Placement | Refusal:
    """Return a policy's answer without components that their clusters do not accept. Raise ``BrokenPolicy``.

    If an answer has some, try larger components of a flexible request, then fewer nodes of these clusters, then without
    the one that accepts only the largest sizes. Each cluster has few ranges of sizes, so that few calls are needed.
    """
    texts = dict[str, None]()
    answer = call_policy(policy, request, view)
    while isinstance(answer, Placement) and (rejected := _rejected_sizes(answer, view)):
        texts |= dict.fromkeys(describe_sizes(cluster.name, cluster.job_sizes) for cluster in rejected)
        min_sizes = {cluster.name: min(sizes.least for sizes in cluster.job_sizes) for cluster in rejected}
        closed = max(min_sizes, key=min_sizes.__getitem__)
        limited: list[ClusterView] = []
        if isinstance(request, FlexibleRequest) and not request.split_options:
            if request.min_component_size < (min_size := min_sizes[closed]) <= request.total_size:
                larger = call_policy(policy, replace(request, min_component_size=min_size), view)
                if isinstance(larger, Placement) and not _rejected_sizes(larger, view):
                    return larger
            accepted = ((cluster, limit_sizes(cluster.job_sizes, 1, size - 1)) for cluster, size in rejected.items())
            limited = [cluster.with_idle(max(part.most for part in parts)) for cluster, parts in accepted if parts]
        others = frozenset(cluster.name for cluster in view if cluster.name != closed)
        view = view.with_clusters(limited) if limited else view.select_clusters(others)
        answer = call_policy(policy, request, view)
    if isinstance(answer, Refusal) and texts:
        return Refusal("; ".join([answer.summary, *texts]), answer.kind)
    return answer


def _rejected_sizes(placement: Placement, view: GridView) -> dict[ClusterView, int]:
    """Return the clusters that do not accept the size of a component there, each with the largest such size."""
    rejected: dict[ClusterView, int] = {}
    for component in placement.components:
        cluster = view.get(component.cluster)
        if cluster is not None and not cluster.accepts(component.size):
            rejected[cluster] = max(component.size, rejected.get(cluster, 0))
    return rejected
