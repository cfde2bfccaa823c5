"""Options of other systems and their meaning in koalapy, from the table ``foreign_options.yaml``.

The table answers unknown options of a command, translates lines of scripts (``cli/jobs/translation.py``),
and is shown in ``docs/coming-from-slurm.md``.
"""

import getpass
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from koalapy.model.job_spec import find_unknown_pattern
from koalapy.model.times import TIME_HINT, parse_time

MAX_VALUE_LENGTH = 60
NO_RESOURCE = "koalapy has no resource {}: use --memory, --cores, --gpus or --feature for each node"
Translation = tuple[list[str], str]
"""Options of koalapy, and a remark."""


class Unclear(Exception):
    """An option without a clear meaning in koalapy. The text is a reason, or what to use instead."""


class UnknownNodes(Unclear):
    """A number of ranks or slots that does not say how many nodes. The text says which requests fit."""

    def __init__(self, count: int, kind: str) -> None:
        fitting = f"--flexible {count} --ppn 1 for a node for each rank, or --flexible 1 --ppn {count} for one node"
        remedy = f"write #KOALA {fitting}, or give --ranks-on each-node or one-node"
        super().__init__(f"{count} {kind} do not say how many nodes: {remedy}")
        self.count = count


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
    parts: Mapping[str, "ForeignOption"] = field(default_factory=dict)
    """Resources that its value may be, by name."""

    def translate(self, value: str) -> Translation:
        """Return the counterpart of the option with a value. Raise ``Unclear`` if it has none."""
        if self.parts:
            name, amount = split_resource(value)
            if name not in self.parts:
                raise Unclear(NO_RESOURCE.format(value))
            return self.parts[name].translate(amount)
        if self.flag and value and value not in self.only:
            raise Unclear("it has no value: write what follows as an option of its own")
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


