"""Translate the ``#SBATCH`` lines of Slurm and the ``#$`` lines of Grid Engine in a script to options of koalapy."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from koalapy.cli.jobs.script_file import Script, ScriptOptions, add_words, print_note, split_words
from koalapy.client.errors import CliError, Exit
from koalapy.model.job_spec import find_unknown_pattern

SLURM, GRID_ENGINE, PBS = "#SBATCH", "#$", "#PBS"


@dataclass
class Line:
    """One option of a foreign line: what it becomes, or why it has no clear meaning."""

    number: int
    text: str
    words: list[str] = field(default_factory=list)
    """The options of koalapy."""
    remark: str = ""
    """Why it needs no option, or why it is not understood."""
    is_understood: bool = True


class Unclear(Exception):
    """An option without a clear meaning here; the text says what to do instead."""


@dataclass
class Nodes:
    """The sizes that the lines of a script give, of which only all together have a meaning."""

    nodes: int | None = None
    tasks: int | None = None
    per_node: int | None = None
    cpus: int | None = None
    """Processors of each task."""
    at_once: int | None = None
    """Tasks of an array that may run at once."""

    def words(self) -> list[str]:
        """Return the options for these sizes. Raise ``Unclear`` if they say neither nodes nor ranks on each."""
        nodes, per_node = self.nodes, self.per_node
        if nodes is None and self.tasks is not None and (per_node or self.tasks == 1):
            nodes = -(-self.tasks // (per_node or 1))
        if nodes is None:
            raise Unclear("it says no number of nodes: add #KOALA --flexible NODES --ppn RANKS")
        if per_node is None and self.tasks is not None:
            per_node = self.tasks // nodes
        if self.tasks is not None and per_node and self.tasks != nodes * per_node:
            raise Unclear(f"{self.tasks} ranks are not the same number on each of {nodes} nodes: use --ppn")
        cores = ["--cores", str(self.cpus * (per_node or 1))] if self.cpus else []
        return ["--flexible", str(nodes), *(["--ppn", str(per_node)] if per_node else []), *cores]


def translate(script: Script, refused: frozenset[str]) -> ScriptOptions:
    """Return the options that the foreign lines of a script mean, and print each line with its meaning.

    Raise ``CliError`` if a line has no clear meaning.
    """
    sizes = Nodes()
    lines = [entry for number, text in script.head for entry in _read_line(number, text, sizes, script.name)]
    of_sizes = [line for line in lines if line.remark == SIZES]
    if of_sizes:
        try:
            of_sizes[0].words, of_sizes[0].remark = sizes.words(), ""
        except Unclear as reason:
            of_sizes[0].is_understood, of_sizes[0].remark = False, str(reason)
    _join_lines(lines, sizes)
    options = ScriptOptions()
    print_note(f"{script.name} is translated:")
    for line in lines:
        meaning = " ".join(line.words) or line.remark
        if line.words and line.remark:
            meaning = f"{meaning} ({line.remark})"
        print_note(f"  line {line.number}: {line.text} → {'' if line.is_understood else 'NOT UNDERSTOOD: '}{meaning}")
        if line.is_understood and line.words:
            options = add_words(options, line.words, f"{script.name}:{line.number}", refused)
    for number, text in _find_variables(script):
        print_note(f"  line {number}: {text}")
    _note_late_lines(script, {number for number, _ in script.head})
    if unclear := sorted({line.number for line in lines if not line.is_understood}):
        if len(unclear) == 1:
            subject, hint = f"line {unclear[0]} is", "remove it, or write what it means as a #KOALA line"
        else:
            subject, hint = f"lines {', '.join(map(str, unclear))} are", "remove them, or write #KOALA lines instead"
        raise CliError(f"{script.name}: {subject} not understood", Exit.USAGE, hint)
    return options


def _join_lines(lines: list[Line], sizes: Nodes) -> None:
    """Join the tasks at once of Grid Engine to its array, and drop its soft time limit beside a hard one."""
    arrays = [line for line in lines if line.words[:1] == ["--array"]]
    has_limit = any(line.text.startswith(f"{GRID_ENGINE} -l h_rt=") for line in lines)
    for line in lines:
        if line.remark == AT_ONCE and arrays:
            arrays[0].words[1] += f"%{sizes.at_once}"
        elif line.remark == AT_ONCE:
            line.is_understood, line.remark = False, "it needs an array: -t"
        elif has_limit and line.text.startswith(f"{GRID_ENGINE} -l s_rt="):
            line.words, line.remark = [], "h_rt is the limit; for a signal before it write #KOALA --signal"


def note_foreign_lines(script: Script) -> None:
    """Print a hint if a script has lines of other systems, which have no effect without ``--translate``."""
    use = "add --translate to use them"
    for prefix, system, hint in ((SLURM, "Slurm", use), (GRID_ENGINE, "Grid Engine", use), (PBS, "PBS", NO_PBS)):
        if count := len([line for _, line in script.head if line.startswith(f"{prefix} ")]):
            what = f"{prefix} for {system}"
            lines = f"1 line {what}, which has" if count == 1 else f"{count} lines {what}, which have"
            print_note(f"{script.name} has {lines} no effect: {hint}")


SIZES = "together with the other sizes"
AT_ONCE = "together with -t"
DEFAULT = "as koalapy does"
NO_PBS = "koalapy translates no lines of PBS; write #KOALA lines instead"


def _read_line(number: int, text: str, sizes: Nodes, name: str) -> list[Line]:
    """Return the options of a line of Slurm or Grid Engine; nothing for a line of no system."""
    prefix = text.split(None, 1)[0] if text else ""
    if prefix == PBS:
        return [Line(number, text, remark=NO_PBS, is_understood=False)]
    if prefix not in (SLURM, GRID_ENGINE):
        return []
    words = split_words(text[len(prefix) :], f"{name}:{number}")
    pairs = _split_slurm(words) if prefix == SLURM else _split_grid_engine(words)
    lines = []
    for option, value in pairs:
        line = Line(number, f"{prefix} {option} {value}".rstrip())
        meaning = (SLURM_OPTIONS if prefix == SLURM else GRID_ENGINE_OPTIONS).get(option)
        try:
            if meaning is None:
                raise Unclear("koalapy has no such option")
            line.words, line.remark = meaning(value, sizes)
        except Unclear as reason:
            line.is_understood, line.remark = False, str(reason)
        lines.append(line)
    return lines


Meaning = Callable[[str, Nodes], tuple[list[str], str]]
SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-J": "--job-name",
    "-o": "--output",
    "-e": "--error",
    "-D": "--chdir",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
    "-C": "--constraint",
    "-G": "--gpus",
    "-x": "--exclude",
    "-w": "--nodelist",
    "-d": "--dependency",
    "-a": "--array",
    "-M": "--clusters",
    "-b": "--begin",
    "-i": "--input",
}
FLAGS = ("--exclusive", "--requeue", "--no-requeue", "--hold", "--wait", "--parsable", "--contiguous", "--overcommit")
SHORT_FLAGS = {"-H": "--hold", "-W": "--wait", "-O": "--overcommit"}


def _split_slurm(words: list[str]) -> list[tuple[str, str]]:
    """Return the options of a Slurm line in their long form, each with its value."""
    pairs = []
    while words:
        word, words = words[0], words[1:]
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            if not equals and name not in FLAGS and words and not words[0].startswith("-"):
                value, words = words[0], words[1:]
            pairs.append((name, value))
        elif word[:2] in SHORT_FLAGS:
            pairs.append((SHORT_FLAGS[word[:2]], ""))
        elif word[:2] in SHORT and len(word) > 2:
            pairs.append((SHORT[word[:2]], word[2:].removeprefix("=")))
        else:
            value, words = (words[0], words[1:]) if words and not words[0].startswith("-") else ("", words)
            pairs.append((SHORT.get(word, word), value))
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


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise Unclear("give one number")
    return int(text)


def _nodes(value: str, sizes: Nodes) -> tuple[list[str], str]:
    sizes.nodes = _number(value)
    return [], SIZES


def _tasks(value: str, sizes: Nodes) -> tuple[list[str], str]:
    sizes.tasks = _number(value)
    return [], SIZES


def _per_node(value: str, sizes: Nodes) -> tuple[list[str], str]:
    sizes.per_node = _number(value)
    return [], SIZES


def _cpus(value: str, sizes: Nodes) -> tuple[list[str], str]:
    sizes.cpus = _number(value)
    return [], SIZES


def _slurm_time(value: str, _: Nodes) -> tuple[list[str], str]:
    """Convert minutes, minutes:seconds, hours:minutes:seconds, and days before hours."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if match is None:
        raise Unclear("it is no time of Slurm: add #KOALA --walltime, as 90m or 1:30:00")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        seconds = days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = (first or 0) * 3600 + (second or 0) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    return ["--walltime", _duration(seconds)], ""


