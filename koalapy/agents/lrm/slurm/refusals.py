"""Whose fault it is that Slurm takes no job, or will never start one, by its own words. Pure; total: any words get an
answer.

What a job can be refused for by its user's doing is its walltime and its size: all other options are the cluster's
configuration, the same for every job, so that what is wrong with them is wrong for all.
"""

import re

from koalapy.agents.lrm.port import Fault

_JOB = re.compile(
    r"time limit|--time\b|MaxWall|PerJob|node count|node configuration|processors requested|date/time", re.IGNORECASE
)
_LIMIT = re.compile(
    r"\b(QOS|Assoc)(Max|Grp)\w+|\bMax(Submit|Jobs|Array)\w*|would exceed|quota exceeded|exceeds? .*\bquota",
    re.IGNORECASE,
)
_SITE = re.compile(
    r"account|partition|\bqos\b|reservation|permission|not permitted|access denied|unrecognized option"
    r"|invalid (--[a-z-]+|feature|license|generic resource|node name|option|native specification)|unable to open file"
    r"|user id|uid|credential|plugin",
    re.IGNORECASE,
)
_NEVER_STARTS: dict[str, Fault] = {
    "PartitionTimeLimit": "job",
    "QOSMaxWallDurationPerJobLimit": "job",
    "AssocMaxWallDurationPerJobLimit": "job",
    "InvalidAccount": "site",
    "InvalidQOS": "site",
    "QOSNotAllowed": "site",
}
_WAITS_FOR = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Resources$", "it waits for nodes"),
        (r"Priority$", "jobs of higher priority come first"),
        (r"ReqNodeNotAvail", "nodes that it needs are reserved for others, or not up"),
        (r"QOS", "a limit of its quality of service"),
        (r"Assoc", "a limit of its account"),
        (r"Reservation", "its reservation has not begun, or has ended"),
        (r"Partition(Down|Inactive)", "its partition is not up"),
        (r"PartitionNodeLimit", "its partition gives a job fewer nodes, or too many of them are down"),
        (r"Licenses", "it waits for a licence"),
        (r"JobHeld", "somebody holds it"),
    )
)


def fault_of(text: str) -> Fault:
    """Of the words of a refused submission; unknown ones are taken to be about the job."""
    return known_fault(text) or "job"


def known_fault(text: str) -> Fault | None:
    """Of the words of a refused submission; None when they are not known."""
    # What every refusal for a limit is wrapped in names everything that might be meant.
    text = re.sub(r"Job violates accounting/QOS policy(\s*\([^)]*\))?", "", text)
    if _JOB.search(text):
        return "job"
    if _LIMIT.search(text):
        return "limit"
    return "site" if _SITE.search(text) else None


def fault_of_waiting(reason: str, *, choice: bool = False) -> Fault | None:
    """Of a job that was taken, by the reason for which it waits; None when it may start some day. ``choice``: it may go
    to one of several partitions, and what is said of one need not hold for the others."""
    return None if choice and reason.startswith("Partition") else _NEVER_STARTS.get(reason)


def waiting_text(reason: str) -> str:
    """Why a job waits, for people; empty while Slurm has not said."""
    if reason in ("", "None", "WaitingForScheduling"):
        return ""
    meant = next((words for pattern, words in _WAITS_FOR if pattern.match(reason)), "")
    return f"Slurm says {reason}" + (f" ({meant})" if meant else "")


def nodes_waited_for(reason: str) -> str:
    """The nodes, in Slurm's short form, whose absence a job waits out; empty when it is not that."""
    found = re.search(r"UnavailableNodes:(\S+)", reason)
    return found[1] if found else ""
