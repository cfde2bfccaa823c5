"""From the options of ``koala workload generate`` to a recipe."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from koalapy.cli.errors import CliError, Exit
from koalapy.workload.recipe import DEFAULT, PRESETS, Recipe, form_for

Json = dict[str, Any]


def recipe_of(preset: str | None, given: Json, *, is_trace: bool) -> Recipe:
    """The preset, or the plain recipe, with everything that was given in place of its own."""
    if preset is not None and preset not in PRESETS:
        raise CliError(f"--preset is {preset!r}", Exit.USAGE, f"known: {', '.join(PRESETS)}")
    recipe = PRESETS[preset] if preset else DEFAULT
    readers: dict[str, Callable[[Any], Any]] = {
        "sizes": lambda text: _numbers("--sizes", text),
        "components": lambda text: _numbers("--components", text),
        "priorities": lambda text: _weights("--priorities", text),
        "applications": lambda text: _weights("--applications", text),
        "arguments": _arguments,
        "estimates": _estimates,
        "run_times": _run_times,
        "inputs": _names,
        "fields": _fields,
    }
    changes = {name: readers.get(name, _same)(value) for name, value in given.items() if value not in (None, [])}
    if "fields" in changes:
        changes["fields"] = (*recipe.fields, *changes["fields"])
    form = changes.get("request") or form_for(changes.get("policy", ""), recipe.request)
    if form not in ("nonfixed", "flexible"):
        raise CliError(f"--request is {form!r}", Exit.USAGE, "give nonfixed or flexible")
    # How many jobs there are, one of the two says; who gives one does not mean the recipe's other.
    if is_trace or "duration" in changes or "jobs" in changes:
        changes = {"jobs": None, "duration": None} | changes
    if is_trace and "scale" not in changes:
        changes["scale"] = None
    return replace(recipe, **changes | {"request": form})


def clusters_of(text: str) -> dict[str, int]:
    """``north:4,south:4``."""
    found = {}
    for part in text.split(","):
        name, colon, nodes = part.strip().rpartition(":")
        if not colon or not name or not nodes.isdecimal() or int(nodes) < 1:
            raise CliError(f"--clusters is {text!r}", Exit.USAGE, "give names and nodes: --clusters north:4,south:4")
        found[name] = int(nodes)
    return found


def _same(value: Any) -> Any:
    return value


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give numbers: {option} 2,4") from None


def _weights(option: str, text: str) -> tuple[tuple[str, float], ...]:
    found = []
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        found.append((name, _number(option, text, weight) if colon else 1.0))
    return tuple(found)


def _number(option: str, text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise CliError(f"{option} is {text!r}: {number!r} is no number", Exit.USAGE, "write it as 2 or 0.5") from None


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CliError(f"{option} is {text!r}", Exit.USAGE, f"give NAME=VALUE: {option} {example}")
    return name, value


def _arguments(texts: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = []
    for text in texts:
        name, words = _pair("--arguments", text, "wave='--steps 400'")
        try:
            found.append((name, tuple(shlex.split(words))))
        except ValueError as error:
            raise CliError(f"--arguments is {text!r}: {error}", Exit.USAGE, "quote as for a shell") from None
    return tuple(found)


def _estimates(texts: list[str]) -> tuple[tuple[str, float], ...]:
    pairs = [(text, *_pair("--estimate", text, "wave=6")) for text in texts]
    return tuple((name, _number("--estimate", text, value)) for text, name, value in pairs)


def _run_times(text: str) -> tuple[float, float]:
    low, dash, high = text.partition("-")
    first = _number("--run-times", text, low)
    return first, _number("--run-times", text, high) if dash else first


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise CliError(f"--inputs is {text!r}", Exit.USAGE, "give logical names: --inputs a,b")
    return names


def _fields(texts: list[str]) -> tuple[tuple[str, Any], ...]:
    import yaml

    from koalapy.config.strict_yaml import DuplicateKey, load_yaml

    found = []
    for text in texts:
        name, value = _pair("--field", text, "claiming=incremental")
        try:
            found.append((name, load_yaml(value)))
        except DuplicateKey as error:
            raise CliError(f"--field is {text!r}: {error}", Exit.USAGE) from None
        except yaml.YAMLError:
            raise CliError(f"--field is {text!r}", Exit.USAGE, "write the value in YAML or JSON") from None
    return tuple(found)
