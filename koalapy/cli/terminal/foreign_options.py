"""Options of Slurm and Grid Engine that users type from habit, and koalapy's own for the same purpose.

One table answers an unknown option of a command and is shown in ``docs/coming-from-slurm.md``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_VALUE_LENGTH = 60


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """Spellings of one option. ``{value}`` in ``answer`` stands for its value, ``example`` if it has none.

    ``unit``: appended to a value that is a number alone.
    """

    names: tuple[str, ...]
    answer: str
    example: str = ""
    unit: str = ""

    def explain(self, value: str) -> str:
        """Return the answer for a value of the option."""
        is_usable = value and value.isprintable() and len(value) <= MAX_VALUE_LENGTH
        unit = self.unit if value.isdecimal() else ""
        return self.answer.replace("{value}", f"{value}{unit}" if is_usable else self.example)


SUBMIT = (
    ForeignOption(("--nodes",), "for {value} nodes anywhere use `--flexible {value}`", "4"),
    ForeignOption(
        ("-N",), "for {value} nodes anywhere use `--flexible {value}`; for a name as in Grid Engine use `--name`", "4"
    ),
    ForeignOption(("-n", "--ntasks"), "use `--flexible` with the number of nodes, and `--ppn` for processes per node"),
    ForeignOption(("--ntasks-per-node", "--tasks-per-node"), "use `--ppn {value}`", "8"),
    ForeignOption(("-pe",), "use `--flexible` with the number of nodes, and `--ppn` for processes per node"),
    ForeignOption(("-w", "--nodelist"), "use `--fixed CLUSTER:NODES`; the cluster chooses the nodes"),
    ForeignOption(("-M", "--clusters"), "use `--fixed CLUSTER:NODES`, with several clusters separated by commas"),
    ForeignOption(("-t", "--time"), "use `--walltime {value}`", "90m", unit="m"),
    ForeignOption(("-l",), "for h_rt use `--walltime`, for nodes use `--flexible`"),
    ForeignOption(("-J", "--job-name"), "use `--name {value}`", "NAME"),
    ForeignOption(("-D", "-wd", "-cwd"), "use `--chdir`; by default the job starts in the current directory"),
    ForeignOption(("-v",), "use `--env NAME=VALUE`, or `--env NAME` for its value here"),
    ForeignOption(("-V",), "use `--export ALL`"),
    ForeignOption(("-W", "-sync"), "use `--wait`"),
    ForeignOption(("--test-only", "--validate"), "use `--dry-run`"),
    ForeignOption(("--parsable", "-terse"), "use `--quiet`"),
    ForeignOption(("-H", "--hold"), "submit the job, then use `koala hold`"),
    ForeignOption(("--requeue",), "use `--max-restarts 3`"),
    ForeignOption(("--no-requeue",), "use `--max-restarts 0`"),
    ForeignOption(("--nice",), "leave it out: it has no counterpart"),
    ForeignOption(("-p",), "for a partition of Slurm use `--partition`; for a priority use `--priority`, high or low"),
    ForeignOption(("-A",), "use `--account {value}`", "ACCOUNT"),
    ForeignOption(("-C", "--constraint"), "use `--feature {value}`, once for each feature", "FEATURE"),
    ForeignOption(("--mem",), "use `--memory {value}`, which is that of each node", "16GB", unit="MiB"),
    ForeignOption(("-c", "--cpus-per-task"), "use `--cpus-per-rank {value}`", "4"),
    ForeignOption(
        ("-G", "--gres", "--gpus-per-node"), "use `--gpus` with the GPUs of each node: `--gpus 2` or `--gpus a100:2`"
    ),
    ForeignOption(("-x",), "use `--exclude {value}`", "n[1-3]"),
    ForeignOption(("-a",), "use `--array {value}`", "1-200"),
    ForeignOption(("--switches",), "use `--coallocation never`, or `--policy communication-aware`"),
    ForeignOption(("--exclusive",), "leave it out: jobs get whole nodes"),
    ForeignOption(("--wrap", "-b"), "write the command after `--`"),
    ForeignOption(("--bcast",), "use `--stage` to send files"),
    ForeignOption(("-d", "--dependency", "-hold_jid"), "use `--after JOB`, or `--after JOB:any` whatever its end is"),
)
QUEUE = (
    ForeignOption(("-u",), "use `--user {value}`", "USER"),
    ForeignOption(("--me",), "leave it out: your own jobs are listed by default"),
    ForeignOption(("-t", "--states"), "use `--state`, such as queued or running", "queued"),
    ForeignOption(("-n",), "use `--name {value}`", "NAME"),
    ForeignOption(("-M", "--clusters"), "use `--cluster {value}`", "CLUSTER"),
    ForeignOption(("-i", "--iterate"), "use `--watch`"),
    ForeignOption(("--start",), "use `koala explain`"),
    ForeignOption(("-j", "--job", "--jobs"), "use `koala show {value}`", "JOB"),
)
CANCEL = (
    ForeignOption(("-u", "--user", "--me"), "use `--mine`"),
    ForeignOption(("-t",), "use `--state`, such as queued or running"),
    ForeignOption(("-n", "--jobname"), "use `--name {value}`", "'study-*'"),
    ForeignOption(("-s", "--signal"), "use `--warn`, which sends the signal that the job was submitted with"),
    ForeignOption(("-i", "--interactive"), "leave it out: on a terminal it asks before it cancels selected jobs"),
)
FOREIGN_OPTIONS: Mapping[str, Sequence[ForeignOption]] = {
    "koala submit": SUBMIT,
    "koala queue": QUEUE,
    "koala cancel": CANCEL,
}
"""Options of other systems by command."""


def explain_option(command: str, option: str, arguments: Sequence[str]) -> str:
    """Return koalapy's way for an unknown option of a command; empty if the option is not known here.

    ``arguments``: the words of the command line, for the option's value and for options such as ``-pe``, of which the
    parser names only the first letter.
    """
    known = {name: entry for entry in FOREIGN_OPTIONS.get(command, ()) for name in entry.names}
    for index, word in enumerate(arguments):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not name.startswith(option):
            continue
        if name not in known and not option.startswith("--"):
            name, value = option, word[len(option) :]
        if name in known:
            if not equals and not value and index + 1 < len(arguments) and not arguments[index + 1].startswith("-"):
                value = arguments[index + 1]
            return f"{command} has no {name}; {known[name].explain(value).replace('`', '')}"
    return ""


def options_page() -> str:
    """Return the table as Markdown, without options that the commands have meanwhile."""
    rows = [
        f"| `{command}` | {', '.join(f'`{name}`' for name in entry.names)} | {entry.explain('')} |"
        for command, entries in FOREIGN_OPTIONS.items()
        for entry in entries
    ]
    return "\n".join(["| command | option elsewhere | here |", "| --- | --- | --- |", *rows, ""])
