"""Load a script, and translate its ``#SBATCH`` lines of Slurm and ``#$`` lines of Grid Engine to options of koalapy."""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from koalapy.cli.jobs.script_file import (
    KINDS,
    Script,
    ScriptOptions,
    add_words,
    job_options,
    merge_job,
    merge_request,
    print_note,
    read_directives,
    read_script,
    split_words,
)
from koalapy.cli.jobs.submission import RequestOptions, ScriptLines
from koalapy.cli.terminal.foreign_options import FOREIGN_OPTIONS, ForeignOption, Unclear
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.model.array import TaskIndices
from koalapy.runner.foreign_scripts import AT_SUBMISSION, COMMANDS, GRID_ENGINE, SLURM, TRANSLATED, settable_variables

SBATCH, QSUB = "#SBATCH", "#$"
UNTRANSLATED = {"#PBS": "PBS", "#BSUB": "LSF", "#OAR": "OAR", "#FLUX:": "Flux", "#COBALT": "Cobalt"}
"""Systems without a translation, by prefix of their lines."""
NO_LINES = "koalapy translates no lines of {system}; write #KOALA lines instead"
OPTIONS: Mapping[str, Mapping[str, ForeignOption]] = {
    prefix: {name: option for option in FOREIGN_OPTIONS["koala submit"][system] for name in option.names}
    for prefix, system in ((SBATCH, "Slurm"), (QSUB, "Grid Engine"))
}
"""The options of each system, by prefix of its lines and by name."""
SYSTEMS = {SBATCH: SLURM, QSUB: GRID_ENGINE}


@dataclass
class Directive:
    """One option of a foreign line: the options of koalapy that it becomes, or why it has no clear meaning."""

    number: int
    prefix: str
    name: str
    value: str
    words: list[str] = field(default_factory=list)
    remark: str = ""
    is_understood: bool = True

    def __str__(self) -> str:
        return f"{self.prefix} {self.name} {self.value}".rstrip()

    @property
    def meaning(self) -> str:
        meaning = " ".join(self.words) + (f" ({self.remark})" if self.words and self.remark else "") or self.remark
        return meaning if self.is_understood else f"NOT UNDERSTOOD: {meaning}"

    def translate(self) -> None:
        try:
            if (option := OPTIONS[self.prefix].get(self.name)) is None:
                raise Unclear("koalapy has no such option")
            self.words, self.remark = option.translate(self.value)
        except Unclear as reason:
            self.reject(str(reason))

    def resolve(self, words: list[str], remark: str = "") -> None:
        """Set the meaning that the option has together with other lines."""
        self.words, self.remark, self.is_understood = words, remark, True

    def reject(self, reason: str) -> None:
        self.words, self.remark, self.is_understood = [], reason, False


def translate_lines(script: Script, refused: frozenset[str]) -> tuple[ScriptOptions, tuple[str, ...]]:
    """Return the options that the foreign lines of a script mean, and its systems; print each line with its meaning.

    Raise ``GridError`` if a line has no clear meaning, or needs what a job on several clusters does not have.
    """
    directives = [entry for number, text in script.head for entry in _read_line(number, text, script.name)]
    _translate_task_counts({entry.name: entry for entry in directives if entry.prefix == SBATCH})
    _combine_grid_engine([entry for entry in directives if entry.prefix == QSUB])
    _check_interpreter(script, directives)
    options = ScriptOptions()
    print_note(f"{script.name} is translated:")
    for entry in directives:
        print_note(f"  line {entry.number}: {entry} → {entry.meaning}")
        if entry.is_understood and entry.words:
            options = add_words(options, entry.words, f"{script.name}:{entry.number}", refused)
    if directives and not any(entry.name in ("--nodes", "--ntasks", "-pe") for entry in directives):
        print_note("  no line says how many nodes → --flexible 1, unless #KOALA lines or options do")
        options = add_words(options, ["--flexible", "1"], script.name, refused)
    systems = tuple(SYSTEMS[prefix] for prefix in SYSTEMS if any(entry.prefix == prefix for entry in directives))
    unmet = [*_find_variables(script, systems), *_find_commands(script, systems)]
    for number, text in unmet:
        print_note(f"  line {number}: NOT UNDERSTOOD: {text}")
    if "mpirun" in script.text:
        for number in (number for number, line in _commands_of(script) if MODULE.search(line)):
            print_note(f"  line {number}: a module may put its own mpirun first in PATH: use koala mpirun")
    head = {number for number, _ in script.head}
    for number in (*script.lines_with(SBATCH), *script.lines_with(QSUB)):
        if number not in head:
            print_note(f"  line {number}: it has no effect, since it follows a command")
    if unclear := sorted({entry.number for entry in directives if not entry.is_understood} | {n for n, _ in unmet}):
        if len(unclear) == 1:
            subject, hint = f"line {unclear[0]} is", "change it, or write what it means as a #KOALA line"
        else:
            subject, hint = f"lines {', '.join(map(str, unclear))} are", "change them, or write #KOALA lines instead"
        raise GridError(f"{script.name}: {subject} not understood", Exit.USAGE, hint)
    return options, systems


