"""Classify rejections by the messages of Slurm and Grid Engine, and reject jobs and options in all adapters.

One table serves commands and DRMAA libraries. It has complete phrases that Slurm and Grid Engine print: single words,
such as "account", also occur in messages of sites' own scripts, where they prove nothing. Walltime and size are chosen
by the user; all other options by koalapy or the cluster's configuration.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn

from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.node_requirement import NodeRequirement
from koalapy.model.wording import format_nodes


def _pattern(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(phrases), re.IGNORECASE)


_FIX_OPTIONS = "correct the cluster's native_specification"
_GIVE_WALLTIME = "give --walltime"
_PHRASES: tuple[tuple[SiteFault, re.Pattern[str], str], ...] = (
    (
        SiteFault.SITE,  # options of all jobs of koalapy
        _pattern(
            r"--(exclusive|mem|no-requeue|ntasks-per-node|comment|open-mode|chdir|output|job-name|parsable)\b",
            r"Memory specification can not be satisfied",
            r"Memory required by task is not available",
        ),
        "",
    ),
    (SiteFault.JOB, _pattern(r"Invalid --time specification", r"invalid date/time format", r"is not a time value"), ""),
    (SiteFault.UNSUITABLE, _pattern(r"Time limit specification required"), _GIVE_WALLTIME),
    (
        SiteFault.UNSUITABLE,
        _pattern(r"Requested time limit is invalid", r"\b(QOS|Assoc)MaxWall\w*PerJob\w*", r"\b[hs]_rt\b"),
        "ask for a shorter walltime, or give one with --walltime",
    ),
    (
        SiteFault.UNSUITABLE,
        _pattern(r"Node count specification invalid"),
        "ask for a number of nodes from the partition's MinNodes to its MaxNodes (scontrol show partition)",
    ),
    (
        SiteFault.UNSUITABLE,
        _pattern(r"\b(QOS|Assoc)Max(Node|Cpu|TRES)\w*PerJob\w*", r"More processors requested than permitted"),
        "ask for fewer nodes",
    ),
    (
        SiteFault.LIMIT,
        _pattern(
            r"\b(QOS|Assoc)(Max|Grp)\w+",
            r"\bMax(Submit|Job|Array)\w*",
            r"would exceed",
            r"quota exceeded",
            r"exceeds? .*\bquota",
            r"jobs are allowed (per|in)",
            r"too many jobs",
            r"Requested nodes are busy",
            r"Requested partition configuration not available now",
            r"Required (node|partition) not available",
            r"Licenses currently unavailable",
        ),
        "",
    ),
    (
        SiteFault.SITE,
        _pattern(r"invalid (parent )?account\b", r"Invalid or unknown association", r"Requested account has breached"),
        "set the cluster's account to one that this user may charge in its partition",
    ),
    (
        SiteFault.SITE,
        _pattern(
            r"invalid partition\b",
            r"No partition specified",
            r"Partition in DOWN state",
            r"not permitted to use this partition",
        ),
        "set the cluster's partition to one of those that sinfo lists",
    ),
    (SiteFault.SITE, _pattern(r"invalid qos\b"), "correct --qos in the cluster's native_specification"),
    (
        SiteFault.SITE,
        _pattern(r"invalid (option|native specification)", r"unrecognized option", r"invalid --[a-z-]+"),
        _FIX_OPTIONS,
    ),
    (SiteFault.SITE, _pattern(r"unknown resource"), _FIX_OPTIONS),
    (SiteFault.SITE, _pattern(r"unknown queue"), "set the cluster's queue to one of qconf -sql"),
    (
        SiteFault.SITE,
        _pattern(r"parallel environment .*does not exist"),
        "set the cluster's parallel_environment to one of qconf -spl",
    ),
    (
        SiteFault.SITE,
        _pattern(r"not allowed to submit", r"submit host", r"denied: host"),
        "make this host a submit host (qconf -as)",
    ),
    (
        SiteFault.SITE,
        _pattern(
            r"invalid (feature|license|generic resource|node name)",
            r"invalid (wckey|user id|group id|cluster name|mcs_label|burst buffer)\b",
            r"unable to open file",
            r"access/permission denied",
            r"Access denied to requested reservation",
            r"Requested reservation",
            r"Requested operation",
            r"Requested GRES option",
            r"System submissions disabled",
            r"Error generating job credential",
            r"\bLua (script|function)\b",
            r"\bplugin\b",
            # Grid Engine
            r"does not exist",
            r"no project assigned",
            r"requires operator privileges",
            r"lower than minimum user id",
            r"advance reservation id",
            r"not a valid object",
            r"denied: user",
            r"\bjsv\b",
        ),
        "",
    ),
    (
        SiteFault.UNKNOWN,
        _pattern(r"Requested node configuration is not available"),
        "ask for fewer nodes, or correct the cluster's native_specification",
    ),
    (
        SiteFault.UNKNOWN,
        _pattern(r"no suitable queues"),
        "check that queue, parallel environment and native_specification fit together (qsub -w v)",
    ),
    (SiteFault.UNKNOWN, _pattern(r"\b(wall ?time|time limit)\b[^;]{0,20} (needed|required|missing)"), _GIVE_WALLTIME),
)
"""For each cause of rejections: the fault, the phrases, and what to do about it, empty if that is not known."""
_POLICY = re.compile(r"Job violates accounting/QOS policy(\s*\([^)]*\))?")
"""A text that Slurm adds to every rejection for a limit; in brackets it lists all limits that exist."""


def classify_rejection(text: str) -> SiteFault:
    """Return the fault of a rejection with this text; ``unknown`` if it has no phrase of the table."""
    default = SiteFault.LIMIT if _POLICY.search(text) else SiteFault.UNKNOWN
    return next((fault for fault, phrases, _ in _PHRASES if phrases.search(_POLICY.sub("", text))), default)


def explain_rejection(text: str) -> str:
    """Return what to do about a rejection, by the phrase that decides its fault; empty if that is not known."""
    return next((hint for _, phrases, hint in _PHRASES if phrases.search(_POLICY.sub("", text))), "")


_TOO_MANY_NODES = _pattern(r"\b(QOS|Assoc)(Max|Grp)(Node|Cpu|TRES)\w*", r"More processors requested than permitted")


def names_too_many_nodes(text: str) -> bool:
    """Return whether a rejection with this text concerns larger jobs, too."""
    return bool(_TOO_MANY_NODES.search(text))


_CHOICES: Mapping[str, re.Pattern[str]] = {
    "account": _pattern(
        r"invalid (parent )?account\b",
        r"Invalid or unknown association",
        r"Requested account has breached",
        r"no project assigned",
        r"(project|job is not) .*(does not exist|permitted|allowed|access)",
    ),
    "qos": _pattern(r"invalid qos\b", r"Invalid or unknown association"),
    "partition": _pattern(
        r"invalid partition\b", r"not permitted to use this partition", r"unknown queue", r"not a valid object"
    ),
    "gpus": _pattern(r"invalid generic resource", r"Requested GRES option", r"unknown resource"),
    "features": _pattern(r"invalid feature", r"unknown resource"),
    "exclude": _pattern(r"invalid node name"),
}
"""Phrases by the field of the job that they concern, if the job sets that field."""


RESERVATION_HINT = "the site has removed the reservation, or it is over: make another one, or submit without it"


def blame_choice(error: SiteRejected, requirement: NodeRequirement, reservation: str) -> SiteRejected:
    """Return a rejection for a choice of the job as unsuitable for this cluster, and any other one unchanged.

    Without a choice of the job, the same text concerns the options of all jobs.
    """
    text = _POLICY.sub("", error.message)
    if reservation and re.search(r"\breservation\b", text, re.IGNORECASE):
        return reservation_rejection(error.message, reservation)
    for field, phrases in _CHOICES.items():
        if (value := getattr(requirement, field)) and phrases.search(text):
            hint = f"correct {field}, or exclude the cluster"
            value = str(value) if field == "gpus" else value
            return SiteRejected(error.message, field=field, value=value, hint=hint, fault=SiteFault.UNSUITABLE)
    return error


def reservation_rejection(message: str, reservation: str) -> SiteRejected:
    """Return the rejection of a job because of its reservation."""
    fault = SiteFault.UNSUITABLE
    return SiteRejected(message, field="reservation", value=reservation, hint=RESERVATION_HINT, fault=fault)


def reject_charges(requirement: NodeRequirement, allowed: Mapping[str, Sequence[str]], *, is_mapped: bool) -> None:
    """Raise ``SiteRejected`` for an account or quality of service that jobs may not choose.

    Where jobs run as their owners' accounts, the resource manager decides. Elsewhere all jobs run as one account, so
    only those ``allowed`` by the cluster's configuration may be chosen.
    """
    for field, names in allowed.items():
        value = getattr(requirement, field)
        if value and not is_mapped and value not in names:
            choices = f"allowed: {', '.join(names)}" if names else "the cluster allows no choice"
            raise SiteRejected(
                f"{field} {value} may not be chosen here; {choices}",
                field=field,
                value=value,
                hint=f"leave {field} out, or have the cluster's administrator add it to allowed_{field}",
                fault=SiteFault.UNSUITABLE,
            )


def reject_fields(requirement: NodeRequirement, fields: Sequence[str], problem: str) -> None:
    """Raise ``SiteRejected`` for a field of a requirement that a resource manager does not have.

    ``problem``: a template with ``{field}`` and ``{value}``.
    """
    for field in fields:
        if value := getattr(requirement, field):
            raise SiteRejected(
                problem.format(field=field, value=value),
                field=field,
                value=str(value),
                hint=f"leave {field} out, or exclude the cluster",
                fault=SiteFault.UNSUITABLE,
            )


def reject_size(
    nodes: int, limit: str, hint: str, fault: SiteFault = SiteFault.LIMIT, sizes: Literal["few", "many"] = "many"
) -> NoReturn:
    """Raise ``SiteRejected`` for too few or too many nodes; ``limit`` is a clause about what the cluster allows."""
    problem = f"{format_nodes(nodes)} requested, but {limit}"
    raise SiteRejected(problem, field="size", value=nodes, hint=hint, fault=fault, sizes=sizes)


def reject_other_job(job: str, actual_name: str, name: str) -> NoReturn:
    """Raise ``SiteRejected`` instead of cancelling a job that has another name."""
    raise SiteRejected(f"job {job} is {actual_name}, not {name}: it is not cancelled", value=job)


_OTHER_CLUSTERS = "leave it out: configure each Slurm cluster as a separate cluster, with its own agent"
_SBATCH_OPTIONS: Mapping[str, str] = {
    "clusters": _OTHER_CLUSTERS,
    "cluster-constraint": _OTHER_CLUSTERS,
    "array": "leave it out: a component is one job of Slurm",
    "job-name": "leave it out: the agent finds its jobs by their names",
    "test-only": "leave it out: no job would run",
    "wait": "leave it out: the agent does not wait for the end of a job",
}
"""Rejected long options of sbatch, each with a hint."""
_SBATCH_LETTERS = {"M": "clusters", "a": "array", "J": "job-name", "W": "wait", "p": "partition"}
_SBATCH_FLAGS = "hHIkOQsvVX"
"""Short options of sbatch without a value: another option may follow in the same word."""
_QSUB_OPTIONS: Mapping[str, str] = {
    "-@": "write the options of that file here",
    "-N": "leave it out: the agent finds its jobs by their names",
    "-sync": "leave it out: the agent does not wait for the end of a job",
    "-t": "leave it out: a component is one job of Grid Engine",
    "-verify": "leave it out: no job would run",
}


def split_options(text: str) -> Sequence[str]:
    """Split configured options as a shell does. Raise ``SiteRejected`` for unclosed quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SiteRejected(f"native_specification {text!r}: {error}", fault=SiteFault.SITE) from error


