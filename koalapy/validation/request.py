"""Check a submission by itself, independent of the clusters: its size, fields, program and request."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from koalapy.model.array import ArrayFail, IndexRange, TaskIndices
from koalapy.model.cluster import check_cluster
from koalapy.model.dependency import MAX_DEPENDENCIES
from koalapy.model.errors import reject
from koalapy.model.field import find_out_of_bounds
from koalapy.model.job_spec import (
    OF_RUNNERS,
    SET_BY_RUNNERS,
    JobSpec,
    Launcher,
    describe_patterns,
    find_script_error,
    find_unknown_pattern,
)
from koalapy.model.node_requirement import MAX_CORES
from koalapy.model.request import ComponentRequest, Environment, FlexibleRequest, NonFixedRequest
from koalapy.model.wording import format_duration, format_time
from koalapy.validation.limits import Limits

MAX_INPUTS = 10_000
"""Maximum inputs of all components of a job together."""
MAX_PLAN_LENGTH = 256 * 1024 * 1024
"""Maximum characters of commands and variables that are sent for one job; each component receives those of all."""
ENTRY_BYTES = 4
"""Bytes that each text counts in addition to its content, so that many empty texts are limited, too."""


def check_size(spec: JobSpec, limits: Limits) -> None:
    """Reject a job with too many components, inputs, dependencies or bytes, before any work is done for it."""
    _check_bytes(spec, limits.max_bytes)
    check_counts(spec, limits)


def check_counts(spec: JobSpec, limits: Limits) -> None:
    """Reject a job with too many components, inputs or dependencies, or with long texts for many components."""
    if (count := sum(map(len, spec.after))) > MAX_DEPENDENCIES:
        hint = "wait for fewer jobs, or for an array instead of many jobs"
        reject("after", count, f"has {count} dependencies, more than {MAX_DEPENDENCIES}", hint)
    request, maximum = spec.request, limits.max_components
    bound = f"more than max_components_per_job, {maximum}"
    way_out = f"give at most {maximum}, or have the daemon's operator raise rules.max_components_per_job"
    if isinstance(request, FlexibleRequest):
        if request.max_components is not None and request.max_components > maximum:
            reject("request.max_components", request.max_components, f"is {request.max_components}, {bound}", way_out)
        for index, option in enumerate(request.split_options):
            if len(option) > maximum:
                field = f"request.split_options[{index}]"
                reject(field, len(option), f"has {len(option)} components, {bound}", way_out)
        return
    count = len(request.components)
    if count > maximum:
        reject("request.components", count, f"has {count} components, {bound}", way_out)
    inputs = count * len(spec.inputs) + sum(len(component.inputs) for component in request.components)
    if inputs > MAX_INPUTS:
        problem = f"are {inputs} of all components together"
        reject("inputs", inputs, problem, f"give at most {MAX_INPUTS}; a folder is one input")
    plan = count * sum(_text_length(spec, component) for component in request.components)
    if plan > MAX_PLAN_LENGTH:
        problem = f"and environment are too long for {count} components, each of which gets all of them"
        reject("command", plan, problem, "put long arguments and values into files")


def _check_bytes(spec: JobSpec, max_bytes: int | None) -> None:
    """Reject a job with more than ``max_bytes`` bytes, by its largest field; None: unlimited."""
    if max_bytes is None:
        return
    sizes = measure_fields(spec)
    total = sum(sizes.values())
    if total > max_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        reject(
            largest,
            sizes[largest],
            f"has {sizes[largest]} bytes, and the whole job {total}: more than max_bytes_per_job, {max_bytes}",
            "put long arguments, values and lists into files and send them along (--stage), or have the daemon's "
            "operator raise rules.max_bytes_per_job",
        )


def measure_fields(spec: JobSpec) -> dict[str, int]:
    """Return the bytes of each field of a submission."""
    kind: Any = spec.__class__
    return {name: bytes_of(getattr(spec, name)) for name in _field_names(kind)}


def bytes_of(value: Any) -> int:
    """Return the bytes of all texts in a value, plus ``ENTRY_BYTES`` for each text and dataclass in it."""
    if isinstance(value, str):
        return len(value.encode(errors="replace")) + ENTRY_BYTES
    if isinstance(value, tuple):
        return sum(map(bytes_of, value))
    if value is not None and not isinstance(value, int | float) and is_dataclass(value):
        kind: Any = value.__class__
        return ENTRY_BYTES + sum(bytes_of(getattr(value, name)) for name in _field_names(kind))
    return 0


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _text_length(spec: JobSpec, component: ComponentRequest) -> int:
    """Return the number of characters in the command and variables of a component."""
    variables = (*spec.environment, *component.environment)
    return sum(map(len, component.command or spec.command)) + sum(len(name) + len(value) for name, value in variables)


def check_fields(spec: JobSpec, limits: Limits) -> None:
    """Reject numbers out of the bounds of their fields, and result patterns that lead out of the component's folder."""
    for field, value, problem, way_out in find_out_of_bounds(spec):
        reject(field, value, problem, way_out)
    for index, pattern in enumerate(spec.collect):
        problem = ""
        if not pattern or not pattern.isprintable():
            problem = "which names no files"
        elif pattern.startswith("/"):
            problem = "which is not below the component's folder"
        elif ".." in pattern.split("/"):
            problem = "which leads out of the component's folder"
        if problem:
            hint = "give a pattern of files below the folder, as out/*.csv or **/*.log"
            reject(f"collect[{index}]", pattern, f"is {pattern!r}, {problem}", hint)


