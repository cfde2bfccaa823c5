"""Options of Slurm and Grid Engine, each with its meaning in koalapy.

One table answers unknown options of a command, translates ``#SBATCH`` and ``#$`` lines (``cli/jobs/translation.py``),
and is shown in ``docs/coming-from-slurm.md``.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import click

from koalapy.model.job_spec import find_unknown_pattern

MAX_VALUE_LENGTH = 60
Translation = tuple[list[str], str]
"""Options of koalapy, and a remark."""


class Unclear(Exception):
    """An option without a clear meaning in koalapy. The text is a reason, or what to use instead."""


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """Spellings of one option, the long one first, and the function that translates its value or raises ``Unclear``.

    ``example``: value in answers to users who gave none. An option with neither is a flag.
    """

    names: tuple[str, ...]
    translate: Callable[[str], Translation]
    example: str = ""
    is_flag: bool = False

    def explain(self, value: str) -> str:
        """Return what to use for a value. Raise ``Unclear``."""
        is_usable = value and value.isprintable() and len(value) <= MAX_VALUE_LENGTH and not self.is_flag
        options, remark = self.translate(value if is_usable else self.example)
        return " ".join(["use", *options]) + (f", {remark}" if remark else "") if options else f"leave it out: {remark}"


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise Unclear("give one number")
    return int(text)


def _replace_with(option: str) -> Callable[[str], Translation]:
    def translate(value: str) -> Translation:
        if not value:
            raise Unclear("its value is missing")
        return [option, value], ""

    return translate


def _replace_with_count(option: str) -> Callable[[str], Translation]:
    return lambda value: ([option, str(_number(value))], "")


def _always(*options: str, remark: str = "") -> Callable[[str], Translation]:
    return lambda _value: (list(options), remark)


def _reject(reason: str) -> Callable[[str], Translation]:
    def translate(_value: str) -> Translation:
        raise Unclear(reason)

    return translate


def _accept_only(
    values: Collection[str], reason: str, remark: str = "koalapy always does so"
) -> Callable[[str], Translation]:
    """Return the translation of an option for which koalapy always does what some values request."""

    def translate(value: str) -> Translation:
        if value not in values:
            raise Unclear(reason)
        return [], remark

    return translate


def _format_walltime(seconds: int) -> Translation:
    if seconds == 0:
        raise Unclear("it is no time limit: leave it out, koalapy has none without --walltime")
    unit, letter = next(pair for pair in ((3600, "h"), (60, "m"), (1, "s")) if seconds % pair[0] == 0)
    return ["--walltime", f"{seconds // unit}{letter}"], ""


def _translate_slurm_time(value: str) -> Translation:
    """Convert minutes, minutes:seconds, hours:minutes:seconds, and days before hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if match is None:
        raise Unclear("it is no time of Slurm: use --walltime, as 90m or 1:30:00")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        first, second, third = 0, first, second
    return _format_walltime(days * 86400 + first * 3600 + second * 60 + third)


def _translate_resource(value: str) -> Translation:
    """Convert the requested run time of Grid Engine, in seconds or as hours:minutes:seconds."""
    name, _, amount = value.partition("=")
    if name not in ("h_rt", "s_rt") or not re.fullmatch(r"\d+(:\d+){0,2}", amount):
        raise Unclear(f"koalapy has no resource {value}: use --memory, --cores, --gpus or --feature for each node")
    numbers = reversed([int(number) for number in amount.split(":")])
    return _format_walltime(sum(number * unit for number, unit in zip(numbers, (1, 60, 3600), strict=False)))


def _translate_file(option: str) -> Callable[[str], Translation]:
    """Return the translation of a file for output. Patterns of Slurm have the same meaning in koalapy."""

    def translate(value: str) -> Translation:
        if pattern := find_unknown_pattern(value):
            raise Unclear(f"koalapy does not replace {pattern} in {option}: use %j, %A, %a or %x")
        return [option, value], "on the cluster of the script"

    return translate


