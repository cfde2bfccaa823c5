"""Whose fault it is that Grid Engine takes no job, by its own words. Pure; total: any words get an answer.

What a job can be refused for by its user's doing is its walltime and its size: all other options are the cluster's
configuration, the same for every job, so that what is wrong with them is wrong for all.
"""

import re

from koalapy.agents.lrm.port import Fault

_JOB = re.compile(r"h_rt|s_rt|no suitable queues", re.IGNORECASE)
_LIMIT = re.compile(r"jobs are allowed (per|in)|too many|would exceed|exceeds? .*\b(quota|limit)", re.IGNORECASE)
_SITE = re.compile(
    r"unknown (queue|resource)|does not exist|invalid option|not allowed to submit|submit host|project|privileges"
    r"|user id|reservation|access|permission|not a valid object|denied: (user|host)|jsv",
    re.IGNORECASE,
)


def fault_of(message: str) -> Fault:
    """Of the words of a refused submission; unknown ones are taken to be about the job."""
    return known_fault(message) or "job"


def known_fault(message: str) -> Fault | None:
    """Of the words of a refused submission; None when they are not known."""
    if _JOB.search(message):
        return "job"
    if _LIMIT.search(message):
        return "limit"
    return "site" if _SITE.search(message) else None
