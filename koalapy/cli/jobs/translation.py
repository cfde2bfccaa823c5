"""Load a script, and translate its lines of Slurm, Grid Engine, PBS and LSF to options of koalapy."""

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
from koalapy.cli.terminal.foreign_options import (
    FOREIGN_OPTIONS,
    VALUES,
    ForeignOption,
    Unclear,
    UnknownNodes,
    split_resource,
)
from koalapy.client.client import nodes_of
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.submission import build_request
from koalapy.model.array import TaskIndices
from koalapy.runner.foreign_scripts import (
    AT_SUBMISSION,
    COMMANDS,
    GRID_ENGINE,
    HOME,
    LSF,
    PBS,
    SLURM,
    TRANSLATED,
    settable_variables,
)
from koalapy.runner.mpirun import SRUN_FLAGS, SRUN_OPTIONS, SRUN_SHORT

SBATCH, QSUB, PBS_LINE, BSUB = "#SBATCH", "#$", "#PBS", "#BSUB"
NAMES_OF_SYSTEMS = {SBATCH: "Slurm", QSUB: "Grid Engine", PBS_LINE: "PBS", BSUB: "LSF"}
UNTRANSLATED = {"#OAR": "OAR", "#FLUX:": "Flux", "#COBALT": "Cobalt"}
"""Systems without a translation, by prefix of their lines."""
NO_LINES = "koalapy translates no lines of {system}; write #KOALA lines instead"
OPTIONS: Mapping[str, Mapping[str, ForeignOption]] = {
    prefix: {name: option for option in FOREIGN_OPTIONS["koala submit"][system] for name in option.names}
    for prefix, system in NAMES_OF_SYSTEMS.items()
}
"""The options of each system, by prefix of its lines and by name."""
SYSTEMS = {SBATCH: SLURM, QSUB: GRID_ENGINE, PBS_LINE: PBS, BSUB: LSF}
RANKS_ON = ("each-node", "one-node")
"""Where ranks go if no line says how many nodes: a node for each, or one node."""


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
    ranks: int = 0
    """Ranks without a number of nodes, for which the line is rejected; 0: none."""

    def __str__(self) -> str:
        return f"{self.prefix} {self.name} {self.value}".rstrip()

    @property
    def key(self) -> str:
        """Return the option's name, with that of a resource in its value."""
        option = OPTIONS.get(self.prefix, {}).get(self.name)
        return f"{self.name} {split_resource(self.value)[0]}" if option and option.parts else self.name

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
            self.reject(reason)

    def resolve(self, arguments: Iterable[str], remark: str = "") -> None:
        """Set the meaning that the option has together with other lines."""
        self.words, self.remark, self.is_understood, self.ranks = [*arguments], remark, True, 0

    def reject(self, reason: Unclear | str) -> None:
        self.words, self.remark, self.is_understood = [], str(reason), False
        self.ranks = reason.count if isinstance(reason, UnknownNodes) else 0


