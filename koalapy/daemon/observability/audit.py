"""Write the audit log: changes with user and origin, and rejected requests.

The entry of a change is written in the transaction of the change where that is possible.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain

import structlog

from koalapy.daemon.engine.database import Threads, query, run_in_database
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.model.errors import KoalaError, StoreUnavailable
from koalapy.model.identity import Identity
from koalapy.model.times import parse_moment
from koalapy.store.audit import AuditStore

log = structlog.get_logger()

DONE, REFUSED, FAILED = "done", "refused", "failed"
MERGE_INTERVAL = 60.0
"""Seconds for which rejections of one kind are counted before they are written as one entry."""
MAX_KINDS = 100
"""Maximum number of kinds in that time; further kinds are counted together, so that a flood fills no disk."""
MAX_WAITING = 1000
"""Maximum number of entries that wait for the database; further ones are only logged."""
OTHERS = "others"
CHECKED_AT_ONCE, MAX_CHECKED = 5_000, 100_000
"""Maximum number of entries that are checked by one query, and for one request."""
HEAD_LOG_INTERVAL = 3600.0
"""Minimum seconds between two log lines with the last entry."""
PATIENCE = 3.0
"""Seconds for which a response waits for its entry; it does not wait while the database is unavailable."""

_writer = Threads(1, "audit")
"""A separate thread, so that a hanging database does not block other work in threads."""


@dataclass(slots=True)
class AuditedRequest:
    """A request in progress, with the content of its audit entry."""

    action: str
    address: str
    is_change: bool
    caller: Identity | None = None
    target: str = ""
    detail: str = ""
    targets: Sequence[str] = ()
    """The objects that the action changed, if it may change several; each gets an entry."""
    written: bool = False
    """Whether it is part of a transaction, or needs no further entry."""

    def make_entry(self, time: float, outcome: str) -> AuditEntry:
        user, role, how = (self.caller.user, str(self.caller.role), self.caller.how) if self.caller else ("", "", "")
        target, detail = _to_storable(self.target), _to_storable(self.detail)
        return AuditEntry(time, user, role, how, self.address, self.action, target, outcome, detail)

    def make_entries(self, time: float) -> list[AuditEntry]:
        """Return the entries of an action that was done: one for each changed object, by which it is found later."""
        entry = self.make_entry(time, DONE)
        return [replace(entry, target=target) for target in self.targets] or [entry]


def _to_storable(text: str) -> str:
    """Return a text that every database accepts: without lone surrogates and NUL."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


_under_way: ContextVar[AuditedRequest | None] = ContextVar("audited_request", default=None)


def begin_request(request: AuditedRequest) -> None:
    """Make ``request`` the current request of this task and of the tasks that it starts."""
    _under_way.set(request)


def describe_request(target: str = "", detail: str = "") -> None:
    """Set target and detail of the current request, if there is one; they must contain no secrets."""
    if (request := _under_way.get()) is not None:
        request.target, request.detail = target or request.target, detail or request.detail


def identify_request(caller: Identity | None, action: str, target: str, *, change: bool) -> None:
    """Set caller, action and target of the current request, if there is one; ``change``: whether it may be a change."""
    if (request := _under_way.get()) is not None:
        request.caller, request.action, request.target = caller, action, target
        request.is_change = request.is_change and change


def take_change() -> AuditedRequest | None:
    """Return the current change, to be written in the transaction of the change.

    Return None if there is no current change, or it was returned before.
    """
    request = _under_way.get()
    if request is None or not request.is_change or request.written:
        return None
    request.written = True
    return request


