"""What is larger than anything a scheduler should look at."""

from dataclasses import fields, is_dataclass
from typing import Any

from koalapy.model.errors import reject
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest
from koalapy.validation.limits import Limits

MAX_INPUTS = 10_000
"""Inputs of all components of a job together."""
MAX_PLAN_LENGTH = 256 * 1024 * 1024
"""Characters of commands and variables that are sent for one job: each component is told those of all."""
ENTRY_BYTES = 4
"""Bytes that each text counts beside its own, so that many empty ones are not free."""


def check_size(spec: JobSpec, limits: Limits) -> None:
    """Components, inputs and texts, before anything is made of them or looked up for them."""
    _check_bytes(spec, limits.max_bytes)
    request, most = spec.request, limits.max_components
    bound = f"more than max_components_per_job, {most}"
    way_out = f"give at most {most}, or have the daemon's operator raise rules.max_components_per_job"
    if isinstance(request, FlexibleRequest):
        if request.max_components is not None and request.max_components > most:
            reject("request.max_components", request.max_components, f"is {request.max_components}, {bound}", way_out)
        for index, option in enumerate(request.split_options):
            if len(option) > most:
                field = f"request.split_options[{index}]"
                reject(field, len(option), f"has {len(option)} components, {bound}", way_out)
        return
    count = len(request.components)
    if count > most:
        reject("request.components", count, f"has {count} components, {bound}", way_out)
    inputs = count * len(spec.inputs) + sum(len(component.inputs) for component in request.components)
    if inputs > MAX_INPUTS:
        problem = f"are {inputs} of all components together"
        reject("inputs", inputs, problem, f"give at most {MAX_INPUTS}; a folder is one input")
    plan = count * sum(_text_length(spec, component) for component in request.components)
    if plan > MAX_PLAN_LENGTH:
        problem = f"and environment are too long for {count} components, each of which is told of all"
        reject("command", plan, problem, "put long arguments and values into files")


def _check_bytes(spec: JobSpec, most: int | None) -> None:
    if most is None:
        return
    sizes = {field.name: _bytes_of(getattr(spec, field.name)) for field in fields(spec)}
    total = sum(sizes.values())
    if total > most:
        largest = max(sizes, key=lambda name: sizes[name])
        reject(
            largest,
            sizes[largest],
            f"has {sizes[largest]} bytes, and the whole job {total}: more than max_bytes_per_job, {most}",
            "put long arguments, values and lists into files and send them along (--stage), or have the daemon's "
            "operator raise rules.max_bytes_per_job",
        )


def _bytes_of(value: Any) -> int:
    """Bytes of all texts in a value, and a few for each text, entry and dataclass in it."""
    if isinstance(value, str):
        return len(value.encode(errors="replace")) + ENTRY_BYTES
    if isinstance(value, tuple):
        return sum(map(_bytes_of, value))
    if is_dataclass(value):
        return ENTRY_BYTES + sum(_bytes_of(getattr(value, field.name)) for field in fields(value))
    return 0


def _text_length(spec: JobSpec, component: ComponentRequest) -> int:
    """Characters that tell what a component runs."""
    variables = (*spec.environment, *component.environment)
    return sum(map(len, component.command or spec.command)) + sum(len(name) + len(value) for name, value in variables)