def translate_lines(
    script: Script, refused: frozenset[str], ranks_on: str = "", size: tuple[int, int] = (0, 0)
) -> tuple[ScriptOptions, tuple[str, ...]]:
    """Return the options that the foreign lines of a script mean, and its systems; print each line with its meaning.

    ``ranks_on``: a value of ``RANKS_ON``, for lines that do not say how many nodes. ``size``: nodes, and processes of
    each, that other lines or options say, 0 if they do not; amounts of each process or of the job depend on them.
    Raise ``GridError`` if a line has no clear meaning, or needs what a job on several clusters does not have.
    """
    texts, head = script.text.splitlines(), len(list(script.head))
    systems_of_head = {entry.prefix for n, text in script.head for entry in _read_line(n, text, script.name)}
    also = tuple(p for p in (QSUB, BSUB) if p in systems_of_head or not systems_of_head)  # count after commands, too
    lines = [(n, text) for n, text in enumerate(texts, 1) if n <= head or text.startswith(also)]
    directives = [entry for number, text in lines for entry in _read_line(number, text.strip(), script.name)]
    by_prefix = {prefix: {e.key: e for e in directives if e.prefix == prefix} for prefix in OPTIONS}
    entries_of_slurm = _refuse_parts([entry for entry in directives if entry.prefix == SBATCH])
    _translate_task_counts(entries_of_slurm, ranks_on, size)
    _combine_lsf(by_prefix[BSUB])
    for entry in directives:
        _choose_nodes(entry, ranks_on)
    _combine_queues({**by_prefix[QSUB], **by_prefix[PBS_LINE]}, size)
    _check_interpreter(script, directives)
    _check_mail(directives)
    for entry in directives:
        if texts[entry.number - 1][0].isspace() and entry.prefix != PBS_LINE:
            entry.reject("it counts only without blanks before it: remove them, or the line")
        elif entry.number > head and entry.prefix == BSUB:
            entry.reject("it follows a command: move it before, or remove it")
    start = _find_start(directives)
    options, translated = ScriptOptions(), list[list[str]]()
    print_note(f"{script.name} is translated:")
    for entry in directives:
        if entry.words in translated:
            entry.resolve([], "another line says so")
        translated += [entry.words] if entry.words else []
        if entry.is_understood and entry.words:
            try:
                options = add_words(options, entry.words, f"{script.name}:{entry.number}", refused)
            except GridError as error:
                entry.reject(f"{error.message.removeprefix(f'{script.name}:{entry.number}: ')}; {error.hint}")
        print_note(f"  line {entry.number}: {entry} → {entry.meaning}")
    if directives and not any(entry.key in SIZES for entry in directives):
        print_note("  no line says how many nodes → --flexible 1 --ppn 1, unless #KOALA lines or options do")
        ranks = [] if "processes_per_node" in options.lines else ["--ppn", "1"]
        options = add_words(options, [*ranks, "--flexible", "1"], script.name, refused)
    systems = tuple(SYSTEMS[prefix] for prefix in SYSTEMS if any(entry.prefix == prefix for entry in directives))
    if {SLURM, LSF} & {*systems} and not any(entry.name in ("--export", "-env") for entry in directives):
        print_note("  no line says which variables are passed → none, unless #KOALA lines or options do (--export ALL)")
    unmet = [*_find_variables(script, systems), *_find_commands(script, systems), *_find_srun_options(script, systems)]
    for number, text in unmet:
        print_note(f"  line {number}: NOT UNDERSTOOD: {text}")
    for number in (n for n, line in _commands_of(script) if "mpirun" in script.text and MODULE.search(line)):
        print_note(f"  line {number}: a module may put its own mpirun first in PATH: use koala mpirun")
    for number in (number for prefix in OPTIONS if prefix not in also for number in script.lines_with(prefix)):
        if number > head:
            print_note(f"  line {number}: it has no effect, since it follows a command")
    if unclear := sorted({entry.number for entry in directives if not entry.is_understood} | {n for n, _ in unmet}):
        if len(unclear) == 1:
            subject, hint = f"line {unclear[0]} is", "change it, or write what it means as a #KOALA line"
        else:
            subject, hint = f"lines {', '.join(map(str, unclear))} are", "change them, or write #KOALA lines instead"
        raise GridError(f"{script.name}: {subject} not understood", Exit.USAGE, hint)
    if start:
        print_note("  no line names a folder → the script starts in the home folder, unless --chdir names another")
    return options, (*systems, *start)


SIZES = ("--nodes", "--ntasks", "-pe", "-l nodes", "-l select", "-l ncpus", "-l procs", "-n", "-nnodes")
"""Keys of directives that say how many nodes or slots a job has."""
INTERPRETERS = {QSUB: "-S", PBS_LINE: "-S", BSUB: "-L"}
"""By prefix: the option that names the interpreter; for LSF, a login shell that gives the environment."""


