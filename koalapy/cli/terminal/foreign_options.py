"""Options of Slurm and Grid Engine and their meaning in koalapy, from the table ``foreign_options.yaml``.

The table answers unknown options of a command, translates ``#SBATCH`` and ``#$`` lines (``cli/jobs/translation.py``),
and is shown in ``docs/coming-from-slurm.md``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from koalapy.model.job_spec import find_unknown_pattern

MAX_VALUE_LENGTH = 60
Translation = tuple[list[str], str]
"""Options of koalapy, and a remark."""


class Unclear(Exception):
    """An option without a clear meaning in koalapy. The text is a reason, or what to use instead."""


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option of another system, as ``foreign_options.yaml`` describes it."""

    names: tuple[str, ...]
    use: str = ""
    value: str = ""
    example: str = ""
    remark: str = ""
    only: Sequence[str] = ()
    unclear: str = ""
    flag: bool = False

    def translate(self, value: str) -> Translation:
        """Return the counterpart of the option with a value. Raise ``Unclear`` if it has none."""
        if self.value:
            return VALUES[self.value](value, self.use)
        if self.unclear and value not in self.only:
            raise Unclear(self.unclear)
        if not self.example:
            return self.use.split(), self.remark
        if not value:
            raise Unclear("its value is missing")
        return [self.use, value], self.remark

    def explain(self, value: str) -> str:
        """Return what to use for a value. Raise ``Unclear``."""
        is_usable = value and value.isprintable() and len(value) <= MAX_VALUE_LENGTH and not self.flag
        options, remark = self.translate(value if is_usable else self.example)
        return " ".join(["use", *options]) + (f", {remark}" if remark else "") if options else f"leave it out: {remark}"


def _translate_number(value: str, use: str) -> Translation:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) == 0:
        raise Unclear("give one number")
    return [use, str(int(value))], ""


def _format_walltime(seconds: int) -> Translation:
    if seconds == 0:
        raise Unclear("it is no time limit: leave it out, koalapy has none without --walltime")
    unit, letter = next(pair for pair in ((3600, "h"), (60, "m"), (1, "s")) if seconds % pair[0] == 0)
    return ["--walltime", f"{seconds // unit}{letter}"], ""


def _translate_slurm_time(value: str, _: str) -> Translation:
    """Convert minutes, minutes:seconds, hours:minutes:seconds, and days before hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if match is None:
        raise Unclear("it is no time of Slurm: use --walltime, as 90m or 1:30:00")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        first, second, third = 0, first, second
    return _format_walltime(days * 86400 + first * 3600 + second * 60 + third)


def _translate_resource(value: str, _: str) -> Translation:
    """Convert the requested run time of Grid Engine, in seconds or as hours:minutes:seconds."""
    name, _, amount = value.partition("=")
    if name not in ("h_rt", "s_rt") or not re.fullmatch(r"\d+(:\d+){0,2}", amount):
        raise Unclear(f"koalapy has no resource {value}: use --memory, --cores, --gpus or --feature for each node")
    numbers = reversed([int(number) for number in amount.split(":")])
    return _format_walltime(sum(number * unit for number, unit in zip(numbers, (1, 60, 3600), strict=False)))


def _translate_file(value: str, use: str) -> Translation:
    """Return a file for output. Patterns of Slurm have the same meaning in koalapy."""
    if pattern := find_unknown_pattern(value):
        raise Unclear(f"koalapy does not replace {pattern} in {use}: use %j, %A, %a or %x")
    return [use, value], "on the cluster of the script"


def _translate_grid_engine_file(value: str, use: str) -> Translation:
    """Return a file for output with koalapy's patterns for Grid Engine's variables."""
    value = re.sub(r"\$\{?(\w+)\}?", lambda match: _PATTERNS.get(match[1], match[0]), value.removeprefix(":"))
    if "$" in value or not value or value.endswith("/"):
        raise Unclear(f"name a file for {use} with %x for the job's name, %A for its number and %a for a task's index")
    return _translate_file(value, use)


_PATTERNS = {"JOB_NAME": "%x", "JOB_ID": "%A", "TASK_ID": "%a"}
"""Variables in names of files of Grid Engine, and the pattern of each."""


def _translate_gres(value: str, use: str) -> Translation:
    if value != "gpu" and not value.startswith("gpu:"):
        raise Unclear("koalapy has no such resource: use --gpus with the GPUs of each node")
    return _translate_gpus(value.removeprefix("gpu").removeprefix(":") or "1", use)


def _translate_gpus(value: str, _: str) -> Translation:
    match = re.fullmatch(r"(\d+)|([A-Za-z]\w*)(?::(\d+))?", value)
    if match is None:
        raise Unclear("use --gpus with the GPUs of each node")
    return ["--gpus", match[1] or f"{match[2]}:{match[3] or 1}"], "on each node"


def _translate_constraint(value: str, _: str) -> Translation:
    if not re.fullmatch(r"[\w.+-]+(&[\w.+-]+)*", value):
        raise Unclear("koalapy has no alternatives of features: use --feature with each that is needed")
    return [word for name in value.split("&") for word in ("--feature", name)], ""


def _translate_memory(value: str, _: str) -> Translation:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    if match is None:
        raise Unclear("it is no memory of Slurm: use --memory, as 16GB")
    if int(match[1]) == 0:
        return [], "jobs have all memory of their nodes"
    return ["--memory", f"{match[1]}{(match[2] or 'M').upper()}iB"], "on each node"


def _translate_mail(names: Sequence[str], events: Mapping[str, Sequence[str]]) -> Translation:
    """Return the mails for the events that another system has under these names."""
    names = [name.strip() for name in names]
    if unknown := sorted(set(names) - events.keys()):
        known = [name for name, kinds in events.items() if len(kinds) == 1]
        raise Unclear(f"koalapy sends no mail about {', '.join(unknown)}: use {', '.join(known)}")
    chosen = dict.fromkeys(event for name in names for event in events[name])
    return [word for event in chosen for word in ("--mail-type", event)], "" if chosen else "no mail"


def _translate_signal(value: str, _: str) -> Translation:
    scope, colon, signal = value.rpartition(":")
    if colon and scope != "R":
        raise Unclear("all processes get the signal except the script itself: use --signal TERM@60")
    return ["--signal", signal if "@" in signal else f"{signal}@60"], ""


def _translate_export(value: str, _: str) -> Translation:
    if not value:
        raise Unclear("its value is missing")
    names = [name for name in value.split(",") if name.upper() not in ("NONE", "NIL")]
    others = [name for name in names if name.upper() != "ALL"]
    if not names:
        return [], "koalapy does so by default"
    return ["--export", ",".join(others if len(others) == len(names) else ["ALL", *others])], ""


def _translate_switches(value: str, _: str) -> Translation:
    if value not in ("", "1"):
        raise Unclear("koalapy counts no switches: use --coallocation never for nodes of one cluster")
    return ["--coallocation", "never"], "or --policy communication-aware"


_MAIL = {"BEGIN": ["begin"], "END": ["end"], "FAIL": ["fail"], "ALL": ["begin", "end", "fail"], "NONE": []}
_MAIL_LETTERS = {"b": ["begin"], "e": ["end"], "a": ["fail"], "n": []}
VALUES: Mapping[str, Callable[[str, str], Translation]] = {
    "number": _translate_number,
    "time": _translate_slurm_time,
    "resource": _translate_resource,
    "file": _translate_file,
    "file of Grid Engine": _translate_grid_engine_file,
    "gres": _translate_gres,
    "gpus": _translate_gpus,
    "constraint": _translate_constraint,
    "memory": _translate_memory,
    "mail": lambda value, _: _translate_mail(value.upper().split(","), _MAIL),
    "mail letters": lambda value, _: _translate_mail(list(value), _MAIL_LETTERS),
    "signal": _translate_signal,
    "export": _translate_export,
    "switches": _translate_switches,
    "variables": lambda value, _: ([word for name in value.split(",") for word in ("--env", name)], ""),
    "restarts": lambda value, _: (
        ([], "koalapy does so by default") if value[:1] == "y" else (["--max-restarts", "0"], "")
    ),
    "job": lambda value, _: (["koala", "show", value], ""),
}
"""Translations of values, each with the value and ``use`` of the option."""
FOREIGN_OPTIONS: Mapping[str, Mapping[str, Sequence[ForeignOption]]] = {
    command: {
        system: [ForeignOption(tuple(names.split()), **properties) for names, properties in options.items()]
        for system, options in systems.items()
    }
    for command, systems in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Options of other systems, by command and system."""