def _duration(seconds: int) -> str:
    if seconds == 0:
        raise Unclear("it is no time limit: remove it, koalapy has none without --walltime")
    return next(f"{seconds // unit}{name}" for unit, name in ((3600, "h"), (60, "m"), (1, "s")) if seconds % unit == 0)


def _file(option: str) -> Meaning:
    """Return the meaning of an option that names a file for output. Patterns of Slurm have the same meaning here."""

    def meaning(value: str, _: Nodes) -> tuple[list[str], str]:
        if pattern := find_unknown_pattern(value):
            raise Unclear(f"koalapy does not replace {pattern} in {option}: use %j, %A, %a or %x")
        return [option, value], "on the cluster of the script"

    return meaning


def _gres(value: str, sizes: Nodes) -> tuple[list[str], str]:
    if value != "gpu" and not value.startswith("gpu:"):
        raise Unclear("koalapy has no such resource: write #KOALA --gpus with the GPUs of each node")
    return _gpus(value.removeprefix("gpu").removeprefix(":") or "1", sizes)


def _gpus(value: str, _: Nodes) -> tuple[list[str], str]:
    match = re.fullmatch(r"(\d+)|([A-Za-z]\w*)(?::(\d+))?", value)
    if match is None:
        raise Unclear("write #KOALA --gpus with the GPUs of each node")
    return ["--gpus", match[1] or f"{match[2]}:{match[3] or 1}"], "on each node"


