"""The checks of a submission that need no scheduler (semantics 2): each says which field, and the way out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NoReturn

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.packing import fits_by_worst_fit
from koalapy.model.profile import ClusterProfile, folders_needed, folders_used, lacks, series_differ, texts_of
from koalapy.model.request import (
    ClusterName,
    ComponentRequest,
    Environment,
    FixedRequest,
    FlexibleRequest,
    NonFixedRequest,
)
from koalapy.model.wording import known_names, listed, nodes


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster's size in nodes, None while it is not known, and what programs find there."""

    name: ClusterName
    total: int | None
    profile: ClusterProfile = field(default_factory=ClusterProfile)


WORST_FIT = ("", "worst-fit")
"""The policies of a non-fixed request, the default among them, for which what fits is known exactly."""

Totals = Mapping[ClusterName, int | None]
Sizes = Mapping[ClusterName, int]


def check(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    """``UsageError`` for the first thing that can never work.

    Whether a request fits on the empty grid is checked once the sizes of all clusters are known; for a fixed one the
    sizes of its own clusters are enough. Only what the request's policy could never place is refused.
    """
    totals = {cluster.name: cluster.total for cluster in clusters}
    _check_options(spec)
    request = spec.request
    if isinstance(request, FlexibleRequest):
        _check_flexible(request)
        _check_split_options(request)
        if not spec.command:
            _refuse("command", [], "is empty", "give the program to run and its arguments")
    else:
        _check_components(spec, request.components)
        _check_clusters_named(request, totals)
    able = _check_profiles(spec, clusters)
    try:
        _check_fits(spec, {cluster.name: cluster.total for cluster in able})
        _check_fits_one_series(spec, able)
    except UsageError as error:
        if left_out := sorted(totals.keys() - {cluster.name for cluster in able}):
            why = lacks(left_out, folders_needed(spec))
            raise UsageError(f"{error.message}; {why}", field=error.field, value=error.value, hint=error.hint) from None
        raise


def _refuse(field: str, value: object, problem: str, hint: str) -> NoReturn:
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


# What is run, and how


def _check_options(spec: JobSpec) -> None:
    _check_least("processes_per_node", spec.processes_per_node, 1)
    _check_least("max_restarts", spec.max_restarts, 0)
    _check_least("max_placement_tries", spec.max_placement_tries, 1)
    if spec.walltime is not None and not (isfinite(spec.walltime) and spec.walltime > 0):
        _refuse("walltime", spec.walltime, f"is {spec.walltime:g}", "give more than 0 seconds, or leave it out")
    _check_command("command", spec.command)
    _check_environment("environment", spec.environment)


def _check_least(field: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        _refuse(field, value, f"is {value}", f"give at least {least}, or leave it out")


def _check_command(field: str, command: Sequence[str]) -> None:
    if command and not command[0]:
        _refuse(f"{field}[0]", "", "is empty", "begin with the program to run")
    for index, word in enumerate(command):
        if "\0" in word:
            _refuse(f"{field}[{index}]", word, f"is {word!r}, with a NUL in it", "leave out the NUL")


def _check_environment(field: str, environment: Environment) -> None:
    for name, value in environment:
        if not name:
            _refuse(field, name, "has a variable without a name", "name it, or leave it out")
        if "=" in name or "\0" in name:
            _refuse(field, name, f"has a variable named {name!r}", "use a name without '=' and NUL")
        if "\0" in value:
            _refuse(f"{field}.{name}", value, f"is {value!r}, with a NUL in it", "leave out the NUL")


def _check_size(field: str, size: int) -> None:
    if size < 1:
        _refuse(field, size, f"is {size}", "ask for at least 1 node")


# Fixed and non-fixed requests


def _check_components(spec: JobSpec, components: Sequence[ComponentRequest]) -> None:
    if not components:
        _refuse("request.components", [], "is empty", "give at least one component")
    for index, component in enumerate(components):
        field = f"request.components[{index}]"
        _check_size(f"{field}.size", component.size)
        _check_environment(f"{field}.environment", component.environment)
        if component.command is not None and not component.command:
            _refuse(f"{field}.command", [], "is empty", "leave it out to run the job's own command")
        _check_command(f"{field}.command", component.command or ())
        if component.command is None and not spec.command:
            _refuse("command", [], f"is empty, and component {index} has none of its own", "give the program to run")


def _check_clusters_named(request: FixedRequest | NonFixedRequest, totals: Totals) -> None:
    for index, component in enumerate(request.components):
        field, name = f"request.components[{index}].cluster", component.cluster
        if isinstance(request, NonFixedRequest):
            if name is not None:
                hint = "leave it out, or make the request fixed"
                _refuse(field, name, f"is {name}, but the request is nonfixed", hint)
        elif not name:
            _refuse(field, name, "is missing", "a fixed request names the cluster of each component")
        elif name not in totals:
            _refuse(field, name, f"is {name}, and there is no such cluster", known_names(name, totals))


# Flexible requests


def _check_flexible(request: FlexibleRequest) -> None:
    total, least = request.total_size, request.min_component_size
    _check_size("request.total_size", total)
    _check_size("request.min_component_size", least)
    if least > total:
        problem = f"is {least}, more than the total_size of {total}"
        _refuse("request.min_component_size", least, problem, f"give at most {total}")
    _check_least("request.max_components", request.max_components, 1)


def _check_split_options(request: FlexibleRequest) -> None:
    least, most = request.min_component_size, request.max_components
    for index, option in enumerate(request.split_options):
        field, value = f"request.split_options[{index}]", list(option)
        if not option:
            _refuse(field, value, "is empty", "give the sizes of its components")
        for place, size in enumerate(option):
            _check_size(f"{field}[{place}]", size)
        if sum(option) != request.total_size:
            hint = "make its sizes sum to the total_size"
            _refuse(field, value, f"sums to {sum(option)}, but total_size is {request.total_size}", hint)
        if min(option) < least:
            problem = f"has a component of {min(option)}, but min_component_size is {least}"
            _refuse(field, value, problem, "leave out one of the two")
        if most is not None and len(option) > most:
            problem = f"has {len(option)} components, but max_components is {most}"
            _refuse(field, value, problem, "leave out one of the two")


# What clusters have to offer


def _check_profiles(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> list[ClusterLimits]:
    """The clusters on which the job, or any component of it, may run."""
    if isinstance(spec.request, FixedRequest):
        _check_fixed_profiles(spec, spec.request, {cluster.name: cluster.profile for cluster in clusters})
        return list(clusters)
    needed = folders_needed(spec)
    able = [cluster for cluster in clusters if needed <= cluster.profile.folders]
    if clusters and not able:
        _refuse_folder(spec, needed, f"and no cluster has a {' and a '.join(sorted(needed))} folder")
    return able


def _check_fixed_profiles(
    spec: JobSpec, request: FixedRequest, profiles: Mapping[ClusterName, ClusterProfile]
) -> None:  # fmt: skip
    first = profiles[request.components[0].cluster or ""]
    for index, component in enumerate(request.components):
        name = component.cluster or ""
        used = folders_used(text for _, text in texts_of(spec, component))
        if missing := used - profiles[name].folders:
            _refuse_folder(spec, missing, f"but {lacks([name], missing)}", index)
        if spec.launcher is Launcher.OPENMPI and profiles[name].mpi_series != first.mpi_series:
            series = {c.cluster or "": profiles[c.cluster or ""].mpi_series for c in request.components[: index + 1]}
            hint = "name clusters of one series, or use the launcher processes"
            _refuse(f"request.components[{index}].cluster", name, f"is {name}, but {series_differ(series)}", hint)


def _refuse_folder(spec: JobSpec, missing: frozenset[str], why: str, component: int | None = None) -> NoReturn:
    """Name the first text that needs one of these folders; of a certain component, or of any."""
    components = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    indices = range(len(components)) if component is None else (component,)
    for index in indices if components else (None,):
        own = components[index] if index is not None else None
        for name, text in texts_of(spec, own):
            if used := folders_used([text]) & missing:
                is_own = own is not None and (own.output if name == "output" else own.command) and name != "workdir"
                place = f"request.components[{index}].{name}" if is_own else name
                folder = min(used)
                hint = f"set {folder} in the cluster's configuration, or write {{{{{folder}}}}} for the text itself"
                _refuse(place, text, f"needs {{{folder}}}, {why}", hint)
    raise AssertionError("a folder is needed that no text names")


# Whether it fits on the empty grid


def _check_fits_one_series(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    """What fits on the whole grid must also fit on clusters with the same series of Open MPI."""
    groups: dict[int, dict[ClusterName, int | None]] = {}
    for cluster in clusters:
        groups.setdefault(cluster.profile.mpi_series, {})[cluster.name] = cluster.total
    if spec.launcher is not Launcher.OPENMPI or isinstance(spec.request, FixedRequest) or len(groups) < 2:
        return
    refused: UsageError | None = None
    for group in sorted(groups.values(), key=lambda totals: -sum(total or 0 for total in totals.values())):
        try:
            _check_fits(spec, group)
            return
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    each = "; ".join(f"Open MPI {series}: {_each(_known(groups[series]))}" for series in sorted(groups, reverse=True))
    problem = f"fits on the grid, but not on clusters with one series of Open MPI ({each})"
    _refuse(refused.field, refused.value, problem, "ask for less, or use the launcher processes")


def _check_fits(spec: JobSpec, totals: Totals) -> None:
    request = spec.request
    if isinstance(request, FixedRequest):
        _check_fixed_fits(request, totals)
        return
    known = _known(totals)
    if not known or len(known) < len(totals):
        return
    if isinstance(request, NonFixedRequest):
        sizes = [component.size for component in request.components]
        _check_components_fit(sizes, known)
        if spec.policy in WORST_FIT and not fits_by_worst_fit(sizes, known.values()):
            problem = f"of {_sum(sizes)} nodes never fit together by worst-fit, even on the empty grid ({_each(known)})"
            _refuse("request.components", sizes, problem, "use smaller components, or make the request flexible")
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
            _refuse(f"request.components[{index}].size", component.size, problem, f"ask for at most {total} on {name}")


def _check_components_fit(sizes: Sequence[int], known: Sizes) -> None:
    largest = max(known.values())
    for index, size in enumerate(sizes):
        if size > largest:
            problem = f"is {size}, but no cluster has more than {nodes(largest)}"
            hint = "split it, or make the request flexible"
            _refuse(f"request.components[{index}].size", size, problem, hint)
    if sum(sizes) > sum(known.values()):
        hint = f"ask for at most {sum(known.values())} in all"
        _refuse("request.components", list(sizes), f"need {sum(sizes)} nodes, but {_grid_has(known)}", hint)
    crowd = _too_many(sizes, known)
    if crowd is not None:
        many, size, room = crowd
        problem = f"are {many} of at least {nodes(size)}, but the empty grid has room for {room} such ({_each(known)})"
        _refuse("request.components", list(sizes), problem, "use smaller components, or make the request flexible")


def _check_flexible_fits(request: FlexibleRequest, known: Sizes) -> None:
    total, least, most = request.total_size, request.min_component_size, request.max_components
    if total > sum(known.values()):
        hint = f"ask for at most {sum(known.values())}"
        _refuse("request.total_size", total, f"is {total}, but {_grid_has(known)}", hint)
    if request.split_options:
        if not any(fits_by_worst_fit(option, known.values()) for option in request.split_options):
            shown = [list(option) for option in request.split_options]
            problem = f"fit in none of the ways given, even on the empty grid ({_each(known)})"
            _refuse("request.split_options", shown, problem, "add one with smaller components")
        return
    roomy = sorted((size for size in known.values() if size >= least), reverse=True)
    if sum(roomy) < total:
        problem = f"is {least}, but the clusters with at least that many have {nodes(sum(roomy))} ({_each(known)})"
        _refuse("request.min_component_size", least, problem, "lower it, or ask for fewer nodes in all")
    if sum(roomy[:most]) < total:
        problem = f"is {most}, but that many clusters have at most {nodes(sum(roomy[:most]))} ({_each(known)})"
        _refuse("request.max_components", most, problem, "allow more, or ask for fewer nodes in all")
    fewest = next(count for count in range(1, len(roomy) + 1) if sum(roomy[:count]) >= total)
    if fewest * least > total:
        problem = f"is {least}, but {nodes(total)} need {fewest} clusters ({_each(known)}), too many for that"
        _refuse("request.min_component_size", least, problem, f"lower it to {total // fewest} or less")


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
