"""Read the limits of accounts and the reservations of nodes from ``scontrol``. Pure."""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass

from koalapy.model.bounds import MAX_NODES
from koalapy.model.node_requirement import expand_host_list

MAX_CHAIN = 100
"""Accounts from an account to the root."""


@dataclass(frozen=True, slots=True)
class AccountLimit:
    """The limits of an account and its superior accounts, or of a quality of service, in nodes."""

    max_job_nodes: int = MAX_NODES
    """Nodes of one job."""
    free_nodes: int = MAX_NODES
    """Nodes that further jobs may have together."""

    def combine(self, other: "AccountLimit") -> "AccountLimit":
        return AccountLimit(min(self.max_job_nodes, other.max_job_nodes), min(self.free_nodes, other.free_nodes))


NO_LIMIT = AccountLimit()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation. ``begins`` is Slurm's text; jobs of a ``flexible`` one may have other nodes too."""

    name: str
    active: bool
    nodes: frozenset[str]
    begins: str = ""
    flexible: bool = False
    begins_at: float | None = None
    ends_at: float | None = None
    """Seconds since the epoch; None: not known."""


def read_reservations(text: str) -> dict[str, Reservation]:
    """Read the lines of ``scontrol show reservation --oneliner``. Skip those with invalid nodes."""
    reservations = {}
    for line in text.splitlines():
        fields = _read_fields(line)
        hosts = fields.get("Nodes", "(null)")
        try:
            nodes = frozenset(() if hosts == "(null)" else expand_host_list(hosts))
        except ValueError:
            continue
        if name := fields.get("ReservationName", ""):
            begins = fields.get("StartTime", "")
            is_flexible = "FLEX" in fields.get("Flags", "").split(",")
            times = _read_time(begins), _read_time(fields.get("EndTime", ""))
            reservations[name] = Reservation(name, fields.get("State") == "ACTIVE", nodes, begins, is_flexible, *times)
    return reservations


def _read_time(text: str) -> float | None:
    """Return a local time of Slurm in seconds since the epoch; None for other text."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def read_account_limit(text: str, user: str, account: str = "", qos: Collection[str] = ()) -> AccountLimit:
    """Return the limits of a user's jobs from the lines of ``scontrol show assoc_mgr --oneliner``.

    ``account``: that of the jobs, by default the user's default account; ``qos``: qualities of service that apply.
    """
    accounts, user_records, limits = dict[str, dict[str, str]](), list[dict[str, str]](), list[AccountLimit]()
    for line in text.splitlines():
        fields = _read_fields(line)
        if (name := fields.get("QOS", "").partition("(")[0]) and name in qos:
            limits.append(_read_limit(fields))
            # Slurm shows the limit for one user once that user has had a job.
            if match := re.search(rf"\b{re.escape(user)}\(\d+\) .*?MaxTRESPU=(\S*)", line):
                limits.append(_read_limit({"GrpTRES": match[1]}))
        elif fields.get("Account") and not fields.get("UserName"):
            accounts[fields["Account"]] = fields
        elif fields.get("UserName", "").partition("(")[0] == user and not fields.get("Partition"):
            user_records.append(fields)
    effective_records = [f for f in user_records if f.get("Account") == account] if account else user_records
    if not account and len(effective_records) > 1:
        effective_records = [fields for fields in user_records if fields.get("DefAssoc") == "Yes"]
    if len(effective_records) == 1:
        limits.append(_read_limit(effective_records[0]))
        account = effective_records[0]["Account"]
        for _ in range(MAX_CHAIN):
            if account not in accounts:
                break
            limits.append(_read_limit(accounts[account]))
            account = accounts[account].get("ParentAccount", "").partition("(")[0]
    limit = NO_LIMIT
    for account_limit in limits:
        limit = limit.combine(account_limit)
    return limit


def _read_fields(line: str) -> dict[str, str]:
    """Return the fields of a line, of fields with one name the first."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"([\w/]+)=(\S*)", line):
        fields.setdefault(name, value)
    return fields


def _read_limit(fields: dict[str, str]) -> AccountLimit:
    """Return the limits of one record, such as ``GrpTRES=cpu=N(0),node=4(2)``: four nodes, of which two are used."""
    job_limit = re.search(r"\bnode=(\d{1,9})\b", fields.get("MaxTRESPJ", ""))
    group_limit = re.search(r"\bnode=(\d{1,9})\((\d{1,9})\)", fields.get("GrpTRES", ""))
    max_job_nodes = int(job_limit[1]) if job_limit else MAX_NODES
    if group_limit is None:
        return AccountLimit(max_job_nodes)
    return AccountLimit(min(max_job_nodes, int(group_limit[1])), max(0, int(group_limit[1]) - int(group_limit[2])))