def split_resource(value: str) -> tuple[str, str]:
    """Return the name and amount of a resource, as in ``h_rt=60`` and ``span[ptile=4]``."""
    name, amount = re.fullmatch(r"([^=\[]*)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, amount.removeprefix("=").removeprefix("[").removesuffix("]") if amount else ""


def _translate_number(value: str, use: str) -> Translation:
    first, dash, last = value.partition("-")  # a range of one number is one
    if not re.fullmatch(r"[0-9]{1,9}", first) or int(first) == 0 or (dash and first != last):
        raise Unclear("give one number")
    return [*use.split(), str(int(first))], ""


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


def _translate_clock(value: str, unit: int, system: str) -> Translation:
    """Convert ``[[hours:]minutes:]seconds`` or ``[hours:]minutes``; ``unit``: seconds of the last number."""
    if not re.fullmatch(r"\d+(:\d+){0,2}" if unit == 1 else r"\d+(:\d+)?", value):
        raise Unclear(f"it is no time of {system}: use --walltime, as 90m or 1:30:00")
    numbers = reversed([int(number) for number in value.split(":")])
    return _format_walltime(sum(number * unit * 60**power for power, number in enumerate(numbers)))


ONE_NODE = ("smp", "threaded", "threads", "thread", "multithread", "omp", "openmp", "shm", "shared", "serial")
"""Usual names of parallel environments of Grid Engine with all slots on one node."""


def _translate_parallel_environment(value: str, use: str) -> Translation:
    name, _, slots = value.partition(" ")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", slots.strip()):
        raise Unclear("name the environment and one number of slots")
    if name.lower() not in ONE_NODE:
        raise UnknownNodes(int(slots), "slots")
    return ["--flexible", "1", use, slots.strip()], f"{name} is an environment of one node"


SEVERAL_SIZES = "koalapy has one number of ranks on each node: use --nonfixed with the nodes of each part, and --ppn"


def _translate_nodes(value: str, _: str) -> Translation:
    """Convert ``nodes=2:ppn=8:gpus=1:feature`` of PBS."""
    nodes, *properties = value.split(":")
    if "+" in value:
        raise Unclear(SEVERAL_SIZES)
    if not nodes.isdecimal():
        raise Unclear("the cluster chooses the nodes: use nodes=NUMBER")
    arguments, remark = _translate_number(nodes, "--flexible")
    ranks = "1"
    for text in properties:
        name, equals, amount = text.partition("=")
        if name == "ppn":
            ranks = amount
        elif name == "gpus":
            arguments += _translate_gpus(amount, "")[0]
        elif equals:
            raise Unclear(NO_RESOURCE.format(text))
        else:
            arguments += ["--feature", name]
    return [*arguments, *_translate_number(ranks, "--ppn")[0]], remark


def _translate_chunks(value: str, _: str) -> Translation:
    """Convert ``select=2:ncpus=8:mpiprocs=4`` of PBS, each chunk to a node."""
    if "+" in value:
        raise Unclear(SEVERAL_SIZES)
    chunks, *texts = value.split(":")
    resources = dict(split_resource(text) for text in texts)
    arguments = _translate_number(chunks, "--flexible")[0]
    cpus, ranks = resources.pop("ncpus", "1"), resources.pop("mpiprocs", "1")
    arguments += _translate_number(ranks, "--ppn")[0]
    _translate_number(cpus, "")
    threads = resources.pop("ompthreads", "") or str(max(1, int(cpus) // int(ranks)))
    if threads != "1":
        arguments += _translate_number(threads, "--cpus-per-rank")[0]
    if memory := resources.pop("mem", ""):
        arguments += VALUES["memory of PBS"](memory, "")[0]
    if gpus := resources.pop("ngpus", ""):
        arguments += _translate_gpus(gpus, "")[0]
    if resources:
        raise Unclear(NO_RESOURCE.format("=".join(next(iter(resources.items())))))
    return arguments, "a node for each chunk"


def _translate_lsf_name(value: str, use: str) -> Translation:
    """Convert ``name[1-10]%4`` to a name and an array."""
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\]]*)\](?:%(\d+))?)?", value)
    if match is None or not (match[1] or match[2]):
        raise Unclear("give a name, or a name and the indices of an array, as name[1-10]")
    arguments = [use, match[1]] if match[1] else []
    if match[2]:
        arguments += _translate_indices(match[2], "--array")[0]
        arguments[-1] += f"%{match[3]}" if match[3] else ""
    return arguments, ""


def _translate_indices(value: str, use: str) -> Translation:
    value = re.sub(r"^\[([^]]*)\]", r"\1", value)
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", value):
        raise Unclear("give indices, as 1-10, 1-10:2 or 1,4,7")
    return [use, value], ""


def _translate_slots(value: str, _: str) -> Translation:
    if value == "1":
        return ["--flexible", "1", "--ppn", "1"], ""
    raise UnknownNodes(int(_translate_number(value, "")[0][-1]), "slots")


def _translate_lsf_gpus(value: str, _: str) -> Translation:
    amounts = dict(split_resource(text) for text in value.split(":"))
    if "num" not in amounts:
        raise Unclear("use --gpus with the GPUs of each node")
    return _translate_gpus(amounts["num"], "")


def _translate_lsf_file(value: str, use: str) -> Translation:
    return _translate_file(value.replace("%J", "%A").replace("%I", "%a"), use)


def _translate_new_file(value: str, use: str) -> Translation:
    if "%J" not in value:
        raise Unclear("koalapy appends to files for output: use %J in names")
    return _translate_lsf_file(value, use)


def _translate_partition(value: str, use: str) -> Translation:
    if not value:
        raise Unclear("its value is missing")
    first, *other_names = re.split(r"[,\s]+", value)
    if re.search(r"[@*?!&|]", first):
        raise Unclear(
            "koalapy takes the name of one partition: use --partition, or leave it out so that koalapy chooses"
        )
    if other_names:
        raise Unclear(f"koalapy takes one partition: use --partition {first}, or leave it out so that koalapy chooses")
    return [use, first], ""


