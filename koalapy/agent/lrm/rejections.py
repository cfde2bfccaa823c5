"""Refuse jobs alike in all adapters, and classify refusals by the words of Slurm or Grid Engine. Pure.

One table serves commands and DRMAA libraries, so that both judge the same words alike. It has whole phrases that Slurm
and Grid Engine print themselves: single words, such as "account", also stand in the texts of sites' own scripts, where
they say nothing certain. A user chooses walltime and size; all other options are koalapy's or the cluster's.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NoReturn

from koalapy.model.errors import SiteFault, SiteRejected


def _pattern(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(phrases), re.IGNORECASE)


_PHRASES: tuple[tuple[SiteFault, re.Pattern[str]], ...] = (
    (
        SiteFault.SITE,  # options that every job of koalapy has
        _pattern(
            r"--(exclusive|mem|no-requeue|ntasks-per-node|comment|open-mode|chdir|output|job-name|parsable)\b",
            r"Memory specification can not be satisfied",
            r"Memory required by task is not available",
        ),
    ),
    (SiteFault.JOB, _pattern(r"Invalid --time specification", r"invalid date/time format", r"is not a time value")),
    (
        SiteFault.UNSUITABLE,
        _pattern(
            r"Requested time limit is invalid",
            r"Time limit specification required",
            r"\b(QOS|Assoc)Max(Wall|Node|Cpu|TRES)\w*PerJob\w*",
            r"Node count specification invalid",
            r"More processors requested than permitted",
            r"\b[hs]_rt\b",
        ),
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
            r"Required node not available",
            r"Licenses currently unavailable",
        ),
    ),
    (
        SiteFault.SITE,
        _pattern(
            r"invalid (parent )?account\b",
            r"invalid partition\b",
            r"invalid (feature|license|generic resource|node name|option|native specification)",
            r"invalid (qos|wckey|user id|group id|cluster name|mcs_label|burst buffer)\b",
            r"invalid --[a-z-]+",
            r"Invalid or unknown association",
            r"unrecognized option",
            r"unable to open file",
            r"No partition specified",
            r"Partition in DOWN state",
            r"Required partition not available",
            r"not permitted to use this partition",
            r"access/permission denied",
            r"Access denied to requested reservation",
            r"Requested reservation",
            r"Requested operation",
            r"Requested GRES option",
            r"Requested account has breached",
            r"System submissions disabled",
            r"Error generating job credential",
            r"\bLua (script|function)\b",
            r"\bplugin\b",
            # Grid Engine
            r"unknown (queue|resource)",
            r"does not exist",
            r"not allowed to submit",
            r"submit host",
            r"no project assigned",
            r"requires operator privileges",
            r"lower than minimum user id",
            r"advance reservation id",
            r"not a valid object",
            r"denied: (user|host)",
            r"\bjsv\b",
        ),
    ),
)
_POLICY = re.compile(r"Job violates accounting/QOS policy(\s*\([^)]*\))?")
"""What Slurm adds to every refusal for a limit; in brackets it names all that might be meant."""


def classify_rejection(text: str) -> SiteFault:
    """Return what a refusal with these words concerns: ``unknown`` if no phrase of the table is in them."""
    text = _POLICY.sub("", text)
    return next((fault for fault, phrases in _PHRASES if phrases.search(text)), SiteFault.UNKNOWN)


def reject_size(nodes: int, limit: str, hint: str, fault: SiteFault = SiteFault.LIMIT) -> NoReturn:
    """Raise ``SiteRejected`` for a number of nodes beyond ``limit``, a sentence about the cluster."""
    raise SiteRejected(f"{nodes} nodes asked for, but {limit}", field="size", value=nodes, hint=hint, fault=fault)


def reject_other_job(job: str, found: str, name: str) -> NoReturn:
    """Raise ``SiteRejected`` for a job that is not the one of ``name``, by which it was to be cancelled."""
    raise SiteRejected(f"job {job} is {found}, not {name}: left alone", value=job)


_OTHER_CLUSTERS = "leave it out: configure each Slurm cluster as a cluster of its own, with its own agent"
_SBATCH: Mapping[str, str] = {
    "clusters": _OTHER_CLUSTERS,
    "cluster-constraint": _OTHER_CLUSTERS,
    "array": "leave it out: a component is one job of Slurm",
    "job-name": "leave it out: the agent finds its jobs by their names",
    "test-only": "leave it out: no job would run",
    "wait": "leave it out: the agent does not wait for the end of a job",
}
"""Long options of sbatch, and what to do instead."""
_SBATCH_SHORT = {"M": "clusters", "a": "array", "J": "job-name", "W": "wait", "p": "partition"}
_SBATCH_FLAGS = "hHIkOQsvVX"
"""Short options of sbatch without a value: another may follow in the same word."""
_QSUB: Mapping[str, str] = {
    "-@": "write the options of that file here",
    "-N": "leave it out: the agent finds its jobs by their names",
    "-sync": "leave it out: the agent does not wait for the end of a job",
    "-t": "leave it out: a component is one job of Grid Engine",
    "-verify": "leave it out: no job would run",
}


def split_options(text: str) -> Sequence[str]:
    """Split options of the configuration as a shell does. Raise ``SiteRejected`` for unclosed quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SiteRejected(f"native_specification {text!r}: {error}", fault=SiteFault.SITE) from error


def reject_sbatch_options(words: Sequence[str], *, short: bool = True, **refused: str) -> None:
    """Raise ``SiteRejected`` for an option of sbatch that moves, multiplies or renames jobs.

    ``refused`` are further long options, with what to do instead. ``short`` says whether one letter is an option of
    sbatch's too, which it is not where the words may be those of another resource manager.
    """
    table = {**_SBATCH, **refused}
    for word in words:
        if word.startswith("--"):
            # sbatch knows an option by the beginning of its name, too.
            begin = word[2:].partition("=")[0]
            name = next((each for each in table if begin and each.startswith(begin)), "")
        elif word.startswith("-") and short:
            letters = word[1:].lstrip(_SBATCH_FLAGS)
            name = _SBATCH_SHORT.get(letters[:1], "")
        else:
            name = ""
        if name in table:
            _reject(word, table[name])


def reject_qsub_options(words: Sequence[str], **refused: str) -> None:
    """Raise ``SiteRejected`` for an option of qsub that moves, multiplies or renames jobs; ``refused`` as above."""
    table = {**_QSUB, **{f"-{name}": remedy for name, remedy in refused.items()}}
    for word in words:
        if word in table:
            _reject(word, table[word])


def _reject(word: str, remedy: str) -> None:
    raise SiteRejected(
        f"native_specification has {word}, with which the agent loses sight of its jobs",
        field="native_specification",
        value=word,
        hint=remedy,
        fault=SiteFault.SITE,
    )
