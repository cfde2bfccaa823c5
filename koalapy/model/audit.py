"""What is kept of who did what, from where, and what became of it."""

import hashlib
import json
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit; nothing of it is ever a secret, a job's environment or a body."""

    at: float
    """Seconds since the epoch."""
    actor: str
    """The user; empty where nobody is known."""
    role: str
    how: str
    """How it is known who it was, for people: ``token 3``, ``alice on north``."""
    address: str
    """Where it came from."""
    action: str
    """An operation of the REST API by its name, or what an agent told."""
    target: str
    """What it was done to: ``job 7``, ``cluster north``."""
    outcome: str
    """``done``, ``refused`` or ``failed``."""
    detail: str = ""
    times: int = 1
    """How many alike it stands for: refusals that come in numbers are counted."""
    id: int = 0
    """Given by the store, in the order in which they were written."""


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries to tell, the oldest first; empty means any. ``after`` is the largest id of the page before.

    With ``newest_first`` the smallest one of that page is ``before``, which is 0 for the first.
    """

    since: float = 0.0
    actor: str = ""
    action: str = ""
    after: int = 0
    limit: int = 100
    target: str = ""
    outcome: str = ""
    newest_first: bool = False
    before: int = 0


@dataclass(frozen=True, slots=True)
class AuditHead:
    """An entry's id and its hash, which covers this entry and all before it; id 0 is before the first entry."""

    id: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """A part of the audit that was checked against its hashes."""

    checked: int
    """Entries in order that are as they were written."""
    last: AuditHead
    """The last of them."""
    is_complete: bool
    """Whether ``last`` is the last entry of all."""
    problem: str = ""
    """What is wrong with the entry that follows; empty where nothing is."""


def chain_hash(previous: str, entry: AuditEntry) -> str:
    """Return the hash of an entry that follows one of the hash ``previous``."""
    values = [getattr(entry, field.name) for field in fields(entry)]
    return hashlib.sha256(json.dumps([previous, *values], separators=(",", ":")).encode()).hexdigest()


class ChainChecker:
    """Checks entries one after the other, from ``after`` on."""

    def __init__(self, after: AuditHead) -> None:
        self.last = after
        self.checked = 0

    def problem_of(self, entry: AuditEntry, hashed: str) -> str:
        """Return what is wrong with the next entry; empty where it follows the last one as it was written."""
        if hashed != chain_hash(self.last.hash, entry):
            return (
                f"entry {entry.id} is not as it was written, was not written by the daemon, or entries between "
                f"{self.last.id} and {entry.id} were removed"
            )
        self.last = AuditHead(entry.id, hashed)
        self.checked += 1
        return ""

    def result(self, head: AuditHead, *, is_end: bool, problem: str = "") -> AuditCheck:
        """Return the check; ``head`` is the last entry by the daemon's own note, ``is_end`` whether no more follow."""
        if is_end and not problem and head.id < self.last.id:
            problem = f"entries after {head.id} were removed: entry {self.last.id} was written"
        elif is_end and not problem and head.id == self.last.id and head.hash != self.last.hash:
            problem = f"entry {head.id} has another hash than the one that is known"
        elif is_end and not problem and self.last != head:
            problem = f"entries after {self.last.id} were removed: the last that was written is {head.id}"
        return AuditCheck(self.checked, self.last, is_end and not problem, problem)
