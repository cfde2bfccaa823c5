"""The command ``koala submit …`` for the body of a submission, and the texts of its requests."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_origin

from koalapy.model.dependency import Dependencies, ResultInputs
from koalapy.model.field import describe_fields, split_annotation
from koalapy.model.job_spec import Duration, JobSpec, Lease, Lines, PolicyOptions
from koalapy.model.node_requirement import Excluded, NodeMemory
from koalapy.model.request import Bundle, Environment, Inputs
from koalapy.model.wording import parse_int

Json = dict[str, Any]
JOB_FIELDS = {field.name: field for field in describe_fields(JobSpec).values() if field.option}
"""The fields with an option, by name."""


def brings_files(body: Json) -> bool:
    """Return whether the job transfers files, so that programs start in separate folders."""
    request = body.get("request")
    components = request.get("components") if isinstance(request, dict) else None
    component_inputs = (
        [c.get("inputs") for c in components if isinstance(c, dict)] if isinstance(components, list) else []
    )
    fields = ("inputs", "result_inputs", "bundle", "stage", "collect")
    return any([*map(body.get, fields), *component_inputs])


def format_pairs(values: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def format_inputs(inputs: list[Json]) -> list[str]:
    """Convert input files of the API to texts for ``--input``."""
    texts = []
    for item in inputs:
        distribution = ":partitioned" if item.get("distribution") == "partitioned" else ""
        texts.append(f"{item['file']}{distribution}{':as=' if item.get('as') else ''}{item.get('as') or ''}")
    return texts


def format_texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"{element:.15g}" if isinstance(element, float) else str(element) for element in values]


def format_memory(value: Any) -> list[str]:
    """Convert bytes of the API to a text with a unit, since options accept no number alone."""
    return [f"{value}B" if isinstance(value, int) else str(value)]


def format_seconds(value: Any) -> list[str]:
    """Convert a duration of the API to a text with a unit, since options accept no number alone."""
    return [f"{text}s" if isinstance(value, int | float) else text for text in format_texts(value)]


@dataclass(frozen=True, slots=True)
class OptionTexts:
    """How an option is written."""

    of: Callable[[Any], Iterable[str]]
    """Return one text for each occurrence of the option."""
    is_repeated: bool = False


TEXTS = {
    Environment: OptionTexts(format_pairs, True),
    PolicyOptions: OptionTexts(format_pairs, True),
    Duration: OptionTexts(format_seconds),
    Lease: OptionTexts(format_seconds),
    NodeMemory: OptionTexts(format_memory),
    Inputs: OptionTexts(format_inputs, True),
    Dependencies: OptionTexts(format_texts, True),
    Excluded: OptionTexts(format_texts, True),
    ResultInputs: OptionTexts(format_texts, True),
    Bundle: OptionTexts(format_texts, True),
    Lines: OptionTexts(list),
    bool: OptionTexts(lambda _: ()),
}
"""The types with other texts than their values."""


def texts_of(kind: Any) -> OptionTexts:
    """Return how an option of a field's type is written."""
    if kind in TEXTS:
        return TEXTS[kind]
    return OptionTexts(format_texts, get_origin(split_annotation(kind)[0]) is tuple)


def command_for(body: Json, here: str) -> str | None:
    """Return the command ``koala submit …`` for a body in the folder ``here``, ``koala run …`` if it is interactive.

    Return None if the body needs a job file.
    """
    request = _request_options(body["request"])
    if request is None or not body.get("command") or any(body.get(name) for name in ("bundle", "each_line", "script")):
        return None
    once: list[str] = []
    repeated: list[str] = []
    for name, field in JOB_FIELDS.items():
        if name != "workdir" and (value := body.get(name)) not in (None, "", [], {}):
            texts = texts_of(field.type)
            if value is True:
                once.append(field.option)
            for text in texts.of(value):
                (repeated if texts.is_repeated else once).extend((field.option, text))
    # A job with transferred files starts in their folder, not in the current one.
    goes_by_itself = body.get("workdir_optional") and body.get("workdir") == here and not brings_files(body)
    if body.get("workdir") is not None and not goes_by_itself:
        once += ["--chdir", body["workdir"]]
    command = "run" if body.get("interactive") else "submit"
    text = shlex.join(["koala", command, *request, *once, *repeated, "--", *body["command"]])
    return text if text.isprintable() else None


def change_command(job: int, change: Json) -> str:
    """Return the command ``koala change …`` for the body of a change."""
    request = dict(change.get("request") or {})
    options, resets = list[str](), list[str]()
    if "type" in request:
        options += _request_options(request) or []
    else:
        for name, option in REQUEST_OPTIONS.items():
            if (value := request.get(name)) is not None and name in request:
                texts = [",".join(map(str, sizes)) for sizes in value] if name == "split_options" else [str(value)]
                options += [argument for text in texts for argument in (option, text)]
            elif name in request:
                resets.append(option)
    for name, field in JOB_FIELDS.items():
        if name in change and name != "request":
            value = change[name]
            if value in (None, [], {}):
                resets.append(field.option)
            else:
                options += [argument for text in texts_of(field.type).of(value) for argument in (field.option, text)]
    arguments = [argument for option in resets for argument in ("--reset", option.removeprefix("--"))]
    return shlex.join(["koala", "change", str(job), *options, *arguments])


REQUEST_OPTIONS = {
    "total_size": "--flexible",
    "min_component_size": "--min-component",
    "max_components": "--max-components",
    "split_options": "--split",
}
"""The options for fields of a flexible request."""


def _request_options(request: Json) -> list[str] | None:
    """Return the options of ``koala submit`` for a request; None if options cannot express it."""
    if request["type"] == "flexible":
        options = ["--flexible", str(request["total_size"])]
        for field, option in (("min_component_size", "--min-component"), ("max_components", "--max-components")):
            options += [option, str(request[field])] if request.get(field) is not None else []
        for sizes in request.get("split_options") or []:
            options += ["--split", ",".join(str(size) for size in sizes)]
        return options
    if any(component.keys() - {"size", "cluster"} for component in request["components"]):
        return None
    return [f"--{request['type']}", format_request(request)]


def format_request(request: Json) -> str:
    """Return the nodes of a request as text: ``6``, ``4,2`` or ``north:2,south:4``."""
    if request["type"] == "flexible":
        return str(request["total_size"])
    parts = request["components"]
    return ",".join(f"{part['cluster']}:{part['size']}" if part.get("cluster") else str(part["size"]) for part in parts)


def parse_request(kind: str, text: str) -> Json | None:
    """Return the request of a kind with the nodes in a text, as ``format_request`` writes it; None for another text."""
    components: list[Json] = []
    for part in text.split(","):
        cluster, colon, size_text = part.strip().rpartition(":")
        size = parse_int(size_text)
        if size is None or (not cluster if kind == "fixed" else colon):
            return None
        components.append({"cluster": cluster, "size": size} if kind == "fixed" else {"size": size})
    if kind == "flexible":
        return {"type": kind, "total_size": components[0]["size"]} if len(components) == 1 else None
    return {"type": kind, "components": components}
