"""Check that a request fits on the empty grid, and on clusters that may share a job. Sizes are in nodes."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from koalapy.model.errors import UsageError, reject
from koalapy.model.job_sizes import accepts_size, describe_sizes, select_partition
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.profile import explain_conflict, find_largest_sets, find_sharing_sets
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.constraints import cap_components, speed_sets
from koalapy.policies.registry import DEFAULTS, Registry
from koalapy.policies.worst_fit import fits_by_worst_fit
from koalapy.validation.limits import ClusterLimits, Limits, able_clusters

Totals = Mapping[ClusterName, int | None]
"""Sizes of clusters, by cluster; None while unknown."""
Sizes = Mapping[ClusterName, int]


def check_fits(spec: JobSpec, limits: Limits) -> None:
    """Reject a request that does not fit on the empty grid.

    A fixed request is checked against the clusters that it names, another one once all sizes are known. A non-fixed
    request is also rejected if its policy can never place it.
    """
    with able_clusters(spec, limits) as able:
        check_on(totals_of(able), spec, spec.request, limits.policies)
        _check_accepted(spec, able)


def _check_accepted(spec: JobSpec, clusters: Collection[ClusterLimits]) -> None:
    """Reject a component of a size that the resource manager of no cluster accepts."""
    components = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    for index, component in enumerate(components):
        requirement = spec.node_requirement(index)
        partition = requirement.partition if requirement is not None else ""
        able = [c for c in clusters if component.cluster in (None, c.name)]
        if any(accepts_size(select_partition(c.job_sizes, partition), component.size) for c in able) or not able:
            continue
        texts = [describe_sizes(c.name, select_partition(c.job_sizes, partition)) for c in able]
        problem = f"is {component.size}, but {format_list(texts, separator='; ')}"
        reject(f"request.components[{index}].size", component.size, problem, "ask for another number of nodes")


def check_fits_together(spec: JobSpec, limits: Limits) -> None:
    """Reject a request that fits on the grid, but on no group of clusters that may run one job."""
    if isinstance(spec.request, FixedRequest):
        return
    with able_clusters(spec, limits) as able:
        groups = [totals_of(group) for group in sharing_groups(spec, able)]
        if len(groups) < 2:
            return
        refused: UsageError | None = None
        for group in sorted(groups, key=lambda group: -sum(total or 0 for total in group.values())):
            try:
                check_on(group, spec, spec.request, limits.policies)
                return
            except UsageError as error:
                refused = refused or error
        assert refused is not None
        size_texts = "; ".join(sizes_text(group) for group in groups)
        profiles = {cluster.name: cluster.profile for cluster in able}
        is_mpi, is_script = spec.launcher is Launcher.OPENMPI, bool(spec.script)
        conflict = explain_conflict(profiles, profiles, one_series=is_mpi, is_script=is_script)
        problem = f"fits on the grid, but not on clusters that may share a job ({size_texts}); {conflict}"
        other_launcher = is_mpi and not is_script and not find_sharing_sets(profiles, one_series=False)
        hint = "ask for less, or use the launcher processes" if other_launcher else "ask for less"
        reject(refused.field, refused.value, problem, hint)


def check_on(totals: Totals, spec: JobSpec, request: Request, policies: Registry) -> None:
    """Raise ``UsageError`` for a request that would not fit on these clusters if all of their nodes were idle.

    ``request``: that of the job ``spec``, or one with fewer components.
    """
    if isinstance(request, FixedRequest):
        _check_fixed(request, totals)
        return
    sizes_by_name = {name: total for name, total in totals.items() if total is not None}
    if not sizes_by_name or len(sizes_by_name) < len(totals):
        return
    if isinstance(request, FlexibleRequest):
        _check_flexible(request, sizes_by_name)
        return
    _check_components(request, sizes_by_name)
    if len(spec.node_requirements) > 1:  # not placed by size alone
        return
    sizes, name = [component.size for component in request.components], spec.policy or DEFAULTS[request.type]
    if not policies.fits_empty_grid(name, sizes, list(sizes_by_name.values())):
        sum_text = format_list([str(size) for size in sizes], separator="+")
        grid = sizes_text(sizes_by_name)
        problem = f"of {sum_text} nodes never fit together by {name}, even on the empty grid ({grid})"
        reject("request.components", sizes, problem, "use smaller components, or make the request flexible")


def sharing_groups(spec: JobSpec, clusters: Iterable[ClusterLimits]) -> list[list[ClusterLimits]]:
    """Return the largest groups of clusters that may run parts of the job together, whatever their sizes and speeds."""
    by_name = {cluster.name: cluster for cluster in clusters}
    profiles = {name: cluster.profile for name, cluster in by_name.items()}
    one_series = spec.launcher is Launcher.OPENMPI
    sets = find_largest_sets(profiles, one_series=one_series, is_script=bool(spec.script))
    return [[cluster for name, cluster in by_name.items() if name in together] for together in sets]


def totals_of(clusters: Iterable[ClusterLimits]) -> Totals:
    return {cluster.name: cluster.total for cluster in clusters}


def sizes_text(totals: Totals) -> str:
    """Return the clusters with known sizes as text, largest first."""
    sizes = ((name, total) for name, total in totals.items() if total is not None)
    return format_list([f"{name} {total}" for name, total in sorted(sizes, key=lambda item: (-item[1], item[0]))])


def _check_fixed(request: FixedRequest, totals: Totals) -> None:
    """Reject a request that needs more nodes on a cluster than it has; skip clusters of unknown size."""
    required: Counter[str] = Counter()
    for index, component in enumerate(request.components):
        name = component.cluster or ""
        required[name] += component.size
        total = totals[name]
        if total is not None and required[name] > total:
            problem = f"is {component.size}, but {name} has {format_nodes(total)}"
            if required[name] > component.size:
                problem += f" and the components there need {required[name]}"
            reject(f"request.components[{index}].size", component.size, problem, f"ask for at most {total} on {name}")


def _check_components(request: NonFixedRequest, totals: Sizes) -> None:
    """Reject components that do not fit on the empty grid: too large, too many, or too large in total."""
    sizes, largest, grid_total = [c.size for c in request.components], max(totals.values()), sum(totals.values())
    for index, size in enumerate(sizes):
        if size > largest:
            problem = f"is {size}, but no cluster has more than {format_nodes(largest)}"
            hint = "split it, or make the request flexible"
            reject(f"request.components[{index}].size", size, problem, hint)
    if sum(sizes) > grid_total:
        problem = f"need {sum(sizes)} nodes, but the whole grid has {format_nodes(grid_total)} ({sizes_text(totals)})"
        reject("request.components", sizes, problem, f"ask for at most {grid_total} in all")
    for size in sorted(set(sizes), reverse=True):
        many = sum(1 for other_size in sizes if other_size >= size)
        capacity = sum(total // size for total in totals.values())
        if many > capacity:
            place = f"the empty grid has room for {capacity} such ({sizes_text(totals)})"
            problem = f"are {many} of at least {format_nodes(size)}, but {place}"
            reject("request.components", sizes, problem, "use smaller components, or make the request flexible")


def _check_flexible(request: FlexibleRequest, totals: Sizes) -> None:
    """Reject a request with a size, bounds or split options that the empty grid cannot satisfy."""
    total, min_size, max_count = request.total_size, request.min_component_size, request.max_components
    grid_total, cluster_sizes = sum(totals.values()), sizes_text(totals)
    if total > grid_total:
        problem = f"is {total}, but the whole grid has {format_nodes(grid_total)} ({cluster_sizes})"
        reject("request.total_size", total, problem, f"ask for at most {grid_total}")
    if request.split_options:
        if not any(fits_by_worst_fit(option, totals.values()) for option in request.split_options):
            options = [list(option) for option in request.split_options]
            problem = f"fit in none of the ways given, even on the empty grid ({cluster_sizes})"
            reject("request.split_options", options, problem, "add one with smaller components")
        return
    roomy = sorted((size for size in totals.values() if size >= min_size), reverse=True)
    if sum(roomy) < total:
        available = format_nodes(sum(roomy))
        problem = f"is {min_size}, but the clusters with at least that many have {available} ({cluster_sizes})"
        reject("request.min_component_size", min_size, problem, "lower it, or ask for fewer nodes in all")
    if sum(roomy[:max_count]) < total:
        largest = format_nodes(sum(roomy[:max_count]))
        problem = f"is {max_count}, but that many clusters have at most {largest} ({cluster_sizes})"
        reject("request.max_components", max_count, problem, "allow more, or ask for fewer nodes in all")
    fewest = next(count for count in range(1, len(roomy) + 1) if sum(roomy[:count]) >= total)
    if fewest * min_size > total:
        needed = f"{format_nodes(total)} need {fewest} clusters"
        problem = f"is {min_size}, but {needed} ({cluster_sizes}), too many for that"
        reject("request.min_component_size", min_size, problem, f"lower it to {total // fewest} or less")


def check_combination(spec: JobSpec, limits: Limits) -> None:
    """Reject a job that cannot fit within ``coallocation`` and ``speed_ratio_min``, its limits on combined clusters.

    Also reject a job too large for each cluster if its policy never combines clusters.
    """
    if isinstance(spec.request, FixedRequest):
        _check_named_together(spec, spec.request, limits)
        return
    unbounded = spec.coallocation is None and spec.speed_ratio_min is None
    if unbounded and limits.policies.capabilities(spec.policy).combines_clusters:
        return
    with able_clusters(spec, limits) as able:
        if able and all(cluster.total is not None for cluster in able):
            _check_fits_together(spec, list(able), limits.policies)


def _check_named_together(spec: JobSpec, request: FixedRequest, limits: Limits) -> None:
    """Reject a fixed request with more clusters or more different speeds than the job's limits allow."""
    at_most, ratio = spec.coallocation, spec.speed_ratio_min
    names = {component.cluster or "" for component in request.components}
    if at_most is not None and len(names) > at_most:
        problem = f"is {at_most}, but the request names {len(names)} clusters ({format_list(sorted(names))})"
        reject("coallocation", at_most, problem, f"allow {len(names)}, or name fewer clusters")
    used = sorted((cluster for cluster in limits.clusters if cluster.name in names), key=lambda c: (c.speed, c.name))
    if ratio is not None and used and used[0].speed < used[-1].speed * ratio:
        slow, fast = used[0], used[-1]
        problem = f"is {ratio:g}, but {slow.name} has speed {slow.speed:g} and {fast.name} {fast.speed:g}"
        reject("speed_ratio_min", ratio, problem, "lower it, or name clusters of more equal speed")