def _features(value: str, _: Nodes) -> tuple[list[str], str]:
    if not re.fullmatch(r"[\w.+-]+(&[\w.+-]+)*", value):
        raise Unclear("koalapy has no alternatives of features: write #KOALA --feature with each that is needed")
    return [word for name in value.split("&") for word in ("--feature", name)], ""


def _mail_type(value: str, _: Nodes) -> tuple[list[str], str]:
    kinds = {"BEGIN": ["begin"], "END": ["end"], "FAIL": ["fail"], "ALL": ["begin", "end", "fail"], "NONE": []}
    names = [name.strip().upper() for name in value.split(",")]
    if unknown := [name for name in names if name not in kinds]:
        raise Unclear(f"koalapy sends no mail about {', '.join(unknown)}: use BEGIN, END or FAIL")
    events = dict.fromkeys(event for name in names for event in kinds[name])
    return [word for event in events for word in ("--mail-type", event)], "" if events else "no mail"


def _signal(value: str, _: Nodes) -> tuple[list[str], str]:
    scope, colon, rest = value.rpartition(":")
    if colon and scope != "R":
        raise Unclear("all processes get the signal except the script itself: write #KOALA --signal TERM@60")
    return ["--signal", rest if "@" in rest else f"{rest}@60"], ""


def _memory(value: str, _: Nodes) -> tuple[list[str], str]:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    if match is None:
        raise Unclear("it is no memory of Slurm: add #KOALA --memory, as 16GB")
    if int(match[1]) == 0:
        return [], f"all memory of the nodes, {DEFAULT}"
    return ["--memory", f"{match[1]}{(match[2] or 'M').upper()}iB"], "on each node"


def _export(value: str, _: Nodes) -> tuple[list[str], str]:
    if not value:
        raise Unclear("its value is missing")
    names = [name for name in value.split(",") if name.upper() not in ("NONE", "NIL")]
    others = [name for name in names if name.upper() != "ALL"]
    if not names:
        return [], DEFAULT
    return ["--export", ",".join(others if len(others) == len(names) else ["ALL", *others])], ""


def _switches(value: str, _: Nodes) -> tuple[list[str], str]:
    if value != "1":
        raise Unclear("koalapy counts no switches: write #KOALA --coallocation never for nodes of one cluster")
    return ["--coallocation", "never"], ""


def _dependency(value: str, _: Nodes) -> tuple[list[str], str]:
    if "singleton" in value:
        raise Unclear("koalapy has no singleton")
    raise Unclear("numbers of Slurm's jobs mean nothing here")


def _only(supported: str, instead: str) -> Meaning:
    """Return the meaning of an option of which koalapy always does what one value says."""

    def meaning(value: str, _: Nodes) -> tuple[list[str], str]:
        if value != supported:
            raise Unclear(instead)
        return [], DEFAULT

    return meaning