def _translate_gres(value: str) -> Translation:
    if value != "gpu" and not value.startswith("gpu:"):
        raise Unclear("koalapy has no such resource: use --gpus with the GPUs of each node")
    return _translate_gpus(value.removeprefix("gpu").removeprefix(":") or "1")


def _translate_gpus(value: str) -> Translation:
    match = re.fullmatch(r"(\d+)|([A-Za-z]\w*)(?::(\d+))?", value)
    if match is None:
        raise Unclear("use --gpus with the GPUs of each node")
    return ["--gpus", match[1] or f"{match[2]}:{match[3] or 1}"], "on each node"


def _translate_constraint(value: str) -> Translation:
    if not re.fullmatch(r"[\w.+-]+(&[\w.+-]+)*", value):
        raise Unclear("koalapy has no alternatives of features: use --feature with each that is needed")
    return [word for name in value.split("&") for word in ("--feature", name)], ""


def _translate_memory(value: str) -> Translation:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    if match is None:
        raise Unclear("it is no memory of Slurm: use --memory, as 16GB")
    if int(match[1]) == 0:
        return [], "jobs have all memory of their nodes"
    return ["--memory", f"{match[1]}{(match[2] or 'M').upper()}iB"], "on each node"


def _translate_mail(
    events: Mapping[str, Sequence[str]], split: Callable[[str], Sequence[str]]
) -> Callable[[str], Translation]:
    def translate(value: str) -> Translation:
        names = [name.strip() for name in split(value)]
        if unknown := sorted(set(names) - events.keys()):
            known = [name for name, kinds in events.items() if len(kinds) == 1]
            raise Unclear(f"koalapy sends no mail about {', '.join(unknown)}: use {', '.join(known)}")
        chosen = dict.fromkeys(event for name in names for event in events[name])
        return [word for event in chosen for word in ("--mail-type", event)], "" if chosen else "no mail"

    return translate


def _translate_signal(value: str) -> Translation:
    scope, colon, signal = value.rpartition(":")
    if colon and scope != "R":
        raise Unclear("all processes get the signal except the script itself: use --signal TERM@60")
    return ["--signal", signal if "@" in signal else f"{signal}@60"], ""


def _translate_export(value: str) -> Translation:
    if not value:
        raise Unclear("its value is missing")
    names = [name for name in value.split(",") if name.upper() not in ("NONE", "NIL")]
    others = [name for name in names if name.upper() != "ALL"]
    if not names:
        return [], "koalapy does so by default"
    return ["--export", ",".join(others if len(others) == len(names) else ["ALL", *others])], ""


def _translate_switches(value: str) -> Translation:
    if value not in ("", "1"):
        raise Unclear("koalapy counts no switches: use --coallocation never for nodes of one cluster")
    return ["--coallocation", "never"], "or --policy communication-aware"