def _check_fits_together(spec: JobSpec, clusters: list[ClusterLimits], policies: Registry) -> None:
    """Reject a job that fits on no set of empty clusters that its policy and its limits allow.

    The error names the limit that excludes it.
    """

    def fits(at_most: int | None, ratio: float | None) -> bool:
        return _fits_within(spec, clusters, policies, at_most, ratio)

    at_most, ratio = spec.coallocation, spec.speed_ratio_min
    if not policies.capabilities(spec.policy).combines_clusters and not fits(1, None):
        largest = max(cluster.total or 0 for cluster in clusters)
        problem = f"is {spec.request.total_size}, but policy {spec.policy} takes one cluster, and none has more than "
        hint = f"ask for at most {largest}, or use another policy"
        reject("request.total_size", spec.request.total_size, f"{problem}{format_nodes(largest)}", hint)
    if fits(at_most, ratio):
        return
    if ratio is not None and (at_most is None or fits(at_most, None)):
        by_speed = sorted(clusters, key=lambda cluster: (-cluster.speed, cluster.name))
        speeds = format_list([f"{c.name} {c.total} of speed {c.speed:g}" for c in by_speed])
        problem = f"is {ratio:g}, but clusters with such speeds have no room for the request together ({speeds})"
        reject("speed_ratio_min", ratio, problem, "lower it, or ask for fewer nodes")
    together = "no cluster has" if at_most == 1 else f"no {at_most} clusters have"
    problem = f"is {at_most}, but {together} room for the whole request ({sizes_text(totals_of(clusters))})"
    reject("coallocation", at_most, problem, "allow more clusters, or ask for fewer nodes")


def _fits_within(
    spec: JobSpec, clusters: list[ClusterLimits], policies: Registry, at_most: int | None, ratio: float | None
) -> bool:
    """Return whether a job fits on empty clusters that may run it together, within two limits.

    ``at_most`` limits the number of clusters, ``ratio`` their speeds relative to the fastest. None: unlimited.
    """
    request, fewer = spec.request, at_most
    if at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        request, fewer = cap_components(request, at_most), None
    for group in sharing_groups(spec, clusters):
        speeds = {cluster.name: cluster.speed for cluster in group}
        for names in [frozenset(speeds)] if ratio is None else speed_sets(speeds, ratio):
            # More nodes never make a request fit worse, so the largest clusters decide for all.
            inside = sorted((c for c in group if c.name in names), key=lambda cluster: -(cluster.total or 0))
            try:
                check_on(totals_of(inside[:fewer]), spec, request, policies)
            except UsageError:
                continue
            return True
    return False