def reject_sbatch_options(options: Sequence[str], *, short: bool = True, **hints: str) -> None:
    """Raise ``SiteRejected`` for an option of sbatch that moves, multiplies or renames jobs.

    ``hints`` are more long options to reject, each with a hint. ``short``: check one-letter options too; they mean
    something else if the options may be those of another resource manager.
    """
    table = {**_SBATCH_OPTIONS, **hints}
    for option in options:
        name = ""
        if option.startswith("--"):
            # sbatch also accepts the beginning of an option's name.
            prefix = option[2:].partition("=")[0]
            name = next((long for long in table if prefix and long.startswith(prefix)), "")
        elif option.startswith("-") and short:
            letters = option[1:].lstrip(_SBATCH_FLAGS)
            name = _SBATCH_LETTERS.get(letters[:1], "")
        if name in table:
            _reject_option(option, table[name])


def reject_qsub_options(options: Sequence[str], **hints: str) -> None:
    """Raise ``SiteRejected`` for an option of qsub that multiplies or renames jobs, or is among ``hints``."""
    table = {**_QSUB_OPTIONS, **{f"-{name}": hint for name, hint in hints.items()}}
    for option in options:
        if option in table:
            _reject_option(option, table[option])


def _reject_option(option: str, hint: str) -> NoReturn:
    """Raise ``SiteRejected`` for a native option with which the agent could not find its jobs."""
    raise SiteRejected(
        f"native_specification has {option}, with which the agent cannot find its jobs",
        field="native_specification",
        value=option,
        hint=hint,
        fault=SiteFault.SITE,
    )
