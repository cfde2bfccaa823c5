"""Check that a request fits on the empty grid, and on clusters that may share a job. Sizes are in nodes."""

from collections import Counter
from collections.abc import Iterable, Mapping

from koalapy.model.errors import UsageError, reject
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.profile import explain_conflict, find_largest_sets, find_sharing_sets
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.constraints import cap_components, speed_sets
from koalapy.policies.registry import DEFAULTS, Registry
from koalapy.policies.worst_fit import fits_by_worst_fit
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.site import able_clusters

Totals = Mapping[ClusterName, int | None]
"""Sizes of clusters, by cluster; None while unknown."""
Sizes = Mapping[ClusterName, int]


def check_fits(spec: JobSpec, limits: Limits) -> None:
    """Reject a request that does not fit on the empty grid.

    A fixed request is checked against the clusters that it names, another one once all sizes are known. A non-fixed
    request is also rejected if its policy can never place it.
    """
    with able_clusters(spec, limits) as able:
        check_on(totals_of(able), spec.request, spec.policy, limits.policies)


def check_fits_together(spec: JobSpec, limits: Limits) -> None:
    """Reject a request that fits on the whole grid, but on no group of clusters that may share a job."""
    if isinstance(spec.request, FixedRequest):
        return
    with able_clusters(spec, limits) as able:
        groups = [totals_of(group) for group in sharing_groups(spec, able)]
        if len(groups) < 2:
            return
        refused: UsageError | None = None
        for group in sorted(groups, key=lambda group: -sum(total or 0 for total in group.values())):
            try:
                check_on(group, spec.request, spec.policy, limits.policies)
                return
            except UsageError as error:
                refused = refused or error
        assert refused is not None
        each = "; ".join(sizes_text(group) for group in groups)
        profiles = {cluster.name: cluster.profile for cluster in able}
        why = explain_conflict(profiles, profiles, one_series=spec.launcher is Launcher.OPENMPI)
        problem = f"fits on the grid, but not on clusters that may share a job ({each}); {why}"
        other_launcher = spec.launcher is Launcher.OPENMPI and not find_sharing_sets(profiles, one_series=False)
        hint = "ask for less, or use the launcher processes" if other_launcher else "ask for less"
        reject(refused.field, refused.value, problem, hint)


def check_on(totals: Totals, request: Request, policy: str, policies: Registry) -> None:
    """Raise ``UsageError`` for a request that would not fit on these clusters if all of their nodes were idle."""
    if isinstance(request, FixedRequest):
        _check_fixed(request, totals)
        return
    known = {name: total for name, total in totals.items() if total is not None}
    if not known or len(known) < len(totals):
        return
    if isinstance(request, FlexibleRequest):
        _check_flexible(request, known)
        return
    _check_components(request, known)
    sizes, name = [component.size for component in request.components], policy or DEFAULTS[request.type]
    if not policies.fits_empty_grid(name, sizes, list(known.values())):
        shown = format_list([str(size) for size in sizes], separator="+")
        problem = f"of {shown} nodes never fit together by {name}, even on the empty grid ({sizes_text(known)})"
        reject("request.components", sizes, problem, "use smaller components, or make the request flexible")


def sharing_groups(spec: JobSpec, clusters: Iterable[ClusterLimits]) -> list[list[ClusterLimits]]:
    """Return the largest groups of clusters that may share the job, whatever their sizes and speeds."""
    by_name = {cluster.name: cluster for cluster in clusters}
    profiles = {name: cluster.profile for name, cluster in by_name.items()}
    sets = find_largest_sets(profiles, one_series=spec.launcher is Launcher.OPENMPI)
    return [[cluster for name, cluster in by_name.items() if name in together] for together in sets]


def totals_of(clusters: Iterable[ClusterLimits]) -> Totals:
    return {cluster.name: cluster.total for cluster in clusters}


def sizes_text(totals: Totals) -> str:
    """Return the clusters with known sizes as text, largest first."""
    known = ((name, total) for name, total in totals.items() if total is not None)
    return format_list([f"{name} {total}" for name, total in sorted(known, key=lambda item: (-item[1], item[0]))])


def _check_fixed(request: FixedRequest, totals: Totals) -> None:
    wanted: Counter[str] = Counter()
    for index, component in enumerate(request.components):
        name = component.cluster or ""
        wanted[name] += component.size
        total = totals[name]
        if total is not None and wanted[name] > total:
            problem = f"is {component.size}, but {name} has {format_nodes(total)}"
            if wanted[name] > component.size:
                problem += f" and the components there need {wanted[name]}"
            reject(f"request.components[{index}].size", component.size, problem, f"ask for at most {total} on {name}")