def check_times(spec: JobSpec, now: float) -> None:
    """Reject a deadline that the job cannot meet, even if it starts at once or at its begin."""
    if spec.deadline is None:
        return
    start, walltime = max(now, spec.begin or now), spec.walltime or 0.0
    if start + walltime < spec.deadline:
        return
    deadline = format_time(spec.deadline, now, exact=True)
    if spec.deadline <= now:
        problem, hint = "has passed", "give a time in the future"
    elif spec.begin is not None and spec.begin >= spec.deadline:
        problem, hint = f"is not after begin, {format_time(spec.begin, now, exact=True)} UTC", "give a later time"
    else:
        problem = f"leaves less than its walltime of {format_duration(walltime)}"
        hint = "give a later time, or a shorter walltime"
    reject("deadline", spec.deadline, f"is {deadline} UTC, which {problem}", hint)


RESERVED_VARIABLES = frozenset(f"KOALA_{name}" for name in (*SET_BY_RUNNERS, *OF_RUNNERS))
"""Environment variables that the runner sets or reads on each node."""
UNSUITED_PLACEHOLDERS = {"{job}": "%j", "{cluster}": "%c"}
"""Placeholders of commands that output files do not have, and the pattern that replaces each."""


def check_program(spec: JobSpec, limits: Limits) -> None:
    """Reject a job with a component without a command, or with commands, variables or files that no process can get."""
    check_command("command", spec.command)
    _check_script(spec)
    if spec.launcher is Launcher.PROCESSES and (count := spec.processes_per_node or 1) > 1:
        problem = f"is {count}, but the launcher processes starts the command once on each node"
        reject("processes_per_node", count, problem, "leave it out, or use the launcher openmpi")
    if spec.cores_of_ranks > MAX_CORES:
        problem = f"is {spec.cpus_per_rank}, for {spec.processes_per_node} processes on each node"
        hint = f"give at most {MAX_CORES // (spec.processes_per_node or 1)}"
        reject("cpus_per_rank", spec.cpus_per_rank, f"{problem}: more than any node has processors", hint)
    if spec.container is not None and not spec.container.startswith(("/", "{")):
        problem = f"is {spec.container!r}, which is not the path of an image"
        hint = "download the image to the sites and give its absolute path, or one that begins with {scratch} or {home}"
        reject("container", spec.container, problem, hint)
    if spec.workdir and not spec.workdir.startswith(("/", "{")):
        problem = f"is {spec.workdir!r}, which is not the same folder on every node"
        reject("workdir", spec.workdir, problem, "give an absolute path, or one that begins with {scratch} or {home}")
    _check_output_file("output", spec.output)
    _check_output_file("error", spec.error)
    _check_environment("environment", spec.environment)
    if isinstance(spec.request, FlexibleRequest):
        if not spec.command:
            reject("command", [], "is empty", "give the program to run and its arguments")
        return
    for index, component in enumerate(spec.request.components):
        field = f"request.components[{index}]"
        _check_environment(f"{field}.environment", component.environment)
        _check_output_file(f"{field}.output", component.output)
        _check_output_file(f"{field}.error", component.error)
        if component.command is not None and not component.command:
            reject(f"{field}.command", [], "is empty", "leave it out to run the job's own command")
        check_command(f"{field}.command", component.command or ())
        if component.command is None and not spec.command:
            reject("command", [], f"is empty, and component {index} has none of its own", "give the program to run")


