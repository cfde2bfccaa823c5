"""Whether a job fits within what it says of the clusters to combine, and what its policy combines."""

from koalapy.model.errors import UsageError, reject
from koalapy.model.job import JobSpec
from koalapy.model.request import FixedRequest, FlexibleRequest
from koalapy.model.wording import listed, nodes
from koalapy.policies.constraints import capped, speed_sets
from koalapy.policies.registry import Registry
from koalapy.validation.fitting import check_on, sharing_groups, sizes_text, totals_of
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.site import able_clusters


def check_combination(spec: JobSpec, limits: Limits) -> None:
    """Clusters that may be combined have room together: as many as are allowed, and of speeds that are alike."""
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
        problem = f"is {at_most}, but the request names {len(named)} clusters ({listed(sorted(named))})"
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
        reject("request.total_size", spec.request.total_size, f"{problem}{nodes(largest)}", hint)
    if fits(at_most, ratio):
        return
    if ratio is not None and (at_most is None or fits(at_most, None)):
        each = sorted(clusters, key=lambda cluster: (-cluster.speed, cluster.name))
        speeds = listed([f"{c.name} {c.total} of speed {c.speed:g}" for c in each])
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
        request, fewer = capped(request, at_most), None
    for group in sharing_groups(spec, clusters):
        speeds = {cluster.name: cluster.speed for cluster in group}
        for names in [frozenset(speeds)] if ratio is None else speed_sets(speeds, ratio):
            # More nodes never make a request fit worse, so that the largest clusters tell of all.
            inside = sorted((c for c in group if c.name in names), key=lambda cluster: -(cluster.total or 0))
            try:
                check_on(totals_of(inside[:fewer]), request, spec.policy, policies)
            except UsageError:
                continue
            return True
    return False