def _simple(option: str) -> Meaning:
    def meaning(value: str, _: Nodes) -> tuple[list[str], str]:
        if not value:
            raise Unclear("its value is missing")
        return [option, value], ""

    return meaning


def _fixed(*words: str, remark: str = "") -> Meaning:
    return lambda _value, _sizes: (list(words), remark)


def _unclear(instead: str) -> Meaning:
    def meaning(_value: str, _sizes: Nodes) -> tuple[list[str], str]:
        raise Unclear(instead)

    return meaning


SAME = ("--account", "--array", "--begin", "--deadline", "--exclude", "--mail-user", "--partition", "--qos")
"""Options of Slurm that have the same name and meaning here."""
COMMAND_LINE = "it is an option of the command: give koala submit {} in its place"
SLURM_OPTIONS: Mapping[str, Meaning] = {
    **{option: _simple(option) for option in SAME},
    "--nodes": _nodes,
    "--ntasks": _tasks,
    "--ntasks-per-node": _per_node,
    "--tasks-per-node": _per_node,
    "--time": _slurm_time,
    "--job-name": _simple("--name"),
    "--output": _file("--output"),
    "--error": _file("--error"),
    "--chdir": _simple("--chdir"),
    "--workdir": _simple("--chdir"),
    "--mail-type": _mail_type,
    "--signal": _signal,
    "--requeue": _fixed(remark=DEFAULT),
    "--no-requeue": _fixed("--max-restarts", "0"),
    "--exclusive": _fixed(remark=f"whole nodes, {DEFAULT}"),
    "--mem": _memory,
    "--export": _export,
    "--gpus-per-node": _gpus,
    "--gres": _gres,
    "--mincpus": _simple("--cores"),
    "--switches": _switches,
    "--kill-on-invalid-dep": _only("yes", "a job that waits for an end that cannot come always fails"),
    "--open-mode": _only("append", "koalapy appends to files for output: put %j into their names"),
    "--input": _unclear("jobs have no standard input: use koala run < file"),
    "--constraint": _features,
    "--gpus": _unclear("it counts the GPUs of all nodes: write #KOALA --gpus with those of each node"),
    "--priority": _unclear("koalapy has --priority high and low only"),
    "--nodelist": _unclear("name clusters by #KOALA --fixed CLUSTER:NODES"),
    "--cpus-per-task": _cpus,
    "--dependency": _dependency,
    "--wait": _unclear(COMMAND_LINE.format("--wait")),
    "--parsable": _unclear(COMMAND_LINE.format("--quiet")),
    "--hold": _unclear("use koala hold after the submission"),
    "--clusters": _unclear("name clusters by #KOALA --fixed CLUSTER:NODES"),
}


def _resources(value: str, _: Nodes) -> tuple[list[str], str]:
    """Convert the requested run time of Grid Engine, in seconds or as hours:minutes:seconds."""
    name, _equals, amount = value.partition("=")
    if name not in ("h_rt", "s_rt") or not re.fullmatch(r"\d+(:\d+){0,2}", amount):
        raise Unclear(f"koalapy has no resource {value}: choose nodes by its options")
    numbers = [int(number) for number in amount.split(":")]
    seconds = sum(number * unit for number, unit in zip(reversed(numbers), (1, 60, 3600), strict=False))
    return ["--walltime", _duration(seconds)], ""


def _at_once(value: str, sizes: Nodes) -> tuple[list[str], str]:
    sizes.at_once = _number(value)
    return [], AT_ONCE


def _grid_engine_mail(value: str, _: Nodes) -> tuple[list[str], str]:
    kinds = {"b": "begin", "e": "end", "a": "fail"}
    if value == "n":
        return [], "no mail"
    if unknown := set(value) - kinds.keys():
        raise Unclear(f"koalapy sends no mail about {', '.join(sorted(unknown))}: use b, e or a")
    return [word for letter in value for word in ("--mail-type", kinds[letter])], ""


def _variables(value: str, _: Nodes) -> tuple[list[str], str]:
    return [word for name in value.split(",") for word in ("--env", name)], ""


def _join(value: str, _: Nodes) -> tuple[list[str], str]:
    if value not in ("", "y", "yes"):
        raise Unclear("koalapy has one output, with errors in it")
    return [], f"errors are in the output, {DEFAULT}"