def _check_script(spec: JobSpec) -> None:
    """Reject a script that cannot run, or fields that contradict it."""
    if not spec.script:
        return
    if error := find_script_error(spec.script):
        reject("script", f"{spec.script[:100]}", *error)
    if not spec.command:
        reject("command", [], "is empty", "give the script's name, and its arguments")
    if spec.interactive:
        reject("interactive", True, "is true, but a script reads no input", "leave it out, or give a command")
    if spec.launcher is Launcher.PROCESSES:
        hint = "leave it out: programs of a script start by mpirun, or by themselves on the first node"
        reject("launcher", spec.launcher, "is processes, but a script runs once", hint)
    if spec.label:
        reject(
            "label", True, "is true, but a script has no ranks", "leave it out: mpirun in the script has --tag-output"
        )
    for field, name in (("output", spec.output), ("error", spec.error)):
        if name and "%r" in name.replace("%%", ""):
            reject(field, name, f"is {name!r}, but a script has no ranks", "leave %r out")
    components = () if isinstance(spec.request, FlexibleRequest) else spec.request.components
    for index, component in enumerate(components):
        if component.command is not None:
            field = f"request.components[{index}].command"
            reject(field, component.command[0], "is given, but a script runs once for the whole job", "leave it out")


def check_warning(spec: JobSpec, limits: Limits) -> None:
    """Reject a warning before the start of the program, or with more grace than is allowed."""
    if spec.warning is None:
        return
    grace, text = spec.warning.grace, str(spec.warning)
    if grace > limits.max_grace:
        problem = f"is {text}, and no job may have more than {limits.max_grace:g} s between its warning and its stop"
        reject("warning", text, problem, f"give at most {spec.warning.signal}@{limits.max_grace:g}")
    if spec.walltime is not None and grace >= spec.walltime:
        problem = f"is {text}, but the walltime is {spec.walltime:g} s: it would be warned before it has begun"
        reject("warning", text, problem, "give fewer seconds, or a longer walltime")


def with_all_indices(spec: JobSpec) -> JobSpec:
    """Return a specification with the indices of all its lines, if it has lines and names no indices."""
    if not spec.each_line or (spec.array is not None and spec.array.ranges):
        return spec
    limit = spec.array.limit if spec.array else None
    return replace(spec, array=TaskIndices((IndexRange(1, len(spec.each_line)),), limit))


def check_array(spec: JobSpec, limits: Limits) -> None:
    """Reject an array that is interactive, has too many tasks, no indices, or indices without a line."""
    if spec.array is None:
        if spec.array_fail is not ArrayFail.CONTINUE:
            reject("array_fail", str(spec.array_fail), f"is {spec.array_fail}, but the job is no array", "add array")
        return
    size, text = spec.array.size, str(spec.array)
    if spec.interactive:
        reject("interactive", True, "is set for an array, whose tasks read no input of a client", "leave array out")
    if not size:
        reject("array", text, f"is {text}, without indices", "give indices: 1-200%16")
    if size > limits.max_array_size:
        problem = f"is {text}, with {size} tasks, more than max_array_size, {limits.max_array_size}"
        way_out = "give fewer indices, or have the daemon's operator raise rules.max_array_size"
        reject("array", text, problem, way_out)
    lines, ranges = len(spec.each_line), spec.array.ranges
    if lines and (ranges[0].first < 1 or ranges[-1].last > lines):
        problem = f"is {text}, but each_line has the lines 1 to {lines}"
        reject("array", text, problem, "give numbers of lines, or leave array out for all lines")
    for number, line in enumerate(spec.each_line, 1):
        if "\0" in line:
            reject(f"each_line[{number - 1}]", line, "has a NUL in it", "leave out the NUL")


