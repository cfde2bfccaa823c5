"""From words to what a command is called with."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from koalapy.cli.arguments.declare import Argument, Command, Option, Parameter
from koalapy.cli.errors import CliError, Exit
from koalapy.model.wording import known_names

HELP = ("-h", "--help")


def refuse(path: str, what: str, hint: str = "") -> NoReturn:
    """``CliError``: what is wrong with the words given to the command that is called ``path``."""
    way_out = f"see {path} --help"
    raise CliError(what, Exit.USAGE, f"{hint}{' ' if hint.endswith('?') else '; '}{way_out}" if hint else way_out)


@dataclass(slots=True)
class Words:
    """What a command line was split into: words for options by parameter, and those at their places."""

    given: dict[str, list[str]] = field(default_factory=dict)
    """By a parameter's name; of a flag ``["yes"]`` or ``["no"]``."""
    places: list[str] = field(default_factory=list)
    asks_for_help: bool = False
    left: list[str] = field(default_factory=list)
    """What was not looked at, from the first word at a place on; for groups."""


def split(path: str, parameters: Sequence[Parameter], words: Sequence[str], *, is_group: bool = False) -> Words:
    """Tell options from words at their places. Of a group all ends at the first of those, the subcommand's name."""
    options = {name: (p, True) for p in parameters if isinstance(p.spec, Option) for name in p.names}
    options |= {name: (p, False) for p in parameters if isinstance(p.spec, Option) for name in p.opposites}
    arguments = [p for p in parameters if isinstance(p.spec, Argument)]
    rest = next((i for i, p in enumerate(arguments) if isinstance(p.spec, Argument) and p.spec.rest), None)
    found = Words()
    coming = iter(words)
    for word in coming:
        if word == "--" and not is_group:
            found.places += coming
        elif word in HELP:
            found.asks_for_help = True
        elif word.startswith("-") and word != "-":
            for name, value in _option(path, options, word, coming):
                found.given.setdefault(name, []).append(value)
        elif is_group:
            found.left = [word, *coming]
        else:
            found.places.append(word)
            if rest is not None and len(found.places) > rest:
                found.places += coming
    return found


def _option(
    path: str, options: Mapping[str, tuple[Parameter, bool]], word: str, coming: Iterator[str]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """The parameters that a word sets, and to what; ``coming`` loses the next word where that is the value."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        after = value if equals else None
    else:
        name, after = word[:2], word[2:] or None
    parameter, sets = options.get(name) or _unknown(path, name, options)
    if parameter.is_flag:
        yield parameter.name, "yes" if sets else "no"
        if after is not None and word.startswith("--"):
            refuse(path, f"{name} takes no value, but {after!r} is given")
        if after is not None:
            yield from _option(path, options, f"-{after}", coming)
        return
    if after is None and (after := next(coming, None)) is None:
        refuse(path, f"{name} needs a value")
    yield parameter.name, after


def _unknown(path: str, name: str, options: Mapping[str, tuple[Parameter, bool]]) -> NoReturn:
    from difflib import get_close_matches

    near = get_close_matches(name, [*options, *HELP], 1) if name.startswith("--") else []
    refuse(path, f"{path} has no option {name}", f"did you mean {near[0]}?" if near else "")


def values(command: Command, words: Words, inherited: Mapping[str, list[str]]) -> dict[str, Any]:
    """By parameter: as given, as given to the group before it, as the environment says, or by default."""
    parameters = command.parameters()
    found = {}
    for parameter in (p for p in parameters if isinstance(p.spec, Option)):
        given = words.given.get(parameter.name) or inherited.get(parameter.name)
        if not given and isinstance(parameter.spec, Option) and (told := os.environ.get(parameter.spec.envvar or "")):
            given = [told]
        found[parameter.name] = _value(command.path, parameter, given)
    arguments = [p for p in parameters if isinstance(p.spec, Argument)]
    places = list(words.places)
    for index, parameter in enumerate(arguments):
        after = sum(p.is_required for p in arguments[index + 1 :])
        taken = max(0, len(places) - after) if parameter.is_list else 1
        given, places = places[:taken], places[taken:]
        found[parameter.name] = _value(command.path, parameter, given)
    if places:
        refuse(command.path, f"{places[0]!r} is one word too many")
    return found


def _value(path: str, parameter: Parameter, given: Sequence[str] | None) -> Any:
    if not given:
        if parameter.is_required:
            refuse(path, f"{parameter.label} is missing")
        return parameter.default
    if parameter.is_flag:
        return given[-1] == "yes"
    if parameter.is_list:
        return [_one(path, parameter, word) for word in given]
    return _one(path, parameter, given[-1])


def _one(path: str, parameter: Parameter, word: str) -> Any:
    """A word as what the parameter is of."""
    kind: Any = parameter.type
    if issubclass(kind, Enum):
        match = next((one for one in kind if str(one.value).lower() == word.lower()), None)
        if match is None:
            refuse(path, f"{parameter.label} is {word!r}", known_names(word, parameter.choices))
        return match
    if kind not in (int, float):
        return kind(word)
    try:
        number = kind(word)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        refuse(path, f"{parameter.label} is {word[:60]!r}, no {'whole ' if kind is int else ''}number")
    least, most = parameter.spec.min, parameter.spec.max
    if least is not None and number < least:
        refuse(path, f"{parameter.label} is {number}, but must be at least {least}")
    if most is not None and number > most:
        refuse(path, f"{parameter.label} is {number}, but must be at most {most}")
    return number
