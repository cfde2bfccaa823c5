"""What is kept of who did what, from where, and what became of it."""

from dataclasses import dataclass


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