SIZES = "use --flexible with the number of nodes, and --ppn for processes on each"
CLUSTERS = "use --fixed CLUSTER:NODES; the cluster chooses the nodes"
_MAIL = {"BEGIN": ["begin"], "END": ["end"], "FAIL": ["fail"], "ALL": ["begin", "end", "fail"], "NONE": []}
SLURM = (
    ForeignOption(("--nodes", "-N"), _replace_with_count("--flexible"), "4"),
    ForeignOption(("--ntasks", "-n"), _reject(SIZES)),
    ForeignOption(("--ntasks-per-node", "--tasks-per-node"), _replace_with_count("--ppn"), "8"),
    ForeignOption(("--cpus-per-task", "-c"), _replace_with_count("--cpus-per-rank"), "4"),
    ForeignOption(("--mincpus",), _replace_with_count("--cores"), "16"),
    ForeignOption(("--mem",), _translate_memory, "16GB"),
    ForeignOption(("--mem-per-cpu",), _reject("use --memory with the memory of each node")),
    ForeignOption(("--gpus-per-node",), _translate_gpus, "a100:2"),
    ForeignOption(("--gres",), _translate_gres, "gpu:a100:2"),
    ForeignOption(("--gpus", "-G"), _reject("it counts GPUs of all nodes: use --gpus with those of each node")),
    ForeignOption(("--gpus-per-task",), _reject("use --gpus with the GPUs of each node")),
    ForeignOption(("--constraint", "-C"), _translate_constraint, "FEATURE"),
    ForeignOption(("--exclusive",), _always(remark="jobs get whole nodes"), is_flag=True),
    ForeignOption(("--oversubscribe", "-s"), _reject("use --share, with --cores or --cpus-per-rank"), is_flag=True),
    ForeignOption(("--switches",), _translate_switches),
    ForeignOption(("--nodelist", "-w"), _reject(CLUSTERS)),
    ForeignOption(("--clusters", "-M"), _reject(CLUSTERS)),
    ForeignOption(("--exclude", "-x"), _replace_with("--exclude"), "n[1-3]"),
    ForeignOption(("--partition", "-p"), _replace_with("--partition"), "large"),
    ForeignOption(("--account", "-A"), _replace_with("--account"), "ACCOUNT"),
    ForeignOption(("--qos", "-q"), _replace_with("--qos"), "QOS"),
    ForeignOption(("--time", "-t"), _translate_slurm_time, "90"),
    ForeignOption(("--begin", "-b"), _replace_with("--begin"), "16:00"),
    ForeignOption(("--deadline",), _replace_with("--deadline"), "tomorrow"),
    ForeignOption(("--signal",), _translate_signal, "TERM@60"),
    ForeignOption(("--job-name", "-J"), _replace_with("--name"), "NAME"),
    ForeignOption(("--output", "-o"), _translate_file("--output"), "job-%j.out"),
    ForeignOption(("--error", "-e"), _translate_file("--error"), "job-%j.err"),
    ForeignOption(("--open-mode",), _accept_only(["append"], "koalapy appends to files for output: use %j in names")),
    ForeignOption(("--input", "-i"), _reject("jobs have no standard input: use koala run < file")),
    ForeignOption(("--chdir", "-D", "--workdir"), _replace_with("--chdir"), "DIRECTORY"),
    ForeignOption(("--export",), _translate_export, "ALL"),
    ForeignOption(("--array", "-a"), _replace_with("--array"), "1-200"),
    ForeignOption(
        ("--dependency", "-d"), _reject("use --after JOB, or --after JOB:any, with a number of koalapy's jobs")
    ),
    ForeignOption(
        ("--kill-on-invalid-dep",), _accept_only(["yes"], "a job that waits for an end that cannot come always fails")
    ),
    ForeignOption(("--mail-type",), _translate_mail(_MAIL, lambda value: value.upper().split(",")), "END"),
    ForeignOption(("--mail-user",), _replace_with("--mail-user"), "USER@HOST"),
    ForeignOption(("--requeue",), _always(remark="koalapy does so, up to --max-restarts"), is_flag=True),
    ForeignOption(("--no-requeue",), _always("--max-restarts", "0"), is_flag=True),
    ForeignOption(("--priority",), _reject("use --priority high or low")),
    ForeignOption(("--nice",), _reject("it has no counterpart")),
    ForeignOption(("--hold", "-H"), _reject("use koala hold after the submission"), is_flag=True),
    ForeignOption(("--wait", "-W"), _reject("use the option --wait of the command"), is_flag=True),
    ForeignOption(("--parsable",), _reject("use the option --quiet of the command"), is_flag=True),
    ForeignOption(("--test-only",), _reject("use the option --dry-run of the command"), is_flag=True),
    ForeignOption(("--wrap",), _reject("write the command after --")),
    ForeignOption(("--bcast",), _reject("use --stage to send files")),
    ForeignOption(("--contiguous",), _reject("the cluster chooses the nodes"), is_flag=True),
    ForeignOption(("--overcommit", "-O"), _reject("use --ppn with the processes on each node"), is_flag=True),
)
_GRID_ENGINE_MAIL = {"b": ["begin"], "e": ["end"], "a": ["fail"], "n": []}
GRID_ENGINE = (
    ForeignOption(("-N",), _replace_with("--name"), "NAME"),
    ForeignOption(("-pe",), _reject(f"slots do not say how many nodes: {SIZES}")),
    ForeignOption(("-l",), _translate_resource, "h_rt=1:30:00"),
    ForeignOption(("-q",), _replace_with("--partition"), "QUEUE"),
    ForeignOption(("-P",), _replace_with("--account"), "PROJECT"),
    ForeignOption(("-A",), _reject("it is a text for Grid Engine's records: use --account for a project")),
    ForeignOption(("-p",), _reject("use --priority high or low")),
    ForeignOption(("-cwd",), _always(remark="koalapy starts jobs in the current directory where it exists")),
    ForeignOption(("-wd",), _replace_with("--chdir"), "DIRECTORY"),
    ForeignOption(("-o",), _translate_file("--output"), "job-%j.out"),
    ForeignOption(("-e",), _translate_file("--error"), "job-%j.err"),
    ForeignOption(
        ("-j",), _accept_only(["", "y", "yes"], "use --error with a file", "errors are in the output by default")
    ),
    ForeignOption(
        ("-v",), lambda value: ([word for name in value.split(",") for word in ("--env", name)], ""), "NAME=VALUE"
    ),
    ForeignOption(("-V",), _always("--export", "ALL")),
    ForeignOption(("-m",), _translate_mail(_GRID_ENGINE_MAIL, list), "ea"),
    ForeignOption(("-M",), _replace_with("--mail-user"), "USER@HOST"),
    ForeignOption(("-S",), _always(remark="the script's first line names its interpreter")),
    ForeignOption(
        ("-r",), lambda value: ([], "koalapy does so by default") if value[:1] == "y" else (["--max-restarts", "0"], "")
    ),
    ForeignOption(("-t",), _replace_with("--array"), "1-200"),
    ForeignOption(("-tc",), _reject("write it after the indices: --array 1-200%16")),
    ForeignOption(("-hold_jid",), _reject("use --after JOB:any, with a number of koalapy's jobs")),
    ForeignOption(("-sync",), _reject("use the option --wait of the command")),
    ForeignOption(("-terse",), _reject("use the option --quiet of the command")),
)
QUEUE = (
    ForeignOption(("--me",), _always(remark="your own jobs are listed by default")),
    ForeignOption(("--states", "-t"), _reject("use --state, such as queued or running")),
    ForeignOption(("-n",), _replace_with("--name"), "NAME"),
    ForeignOption(("--clusters", "-M"), _replace_with("--cluster"), "CLUSTER"),
    ForeignOption(("--iterate", "-i"), _reject("use --watch")),
    ForeignOption(("--start",), _reject("use koala explain")),
    ForeignOption(("--jobs", "--job", "-j"), lambda value: (["koala", "show", value], ""), "JOB"),
)
CANCEL = (
    ForeignOption(("--me",), _always("--mine")),
    ForeignOption(("-t",), _reject("use --state, such as queued or running")),
    ForeignOption(("--jobname", "-n"), _replace_with("--name"), "'study-*'"),
    ForeignOption(("--signal", "-s"), _reject("use --warn, which sends the signal that the job was submitted with")),
    ForeignOption(
        ("--interactive", "-i"), _reject("leave it out: on a terminal it asks before it cancels selected jobs")
    ),
)
FOREIGN_OPTIONS: Mapping[str, Mapping[str, Sequence[ForeignOption]]] = {
    "koala submit": {"Slurm": SLURM, "Grid Engine": GRID_ENGINE},
    "koala queue": {"Slurm": QUEUE},
    "koala cancel": {"Slurm": CANCEL},
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
