"""``koala workload generate``: build a recipe from options, and generate a file of jobs from it."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from koalapy.cli.terminal.arguments import Option
from koalapy.cli.terminal.job_reference import parse_int
from koalapy.cli.terminal.options import DAEMON, Daemon
from koalapy.cli.terminal.screen import waiting_for
from koalapy.cli.workload.report import write_file
from koalapy.client.errors import CliError, Exit
from koalapy.config.strict_yaml import DuplicateKey, load_yaml
from koalapy.workload import generate as workloads
from koalapy.workload import plan, swf
from koalapy.workload.recipe import DEFAULT, PRESETS, GridSize, Recipe, form_for


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """Options that override properties of the preset; the fields are those of ``Recipe``."""

    jobs: Annotated[int | None, Option(help="number of jobs")] = None
    duration: Annotated[float | None, Option(help="seconds in which jobs arrive")] = None
    rate: Annotated[float | None, Option(help="mean number of jobs per second")] = None
    utilisation: Annotated[float | None, Option(help="fraction of the grid to use, instead of a rate")] = None
    sizes: Annotated[str | None, Option(help="nodes of a job, drawn from e.g. 8,16,32")] = None
    components: Annotated[str | None, Option(help="nonfixed: number of components, drawn from e.g. 3,4,6")] = None
    least: Annotated[int | None, Option(help="nonfixed: minimum nodes of a component")] = None
    request: Annotated[str | None, Option(help="nonfixed or flexible; default: what the policy supports")] = None
    policy: Annotated[str | None, Option(help="placement policy of every job", completes="policies")] = None
    priorities: Annotated[str | None, Option(help="priorities with weights, e.g. high:1,low:3")] = None
    applications: Annotated[str | None, Option(help="applications with weights, e.g. prime:2,wave")] = None
    arguments: Annotated[
        list[str] | None, Option(help="arguments of an application, e.g. wave='--steps 400'; repeatable")
    ] = None
    estimates: Annotated[
        list[str] | None, Option("--estimate", help="run time of an application in seconds, e.g. wave=6; repeatable")
    ] = None
    run_times: Annotated[str | None, Option(help="range of run times of sleep in seconds, e.g. 30-192")] = None
    inputs: Annotated[str | None, Option(help="logical files, of which each job reads one, e.g. a,b")] = None
    scale: Annotated[float | None, Option(help="factor of sizes; default: the same fraction of the grid")] = None
    compress: Annotated[float | None, Option(help="factor by which everything runs faster")] = None
    fields: Annotated[
        list[str] | None, Option("--field", help="field of every submission, e.g. claiming=incremental; repeatable")
    ] = None


def generate_workload(
    options: RecipeOptions,
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
    if trace is not None and (options.rate is not None or options.utilisation is not None):
        raise CliError("--swf defines the arrivals", Exit.USAGE, "leave out --rate and --utilisation")
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
    except CliError as error:
        if recipe.rate is not None and recipe.scale is not None:
            return GridSize()
        hint = "give --clusters north:4,south:4; or start a daemon, or set KOALA_URL"
        raise CliError(f"the clusters and their sizes are unknown: {error.message}", error.code, hint) from error
    return GridSize({cluster["name"]: cluster["total"] for cluster in answer if cluster["total"]})


def recipe_of(preset: str | None, options: RecipeOptions, *, is_trace: bool) -> Recipe:
    """Return the preset, or the default recipe, with values overridden by the options."""
    if preset is not None and preset not in PRESETS:
        raise CliError(f"--preset is {preset!r}, which is not a preset", Exit.USAGE, f"known: {', '.join(PRESETS)}")
    recipe = PRESETS[preset] if preset else DEFAULT
    readers: dict[str, Callable[[Any], Any]] = {
        "sizes": lambda text: _parse_numbers("--sizes", text),
        "components": lambda text: _parse_numbers("--components", text),
        "priorities": lambda text: _parse_weights("--priorities", text),
        "applications": lambda text: _parse_weights("--applications", text),
        "arguments": _parse_arguments,
        "estimates": _parse_estimates,
        "run_times": _parse_run_times,
        "inputs": _parse_names,
        "fields": _parse_fields,
    }
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    changes = {
        name: readers[name](value) if name in readers else value
        for name, value in values.items()
        if value not in (None, [])
    }
    if "fields" in changes:
        changes["fields"] = (*recipe.fields, *changes["fields"])
    form = changes.get("request") or form_for(changes.get("policy", ""), recipe.request)
    if form not in ("nonfixed", "flexible"):
        raise CliError(f"--request is {form!r}", Exit.USAGE, "give nonfixed or flexible")
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
            raise CliError(f"--clusters is {text!r}", Exit.USAGE, "give names and nodes: --clusters north:4,south:4")
        sizes[name] = size
    return sizes


def _parse_numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = tuple(number for part in text.split(",") if (number := parse_int(part)) is not None)
    if len(numbers) < len(text.split(",")):
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4")
    return numbers


def _parse_weights(option: str, text: str) -> tuple[tuple[str, float], ...]:
    """Convert text such as ``wave:2,prime`` to pairs of name and weight; the default weight is 1."""
    weights = []
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        weights.append((name, _parse_number(option, text, weight) if colon else 1.0))
    return tuple(weights)


def _parse_number(option: str, text: str, number: str) -> float:
    """Convert ``number`` to a float. Raise ``CliError`` for the option with the value ``text`` if it is invalid."""
    try:
        return float(number)
    except ValueError:
        raise CliError(
            f"{option} is {text!r}: {number!r} is not a number", Exit.USAGE, "write it as 2 or 0.5"
        ) from None


def _split_pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give NAME=VALUE: {option} {example}")
    return name, value


def _parse_arguments(texts: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Convert texts such as ``wave='--steps 400'`` to pairs of application and arguments. Raise ``CliError``."""
    arguments = []
    for text in texts:
        name, command_line = _split_pair("--arguments", text, "wave='--steps 400'")
        try:
            arguments.append((name, tuple(shlex.split(command_line))))
        except ValueError as error:
            raise CliError(f"--arguments is {text!r}: {error}", Exit.USAGE, "quote as for a shell") from None
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
        raise CliError(f"--inputs is {text!r}", Exit.USAGE, "give logical names: --inputs a,b")
    return names


def _parse_fields(texts: list[str]) -> tuple[tuple[str, Any], ...]:
    """Convert texts ``NAME=VALUE``, with values in YAML, to pairs of job field and value. Raise ``CliError``."""
    pairs = []
    for text in texts:
        name, value = _split_pair("--field", text, "claiming=incremental")
        try:
            pairs.append((name, load_yaml(value)))
        except DuplicateKey as error:
            raise CliError(f"--field is {text!r}: {error}", Exit.USAGE) from None
        except yaml.YAMLError:
            raise CliError(
                f"--field is {text!r}: its value is neither YAML nor JSON",
                Exit.USAGE,
                "write the value in YAML or JSON",
            ) from None
    return tuple(pairs)