def _shell(value: str, _: Nodes) -> tuple[list[str], str]:
    return [], f"the script's first line names its interpreter, not {value}"


def _rerun(value: str, _: Nodes) -> tuple[list[str], str]:
    return ([], DEFAULT) if value in ("y", "yes") else (["--max-restarts", "0"], "")


SLOTS = "slots do not say how many nodes: write #KOALA --flexible NODES --ppn RANKS in its place"
GRID_ENGINE_OPTIONS: Mapping[str, Meaning] = {
    "-N": _simple("--name"),
    "-l": _resources,
    "-cwd": _fixed(remark=f"it starts in the current folder where that exists, {DEFAULT}"),
    "-wd": _simple("--chdir"),
    "-o": _file("--output"),
    "-q": _simple("--partition"),
    "-A": _simple("--account"),
    "-e": _file("--error"),
    "-j": _join,
    "-v": _variables,
    "-V": _fixed("--export", "ALL"),
    "-m": _grid_engine_mail,
    "-M": _simple("--mail-user"),
    "-S": _shell,
    "-r": _rerun,
    "-pe": _unclear(SLOTS),
    "-t": _simple("--array"),
    "-tc": _at_once,
    "-hold_jid": _unclear("names of Grid Engine's jobs mean nothing here"),
    "-sync": _unclear(COMMAND_LINE.format("--wait")),
    "-terse": _unclear(COMMAND_LINE.format("--quiet")),
}
VARIABLES = {
    "SLURM_JOB_ID": "KOALA_JOB_ID",
    "SLURM_JOBID": "KOALA_JOB_ID",
    "SLURM_NTASKS": "KOALA_SLOTS, or leave it out: mpirun uses all slots",
    "SLURM_NPROCS": "KOALA_SLOTS, or leave it out: mpirun uses all slots",
    "SLURM_NNODES": "KOALA_NODES",
    "SLURM_JOB_NUM_NODES": "KOALA_NODES",
    "SLURM_NTASKS_PER_NODE": "KOALA_PPN",
    "SLURM_NODELIST": "KOALA_NODELIST",
    "SLURM_JOB_NODELIST": "KOALA_NODELIST",
    "SLURM_SUBMIT_DIR": "nothing: the script starts in the folder of the submission where that exists",
    "SLURM_CLUSTER_NAME": "KOALA_CLUSTER",
    "SLURM_ARRAY_TASK_ID": "KOALA_ARRAY_INDEX",
    "SLURM_ARRAY_JOB_ID": "KOALA_ARRAY_JOB",
    "SLURM_ARRAY_TASK_COUNT": "KOALA_ARRAY_COUNT",
    "SGE_TASK_ID": "KOALA_ARRAY_INDEX",
    "JOB_ID": "KOALA_JOB_ID",
    "NSLOTS": "KOALA_SLOTS",
    "NHOSTS": "KOALA_NODES",
    "PE_HOSTFILE": "KOALA_HOSTFILE",
    "SGE_O_WORKDIR": "nothing: the script starts in the folder of the submission where that exists",
}
"""Variables of Slurm and Grid Engine, and those to use in a script of koalapy."""
VARIABLE = re.compile(r"\$\{?(SLURM_\w+|SGE_\w+|JOB_ID|NSLOTS|NHOSTS|PE_HOSTFILE)\b")
COMMANDS = re.compile(r"(?:^|[;&|(]|\s)(srun|sbcast|sgather|qrsh)\s")


def _find_variables(script: Script) -> list[tuple[int, str]]:
    """Return a remark for each line that uses a variable or a command of Slurm or Grid Engine."""
    remarks = []
    for number, line in enumerate(script.text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for name in dict.fromkeys(VARIABLE.findall(line)):
            use = VARIABLES.get(name, "nothing: koalapy has no counterpart")
            remarks.append((number, f"${name} does not describe the whole job: use {use}"))
        for command in dict.fromkeys(COMMANDS.findall(line)):
            use = "mpirun" if command in ("srun", "qrsh") else "--stage and --collect"
            remarks.append((number, f"{command} does not reach the nodes of other clusters: use {use}"))
    return remarks


def _note_late_lines(script: Script, head: set[int]) -> None:
    for number in (*script.lines_with(SLURM), *script.lines_with(GRID_ENGINE)):
        if number not in head:
            print_note(f"  line {number}: it has no effect, since it follows a command")