def _find_start(directives: list[Directive]) -> tuple[str, ...]:
    """Return ``HOME`` if the script starts in the home folder. Reject names of files that are relative to it."""
    if any(e.prefix not in (QSUB, PBS_LINE) or e.name == "-cwd" or "--chdir" in e.words for e in directives):
        return ()
    for entry in directives:
        is_file = entry.prefix == QSUB and entry.words[:1] in (["--output"], ["--error"])
        if is_file and not entry.words[1].startswith("/"):
            entry.reject("it is relative to the home folder: add #$ -cwd, or write the whole path")
    return (HOME,) if directives else ()


def _check_interpreter(script: Script, directives: Iterable[Directive]) -> None:
    """Reject an interpreter of another line that is not that of the script's first line."""
    first = script.text.partition("\n")[0].removeprefix("#!").strip()
    shells = {os.path.basename(word) for word in first.split()}
    is_login = re.search(" (-[a-z]*l|--login)\\b", first)
    for entry in directives:
        if entry.name != INTERPRETERS.get(entry.prefix):
            continue
        shell, login = entry.value, " -l" if entry.prefix == BSUB else ""
        if not shell or os.path.basename(shell.split()[0]) not in shells or (login and not is_login):
            entry.reject(
                f"the script's first line names {first}: write #!{shell}{login} there, or leave out {entry.name}"
            )


def _check_mail(directives: Iterable[Directive]) -> None:
    """Leave out mail of a script that names no address."""
    if not any("--mail-user" in entry.words for entry in directives):
        for entry in directives:
            if "--mail-type" in entry.words:
                entry.resolve([], "no mail without an address: give --mail-user and --mail-type")


def _refuse_parts(entries: list[Directive]) -> dict[str, Directive]:
    """Return the options of a job of Slurm by name. Reject a heterogeneous one, and return those of its first part."""
    borders = [index for index, entry in enumerate(entries) if entry.name in ("hetjob", "packjob")]
    first, *later_parts = [entries[begin:end] for begin, end in zip([0, *borders], [*borders, None], strict=True)]
    sizes = ",".join(next((e.value for e in part if e.name == "--nodes"), "1") for part in (first, *later_parts))
    for border, *part in later_parts:
        border.reject(
            f"a script runs on the nodes of all parts: write #KOALA --nonfixed {sizes} in place of their lines, and "
            "start the program of each by mpirun --cluster, with the clusters of $KOALA_CLUSTER_LIST"
        )
        for entry in part:
            entry.resolve([], "of another part")
    return {entry.name: entry for entry in first}


def _translate_task_counts(directives: Mapping[str, Directive], ranks_on: str, size: tuple[int, int]) -> None:
    """Set the meaning of Slurm's options that depend on others: tasks, and GPUs and memory of the job or of a task."""

    def read(name: str) -> int | None:
        value = directives[name].value if name in directives else ""
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:-\1)?", value)
        return int(match[1]) if match else None

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
            entry.reject(UnknownNodes(tasks, "ranks"))
            _choose_nodes(entry, ranks_on)
            if entry.is_understood:
                nodes, per_node = int(entry.words[1]), int(entry.words[3])
        elif per_node is None or (tasks < nodes * per_node and tasks % nodes == 0):
            if "--ntasks-per-node" in directives:
                directives["--ntasks-per-node"].resolve([], "together with --ntasks")
            per_node = tasks // nodes
            entry.resolve(["--ppn", str(per_node)])
        else:
            entry.resolve([], "together with the other sizes")
        if nodes is not None and tasks != nodes * (per_node or 1):
            entry.reject(f"{tasks} ranks are not the same number on each of {nodes} nodes: use --ppn")
    elif "--nodes" not in directives:
        nodes = 1
    elif nodes and "--ntasks-per-node" not in directives:
        directives["--nodes"].words += ["--ppn", "1"]
    ranks, cpus = size[1] or per_node or 1, read("--cpus-per-task") or 1
    for name, kind, part, count in (
        ("--gpus", "gpus", 1, size[0] or nodes),
        ("--gpus-per-task", "gpus", ranks, 1),
        ("--mem-per-cpu", "memory", ranks * cpus, 1),
    ):
        if name in directives and nodes and count:
            _resolve_amount(directives[name], kind, directives[name].value, part, count)