class Audit:
    """The audit log: writes the entries that belong to no transaction, and reads and verifies all entries."""

    def __init__(self, store: AuditStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._rejections: dict[tuple[str, ...], AuditEntry] = {}
        """Recent rejections by kind: the newest one, with the number of those that are not written."""
        self._waiting: list[AuditEntry] = []
        self._writing: dict[asyncio.Future[None], Sequence[AuditEntry]] = {}
        self._head: AuditHead | None = None
        """The last entry when it was last read."""
        self._head_logged = AuditHead()
        self._head_logged_at: float | None = None
        self._is_away = False
        """Whether the database rejected the last write, or has not answered it yet."""

    async def close_request(self, request: AuditedRequest, status: int) -> None:
        """Write the entry of a request before its response is sent, so that it is not lost if the daemon then ends."""
        refused, failed = 400 <= status < 500, status >= 500
        if not refused and (request.written or not (request.is_change or failed)):
            return
        request.written = True
        if not request.is_change and status not in (401, 403, 429):
            return
        outcome = FAILED if failed else REFUSED if refused else DONE
        entry = request.make_entry(self._clock(), outcome)
        if not refused and not failed:
            await self._write_entries([entry])
            return
        entry = replace(entry, detail=f"{status} {entry.detail}".strip())
        if self._is_first(entry, str(status)):
            await self._write_entries([entry])

    async def record(
        self,
        action: str,
        caller: Identity | None,
        *,
        origin: str,
        target: str = "",
        outcome: str = DONE,
        detail: str = "",
    ) -> None:
        """Record an action without an HTTP request, such as a report of an agent.

        Rejections of one kind are counted, and written as one entry later.
        """
        request = AuditedRequest(action, origin, True, caller, target, detail)
        entry = request.make_entry(self._clock(), outcome)
        if outcome == DONE or self._is_first(entry, outcome):
            await self._write_entries([entry])

    async def flush_entries(self) -> None:
        """Write counted rejections and the entries that the database did not accept; called periodically."""
        self._keep_counted()
        if not self._writing:
            self._write_waiting()
        if self._writing:
            await asyncio.wait(self._writing, timeout=PATIENCE)

    async def end_writing(self) -> None:
        """Write all entries at the daemon's end; log those that the database does not accept in time."""
        self._keep_counted()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self._until_written()  # A failed write does not start one of the waiting entries.
                self._write_waiting()
                await self._until_written()
        self.give_up()

    def give_up(self) -> None:
        """Log the entries that are not written, or not known to be written."""
        self._keep_counted()
        under_way, self._writing = self._writing, {}
        waiting, self._waiting = self._waiting, []
        for entry in (*chain.from_iterable(under_way.values()), *waiting):
            self._log_entry(entry, "the daemon ends")

    def parse_time(self, text: str, field: str) -> float:
        """Return the time that a user gave, in seconds since the epoch; 0 for an empty text. Raise ``UsageError``."""
        return parse_moment(text, self._clock(), field) if text else 0.0

    async def read_entries(self, entry_filter: AuditFilter, last: float | None = None) -> Sequence[AuditEntry]:
        """Return the entries that match a filter, the oldest first; with ``last``, those of the last seconds only."""
        if last is not None:
            entry_filter = replace(entry_filter, since=self._clock() - last)
        return await query(self._store.audit_entries, entry_filter)

    async def verify_entries(self, start: AuditHead | None = None) -> AuditCheck:
        """Check at most ``MAX_CHECKED`` entries against their hashes, from the one after ``start`` or the first on."""
        if start is None and (problem := await self._find_tampering()):
            return AuditCheck(0, AuditHead(), False, problem)
        checked = 0
        while True:
            check: AuditCheck = await query(self._store.check_audit, start, CHECKED_AT_ONCE)
            checked, start = checked + check.checked, check.last
            if check.is_complete or check.problem or checked >= MAX_CHECKED:
                return replace(check, checked=checked)

    async def watch_head(self) -> None:
        """Log an error if the last known entry was changed or removed, and periodically log the last entry.

        From that line, an administrator can detect that entries were removed later.
        """
        if problem := await self._find_tampering():
            log.error("the audit was changed past the daemon", action="audit-changed", error=problem)
        head = await query(self._store.audit_head)
        now = self._clock()
        is_due = self._head_logged_at is None or now - self._head_logged_at >= HEAD_LOG_INTERVAL
        if is_due and (self._head_logged_at is None or head != self._head_logged):
            log.info("the last entry of the audit", action="audit-head", entry=head.id, hash=head.hash)
            self._head_logged_at, self._head_logged = now, head
        self._head = head

    async def _find_tampering(self) -> str:
        """Return how the last known entry was changed in the database; empty if it was not."""
        head = self._head
        if head is None or head.id == 0:
            return ""
        hashed = await query(self._store.audit_hash, head.id)
        if hashed in ("", head.hash):
            return ""
        return f"entry {head.id} was {'removed' if hashed is None else 'changed'} since the daemon wrote it"

    async def write_and_prune(self, keep: float | None) -> None:
        """Write waiting entries, and remove entries older than ``keep`` seconds (None removes none)."""
        await self.flush_entries()
        try:
            await self.watch_head()
        except StoreUnavailable as error:
            log.warning("the last entry of the audit was not looked at", action="audit-not-tidied", error=error.message)
        if keep is not None:
            try:
                await run_in_database(self._store.forget_audit, min(self._clock(), time.time()) - keep)
            except KoalaError as error:
                log.error("what is old of the audit was not removed", action="audit-not-tidied", error=error.message)

    def _is_first(self, entry: AuditEntry, status: str) -> bool:
        """Check whether a rejection is the first of its kind since the last flush; count it if it is not."""
        kind: tuple[str, ...] = (entry.actor, entry.address, entry.action, status)
        if kind not in self._rejections and len(self._rejections) >= MAX_KINDS:
            kind, entry = (OTHERS,), replace(entry, actor="", role="", how="", address=OTHERS, action=OTHERS, target="")
        elif kind not in self._rejections:
            self._rejections[kind] = replace(entry, times=0)
            return True
        previous = self._rejections.get(kind)
        self._rejections[kind] = replace(entry, times=previous.times + 1 if previous else 1)
        return False

    async def _write_entries(self, entries: list[AuditEntry]) -> None:
        """Write entries, for which the response waits up to ``PATIENCE`` seconds.

        Keep them if the database is unavailable.
        """
        if self._is_away:
            self._log_unwritten(entries, "the database is away")
            self._keep_waiting(entries)
            if not self._writing:
                self._write_waiting()
        elif not (await asyncio.wait({self._begin_write(entries)}, timeout=PATIENCE))[0]:
            self._log_unwritten(entries, f"the database has not answered for {PATIENCE:g} s")

    async def _until_written(self) -> None:
        while self._writing:
            await asyncio.wait(self._writing)

    def _write_waiting(self) -> None:
        entries, self._waiting = self._waiting, []
        if entries:
            self._begin_write(entries, again=True)

    def _begin_write(self, entries: list[AuditEntry], *, again: bool = False) -> "asyncio.Future[None]":
        """Write entries in the writer thread. ``again``: they were logged when an earlier write failed."""
        writing = asyncio.get_running_loop().run_in_executor(_writer, self._store.append_audit, entries)
        self._writing[writing] = entries
        writing.add_done_callback(lambda _: self._finish_write(writing, entries, again))
        return writing

    def _finish_write(self, writing: "asyncio.Future[None]", entries: list[AuditEntry], again: bool) -> None:
        """Handle the result of a write, also when the request that started it no longer waits."""
        if self._writing.pop(writing, None) is None:
            return  # ``give_up`` has logged the entries.
        error = asyncio.CancelledError("the writer has stopped") if writing.cancelled() else writing.exception()
        if error is None:
            self._is_away = False
            self._write_waiting()
        elif isinstance(error, KoalaError):
            self._log_unwritten([] if again else entries, error.message)
            self._keep_waiting(entries)
        else:  # An entry that cannot be written must not block the waiting ones.
            for entry in entries:
                self._log_entry(entry, str(error))

    def _log_unwritten(self, entries: Sequence[AuditEntry], reason: str) -> None:
        """Log each entry once, in case the daemon is killed before the database accepts it."""
        self._is_away = True
        for entry in entries:
            log.error("the database does not take the audit", action="audit-not-written", entry=entry, error=reason)

    def _keep_counted(self) -> None:
        """Queue the counts of repeated rejections for writing, and count anew."""
        counted, self._rejections = [entry for entry in self._rejections.values() if entry.times], {}
        self._keep_waiting(counted)

    def _keep_waiting(self, entries: Sequence[AuditEntry]) -> None:
        """Keep entries until the database is available; only log those beyond ``MAX_WAITING``."""
        for entry in entries:
            if len(self._waiting) >= MAX_WAITING:
                self._log_entry(entry, f"{MAX_WAITING} wait")
            else:
                self._waiting.append(entry)

    def _log_entry(self, entry: AuditEntry, reason: str) -> None:
        log.error("an entry of the audit is only here", action="audit-entry", entry=entry, error=reason)
