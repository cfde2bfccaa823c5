"""Explain why Slurm does not start a job that it has taken. Pure; any text gets an answer."""

import re

from koalapy.agent.lrm.port import Fault

_NEVER_STARTS: dict[str, Fault] = {
    "PartitionTimeLimit": "unsuitable",
    "QOSMaxWallDurationPerJobLimit": "unsuitable",
    "AssocMaxWallDurationPerJobLimit": "unsuitable",
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