def explain_option(command: str, option: str, arguments: Sequence[str]) -> str:
    """Return koalapy's counterpart of an unknown option of a command; empty if the option is not in the table.

    ``arguments``: the words of the command line, for the option's value and for options such as ``-pe``, of which the
    parser names only the first letter.
    """
    systems = FOREIGN_OPTIONS.get(command, {})
    names = {name for options in systems.values() for entry in options for name in entry.names}
    for index, word in enumerate(arguments):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not name.startswith(option):
            continue
        if name not in names and not option.startswith("--"):
            name, value = option, word[len(option) :]
        if name in names:
            if not equals and not value and index + 1 < len(arguments) and not arguments[index + 1].startswith("-"):
                value = arguments[index + 1]
            return f"{command} has no {name}; {_explain_name(systems, name, value)}"
    return ""


def _explain_name(systems: Mapping[str, Sequence[ForeignOption]], name: str, value: str) -> str:
    """Return what to use for an option and its value, for each system in which they have a meaning."""
    answers: dict[str, str] = {}
    reasons = []
    for system, options in systems.items():
        for entry in options:
            if name in entry.names:
                try:
                    answers.setdefault(entry.explain(value), system)
                except Unclear as reason:
                    reasons.append(str(reason))
    if not answers:
        return reasons[0]
    return (
        next(iter(answers))
        if len(answers) == 1
        else "; ".join(f"for {system} {answer}" for answer, system in answers.items())
    )


def format_options_page(commands: Mapping[str, click.Command]) -> str:
    """Return the table as Markdown, without options that the commands have themselves."""
    rows = ["| command | option elsewhere | here |", "| --- | --- | --- |"]
    for path, systems in FOREIGN_OPTIONS.items():
        own_names = {name for parameter in commands[path].params for name in parameter.opts}
        for system, options in systems.items():
            for entry in options:
                if names := ", ".join(f"`{name}`" for name in entry.names if name not in own_names):
                    rows.append(f"| `{path}` | {system}: {names} | {_quote_options(_answer(entry))} |")
    return "\n".join([*rows, ""])


def _answer(entry: ForeignOption) -> str:
    try:
        return entry.explain("")
    except Unclear as reason:
        return str(reason)


def _quote_options(text: str) -> str:
    """Mark options and commands in a text as code."""
    value = r"(?: [^ ,;:]*[A-Z0-9'][^ ,;]*)?"
    return re.sub(rf"--[a-z][a-z-]*{value}|koala [a-z]+", r"`\g<0>`", text)
