"""Resolve the inputs of a submission: the replica catalogue maps logical names to sizes, file sites and parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from koalapy.model.errors import reject
from koalapy.model.job_spec import JobSpec
from koalapy.model.replica import Catalogue, Replica, ReplicaState
from koalapy.model.request import FlexibleRequest, InputFile
from koalapy.model.wording import format_list, suggest_names

ADD = "koala replicas add NAME CLUSTER:PATH"
MAX_SHOWN = 20
MAX_COMPARED = 1000


def resolve_inputs(spec: JobSpec, catalogue: Catalogue) -> JobSpec:
    """Return the submission with the inputs of each component, their sizes and file sites.

    Raise ``UsageError`` for a name without a good replica in the catalogue, and for a partitioned input that does not
    fit the components. Raise it also for two inputs with the same file name in the folder of one component.
    """
    if not spec.all_inputs:
        return spec
    request, inputs = spec.request, {f"inputs[{index}]": file for index, file in enumerate(spec.inputs)}
    if isinstance(request, FlexibleRequest):
        common = {field: _job_input(field, file, None, catalogue)[0] for field, file in inputs.items()}
        _check_names(common)
        return replace(spec, inputs=tuple(common.values()))
    resolved = {field: _job_input(field, file, len(request.components), catalogue) for field, file in inputs.items()}
    components = []
    for index, component in enumerate(request.components):
        files = {field: parts[index] for field, parts in resolved.items()}
        for place, file in enumerate(component.inputs):
            field = f"request.components[{index}].inputs[{place}]"
            files[field] = _own_input(field, file, catalogue)
        _check_names(files)
        components.append(replace(component, inputs=tuple(files.values())))
    return replace(spec, request=replace(request, components=tuple(components)), inputs=())


def _job_input(field: str, file: InputFile, count: int | None, catalogue: Catalogue) -> Sequence[InputFile]:
    """Return an input of the job for each of ``count`` components, or one for all if the scheduler chooses the
    components."""
    good = _good(field, file, catalogue)
    sites, first = tuple(replica.cluster for replica in good), good[0]
    resolved = replace(file, size=first.size, sites=sites)
    if file.distribution == "whole":
        return [resolved] * (count or 1)
    if count is None:
        hint = "make the request nonfixed or fixed, or give each component the whole"
        reject(f"{field}.distribution", file.distribution, "is partitioned, but the request is flexible", hint)
    if first.parts is None:
        hint = "make it a folder with one entry for each component, and add that to the catalogue"
        reject(field, file.name, f"is {file.name}, which is a file and cannot be partitioned", hint)
    if len(first.parts) != count:
        entries = f"{len(first.parts)} {'entry' if len(first.parts) == 1 else 'entries'}"
        has = f"{count} component{'' if count == 1 else 's'}"
        hint = f"ask for as many components as there are entries, or make a folder with {count}"
        reject(field, file.name, f"is {file.name}, a folder of {entries}, but the request has {has}", hint)
    return [replace(resolved, size=part.size, part=part.name, target=resolved.file_name) for part in first.parts]


def _own_input(field: str, file: InputFile, catalogue: Catalogue) -> InputFile:
    """Return an input of one component: a logical file, or one entry of it."""
    good = _good(field, file, catalogue)
    first, sites = good[0], tuple(replica.cluster for replica in good)
    if file.part is None:
        return replace(file, size=first.size, sites=sites, distribution="whole")
    if first.parts is None:
        reject(f"{field}.part", file.part, f"is {file.part}, but {file.name} is a file", "leave it out")
    part = first.part(file.part)
    if part is None:
        names = [part.name for part in first.parts]
        few = len(names) <= MAX_SHOWN
        hint = suggest_names(file.part, names) if few else f"its {len(names)} entries are {format_list(names)}"
        reject(f"{field}.part", file.part, f"is {file.part}, and {file.name} has no such entry", hint)
    return replace(file, size=part.size, sites=sites, distribution="partitioned", target=file.file_name)


def _good(field: str, file: InputFile, catalogue: Catalogue) -> list[Replica]:
    """Return the good replicas of a logical file. Reject a file that has none."""
    replicas = catalogue.replicas_of(file.name)
    if not replicas:
        hint = f"{near_names(file.name, catalogue.names())}; add it with {ADD}"
        reject(f"{field}.file", file.name, f"is {file.name}, which the replica catalogue does not know", hint)
    good = [replica for replica in replicas if replica.state is ReplicaState.GOOD]
    if not good:
        bad = format_list([f"{r.cluster} is {r.state}{f' ({r.reason})' if r.reason else ''}" for r in replicas])
        hint = f"mend one and say koala replicas verify {file.name}, or add another with {ADD}"
        reject(f"{field}.file", file.name, f"is {file.name}, of which no replica is good: {bad}", hint)
    return good


def _check_names(inputs: Mapping[str, InputFile]) -> None:
    """Reject inputs with an invalid or duplicate file name in the folder of their component."""
    files_by_name: dict[str, InputFile] = {}
    for field, file in inputs.items():
        name = file.file_name
        if problem := name_problem(name):
            reject(f"{field}.as", name, f"is {name!r}, {problem}", "give another with as: a plain file name")
        if name in files_by_name:
            same = f"would make {file.name} {name} in the component's folder, as {files_by_name[name].name} is"
            reject(f"{field}.as", name, same, "give one of them another name with as")
        files_by_name[name] = file


def check_result_inputs(spec: JobSpec) -> None:
    """Reject results of other jobs with an invalid path, or with an invalid or duplicate name in the folder."""
    names = {file.file_name: file.name for file in spec.all_inputs}
    for index, result in enumerate(spec.result_inputs):
        field, name = f"result_inputs[{index}]", result.file_name
        if result.path.startswith("/") or ".." in result.path.split("/"):
            hint = f"give a path below the folder that job {result.job_name} ran in"
            reject(field, str(result), f"is {str(result)!r}, with a path that leads out of a folder", hint)
        if problem := name_problem(name):
            hint = "give another name with :as=NAME, a plain file name"
            reject(field, str(result), f"is named {name!r}, {problem}", hint)
        if name in names:
            problem = f"would make {result} {name} in the component's folder, as {names[name]} is"
            reject(field, str(result), problem, "give one of them another name with :as=NAME")
        names[name] = str(result)


def near_names(wrong: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown logical name: all names if they are few, otherwise the most similar one."""
    ordered = sorted(names)
    if len(ordered) <= MAX_SHOWN:
        return suggest_names(wrong, ordered)
    likely = ordered
    if len(ordered) > MAX_COMPARED:
        # Comparison with very many names takes seconds; names with the same last part are the likeliest.
        last = InputFile(wrong).file_name
        likely = [name for name in ordered if InputFile(name).file_name == last][:MAX_COMPARED]
    near = get_close_matches(wrong, likely, 1)
    return f"{f'did you mean {near[0]}? ' if near else ''}koala replicas list shows all {len(ordered)}"


def name_problem(name: str) -> str:
    """Return the reason why a text is not a valid file name; empty if it is valid."""
    if not name or name in (".", ".."):
        return "which is not a file name"
    if "/" in name:
        return "with a / in it"
    if not name.isprintable():
        return "with characters that cannot be shown"
    return "longer than 255 bytes" if len(name.encode()) > 255 else ""