def _resolve_amount(entry: Directive, kind: str, value: str, factor: int, divisor: int) -> None:
    """Set the meaning of an amount, a value of a kind of ``VALUES``, of which each node has ``factor / divisor``."""
    try:
        (option, amount), remark = VALUES[kind](value, "")
    except (Unclear, ValueError):
        return
    number = re.search(r"^\d+(?=[kKMGT]?i?B$)|\d+$", amount)
    if number and int(number[0]) * factor % divisor == 0:
        of_each = str(int(number[0]) * factor // divisor)
        entry.resolve([option, f"{amount[: number.start()]}{of_each}{amount[number.end() :]}"], remark)


def _choose_nodes(entry: Directive, ranks_on: str) -> None:
    """Set the meaning of a number of ranks that does not say how many nodes, as the user chooses."""
    if ranks_on and entry.ranks:
        nodes, ranks_of_node = (entry.ranks, 1) if ranks_on == RANKS_ON[0] else (1, entry.ranks)
        entry.resolve(["--flexible", str(nodes), "--ppn", str(ranks_of_node)], f"--ranks-on {ranks_on}")


def _number_after(option: str, arguments: list[str]) -> int:
    """Return the number of an option in the words of a request; 1 if it is missing."""
    return int(arguments[arguments.index(option) + 1]) if option in arguments else 1


def _combine_queues(directives: Mapping[str, Directive], size: tuple[int, int]) -> None:
    """Set the meaning of options of Grid Engine and PBS that depend on others."""
    array, at_once = directives.get("-t"), directives.get("-tc")
    if array and array.words and at_once:
        array.words[1] += f"%{at_once.value}"
        at_once.resolve([], "together with -t")
    if {"-l h_rt", "-l s_rt"} <= directives.keys():
        directives["-l s_rt"].resolve([], "h_rt is the limit; use --signal for a signal before it")
    files = [directives[name] for name in ("-o", "-e") if name in directives and directives[name].words]
    for entry in files:
        if ("-t" in directives or "-J" in directives) and entry.words[1].endswith(("/%x.o%A", "/%x.e%A")):
            entry.words[1] += ".%a"
    if "-e" in directives and "-j" in directives and directives["-j"].value not in ("n", "no"):
        directives["-e"].resolve([], "errors are in the output, by -j")
    sizes = [directives[key] for key in SIZES if key in directives]
    arguments = sizes[0].words if sizes else ["--flexible", "1"]
    for key, entry in directives.items():
        of_slot = key.removeprefix("-l ") in ("h_vmem", "s_vmem", "mem_free", "m_mem_free", "virtual_free", "vf") or (
            key == "-l mem" and entry.prefix == QSUB
        )
        nodes, ranks = size[0] or _number_after("--flexible", arguments), size[1] or _number_after("--ppn", arguments)
        if arguments and (of_slot or key in ("-l mem", "-l pmem")):
            kind = "memory of Grid Engine" if of_slot else "memory of PBS"
            factor, divisor = (1, nodes) if kind == "memory of PBS" and key == "-l mem" else (ranks, 1)
            _resolve_amount(entry, kind, split_resource(entry.value)[1], factor, divisor)
        if "--gpus" in entry.words and nodes * (ranks if entry.prefix == QSUB else key == "-l ngpus") > 1:
            entry.reject("sites count it for a slot or for the job: use --gpus with the GPUs of each node")


def _combine_lsf(directives: Mapping[str, Directive]) -> None:
    """Set the meaning of slots of LSF by the hosts that they span."""
    slots, span = directives.get("-n"), directives.get("-R span")
    if not slots or not span or not slots.value.isdecimal():
        return
    kind, count = split_resource(split_resource(span.value)[1])
    ranks = int(slots.value) if (kind, count) == ("hosts", "1") else int(count) if count.isdecimal() else 0
    if kind in ("hosts", "ptile") and ranks:
        ranks = min(ranks, int(slots.value))
        span.resolve([], "together with -n")
        if int(slots.value) % ranks:
            slots.reject(f"{slots.value} slots are not the same number on each node: use --flexible and --ppn")
        else:
            slots.resolve(["--flexible", str(int(slots.value) // ranks), "--ppn", str(ranks)])


def note_foreign_lines(script: Script) -> None:
    """Print a hint if a script has lines of other systems, which have no effect without ``--translate``."""
    use = "add --translate to use them"
    systems = {prefix: (system, use) for prefix, system in NAMES_OF_SYSTEMS.items()}
    systems |= {prefix: (system, NO_LINES.format(system=system)) for prefix, system in UNTRANSLATED.items()}
    for prefix, (system, hint) in systems.items():
        if count := len([line for _, line in script.head if line.startswith(f"{prefix} ")]):
            origin = f"{prefix} for {system}"
            lines = f"1 line {origin}, which has" if count == 1 else f"{count} lines {origin}, which have"
            print_note(f"{script.name} has {lines} no effect: {hint}")


def _read_line(number: int, text: str, name: str) -> list[Directive]:
    """Return the options of a line of another system; nothing for a line of none."""
    prefix = text.split(None, 1)[0] if text else ""
    prefix = next((key for key in OPTIONS if text.startswith(f"{key}-")), prefix)  # no blank is needed
    if prefix in UNTRANSLATED:
        reason = NO_LINES.format(system=UNTRANSLATED[prefix])
        return [Directive(number, prefix, text.removeprefix(prefix).strip(), "", remark=reason, is_understood=False)]
    if prefix not in OPTIONS:
        return []
    arguments = split_words(text[len(prefix) :], f"{name}:{number}")
    pairs = _split_slurm(arguments) if prefix == SBATCH else _split_letters(arguments, prefix)
    directives = [Directive(number, prefix, option, value) for option, value in pairs]
    for entry in directives:
        entry.translate()
        if entry.name in ("-v", "--export", "-env") and (QUOTED_COMMA.search(text) or re.search("['\"]", entry.value)):
            entry.reject("systems read quotes in a list differently: write #KOALA --env NAME=VALUE for each variable")
    return directives


QUOTED_COMMA = re.compile(r"[,=\s\"']\w+=([\"'])[^\"']*,|\\,")
"""A value of a list of variables with a comma in quotes or after a backslash."""


def _split_slurm(arguments: list[str]) -> list[tuple[str, str]]:
    """Return the options of a Slurm line under their long names, each with its value."""
    pairs = []
    while arguments:
        argument, arguments = arguments[0], arguments[1:]
        name, equals, value = argument.partition("=")
        if not argument.startswith("--") and argument.startswith("-"):
            name, value = argument[:2], argument[2:].removeprefix("=")
        matches = {o.names[0]: o for long, o in OPTIONS[SBATCH].items() if name[2:] and long.startswith(name)}
        option = OPTIONS[SBATCH].get(name) or (next(iter(matches.values())) if len(matches) == 1 else None)
        if option is not None and option.flag and not equals:
            value, arguments = "", [f"-{value}", *arguments] if value else arguments  # as in -vN4
        elif not equals and not value and arguments and not arguments[0].startswith("-"):
            value, arguments = arguments[0], arguments[1:]
        pairs.append((option.names[0] if option else name, value))
    return pairs


def _split_letters(arguments: list[str], prefix: str) -> list[tuple[str, str]]:
    """Return the options of a line of Grid Engine, PBS or LSF, each with its values, and one for each resource."""
    pairs: list[tuple[str, str]] = []
    while arguments:
        argument = arguments.pop(0)
        is_joined = argument[2:] and (prefix == PBS_LINE or (prefix == BSUB and argument[2].isdigit()))
        if re.match(r"-?\d|[^-]", argument) and pairs:
            option, value = pairs[-1]
            pairs[-1] = option, f"{value} {argument}".strip()
        elif is_joined and argument[:2] in OPTIONS[prefix]:  # as in -lwalltime=60
            is_flag = OPTIONS[prefix][argument[:2]].flag
            pairs.append((argument[:2], "" if is_flag else argument[2:]))
            arguments[:0] = [f"-{argument[2:]}"] if is_flag else []
        else:
            pairs.append((argument, ""))
    separate = {"-l": r"[^,]+", "-R": r"\w+\[[^\]]*\]|\S+"}
    return [(o, part) for o, value in pairs for part in (re.findall(separate.get(o, r"(?s).+"), value) or [""])]


OWN_NAMES = {
    "SLURM_CLUSTER_NAME": "KOALA_CLUSTER, the cluster of a node",
    "SLURM_JOB_PARTITION": "the name of the partition",
    "SLURM_TASKS_PER_NODE": "KOALA_PPN, or KOALA_HOSTFILE",
    "SLURM_CPUS_ON_NODE": "nproc",
    "SLURM_JOB_CPUS_PER_NODE": "nproc",
    "SLURM_GPUS_ON_NODE": "CUDA_VISIBLE_DEVICES, if the site sets it",
    "SGE_STDOUT_PATH": "koala logs",
    "LSB_JOBNAME": "the name of the job",
}
"""Variables that a job on several clusters does not have, and what to use instead."""
NAMES = {
    SLURM: re.compile(r"\b(SLURMD?_\w+)\b"),
    GRID_ENGINE: re.compile(r"(?<=\$)\{?(JOB_ID|JOB_NAME|NSLOTS|NHOSTS|NQUEUES|QUEUE|PE)\b|\b(SGE_\w+|PE_HOSTFILE)\b"),
    PBS: re.compile(r"\b(PBS_\w+)\b|(?<=\$)\{?(NCPUS)\b"),
    LSF: re.compile(r"\b(LSB_\w+|LS_SUBCWD)\b"),
}
"""By system: its variables in a script of any language."""
COMMAND = (
    r"(?:^|[;&|{`]|(?<![\"'\w])(?<!\w\s)\(|\b(?:if|elif|while|until|then|do|else|time)\s*\("
    r"|\b(?:then|do|else|exec|time|nohup|timeout\s+\S+)\s+\(?)\s*(?:\w+=\S*\s+)*(%s)(?=\s|$)"
)
"""A command in a script. A parenthesis after a quote, or a word that is no keyword, begins no subshell."""
FOREIGN_MPIRUN = re.compile(
    COMMAND % r"(?:(?:export\s+)?\w+=)?[^\s;&|=]*/(?:mpirun|mpiexec|srun)[\"']?|mpiexec\.hydra|mpirun_rsh|orterun|prun"
)
"""Another program in place of the ``mpirun`` or ``srun`` of a translated script."""
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
                if not (name in settable or has_default or is_own):
                    use = f"use {OWN_NAMES[name]}" if name in OWN_NAMES else "remove it"
                    yield number, f"${name} is not set, since it describes one cluster only: {use}"


def _find_commands(script: Script, systems: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each use of a command of a batch system that a translated script does not have, with a remedy."""
    names = "|".join((*COMMANDS, "sbcast", "sgather", "sattach", "aprun"))
    pattern = re.compile(COMMAND % rf"(?:[^\s;&|=]*/)?(?:{names})")
    for number, line in _commands_of(script) if systems else ():
        for name in FOREIGN_MPIRUN.findall(line):
            yield number, f"{name} does not know the job's other clusters: use {'srun' if 'srun' in name else 'mpirun'}"
        for name in pattern.findall(line):
            use = "use --stage and --collect" if name in ("sbcast", "sgather") else "use koala where you submit"
            yield number, f"{name} does not know the job's other clusters: {use}"


def _find_srun_options(script: Script, systems: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each option of ``srun`` that a translated script does not have, with a remedy."""
    for number, line in _commands_of(script) if SLURM in systems else ():
        for match in re.finditer(COMMAND % "srun", line):
            arguments = iter(line[match.end() :].split())
            for option in arguments:
                if not option.startswith("-"):
                    break
                name = option.partition("=")[0] if option.startswith("--") else SRUN_SHORT.get(option[:2], option[:2])
                if name not in SRUN_OPTIONS:
                    yield number, f"srun has no {name} in a translated script: use koala mpirun, or leave it out"
                    break
                value = option.partition("=")[2]
                if name not in SRUN_FLAGS and "=" not in option and (option.startswith("--") or len(option) == 2):
                    value = next(arguments, "")
                if name == "--export" and value.strip("\"'").split(",")[0] != "ALL":
                    yield number, "srun has only --export=ALL in a translated script: use that, or leave it out"


@dataclass(frozen=True)
class LoadedScript:
    """A script with the options of its lines."""

    name: str
    text: str
    options: ScriptOptions
    systems: tuple[str, ...] = ()
    """Systems from which it is translated: keys of ``COUNTERPARTS``; and ``HOME`` if it starts in the home folder."""

    def variables(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the script's systems that are known at submission; ``options``: those of the job."""
        if not self.systems:
            return {}
        try:
            indices = TaskIndices.parse(options["array"]).ranges if options.get("array") else ()
        except ValueError:  # the daemon rejects it
            indices = ()
        step = indices[0].step if len(indices) == 1 else 1
        array = (indices[0].first, indices[-1].last, step) if indices else (None, None, None)
        name, folder, host = options.get("name") or self.name, os.getcwd(), socket.gethostname()
        shape = options.get("cpus_per_rank"), options.get("processes_per_node")
        values = {
            SLURM: (name, folder, host, *shape, *array),
            GRID_ENGINE: (name, folder, host, *array),
            PBS: (name, folder, host),
            LSF: (folder, host, *array[1:]),
        }
        systems = [system for system in self.systems if system in values]
        pairs = [pair for system in systems for pair in zip(AT_SUBMISSION[system], values[system], strict=True)]
        names = " ".join(systems if options.get("workdir") else self.systems)
        return {TRANSLATED: names} | {n: str(value) for n, value in pairs if value is not None}

    def apply_options(self, request: RequestOptions, job: Json) -> tuple[RequestOptions, Json, ScriptLines]:
        """Return the script's options, overridden by those of the command line, and its own lines."""
        merged_request, merged_job = merge_request(self.options.request, request), merge_job(self.options.job, job)
        lines = {name: line for name, line in self.options.lines.items() if job.get(name) is None}
        if all(value is None for value in vars(request).values()):
            lines.update(("request", lines[kind]) for kind in KINDS if kind in lines)
        return merged_request, merged_job, lines


def load_script(
    path: str, names: set[str], request: RequestOptions, job: Json, *, translate: bool, ranks_on: str = ""
) -> LoadedScript:
    """Read a script and its options. Raise ``GridError`` with its file and line for a wrong one.

    ``names``: all options of ``koala submit``, of which only those of a job may be in the script. ``ranks_on``: see
    ``translate_lines``. ``request``, ``job``: the options of the command line.
    """
    if ranks_on and ranks_on not in RANKS_ON:
        raise GridError(f"--ranks-on is {ranks_on!r}", Exit.USAGE, f"use {' or '.join(RANKS_ON)}")
    script = read_script(path)
    refused = frozenset(names - job_options())
    options = read_directives(script, refused)
    if not translate:
        note_foreign_lines(script)
        return LoadedScript(script.name, script.text, options)
    chosen = merge_request(options.request, request)
    own_request = build_request(chosen.flexible, chosen.nonfixed, chosen.fixed)  # bounds need the lines' request
    size = nodes_of(own_request) if own_request else 0, merge_job(options.job, job).get("processes_per_node") or 0
    foreign, systems = translate_lines(script, refused, ranks_on, size)
    merged = ScriptOptions(
        merge_request(foreign.request, options.request),
        merge_job(foreign.job, options.job),
        foreign.export if options.export is None else options.export,
        {**foreign.lines, **options.lines},
    )
    return LoadedScript(script.name, script.text, merged, systems)
