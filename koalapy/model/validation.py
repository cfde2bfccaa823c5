"""The checks of a submission that need no scheduler (semantics 2): each says which field, and the way out."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NoReturn

from koalapy.model.cluster import check_cluster
from koalapy.model.errors import UsageError
from koalapy.model.fitting import ClusterLimits, Totals, check_fits, refuse
from koalapy.model.inputs import pattern_problem
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.profile import ClusterProfile, folders_needed, folders_used, lacks, series_differ, texts_of
from koalapy.model.request import (
    ClusterName,
    ComponentRequest,
    Environment,
    FixedRequest,
    FlexibleRequest,
    NonFixedRequest,
)

__all__ = ["ClusterLimits", "check", "check_size"]

MOST_COMPONENTS = 10_000
"""Components of one job that no configuration can allow more of."""
MOST_INPUTS = 10_000
"""Inputs of all components of a job together."""
MOST_PROCESSES = 8192
"""Processes on a node: Linux knows no machine with more processors."""
LARGEST_PLAN = 256 * 1024 * 1024
"""Characters of commands and variables that are sent for one job: each component is told those of all."""


def check_size(spec: JobSpec, most: int) -> None:
    """``UsageError`` for what is larger than anything a scheduler should look at, before it is looked at.

    ``most``: components of one job.
    """
    request, bound = spec.request, f"more than max_components_per_job, {most}"
    way_out = f"give at most {most}, or have the daemon's operator raise rules.max_components_per_job"
    if isinstance(request, FlexibleRequest):
        if request.max_components is not None and request.max_components > most:
            refuse("request.max_components", request.max_components, f"is {request.max_components}, {bound}", way_out)
        for index, option in enumerate(request.split_options):
            if len(option) > most:
                field = f"request.split_options[{index}]"
                refuse(field, len(option), f"has {len(option)} components, {bound}", way_out)
        return
    count = len(request.components)
    if count > most:
        refuse("request.components", count, f"has {count} components, {bound}", way_out)
    inputs = count * len(spec.inputs) + sum(len(component.inputs) for component in request.components)
    if inputs > MOST_INPUTS:
        problem = f"are {inputs} of all components together"
        refuse("inputs", inputs, problem, f"give at most {MOST_INPUTS}; a folder is one input")
    plan = count * sum(_text_size(spec, component) for component in request.components)
    if plan > LARGEST_PLAN:
        problem = f"and environment are too long for {count} components, each of which is told of all"
        refuse("command", plan, problem, "put long arguments and values into files")


def _text_size(spec: JobSpec, component: ComponentRequest) -> int:
    """Characters that tell what a component runs."""
    variables = (*spec.environment, *component.environment)
    return sum(map(len, component.command or spec.command)) + sum(len(name) + len(value) for name, value in variables)


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
            refuse("command", [], "is empty", "give the program to run and its arguments")
    else:
        _check_components(spec, request.components)
        _check_clusters_named(request, totals)
    able = _check_profiles(spec, clusters)
    try:
        check_fits(spec, able)
    except UsageError as error:
        if left_out := sorted(totals.keys() - {cluster.name for cluster in able}):
            why = lacks(left_out, folders_needed(spec))
            raise UsageError(f"{error.message}; {why}", field=error.field, value=error.value, hint=error.hint) from None
        raise


# What is run, and how


def _check_options(spec: JobSpec) -> None:
    _check_least("processes_per_node", spec.processes_per_node, 1)
    if (processes := spec.processes_per_node) is not None and processes > MOST_PROCESSES:
        problem = f"is {processes}, more than any node has processors"
        refuse("processes_per_node", processes, problem, f"give at most {MOST_PROCESSES}, or leave it out")
    _check_least("max_restarts", spec.max_restarts, 0)
    _check_least("max_placement_tries", spec.max_placement_tries, 1)
    _check_least("max_claiming_tries", spec.max_claiming_tries, 1)
    _check_least("coallocation", spec.coallocation, 1)
    ratio, threshold = spec.speed_ratio_min, spec.claim_threshold
    if ratio is not None and not 0 < ratio <= 1:
        refuse("speed_ratio_min", ratio, f"is {ratio:g}", "give a fraction above 0 and up to 1, or leave it out")
    if threshold is not None and not 0 <= threshold <= 1:
        refuse("claim_threshold", threshold, f"is {threshold:g}", "give a fraction from 0 to 1, or leave it out")
    for index, code in enumerate(spec.retry_on_exit):
        if not 1 <= code <= 255:
            refuse(f"retry_on_exit[{index}]", code, f"is {code}", "give exit codes from 1 to 255")
    for index, pattern in enumerate(spec.collect):
        if problem := pattern_problem(pattern):
            hint = "give a pattern of files below the folder, as out/*.csv or **/*.log"
            refuse(f"collect[{index}]", pattern, f"is {pattern!r}, {problem}", hint)
    share = spec.communication
    if share is not None and not 0 <= share <= 1:
        refuse("communication", share, f"is {share:g}", "give a fraction of the run time from 0 to 1, or leave it out")
    if spec.walltime is not None and not (isfinite(spec.walltime) and spec.walltime > 0):
        refuse("walltime", spec.walltime, f"is {spec.walltime:g}", "give more than 0 seconds, or leave it out")
    _check_command("command", spec.command)
    _check_environment("environment", spec.environment)


def _check_least(field: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        refuse(field, value, f"is {value}", f"give at least {least}, or leave it out")


def _check_command(field: str, command: Sequence[str]) -> None:
    if command and not command[0]:
        refuse(f"{field}[0]", "", "is empty", "begin with the program to run")
    for index, word in enumerate(command):
        if "\0" in word:
            refuse(f"{field}[{index}]", word, f"is {word!r}, with a NUL in it", "leave out the NUL")


def _check_environment(field: str, environment: Environment) -> None:
    for name, value in environment:
        if not name:
            refuse(field, name, "has a variable without a name", "name it, or leave it out")
        if "=" in name or "\0" in name:
            refuse(field, name, f"has a variable named {name!r}", "use a name without '=' and NUL")
        if "\0" in value:
            refuse(f"{field}.{name}", value, f"is {value!r}, with a NUL in it", "leave out the NUL")


def _check_size(field: str, size: int) -> None:
    if size < 1:
        refuse(field, size, f"is {size}", "ask for at least 1 node")


# Fixed and non-fixed requests


def _check_components(spec: JobSpec, components: Sequence[ComponentRequest]) -> None:
    if not components:
        refuse("request.components", [], "is empty", "give at least one component")
    for index, component in enumerate(components):
        field = f"request.components[{index}]"
        _check_size(f"{field}.size", component.size)
        _check_environment(f"{field}.environment", component.environment)
        if component.command is not None and not component.command:
            refuse(f"{field}.command", [], "is empty", "leave it out to run the job's own command")
        _check_command(f"{field}.command", component.command or ())
        if component.command is None and not spec.command:
            refuse("command", [], f"is empty, and component {index} has none of its own", "give the program to run")


def _check_clusters_named(request: FixedRequest | NonFixedRequest, totals: Totals) -> None:
    for index, component in enumerate(request.components):
        field, name = f"request.components[{index}].cluster", component.cluster
        if isinstance(request, NonFixedRequest):
            if name is not None:
                hint = "leave it out, or make the request fixed"
                refuse(field, name, f"is {name}, but the request is nonfixed", hint)
        elif not name:
            refuse(field, name, "is missing", "a fixed request names the cluster of each component")
        else:
            check_cluster(name, totals, field)


# Flexible requests


def _check_flexible(request: FlexibleRequest) -> None:
    total, least = request.total_size, request.min_component_size
    _check_size("request.total_size", total)
    _check_size("request.min_component_size", least)
    if least > total:
        problem = f"is {least}, more than the total_size of {total}"
        refuse("request.min_component_size", least, problem, f"give at most {total}")
    _check_least("request.max_components", request.max_components, 1)


def _check_split_options(request: FlexibleRequest) -> None:
    least, most = request.min_component_size, request.max_components
    for index, option in enumerate(request.split_options):
        field, value = f"request.split_options[{index}]", list(option)
        if not option:
            refuse(field, value, "is empty", "give the sizes of its components")
        for place, size in enumerate(option):
            _check_size(f"{field}[{place}]", size)
        if sum(option) != request.total_size:
            hint = "make its sizes sum to the total_size"
            refuse(field, value, f"sums to {sum(option)}, but total_size is {request.total_size}", hint)
        if min(option) < least:
            problem = f"has a component of {min(option)}, but min_component_size is {least}"
            refuse(field, value, problem, "leave out one of the two")
        if most is not None and len(option) > most:
            problem = f"has {len(option)} components, but max_components is {most}"
            refuse(field, value, problem, "leave out one of the two")


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


def _check_fixed_profiles(spec: JobSpec, request: FixedRequest, profiles: Mapping[ClusterName, ClusterProfile]) -> None:
    first = profiles[request.components[0].cluster or ""]
    for index, component in enumerate(request.components):
        name = component.cluster or ""
        used = folders_used(text for _, text in texts_of(spec, component))
        if missing := used - profiles[name].folders:
            _refuse_folder(spec, missing, f"but {lacks([name], missing)}", index)
        if spec.launcher is Launcher.OPENMPI and profiles[name].mpi_series != first.mpi_series:
            series = {c.cluster or "": profiles[c.cluster or ""].mpi_series for c in request.components[: index + 1]}
            hint = "name clusters of one series, or use the launcher processes"
            refuse(f"request.components[{index}].cluster", name, f"is {name}, but {series_differ(series)}", hint)


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
                refuse(place, text, f"needs {{{folder}}}, {why}", hint)
    raise AssertionError("a folder is needed that no text names")