def _check_interpreter(script: Script, directives: Iterable[Directive]) -> None:
    """Reject an interpreter of Grid Engine that is not that of the script's first line."""
    first = script.text.partition("\n")[0].removeprefix("#!").strip()
    for entry in directives:
        if (entry.prefix, entry.name) == (QSUB, "-S") and entry.value != first:
            entry.reject(f"the script's first line names {first}: write #!{entry.value} there, or leave out -S")


def _translate_task_counts(directives: Mapping[str, Directive]) -> None:
    """Set the meaning of Slurm's options that depend on others: tasks, and GPUs and memory of the job or of a task."""

    def read(name: str) -> int | None:
        value = directives[name].value if name in directives else ""
        return int(value) if re.fullmatch(r"[1-9][0-9]{0,8}", value) else None

    nodes, tasks, per_node = read("--nodes"), read("--ntasks"), read("--ntasks-per-node")
    if tasks is not None:
        entry = directives["--ntasks"]
        if nodes is None and (per_node or tasks == 1):
            ranks_of_one = []
            if per_node is None or tasks < per_node:  # --ntasks-per-node is a maximum
                if "--ntasks-per-node" in directives:
                    directives["--ntasks-per-node"].resolve([], "together with --ntasks")
                per_node, ranks_of_one = tasks, ["--ppn", str(tasks)]
            nodes = -(-tasks // per_node)
            entry.resolve(["--flexible", str(nodes), *ranks_of_one])
        elif nodes is None:
            of_both = f"--flexible {tasks} --ppn 1 for a node for each rank, or --flexible 1 --ppn {tasks} for one node"
            entry.reject(f"{tasks} ranks do not say how many nodes: write #KOALA {of_both}")
        elif per_node is None:
            per_node = tasks // nodes
            entry.resolve(["--ppn", str(per_node)])
        else:
            entry.resolve([], "together with the other sizes")
        if nodes is not None and tasks != nodes * (per_node or 1):
            entry.reject(f"{tasks} ranks are not the same number on each of {nodes} nodes: use --ppn")
    elif "--nodes" not in directives and "--ntasks" not in directives:
        nodes = 1
    ranks, cpus = per_node or 1, read("--cpus-per-task") or 1
    for name, option, part, count in (
        ("--gpus", "--gpus-per-node", 1, nodes),
        ("--gpus-per-task", "--gpus-per-node", ranks, 1),
        ("--mem-per-cpu", "--mem", ranks * cpus, 1),
    ):
        if name in directives and nodes and count:
            _resolve_amount(directives[name], OPTIONS[SBATCH][option], part, count)


def _resolve_amount(entry: Directive, of_node: ForeignOption, factor: int, divisor: int) -> None:
    """Set the meaning of an amount of which each node has ``factor / divisor``."""
    try:
        (option, amount), remark = of_node.translate(entry.value)
    except (Unclear, ValueError):
        return
    number = re.search(r"^\d+(?=[KMGT]iB$)|\d+$", amount)
    if number and int(number[0]) * factor % divisor == 0:
        of_each = str(int(number[0]) * factor // divisor)
        entry.resolve([option, f"{amount[: number.start()]}{of_each}{amount[number.end() :]}"], remark)


def _combine_grid_engine(entries: Iterable[Directive]) -> None:
    """Join the tasks at once of Grid Engine to its array, and drop its soft time limit beside a hard one."""
    directives = {
        f"{entry.name} {entry.value}".partition("=")[0] if entry.name == "-l" else entry.name: entry
        for entry in entries
    }
    array, at_once = directives.get("-t"), directives.get("-tc")
    if array and array.words and at_once:
        array.words[1] += f"%{at_once.value}"
        at_once.resolve([], "together with -t")
    if {"-l h_rt", "-l s_rt"} <= directives.keys():
        directives["-l s_rt"].resolve([], "h_rt is the limit; use --signal for a signal before it")


def note_foreign_lines(script: Script) -> None:
    """Print a hint if a script has lines of other systems, which have no effect without ``--translate``."""
    use = "add --translate to use them"
    systems = {SBATCH: ("Slurm", use), QSUB: ("Grid Engine", use)}
    systems |= {prefix: (system, NO_LINES.format(system=system)) for prefix, system in UNTRANSLATED.items()}
    for prefix, (system, hint) in systems.items():
        if count := len([line for _, line in script.head if line.startswith(f"{prefix} ")]):
            what = f"{prefix} for {system}"
            lines = f"1 line {what}, which has" if count == 1 else f"{count} lines {what}, which have"
            print_note(f"{script.name} has {lines} no effect: {hint}")


def _read_line(number: int, text: str, name: str) -> list[Directive]:
    """Return the options of a line of Slurm or Grid Engine; nothing for a line of no system."""
    prefix = text.split(None, 1)[0] if text else ""
    if text.startswith(f"{QSUB}-"):  # Grid Engine needs no blank
        prefix = QSUB
    if prefix in UNTRANSLATED:
        reason = NO_LINES.format(system=UNTRANSLATED[prefix])
        return [Directive(number, prefix, text.removeprefix(prefix).strip(), "", remark=reason, is_understood=False)]
    if prefix not in OPTIONS:
        return []
    words = split_words(text[len(prefix) :], f"{name}:{number}")
    pairs = _split_slurm(words) if prefix == SBATCH else _split_grid_engine(words)
    directives = [Directive(number, prefix, option, value) for option, value in pairs]
    for entry in directives:
        entry.translate()
    return directives


def _split_slurm(words: list[str]) -> list[tuple[str, str]]:
    """Return the options of a Slurm line under their long names, each with its value."""
    pairs = []
    while words:
        word, words = words[0], words[1:]
        name, equals, value = word.partition("=")
        if not word.startswith("--") and word.startswith("-"):
            name, value = word[:2], word[2:].removeprefix("=")
        option = OPTIONS[SBATCH].get(name)
        if option is not None and option.flag:
            value = value if equals else ""
        elif not equals and not value and words and not words[0].startswith("-"):
            value, words = words[0], words[1:]
        pairs.append((option.names[0] if option else name, value))
    return pairs


def _split_grid_engine(words: list[str]) -> list[tuple[str, str]]:
    """Return the options of a Grid Engine line, each with its values."""
    pairs: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("-") or not pairs:
            pairs.append((word, ""))
        else:
            option, value = pairs[-1]
            pairs[-1] = option, f"{value} {word}".strip()
    return [(option, part) for option, value in pairs for part in (value.split(",") if option == "-l" else [value])]


OWN_NAMES = {
    "SLURM_CLUSTER_NAME": "KOALA_CLUSTER, the cluster of a node",
    "SLURM_JOB_PARTITION": "the name of the partition",
    "SLURM_TASKS_PER_NODE": "KOALA_PPN, or KOALA_HOSTFILE",
    "SLURM_CPUS_ON_NODE": "nproc",
    "SLURM_JOB_CPUS_PER_NODE": "nproc",
    "SLURM_GPUS_ON_NODE": "CUDA_VISIBLE_DEVICES, if the site sets it",
    "SGE_STDOUT_PATH": "koala logs",
}
"""Variables that a job on several clusters does not have, and what to use instead."""
NAMES = {
    SLURM: re.compile(r"\b(SLURMD?_\w+)\b"),
    GRID_ENGINE: re.compile(r"(?<=\$)\{?(JOB_ID|JOB_NAME|NSLOTS|NHOSTS|NQUEUES|QUEUE|PE)\b|\b(SGE_\w+|PE_HOSTFILE)\b"),
}
"""By system: its variables in a script of any language."""
COMMAND = r"(?:^|[;&|({`]|\b(?:then|do|else|exec|time)\s)\s*(%s)(?=\s|$)"
MODULE = re.compile(COMMAND % r"module\s+(?:load|add|restore)|ml")


def _commands_of(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is no comment."""
    for number, line in enumerate(script.text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _find_variables(script: Script, systems: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each use of a variable of the systems that the script would not get, with a remedy.

    A variable with a default in the shell, or one that the script sets itself, may be missing.
    """
    for system in systems:
        settable = settable_variables(system)
        for number, line in _commands_of(script):
            for match in NAMES[system].finditer(line):
                begin, end = match.span(match.lastindex or 0)
                name = line[begin:end]
                has_default = line[:begin].endswith("${") and re.match(r":?[-=+]", line[end:])
                is_own = re.search(rf"^\s*(?:export\s+)?{name}=", script.text, re.MULTILINE)
                if name in settable or has_default or is_own:
                    continue
                use = f"use {OWN_NAMES[name]}" if name in OWN_NAMES else "remove it"
                yield number, f"${name} is not set, since it describes one cluster only: {use}"


def _find_commands(script: Script, systems: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each use of a command of a batch system that a translated script does not have, with a remedy."""
    pattern = re.compile(COMMAND % "|".join((*COMMANDS, "sbcast", "sgather", "sattach", "ibrun", "aprun")))
    for number, line in _commands_of(script) if systems else ():
        for name in pattern.findall(line):
            use = "use --stage and --collect" if name in ("sbcast", "sgather") else "use koala where you submit"
            yield number, f"{name} does not know the job's other clusters: {use}"


@dataclass(frozen=True)
class LoadedScript:
    """A script with the options of its lines."""

    name: str
    text: str
    options: ScriptOptions
    systems: tuple[str, ...] = ()
    """Systems from which it is translated: keys of ``COUNTERPARTS``."""

    def variables(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the script's systems that are known at submission; ``options``: those of the job."""
        if not self.systems:
            return {}
        indices = TaskIndices.parse(options["array"]).ranges if options.get("array") else ()
        step = indices[0].step if len(indices) == 1 else 1
        array = (indices[0].first, indices[-1].last, step) if indices else (None, None, None)
        name, folder, host = options.get("name") or self.name, os.getcwd(), socket.gethostname()
        shape = options.get("cpus_per_rank"), options.get("processes_per_node")
        values = {SLURM: (name, folder, host, *shape, *array), GRID_ENGINE: (name, folder, host, *array)}
        pairs = [pair for system in self.systems for pair in zip(AT_SUBMISSION[system], values[system], strict=True)]
        return {TRANSLATED: " ".join(self.systems)} | {n: str(value) for n, value in pairs if value is not None}

    def apply_options(self, request: RequestOptions, job: Json) -> tuple[RequestOptions, Json, ScriptLines]:
        """Return the options of the script as those of the command line override them, and the lines of its own."""
        merged_request, merged_job = merge_request(self.options.request, request), merge_job(self.options.job, job)
        lines = {name: line for name, line in self.options.lines.items() if job.get(name) is None}
        for kind in KINDS:
            if kind in lines and getattr(request, kind) is None:
                lines["request"] = lines[kind]
        return merged_request, merged_job, lines


def load_script(path: str, names: set[str], *, translate: bool) -> LoadedScript:
    """Read a script and its options. Raise ``GridError`` with its file and line for a wrong one.

    ``names``: all options of ``koala submit``, of which only those of a job may be in the script.
    """
    script = read_script(path)
    refused = frozenset(names - job_options())
    options = read_directives(script, refused)
    if not translate:
        note_foreign_lines(script)
        return LoadedScript(script.name, script.text, options)
    foreign, systems = translate_lines(script, refused)
    merged = ScriptOptions(
        merge_request(foreign.request, options.request),
        merge_job(foreign.job, options.job),
        foreign.export if options.export is None else options.export,
        {**foreign.lines, **options.lines},
    )
    return LoadedScript(script.name, script.text, merged, systems)
