"""``koala workload generate``: build a recipe from options, and generate a file of jobs from it."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from koalapy.cli.terminal.arguments import Option, Options
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.cli.terminal.screen import waiting_for
from koalapy.cli.workload.report import write_file
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.config.strict_yaml import DuplicateKey, load_yaml
from koalapy.model.field import describe_fields
from koalapy.model.wording import parse_int
from koalapy.workload import generate as workloads
from koalapy.workload import plan, swf
from koalapy.workload.recipe import DEFAULT, PRESETS, GridSize, Recipe, form_for


def _parse_numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = tuple(number for part in text.split(",") if (number := parse_int(part)) is not None)
    if len(numbers) < len(text.split(",")):
        raise GridError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4")
    return numbers


def _parse_weights(option: str, text: str) -> tuple[tuple[str, float], ...]:
    """Convert text such as ``wave:2,prime`` to pairs of name and weight; the default weight is 1."""
    weights = []
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        weights.append((name, _parse_number(option, text, weight) if colon else 1.0))
    return tuple(weights)


def _parse_number(option: str, text: str, number: str) -> float:
    """Convert ``number`` to a float. Raise ``GridError`` for the option with the value ``text`` if it is invalid."""
    try:
        return float(number)
    except ValueError:
        raise GridError(
            f"{option} is {text!r}: {number!r} is not a number", Exit.USAGE, "write it as 2 or 0.5"
        ) from None


def _split_pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise GridError(f"{option} is {text!r}", Exit.USAGE, f"give NAME=VALUE: {option} {example}")
    return name, value


def _parse_arguments(texts: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Convert texts such as ``wave='--steps 400'`` to pairs of application and arguments. Raise ``GridError``."""
    arguments = []
    for text in texts:
        name, command_line = _split_pair("--arguments", text, "wave='--steps 400'")
        try:
            arguments.append((name, tuple(shlex.split(command_line))))
        except ValueError as error:
            raise GridError(f"--arguments is {text!r}: {error}", Exit.USAGE, "quote as for a shell") from None
    return tuple(arguments)


def _parse_estimates(texts: list[str]) -> tuple[tuple[str, float], ...]:
    pairs = [(text, *_split_pair("--estimate", text, "wave=6")) for text in texts]
    return tuple((name, _parse_number("--estimate", text, value)) for text, name, value in pairs)


def _parse_run_times(text: str) -> tuple[float, float]:
    low, dash, high = text.partition("-")
    first = _parse_number("--run-times", text, low)
    return first, _parse_number("--run-times", text, high) if dash else first


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise GridError(f"--inputs is {text!r}", Exit.USAGE, "give logical names: --inputs a,b")
    return names


def _parse_fields(texts: list[str]) -> tuple[tuple[str, Any], ...]:
    """Convert texts ``NAME=VALUE``, with values in YAML, to pairs of job field and value. Raise ``GridError``."""
    pairs = []
    for text in texts:
        name, value = _split_pair("--field", text, "claiming=incremental")
        try:
            json.dumps(loaded := load_yaml(value), allow_nan=False)
        except DuplicateKey as error:
            raise GridError(f"--field is {text!r}: {error}", Exit.USAGE) from None
        except TypeError as error:  # a date
            hint = "write it as text, in quotes: --field 'begin=\"2026-12-01\"'"
            raise GridError(f"--field is {text!r}, which JSON does not allow: {error}", Exit.USAGE, hint) from None
        except ValueError:
            raise GridError(
                f"--field is {text!r}: its value is neither YAML nor JSON",
                Exit.USAGE,
                "write the value in YAML or JSON",
            ) from None
        pairs.append((name, loaded))
    return tuple(pairs)


READERS: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "sizes": (str, partial(_parse_numbers, "--sizes")),
    "components": (str, partial(_parse_numbers, "--components")),
    "request": (str, str),
    "priorities": (str, partial(_parse_weights, "--priorities")),
    "applications": (str, partial(_parse_weights, "--applications")),
    "arguments": (list[str], _parse_arguments),
    "estimates": (list[str], _parse_estimates),
    "run_times": (str, _parse_run_times),
    "inputs": (str, _parse_names),
    "fields": (list[str], _parse_fields),
}
"""Options with another type than their field in ``Recipe``: the type, and the function that converts a value."""
RECIPE_OPTIONS = {
    name: Annotated[
        READERS.get(name, (field.type,))[0] | None,
        Option(field.option, help=field.field.help, completes="policies" if name == "policy" else ""),
    ]
    for name, field in describe_fields(Recipe).items()
    if field.option
}
"""Options that override properties of the preset."""