def _check_components(request: NonFixedRequest, known: Sizes) -> None:
    sizes, largest, whole = [c.size for c in request.components], max(known.values()), sum(known.values())
    for index, size in enumerate(sizes):
        if size > largest:
            problem = f"is {size}, but no cluster has more than {format_nodes(largest)}"
            hint = "split it, or make the request flexible"
            reject(f"request.components[{index}].size", size, problem, hint)
    if sum(sizes) > whole:
        problem = f"need {sum(sizes)} nodes, but the whole grid has {format_nodes(whole)} ({sizes_text(known)})"
        reject("request.components", sizes, problem, f"ask for at most {whole} in all")
    for size in sorted(set(sizes), reverse=True):
        many = sum(1 for other in sizes if other >= size)
        room = sum(total // size for total in known.values())
        if many > room:
            place = f"the empty grid has room for {room} such ({sizes_text(known)})"
            problem = f"are {many} of at least {format_nodes(size)}, but {place}"
            reject("request.components", sizes, problem, "use smaller components, or make the request flexible")


def _check_flexible(request: FlexibleRequest, known: Sizes) -> None:
    total, least, most = request.total_size, request.min_component_size, request.max_components
    whole, each = sum(known.values()), sizes_text(known)
    if total > whole:
        problem = f"is {total}, but the whole grid has {format_nodes(whole)} ({each})"
        reject("request.total_size", total, problem, f"ask for at most {whole}")
    if request.split_options:
        if not any(fits_by_worst_fit(option, known.values()) for option in request.split_options):
            shown = [list(option) for option in request.split_options]
            problem = f"fit in none of the ways given, even on the empty grid ({each})"
            reject("request.split_options", shown, problem, "add one with smaller components")
        return
    roomy = sorted((size for size in known.values() if size >= least), reverse=True)
    if sum(roomy) < total:
        problem = f"is {least}, but the clusters with at least that many have {format_nodes(sum(roomy))} ({each})"
        reject("request.min_component_size", least, problem, "lower it, or ask for fewer nodes in all")
    if sum(roomy[:most]) < total:
        problem = f"is {most}, but that many clusters have at most {format_nodes(sum(roomy[:most]))} ({each})"
        reject("request.max_components", most, problem, "allow more, or ask for fewer nodes in all")
    fewest = next(count for count in range(1, len(roomy) + 1) if sum(roomy[:count]) >= total)
    if fewest * least > total:
        problem = f"is {least}, but {format_nodes(total)} need {fewest} clusters ({each}), too many for that"
        reject("request.min_component_size", least, problem, f"lower it to {total // fewest} or less")


def check_combination(spec: JobSpec, limits: Limits) -> None:
    """Reject a job that does not fit within its own bounds on combined clusters: their number and speed ratio."""
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
    at_most, ratio = spec.coallocation, spec.speed_ratio_min
    named = {component.cluster or "" for component in request.components}
    if at_most is not None and len(named) > at_most:
        problem = f"is {at_most}, but the request names {len(named)} clusters ({format_list(sorted(named))})"
        reject("coallocation", at_most, problem, f"allow {len(named)}, or name fewer clusters")
    used = sorted((cluster for cluster in limits.clusters if cluster.name in named), key=lambda c: (c.speed, c.name))
    if ratio is not None and used and used[0].speed < used[-1].speed * ratio:
        slow, fast = used[0], used[-1]
        problem = f"is {ratio:g}, but {slow.name} has speed {slow.speed:g} and {fast.name} {fast.speed:g}"
        reject("speed_ratio_min", ratio, problem, "lower it, or name clusters of more equal speed")


def _check_fits_together(spec: JobSpec, clusters: list[ClusterLimits], policies: Registry) -> None:
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
        each = sorted(clusters, key=lambda cluster: (-cluster.speed, cluster.name))
        speeds = format_list([f"{c.name} {c.total} of speed {c.speed:g}" for c in each])
        problem = f"is {ratio:g}, but clusters with such speeds have no room for the request together ({speeds})"
        reject("speed_ratio_min", ratio, problem, "lower it, or ask for fewer nodes")
    together = "no cluster has" if at_most == 1 else f"no {at_most} clusters have"
    problem = f"is {at_most}, but {together} room for the whole request ({sizes_text(totals_of(clusters))})"
    reject("coallocation", at_most, problem, "allow more clusters, or ask for fewer nodes")


def _fits_within(
    spec: JobSpec, clusters: list[ClusterLimits], policies: Registry, at_most: int | None, ratio: float | None
) -> bool:
    request, fewer = spec.request, at_most
    if at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        request, fewer = cap_components(request, at_most), None
    for group in sharing_groups(spec, clusters):
        speeds = {cluster.name: cluster.speed for cluster in group}
        for names in [frozenset(speeds)] if ratio is None else speed_sets(speeds, ratio):
            # More nodes never make a request fit worse, so the largest clusters decide for all.
            inside = sorted((c for c in group if c.name in names), key=lambda cluster: -(cluster.total or 0))
            try:
                check_on(totals_of(inside[:fewer]), request, spec.policy, policies)
            except UsageError:
                continue
            return True
    return False
