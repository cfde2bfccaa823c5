"""Whose fault it is that Slurm takes no job, or will never start one, by its own words. Pure; total: any words get an
answer.

What a job can be refused for by its user's doing is its walltime and its size: all other options are the cluster's
configuration, the same for every job, so that what is wrong with them is wrong for all.
"""

import re

from koalapy.agents.lrm.port import Fault

_JOB = re.compile(
    r"time limit|--time\b|MaxWall|PerJob|node count|node configuration|processors requested|date/time",
    re.IGNORECASE,
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


def fault_of(told: str) -> Fault:
    """Of the words of a refused submission; unknown ones are taken to be about the job."""
    return known_fault(told) or "job"


def known_fault(told: str) -> Fault | None:
    """Of the words of a refused submission; None when they are not known."""
    # What every refusal for a limit is wrapped in names everything that might be meant.
    told = re.sub(r"Job violates accounting/QOS policy(\s*\([^)]*\))?", "", told)
    if _JOB.search(told):
        return "job"
    if _LIMIT.search(told):
        return "limit"
    return "site" if _SITE.search(told) else None


def fault_of_waiting(reason: str) -> Fault | None:
    """Of a job that was taken, by the reason for which it waits; None when it may start some day."""
    return _NEVER_STARTS.get(reason)