def generate_workload(
    options: Annotated[Json, Options(RECIPE_OPTIONS)],
    preset: Annotated[str | None, Option(help="workload of a paper: m05, s10-vi or s10-vii")] = None,
    trace: Annotated[
        Path | None,
        Option(
            "--swf", help="trace in the Standard Workload Format with arrivals, sizes and run times; also .gz and .xz"
        ),
    ] = None,
    status: Annotated[int | None, Option(help="trace: only jobs with this status; 1 is completed")] = None,
    keep_zero: Annotated[bool, Option("--keep-zero", help="trace: include jobs with run time 0")] = False,
    clusters: Annotated[str | None, Option(help="grid, e.g. north:4,south:4; default: the daemon's")] = None,
    seed: Annotated[int, Option(help="seed; the same seed gives the same workload")] = 1,
    output: Annotated[Path | None, Option("-o", "--output", help="output file; default: standard output")] = None,
    daemon: Daemon = DAEMON,
) -> None:
    """Generate a workload file: koala workload generate --preset s10-vi --jobs 50 -o wave.jsonl"""
    if trace is not None and (options["rate"] is not None or options["utilisation"] is not None):
        raise GridError("--swf defines the arrivals", Exit.USAGE, "leave out --rate and --utilisation")
    recipe = recipe_of(preset, options, is_trace=trace is not None)
    grid = GridSize(clusters_of(clusters)) if clusters is not None else _grid_of_daemon(daemon, recipe)
    with waiting_for(f"makes a workload{f' of {trace.name}' if trace else ''}"):
        if trace is None:
            workload = workloads.generate_workload(recipe, grid, seed)
        else:
            workload = workloads.from_trace(
                recipe, swf.read_trace(trace), grid, seed, status=status, keep_zero=keep_zero, name=trace.name
            )
    header = {"preset": preset, **workload.header} if preset else workload.header
    text = "\n".join(plan.workload_lines(plan.Workload(header, workload.jobs))) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_file(output, text, Exit.USAGE, "give another -o")
    span = f"{workload.lasts:.0f} s" if workload.lasts < 7200 else f"{workload.lasts / 3600:.1f} h"
    print(f"{len(workload.jobs)} jobs over {span}{f' in {output}' if output else ''}", file=sys.stderr)
    if left_out := workload.header.get("trace", {}).get("left_out"):
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        hint = "; --keep-zero keeps those of run time 0" if swf.ZERO in left_out else ""
        print(f"koala: of {trace} jobs are left out: {reasons}{hint}", file=sys.stderr)


def _grid_of_daemon(daemon: Daemon, recipe: Recipe) -> GridSize:
    """Return the daemon's grid; an empty one if the daemon is unreachable and the recipe needs none."""
    try:
        answer = daemon.client().get("/api/v1/clusters")["clusters"]
    except GridError as error:
        if recipe.rate is not None and recipe.scale is not None:
            return GridSize()
        hint = "give --clusters north:4,south:4; or start a daemon, or set KOALA_URL"
        raise GridError(f"the clusters and their sizes are unknown: {error.message}", error.code, hint) from error
    return GridSize({cluster["name"]: cluster["total"] for cluster in answer if cluster["total"]})


def recipe_of(preset: str | None, options: Json, *, is_trace: bool) -> Recipe:
    """Return the preset, or the default recipe, with values overridden by the options."""
    if preset is not None and preset not in PRESETS:
        raise GridError(f"--preset is {preset!r}, which is not a preset", Exit.USAGE, f"known: {', '.join(PRESETS)}")
    recipe = PRESETS[preset] if preset else DEFAULT
    changes = {
        name: READERS[name][1](value) if name in READERS else value
        for name, value in options.items()
        if value not in (None, [])
    }
    if "fields" in changes:
        changes["fields"] = (*recipe.fields, *changes["fields"])
    form = changes.get("request") or form_for(changes.get("policy", ""), recipe.request)
    if form not in ("nonfixed", "flexible"):
        raise GridError(f"--request is {form!r}", Exit.USAGE, "give nonfixed or flexible")
    # Either jobs or duration limits a workload: an option for one removes the other from the recipe.
    if is_trace or "duration" in changes or "jobs" in changes:
        changes = {"jobs": None, "duration": None} | changes
    if is_trace and "scale" not in changes:
        changes["scale"] = None
    return replace(recipe, **changes | {"request": form})


def clusters_of(text: str) -> dict[str, int]:
    """Parse clusters and their sizes: ``north:4,south:4``."""
    sizes = {}
    for part in text.split(","):
        name, colon, nodes = part.strip().rpartition(":")
        if not colon or not name or (size := parse_int(nodes) or 0) < 1:
            raise GridError(f"--clusters is {text!r}", Exit.USAGE, "give names and nodes: --clusters north:4,south:4")
        sizes[name] = size
    return sizes
