"""What a submission's inputs mean: logical names become sizes, file sites and parts by the replica catalogue.

Pure: the catalogue is a function from a logical name to its replicas.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from koalapy.model.application import application_of
from koalapy.model.fitting import refuse
from koalapy.model.job import JobSpec
from koalapy.model.replica import Replica, ReplicaState
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile
from koalapy.model.wording import known_names, listed

ADD = "koala replicas add NAME CLUSTER:PATH"
FEW = 20
MANY = 1000


@dataclass(frozen=True, slots=True)
class Known:
    """The replica catalogue as a submission sees it."""

    replicas_of: Callable[[str], Sequence[Replica]]
    names: Callable[[], Iterable[str]]


def fill_in(spec: JobSpec, known: Known) -> JobSpec:
    """The submission with each component's inputs, their sizes and sites, and its application's name.

    Raises ``UsageError`` for a name the catalogue does not know or has no good replica of, for a partitioned input that
    does not fit the components, and for two inputs of one component that would be one file in its folder.
    """
    application = spec.application or application_of(spec)
    spec = replace(spec, application=application if application.isprintable() else "")
    if not spec.all_inputs:
        return spec
    request = spec.request
    if isinstance(request, FlexibleRequest):
        inputs = {
            f"inputs[{i}]": _job_input(f"inputs[{i}]", file, None, known)[0] for i, file in enumerate(spec.inputs)
        }
        _check_names(inputs)
        return replace(spec, inputs=tuple(inputs.values()))
    count = len(request.components)
    common = {f"inputs[{i}]": _job_input(f"inputs[{i}]", file, count, known) for i, file in enumerate(spec.inputs)}
    components = tuple(
        _component(index, component, {field: files[index] for field, files in common.items()}, known)
        for index, component in enumerate(request.components)
    )
    return replace(spec, request=replace(request, components=components), inputs=())


def _component(index: int, component: ComponentRequest, common: dict[str, InputFile], known: Known) -> ComponentRequest:
    """A component with those of the whole job (by their fields) before its own."""
    inputs = dict(common)
    for place, file in enumerate(component.inputs):
        field = f"request.components[{index}].inputs[{place}]"
        inputs[field] = _own_input(field, file, known)
    _check_names(inputs)
    return replace(component, inputs=tuple(inputs.values()))


def _job_input(field: str, file: InputFile, count: int | None, known: Known) -> Sequence[InputFile]:
    """One input of the whole job for each of ``count`` components, or for all when that is for the scheduler to say."""
    good = _good(field, file, known)
    sites, first = tuple(replica.cluster for replica in good), good[0]
    whole = replace(file, size=first.size, sites=sites)
    if file.distribution == "whole":
        return [whole] * (count or 1)
    if count is None:
        hint = "make the request nonfixed or fixed, or give each component the whole"
        refuse(f"{field}.distribution", file.distribution, "is partitioned, but the request is flexible", hint)
    if first.parts is None:
        hint = "make it a folder with one entry for each component, and add that to the catalogue"
        refuse(field, file.name, f"is {file.name}, which is a file and cannot be partitioned", hint)
    if len(first.parts) != count:
        entries = f"{len(first.parts)} {'entry' if len(first.parts) == 1 else 'entries'}"
        has = f"{count} component{'' if count == 1 else 's'}"
        hint = f"ask for as many components as there are entries, or make a folder with {count}"
        refuse(field, file.name, f"is {file.name}, a folder of {entries}, but the request has {has}", hint)
    return [replace(whole, size=part.size, part=part.name, target=whole.file_name) for part in first.parts]


def _own_input(field: str, file: InputFile, known: Known) -> InputFile:
    """One input of one component: a logical file, or one entry of it."""
    good = _good(field, file, known)
    first, sites = good[0], tuple(replica.cluster for replica in good)
    if file.part is None:
        return replace(file, size=first.size, sites=sites, distribution="whole")
    if first.parts is None:
        refuse(f"{field}.part", file.part, f"is {file.part}, but {file.name} is a file", "leave it out")
    part = first.part(file.part)
    if part is None:
        names = [part.name for part in first.parts]
        hint = known_names(file.part, names) if len(names) <= FEW else f"its {len(names)} entries are {listed(names)}"
        refuse(f"{field}.part", file.part, f"is {file.part}, and {file.name} has no such entry", hint)
    return replace(file, size=part.size, sites=sites, distribution="partitioned", target=file.file_name)


def _good(field: str, file: InputFile, known: Known) -> list[Replica]:
    """The good replicas of a logical file, at least one."""
    replicas = known.replicas_of(file.name)
    if not replicas:
        hint = f"{near_names(file.name, known.names())}; add it with {ADD}"
        refuse(f"{field}.file", file.name, f"is {file.name}, which the replica catalogue does not know", hint)
    good = [replica for replica in replicas if replica.state is ReplicaState.GOOD]
    if not good:
        bad = listed([f"{r.cluster} is {r.state}{f' ({r.reason})' if r.reason else ''}" for r in replicas])
        hint = f"mend one and say koala replicas verify {file.name}, or add another with {ADD}"
        refuse(f"{field}.file", file.name, f"is {file.name}, of which no replica is good: {bad}", hint)
    return good


def _check_names(inputs: Mapping[str, InputFile]) -> None:
    """Each input, by its field, must have a name of its own in the component's folder."""
    seen: dict[str, InputFile] = {}
    for field, file in inputs.items():
        name = file.file_name
        if problem := name_problem(name):
            refuse(f"{field}.as", name, f"is {name!r}, {problem}", "give another with as: a plain file name")
        if name in seen:
            same = f"would make {file.name} {name} in the component's folder, as {seen[name].name} is"
            refuse(f"{field}.as", name, same, "give one of them another name with as")
        seen[name] = file


def near_names(wrong: str, names: Iterable[str]) -> str:
    """The way out after a wrong logical name, however many there are: all of a few, else the nearest."""
    known = sorted(names)
    if len(known) <= FEW:
        return known_names(wrong, known)
    last = InputFile(wrong).file_name
    # To compare with very many costs seconds: those that end alike are the likeliest.
    alike = known if len(known) <= MANY else [name for name in known if InputFile(name).file_name == last][:MANY]
    near = get_close_matches(wrong, alike, 1)
    return f"{f'did you mean {near[0]}? ' if near else ''}koala replicas list shows all {len(known)}"


def name_problem(name: str) -> str:
    """Why a text is no name of one file in a folder; empty when it is one."""
    if not name or name in (".", ".."):
        return "which is no file name"
    if "/" in name:
        return "with a / in it"
    if not name.isprintable():
        return "with characters that cannot be shown"
    return "longer than 255 bytes" if len(name.encode()) > 255 else ""


def pattern_problem(pattern: str) -> str:
    """Why a text is no pattern of files below a folder; empty when it is one."""
    if not pattern or not pattern.isprintable():
        return "which names no files"
    if pattern.startswith("/"):
        return "which is not below the component's folder"
    return "which leads out of the component's folder" if ".." in pattern.split("/") else ""
