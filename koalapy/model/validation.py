"""The checks of a submission that need no scheduler (semantics 2): each says which field, and the way out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec
from koalapy.model.request import ClusterName, ComponentRequest, Environment, FixedRequest, FlexibleRequest


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """A cluster's size in nodes; None while it is not known."""

    name: ClusterName
    total: int | None


def check(spec: JobSpec, clusters: Sequence[ClusterLimits]) -> None:
    """``UsageError`` for the first thing that can never work; nothing is held against sizes that are not known."""
    _check_options(spec)
    totals = {c.name: c.total for c in clusters}
    if isinstance(spec.request, FlexibleRequest):
        _check_flexible(spec.request)
        if not spec.command:
            _refuse("command", list(spec.command), "is empty", "give the program to run and its arguments")
        _check_flexible_fits(spec.request, totals)
        return
    components = spec.request.components
    _check_components(spec, components, fixed=isinstance(spec.request, FixedRequest), totals=totals)
    if isinstance(spec.request, FixedRequest):
        _check_fixed_fits(components, totals)
    else:
        _check_components_fit(components, totals, together=spec.policy in ("", "worst-fit"))


def _refuse(field: str, value: object, problem: str, hint: str) -> NoReturn:
    raise UsageError(f"{field} {problem}", field=field, value=value, hint=hint)


def _check_options(spec: JobSpec) -> None:
    if spec.processes_per_node is not None and spec.processes_per_node < 1:
        _refuse("processes_per_node", spec.processes_per_node, f"is {spec.processes_per_node}", "ask for at least 1")
    if spec.walltime is not None and not spec.walltime > 0:
        _refuse("walltime", spec.walltime, f"is {spec.walltime:g}", "give more than 0 seconds, or leave it out")
    if spec.max_restarts is not None and spec.max_restarts < 0:
        _refuse("max_restarts", spec.max_restarts, f"is {spec.max_restarts}", "give 0 or more")
    if spec.max_placement_tries is not None and spec.max_placement_tries < 1:
        _refuse("max_placement_tries", spec.max_placement_tries, f"is {spec.max_placement_tries}", "give at least 1")
    _check_words("command", spec.command)
    _check_environment("environment", spec.environment)


def _check_environment(field: str, environment: Environment) -> None:
    for name, value in environment:
        if not name or "=" in name or "\0" in name + value:
            _refuse(field, name, f"has the name {name!r}", "names are not empty and hold no '='; nothing holds a NUL")


def _check_words(field: str, command: Sequence[str]) -> None:
    for index, word in enumerate(command):
        if "\0" in word or (index == 0 and not word):
            _refuse(f"{field}[{index}]", word, f"is {word!r}", "give a program's name; nothing may hold a NUL")


def _check_size(field: str, size: int) -> None:
    if size < 1:
        _refuse(field, size, f"is {size}", "ask for at least 1 node")


# Flexible requests


def _check_flexible(request: FlexibleRequest) -> None:
    total, least, most = request.total_size, request.min_component_size, request.max_components
    _check_size("request.total_size", total)
    _check_size("request.min_component_size", least)
    if least > total:
        _refuse("request.min_component_size", least, f"is {least}, more than the total_size of {total}", "lower it")
    if most is not None and most < 1:
        _refuse("request.max_components", most, f"is {most}", "allow at least 1")
    for index, option in enumerate(request.split_options):
        field = f"request.split_options[{index}]"
        if not option:
            _refuse(field, list(option), "is empty", "give the sizes of its components")
        for place, size in enumerate(option):
            _check_size(f"{field}[{place}]", size)
        if sum(option) != total:
            _refuse(field, list(option), f"sums to {sum(option)}", f"its sizes must sum to the total_size of {total}")
        if min(option) < least:
            _refuse(field, list(option), f"has a component of {min(option)}", f"min_component_size is {least}")
        if most is not None and len(option) > most:
            _refuse(field, list(option), f"has {len(option)} components", f"max_components is {most}")


def _check_flexible_fits(request: FlexibleRequest, totals: Mapping[str, int | None]) -> None:
    known = _known(totals)
    if known is None:
        return
    grid, total = sum(known.values()), request.total_size
    if total > grid:
        _refuse(
            "request.total_size",
            total,
            f"is {total}, but the whole grid has {_nodes(known)}",
            f"ask for at most {grid}",
        )
    if request.split_options:
        if not any(_fits_empty(option, known) for option in request.split_options):
            shown = [list(option) for option in request.split_options]
            _refuse("request.split_options", shown, f"fit in none of their ways on {_nodes(known)}", "split smaller")
        return
    roomy = sorted((n for n in known.values() if n >= request.min_component_size), reverse=True)
    if sum(roomy) < total:
        problem = (
            f"is {request.min_component_size}, and the clusters that large have {sum(roomy)} nodes ({_each(known)})"
        )
        _refuse("request.min_component_size", request.min_component_size, problem, "lower it or ask for less")
    if sum(roomy[: request.max_components]) < total:
        problem = f"is {request.max_components}: so few clusters never have {total} nodes ({_each(known)})"
        _refuse("request.max_components", request.max_components, problem, "allow more components or ask for less")
    if not _can_be_split(total, request.min_component_size, roomy[: request.max_components]):
        problem = f"is {request.min_component_size}: {total} nodes cannot be split so ({_each(known)})"
        _refuse("request.min_component_size", request.min_component_size, problem, "lower it or ask for less")


