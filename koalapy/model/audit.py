"""The audit log: every action with its user, origin and outcome, chained by hashes."""

import hashlib
import json
from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log. It never holds a secret, the environment of a job or a request body."""

    at: float
    """Seconds since the epoch."""
    actor: str
    """The user; empty for an unauthenticated caller."""
    role: str
    how: str
    """By what the user was authenticated: ``token 3``, ``alice on north``."""
    address: str
    """The network address of the caller."""
    action: str
    """The name of a REST operation, or of an event that an agent reported."""
    target: str
    """The object of the action: ``job 7``, ``cluster north``."""
    outcome: str
    """``done``, ``refused`` or ``failed``."""
    detail: str = ""
    times: int = 1
    """Number of equal actions in this entry; repeated rejections are counted in one entry."""
    id: int = 0
    """Sequence number, set by the store."""


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """A query for audit entries, oldest first; empty fields match any entry.

    ``after`` is the largest id of the previous page. With ``newest_first``, ``before`` is its smallest id, or 0.
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
    until: float = 0.0
    """Only entries before this time; 0: all."""


@dataclass(frozen=True, slots=True)
class AuditHead:
    """The id of an entry and its hash, which covers all earlier entries; id 0 means before the first entry."""

    id: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The result of checking a part of the audit log against its hashes."""

    checked: int
    """Number of valid entries."""
    last: AuditHead
    """The last valid entry."""
    is_complete: bool
    """Whether ``last`` is the last entry of the log."""
    problem: str = ""
    """Description of the error in the next entry; empty if it is valid."""


def chain_hash(previous: str, entry: AuditEntry) -> str:
    """Return the hash of an entry in the hash chain, given the hash of the previous entry."""
    return hashlib.sha256(_encode_json([previous, *_VALUES(entry)]).encode()).hexdigest()


_VALUES = attrgetter(*(field.name for field in fields(AuditEntry)))
_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class ChainChecker:
    """A checker of consecutive audit entries that follow ``after``."""

    def __init__(self, head: AuditHead) -> None:
        self.last = head
        self.checked = 0

    def problem_of(self, entry: AuditEntry, stored_hash: str) -> str:
        """Check the next entry against its stored hash. Return a description of the error; empty if it is valid."""
        if stored_hash != chain_hash(self.last.hash, entry):
            return (
                f"entry {entry.id} is not as it was written, was not written by the daemon, or entries between "
                f"{self.last.id} and {entry.id} were removed"
            )
        self.last = AuditHead(entry.id, stored_hash)
        self.checked += 1
        return ""

    def result(self, head: AuditHead, *, is_end: bool, problem: str = "") -> AuditCheck:
        """Return the result of the check.

        ``head`` is the last entry that the daemon has noted, ``is_end`` whether the checked entries reach the end.
        """
        if is_end and not problem and head.id < self.last.id:
            problem = f"entries after {head.id} were removed: entry {self.last.id} was written"
        elif is_end and not problem and head.id == self.last.id and head.hash != self.last.hash:
            problem = f"entry {head.id} does not have the hash that the daemon noted"
        elif is_end and not problem and self.last != head:
            problem = f"entries after {self.last.id} were removed: the last that was written is {head.id}"
        return AuditCheck(self.checked, self.last, is_end and not problem, problem)
