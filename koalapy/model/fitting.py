"""Whether a request fits on the empty grid at all, within what the job says of the clusters to combine."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.packing import fits_by_worst_fit, speed_sets
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.wording import listed, nodes


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster's size in nodes, None while it is not known, its speed, and what programs find there."""

    name: ClusterName
    total: int | None
    profile: ClusterProfile = field(default_factory=ClusterProfile)
    speed: float = 1.0


WORST_FIT = ("", "worst-fit")
"""The policies of a non-fixed request, the default among them, for which what fits is known exactly."""
ONE_CLUSTER = ("best-fit", "fastest-one")
"""The policies that never combine clusters."""

Totals = Mapping[ClusterName, int | None]
Sizes = Mapping[ClusterName, int]


def check_fits(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    """``UsageError`` for what never fits on these clusters, on those of one series, or within the constraints."""
    _check_part(spec.request, spec.policy, _totals(clusters))
    _check_fits_one_series(spec, clusters)
    _check_constraints(spec, clusters)


def refuse(field: str, value: object, problem: str, hint: str) -> NoReturn:
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


def _totals(clusters: Sequence[ClusterLimits]) -> dict[ClusterName, int | None]:
    return {cluster.name: cluster.total for cluster in clusters}


def _by_series(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> dict[int, list[ClusterLimits]]:
    """The clusters that may be combined as far as the series of Open MPI goes."""
    groups: dict[int, list[ClusterLimits]] = {}
    for cluster in clusters:
        series = cluster.profile.mpi_series if spec.launcher is Launcher.OPENMPI else 0
        groups.setdefault(series, []).append(cluster)
    return groups


def _check_fits_one_series(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    """What fits on the whole grid must also fit on clusters with the same series of Open MPI."""
    groups = _by_series(spec, clusters)
    if isinstance(spec.request, FixedRequest) or len(groups) < 2:
        return
    refused: UsageError | None = None
    totals = [_totals(group) for group in groups.values()]
    for group in sorted(totals, key=lambda group: -sum(total or 0 for total in group.values())):
        try:
            _check_part(spec.request, spec.policy, group)
            return
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    each = "; ".join(
        f"Open MPI {series}: {_each(_known(_totals(groups[series])))}" for series in sorted(groups, reverse=True)
    )
    problem = f"fits on the grid, but not on clusters with one series of Open MPI ({each})"
    refuse(refused.field, refused.value, problem, "ask for less, or use the launcher processes")


# Within what the job says of the clusters to combine


def _check_constraints(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    at_most, ratio = spec.coallocation, spec.speed_ratio_min
    if isinstance(spec.request, FixedRequest):
        _check_named_together(spec.request, at_most, ratio, clusters)
        return
    if any(cluster.total is None for cluster in clusters) or not clusters:
        return
    if spec.policy in ONE_CLUSTER and not _fits_within(spec, clusters, 1, None):
        largest = max(cluster.total or 0 for cluster in clusters)
        problem = f"is {spec.request.total_size}, but policy {spec.policy} takes one cluster, and none has more than "
        hint = f"ask for at most {largest}, or use another policy"
        refuse("request.total_size", spec.request.total_size, f"{problem}{nodes(largest)}", hint)
    if _fits_within(spec, clusters, at_most, ratio):
        return
    if ratio is not None and (at_most is None or _fits_within(spec, clusters, at_most, None)):
        each = sorted(clusters, key=lambda cluster: (-cluster.speed, cluster.name))
        told = listed([f"{c.name} {c.total} of speed {c.speed:g}" for c in each])
        problem = f"is {ratio:g}, but clusters with such speeds have no room for the request together ({told})"
        refuse("speed_ratio_min", ratio, problem, "lower it, or ask for fewer nodes")
    together = "no cluster has" if at_most == 1 else f"no {at_most} clusters have"
    problem = f"is {at_most}, but {together} room for the whole request ({_each(_known(_totals(clusters)))})"
    refuse("coallocation", at_most, problem, "allow more clusters, or ask for fewer nodes")


def _check_named_together(
    request: FixedRequest, at_most: int | None, ratio: float | None, clusters: Sequence[ClusterLimits]
) -> None:
    named = {component.cluster or "" for component in request.components}
    if at_most is not None and len(named) > at_most:
        problem = f"is {at_most}, but the request names {len(named)} clusters ({listed(sorted(named))})"
        refuse("coallocation", at_most, problem, f"allow {len(named)}, or name fewer clusters")
    used = sorted((cluster for cluster in clusters if cluster.name in named), key=lambda c: (c.speed, c.name))
    if ratio is not None and used and used[0].speed < used[-1].speed * ratio:
        slow, fast = used[0], used[-1]
        problem = f"is {ratio:g}, but {slow.name} has speed {slow.speed:g} and {fast.name} {fast.speed:g}"
        refuse("speed_ratio_min", ratio, problem, "lower it, or name clusters of more equal speed")


def _fits_within(spec: JobSpec, clusters: Sequence[ClusterLimits], at_most: int | None, ratio: float | None) -> bool:
    request = spec.request
    if at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        most = request.max_components
        request = replace(request, max_components=at_most if most is None else min(most, at_most))
    for group in _by_series(spec, clusters).values():
        for part in _of_like_speed(group, ratio):
            # More nodes never make a request fit worse, so that the largest clusters tell of all.
            largest = sorted(part, key=lambda cluster: -(cluster.total or 0))
            kept = part if request is not spec.request else largest[:at_most]
            try:
                _check_part(request, spec.policy, _totals(kept))
            except UsageError:
                continue
            return True
    return False


def _of_like_speed(clusters: Sequence[ClusterLimits], ratio: float | None) -> Iterator[list[ClusterLimits]]:
    if ratio is None:
        yield list(clusters)
        return
    for names in speed_sets({cluster.name: cluster.speed for cluster in clusters}, ratio):
        yield [cluster for cluster in clusters if cluster.name in names]


# On a part of the grid


def _check_part(request: Request, policy: str, totals: Totals) -> None:
    if isinstance(request, FixedRequest):
        _check_fixed_fits(request, totals)
        return
    known = _known(totals)
    if not known or len(known) < len(totals):
        return
    if isinstance(request, NonFixedRequest):
        sizes = [component.size for component in request.components]
        _check_components_fit(sizes, known)
        if policy in WORST_FIT and not fits_by_worst_fit(sizes, known.values()):
            problem = f"of {_sum(sizes)} nodes never fit together by worst-fit, even on the empty grid ({_each(known)})"
            refuse("request.components", sizes, problem, "use smaller components, or make the request flexible")
    else:
        _check_flexible_fits(request, known)


def _known(totals: Totals) -> dict[ClusterName, int]:
    return {name: total for name, total in totals.items() if total is not None}


def _check_fixed_fits(request: FixedRequest, totals: Totals) -> None:
    wanted: Counter[str] = Counter()
    for index, component in enumerate(request.components):
        name = component.cluster or ""
        wanted[name] += component.size
        total = totals[name]
        if total is not None and wanted[name] > total:
            problem = f"is {component.size}, but {name} has {nodes(total)}"
            if wanted[name] > component.size:
                problem += f" and the components there need {wanted[name]}"
            refuse(f"request.components[{index}].size", component.size, problem, f"ask for at most {total} on {name}")


def _check_components_fit(sizes: Sequence[int], known: Sizes) -> None:
    largest = max(known.values())
    for index, size in enumerate(sizes):
        if size > largest:
            problem = f"is {size}, but no cluster has more than {nodes(largest)}"
            hint = "split it, or make the request flexible"
            refuse(f"request.components[{index}].size", size, problem, hint)
    if sum(sizes) > sum(known.values()):
        hint = f"ask for at most {sum(known.values())} in all"
        refuse("request.components", list(sizes), f"need {sum(sizes)} nodes, but {_grid_has(known)}", hint)
    crowd = _too_many(sizes, known)
    if crowd is not None:
        many, size, room = crowd
        problem = f"are {many} of at least {nodes(size)}, but the empty grid has room for {room} such ({_each(known)})"
        refuse("request.components", list(sizes), problem, "use smaller components, or make the request flexible")


def _check_flexible_fits(request: FlexibleRequest, known: Sizes) -> None:
    total, least, most = request.total_size, request.min_component_size, request.max_components
    if total > sum(known.values()):
        hint = f"ask for at most {sum(known.values())}"
        refuse("request.total_size", total, f"is {total}, but {_grid_has(known)}", hint)
    if request.split_options:
        if not any(fits_by_worst_fit(option, known.values()) for option in request.split_options):
            shown = [list(option) for option in request.split_options]
            problem = f"fit in none of the ways given, even on the empty grid ({_each(known)})"
            refuse("request.split_options", shown, problem, "add one with smaller components")
        return
    roomy = sorted((size for size in known.values() if size >= least), reverse=True)
    if sum(roomy) < total:
        problem = f"is {least}, but the clusters with at least that many have {nodes(sum(roomy))} ({_each(known)})"
        refuse("request.min_component_size", least, problem, "lower it, or ask for fewer nodes in all")
    if sum(roomy[:most]) < total:
        problem = f"is {most}, but that many clusters have at most {nodes(sum(roomy[:most]))} ({_each(known)})"
        refuse("request.max_components", most, problem, "allow more, or ask for fewer nodes in all")
    fewest = next(count for count in range(1, len(roomy) + 1) if sum(roomy[:count]) >= total)
    if fewest * least > total:
        problem = f"is {least}, but {nodes(total)} need {fewest} clusters ({_each(known)}), too many for that"
        refuse("request.min_component_size", least, problem, f"lower it to {total // fewest} or less")


def _too_many(sizes: Sequence[int], known: Sizes) -> tuple[int, int, int] | None:
    """More components of some size than there is room for: (how many, size, room), counting larger ones as of it."""
    for size in sorted(set(sizes), reverse=True):
        many = sum(1 for other in sizes if other >= size)
        room = sum(total // size for total in known.values())
        if many > room:
            return many, size, room
    return None


def _sum(sizes: Sequence[int]) -> str:
    return listed([str(size) for size in sizes], separator="+")


def _grid_has(known: Sizes) -> str:
    return f"the whole grid has {nodes(sum(known.values()))} ({_each(known)})"


def _each(known: Sizes) -> str:
    """The largest clusters with their sizes."""
    largest = sorted(known.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{name} {total}" for name, total in largest])