def _can_be_split(total: int, least: int, roomy: Sequence[int]) -> bool:
    """Whether the k largest clusters, for some k, can share ``total`` with at least ``least`` each."""
    return any(k * least <= total <= sum(roomy[:k]) for k in range(1, len(roomy) + 1))


# Requests with components


def _check_components(
    spec: JobSpec, components: Sequence[ComponentRequest], *, fixed: bool, totals: Mapping[str, int | None]
) -> None:  # fmt: skip
    if not components:
        _refuse("request.components", [], "is empty", "give at least one component")
    for index, component in enumerate(components):
        field = f"request.components[{index}]"
        _check_size(f"{field}.size", component.size)
        _check_environment(f"{field}.environment", component.environment)
        _check_words(f"{field}.command", component.command or ())
        if component.command is not None and not component.command:
            _refuse(f"{field}.command", [], "is empty", "leave it out to run the job's own command")
        if component.command is None and not spec.command:
            _refuse("command", [], f"is empty, and component {index} has none of its own", "give the program to run")
        if not fixed and component.cluster is not None:
            _refuse(f"{field}.cluster", component.cluster, "is given", "use a fixed request to choose clusters")
        if fixed:
            _check_cluster(f"{field}.cluster", component.cluster, totals)


def _check_cluster(field: str, name: str | None, totals: Mapping[str, int | None]) -> None:
    if not name:
        _refuse(field, name, "is missing", "a fixed request names the cluster of each component")
    if name not in totals:
        near = get_close_matches(name, totals, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(totals))}"
        _refuse(field, name, f"is {name}, and there is no such cluster", hint)


def _check_fixed_fits(components: Sequence[ComponentRequest], totals: Mapping[str, int | None]) -> None:
    wanted: Counter[str] = Counter()
    for index, component in enumerate(components):
        name = component.cluster or ""
        wanted[name] += component.size
        total = totals[name]
        if total is not None and wanted[name] > total:
            sizes = f"brings {name} to {wanted[name]} nodes, but it has {total}"
            _refuse(f"request.components[{index}].size", component.size, sizes, f"ask for at most {total} there")


def _check_components_fit(
    components: Sequence[ComponentRequest], totals: Mapping[str, int | None], *, together: bool
) -> None:  # fmt: skip
    known = _known(totals)
    if known is None:
        return
    largest = max(known.values())
    for index, component in enumerate(components):
        if component.size > largest:
            problem = f"is {component.size}, but no cluster has more than {largest} nodes ({_each(known)})"
            _refuse(
                f"request.components[{index}].size", component.size, problem, "split it, or make the request flexible"
            )
    sizes = [component.size for component in components]
    if sum(sizes) > sum(known.values()):
        problem = f"need {sum(sizes)} nodes, but the whole grid has {_nodes(known)}"
        _refuse("request.components", sizes, problem, f"ask for at most {sum(known.values())}")
    if together and not _fits_empty(sizes, known):
        problem = f"of {'+'.join(map(str, sizes))} nodes do not fit together on {_nodes(known)}"
        _refuse("request.components", sizes, problem, "use smaller components, or make the request flexible")


def _fits_empty(sizes: Sequence[int], known: Mapping[str, int]) -> bool:
    """Whether worst-fit, by which it will be placed, places the sizes on the empty grid."""
    idle = dict(known)
    for size in sorted(sizes, reverse=True):
        site = min(idle, key=lambda name: (-idle[name], name))
        if idle[site] < size:
            return False
        idle[site] -= size
    return True


def _known(totals: Mapping[str, int | None]) -> dict[str, int] | None:
    """The sizes of all clusters, if all are known."""
    known = dict(_sizes(totals))
    return known if known and len(known) == len(totals) else None


def _sizes(totals: Mapping[str, int | None]) -> Iterator[tuple[str, int]]:
    for name, total in sorted(totals.items()):
        if total is not None:
            yield name, total


def _each(known: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {total}" for name, total in known.items())


def _nodes(known: Mapping[str, int]) -> str:
    return f"{sum(known.values())} nodes ({_each(known)})"