def _translate_file(value: str, use: str) -> Translation:
    """Return a file for output. Patterns of Slurm have the same meaning in koalapy."""
    value = value.replace("%J", "%j")
    if "%u" in value:
        try:
            value = value.replace("%u", getpass.getuser())
        except (KeyError, OSError):
            raise Unclear("this account has no name: set USER, or write a name in place of %u") from None
    if pattern := find_unknown_pattern(value):
        raise Unclear(f"koalapy does not replace {pattern} in {use}: use %j, %A, %a or %x")
    if value.endswith("/"):
        raise Unclear("it is a folder: name a file, as in logs/%j.out")
    return [use, value], "on the cluster of the script"


def _translate_grid_engine_file(value: str, use: str) -> Translation:
    """Return a file for output with koalapy's patterns for variables of Grid Engine and PBS."""
    if re.match(r"[^/:]+:", value):
        raise Unclear("the file is on the cluster of the script: leave out the host")
    value = value.replace("^array_index^", "%a")
    value = re.sub(r"\$\{?(\w+)\}?", lambda match: _PATTERNS.get(match[1], match[0]), value.removeprefix(":"))
    if value.endswith("/") or os.path.isdir(value):
        value = f"{value.rstrip('/')}/%x.{use[2]}%A"
    if "$" in value or not value:
        raise Unclear(f"name a file for {use} with %x for the job's name, %A for its number and %a for a task's index")
    return _translate_file(value, use)


_PATTERNS = {"JOB_NAME": "%x", "JOB_ID": "%A", "TASK_ID": "%a", "PBS_JOBNAME": "%x", "PBS_JOBID": "%j", "USER": "%u"}
"""Variables in names of files of Grid Engine and PBS, and the pattern of each."""


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
    return [argument for name in value.split("&") for argument in ("--feature", name)], ""