def _check_output_file(field: str, name: str | None) -> None:
    """Reject an empty file name, one with a NUL, and one with patterns or placeholders that it cannot have."""
    if name is None:
        return
    if not name or "\0" in name:
        reject(field, name, f"is {name!r}, which no file can have as its name", "name a file, or leave it out")
    if pattern := find_unknown_pattern(name):
        reject(field, name, f"is {name!r}, and {pattern} has no meaning", f"use {describe_patterns()}")
    for placeholder, replacement in UNSUITED_PLACEHOLDERS.items():
        if placeholder in name:
            problem = f"is {name!r}, and {placeholder} is for commands and working directories"
            reject(field, name, problem, f"write {replacement} in its place")


def check_command(field: str, command: Sequence[str]) -> None:
    """Reject a command without a program, or with a NUL character."""
    if command and not command[0]:
        reject(f"{field}[0]", "", "is empty", "begin with the program to run")
    for index, argument in enumerate(command):
        if "\0" in argument:
            reject(f"{field}[{index}]", argument, f"is {argument!r}, with a NUL in it", "leave out the NUL")


def _check_environment(field: str, environment: Environment) -> None:
    """Reject variables that no process can receive, or that koalapy sets; ``field`` is for messages."""
    for name, value in environment:
        if not name:
            reject(field, name, "has a variable without a name", "name it, or leave it out")
        if "=" in name or "\0" in name:
            reject(field, name, f"has a variable named {name!r}", "use a name without '=' and NUL")
        if name in RESERVED_VARIABLES:
            reject(f"{field}.{name}", value, "is set by koalapy on each node", "use a variable of another name")
        if "\0" in value:
            reject(f"{field}.{name}", value, f"is {value!r}, with a NUL in it", "leave out the NUL")


def check_components(spec: JobSpec, limits: Limits) -> None:
    """Reject a request without components, or with a wrong cluster.

    Each component of a fixed request names an existing cluster, and none of a non-fixed request names one.
    """
    if isinstance(spec.request, FlexibleRequest):
        return
    if not spec.request.components:
        reject("request.components", [], "is empty", "give at least one component")
    names = [cluster.name for cluster in limits.clusters]
    for index, component in enumerate(spec.request.components):
        field, name = f"request.components[{index}].cluster", component.cluster
        if isinstance(spec.request, NonFixedRequest):
            if name is not None:
                hint = "leave it out, or make the request fixed"
                reject(field, name, f"is {name}, but the request is nonfixed", hint)
        elif not name:
            reject(field, name, "is missing", "a fixed request names the cluster of each component")
        else:
            check_cluster(name, names, field)


def check_flexible(spec: JobSpec, limits: Limits) -> None:
    """Reject a flexible request with contradictory bounds, or a split option that violates them."""
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        return
    total, min_size, max_count = request.total_size, request.min_component_size, request.max_components
    if min_size > total:
        problem = f"is {min_size}, more than the total_size of {total}"
        reject("request.min_component_size", min_size, problem, f"give at most {total}")
    for index, option in enumerate(request.split_options):
        field, value = f"request.split_options[{index}]", list(option)
        if not option:
            reject(field, value, "is empty", "give the sizes of its components")
        if sum(option) != total:
            hint = "make its sizes sum to the total_size"
            reject(field, value, f"sums to {sum(option)}, but total_size is {total}", hint)
        if min(option) < min_size:
            problem = f"has a component of {min(option)}, but min_component_size is {min_size}"
            reject(field, value, problem, "leave out one of the two")
        if max_count is not None and len(option) > max_count:
            problem = f"has {len(option)} components, but max_components is {max_count}"
            reject(field, value, problem, "leave out one of the two")