def _translate_memory(value: str, unit: str, decimal: str = "") -> Translation:
    """Convert an amount of memory; ``unit``: that of a number alone, ``decimal``: letters that count by 1000."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    if match is None:
        raise Unclear("it is no amount of memory: use --memory, as 16GB")
    if int(match[1]) == 0:
        return [], "jobs have all memory of their nodes"
    letter = match[2] or unit
    suffix = "iB" if letter and letter not in decimal else "B"
    prefix = "k" if (letter, suffix) == ("k", "B") else letter.upper()
    return ["--memory", f"{match[1]}{prefix}{suffix}"], "on each node"


def _translate_mail(names: Sequence[str], events: Mapping[str, Sequence[str]]) -> Translation:
    """Return the mails for the events that another system has under these names."""
    names = [name.strip() for name in names]
    if unknown := sorted(set(names) - events.keys()):
        supported = [name for name, kinds in events.items() if len(kinds) == 1]
        raise Unclear(f"koalapy sends no mail about {', '.join(unknown)}: use {', '.join(supported)}")
    chosen = dict.fromkeys(event for name in names for event in events[name])
    return [argument for event in chosen for argument in ("--mail-type", event)], "" if chosen else "no mail"


def _translate_signal(value: str, _: str) -> Translation:
    scope, colon, signal = value.rpartition(":")
    if colon and scope != "R":
        raise Unclear("all processes get the signal except the script itself: use --signal TERM@60")
    return ["--signal", signal if "@" in signal else f"{signal}@60"], ""


def _translate_moment(value: str, use: str) -> Translation:
    """Return a point in time. A number alone after ``now+`` counts seconds, as in Slurm."""
    value = re.sub(r"^(now\+\d+)$", r"\1s", value)
    try:
        parse_time(value, 0.0)
    except ValueError:
        raise Unclear(f"koalapy does not know this form: {TIME_HINT}") from None
    return [use, value], ""


def _translate_export(value: str, _: str) -> Translation:
    if not value:
        raise Unclear("its value is missing")
    names = [name.strip() for name in value.split(",") if name.upper() not in ("NONE", "NIL")]
    variables = [name for name in names if name.upper() != "ALL"]
    if not names:
        return [], "koalapy does so by default"
    return ["--export", ",".join(variables if len(variables) == len(names) else ["ALL", *variables])], ""


def _translate_switches(value: str, _: str) -> Translation:
    if value not in ("", "1"):
        raise Unclear("koalapy counts no switches: use --coallocation never for nodes of one cluster")
    return ["--coallocation", "never"], "or --policy communication-aware"


_MAIL = {"BEGIN": ["begin"], "END": ["end"], "FAIL": ["fail"], "ALL": ["begin", "end", "fail"], "NONE": []}
_MAIL_LETTERS = {"b": ["begin"], "e": ["end"], "a": ["fail"], "s": [], "n": []}
VALUES: Mapping[str, Callable[[str, str], Translation]] = {
    "number": _translate_number,
    "time": _translate_slurm_time,
    "point in time": _translate_moment,
    "partition": _translate_partition,
    "seconds": lambda value, _: _translate_clock(value, 1, "Grid Engine or PBS"),
    "minutes": lambda value, _: _translate_clock(value, 60, "LSF"),
    "parallel environment": _translate_parallel_environment,
    "nodes of PBS": _translate_nodes,
    "chunks": _translate_chunks,
    "indices": _translate_indices,
    "slots": _translate_slots,
    "job name": _translate_lsf_name,
    "GPUs of LSF": _translate_lsf_gpus,
    "file of LSF": _translate_lsf_file,
    "new file of LSF": _translate_new_file,
    "file": _translate_file,
    "file of Grid Engine": _translate_grid_engine_file,
    "gres": _translate_gres,
    "gpus": _translate_gpus,
    "constraint": _translate_constraint,
    "memory": lambda value, _: _translate_memory(value, "M"),
    "memory of PBS": lambda value, _: _translate_memory(value, ""),
    "memory of Grid Engine": lambda value, _: _translate_memory(value, "", decimal="kmgt"),
    "mail": lambda value, _: _translate_mail(value.upper().split(","), _MAIL),
    "mail letters": lambda value, _: _translate_mail(list(value), _MAIL_LETTERS),
    "signal": _translate_signal,
    "export": _translate_export,
    "switches": _translate_switches,
    "variables": lambda value, _: ([argument for name in value.split(",") for argument in ("--env", name)], ""),
    "restarts": lambda value, _: (
        ([], "koalapy does so by default") if value[:1] == "y" else (["--max-restarts", "0"], "")
    ),
    "job": lambda value, _: (["koala", "show", value], ""),
}
"""Translations of values, each with the value and ``use`` of the option."""


def _read_options(table: Mapping[str, Any]) -> list[ForeignOption]:
    options = []
    for names, properties in table.items():
        parts = {name: part for part in _read_options(properties.get("parts", {})) for name in part.names}
        options.append(ForeignOption(tuple(names.split()), **{**properties, "parts": parts}))
    return options


FOREIGN_OPTIONS: Mapping[str, Mapping[str, Sequence[ForeignOption]]] = {
    command: {system: _read_options(options) for system, options in systems.items()}
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
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        if not name.startswith(option):
            continue
        if name not in names and not option.startswith("--"):
            name, value = option, argument[len(option) :]
        if name in names:
            if not equals and not value and index + 1 < len(arguments) and not arguments[index + 1].startswith("-"):
                value = arguments[index + 1]
            return f"{command} has no {name}; {_explain_name(systems, name, value)}"
    return ""


def _explain_name(systems: Mapping[str, Sequence[ForeignOption]], name: str, value: str) -> str:
    """Return what to use for an option and its value, for each system that knows them."""
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
