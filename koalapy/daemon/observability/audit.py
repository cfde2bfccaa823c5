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
from koalapy.ports import AuditStore

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
class Deed:
    """A request in progress, with the content of its audit entry."""

    action: str
    address: str
    is_change: bool
    by: Identity | None = None
    target: str = ""
    detail: str = ""
    written: bool = False
    """Whether it is part of a transaction, or needs no further entry."""

    def entry(self, at: float, outcome: str) -> AuditEntry:
        user, role, how = (self.by.user, str(self.by.role), self.by.how) if self.by else ("", "", "")
        target, detail = _storable(self.target), _storable(self.detail)
        return AuditEntry(at, user, role, how, self.address, self.action, target, outcome, detail)


def _storable(text: str) -> str:
    """Return a text that every database accepts: without lone surrogates and NUL."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


_under_way: ContextVar[Deed | None] = ContextVar("deed", default=None)


def begin(deed: Deed) -> None:
    """Make ``deed`` the current request of this task and of the tasks that it starts."""
    _under_way.set(deed)


def about(target: str = "", detail: str = "") -> None:
    """Set target and detail of the current request, if there is one; they must contain no secrets."""
    if (deed := _under_way.get()) is not None:
        deed.target, deed.detail = target or deed.target, detail or deed.detail


def under_way(by: Identity | None, action: str, target: str, *, change: bool) -> None:
    """Set caller, action and target of the current request, if there is one; ``change``: whether it may be a change."""
    if (deed := _under_way.get()) is not None:
        deed.by, deed.action, deed.target = by, action, target
        deed.is_change = deed.is_change and change


def take() -> Deed | None:
    """Return the current change, to be written in the transaction of the change.

    Return None if there is no current change, or it was returned before.
    """
    deed = _under_way.get()
    if deed is None or not deed.is_change or deed.written:
        return None
    deed.written = True
    return deed


class Audit:
    """The audit log: writes the entries that belong to no transaction, and reads and verifies all entries."""

    def __init__(self, store: AuditStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._more: dict[tuple[str, ...], AuditEntry] = {}
        """Recent rejections by kind: the newest one, with the number of those that are not written."""
        self._waiting: list[AuditEntry] = []
        self._writing: dict[asyncio.Future[None], Sequence[AuditEntry]] = {}
        self._head: AuditHead | None = None
        """The last entry when it was last read."""
        self._head_logged = AuditHead()
        self._head_logged_at: float | None = None
        self._is_away = False
        """Whether the database rejected the last write, or has not answered it yet."""

    async def close(self, deed: Deed, status: int) -> None:
        """Write the entry of a request before its response is sent, so that it is not lost if the daemon then ends."""
        refused, failed = 400 <= status < 500, status >= 500
        if not refused and (deed.written or not (deed.is_change or failed)):
            return
        deed.written = True
        if not deed.is_change and status not in (401, 403, 429):
            return
        outcome = FAILED if failed else REFUSED if refused else DONE
        entry = deed.entry(self._clock(), outcome)
        if not refused and not failed:
            await self._write([entry])
            return
        await self._refused(replace(entry, detail=f"{status} {entry.detail}".strip()), str(status))

    async def record(
        self, action: str, by: Identity | None, *, origin: str, target: str = "", outcome: str = DONE, detail: str = ""
    ) -> None:
        """Record an action without an HTTP request, such as a report of an agent.

        Rejections of one kind are counted, and written as one entry later.
        """
        deed = Deed(action, origin, True, by, target, detail)
        entry = deed.entry(self._clock(), outcome)
        if outcome == DONE or self._is_first(entry, outcome):
            await self._write([entry])

    async def flush(self) -> None:
        """Write counted rejections and the entries that the database did not accept; called periodically."""
        self._keep_counted()
        if not self._writing:
            self._write_waiting()
        if self._writing:
            await asyncio.wait(self._writing, timeout=PATIENCE)

    async def end(self) -> None:
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
            self._tell(entry, "the daemon ends")

    async def entries(self, which: AuditFilter, last: float | None = None) -> Sequence[AuditEntry]:
        """Return the entries that match a filter, the oldest first; with ``last``, those of the last seconds only."""
        if last is not None:
            which = replace(which, since=self._clock() - last)
        return await query(self._store.audit_entries, which)

    async def verify(self, after: AuditHead | None = None) -> AuditCheck:
        """Check at most ``MAX_CHECKED`` entries against their hashes, from the one after ``after`` or the first on."""
        if after is None and (problem := await self._changed_since_seen()):
            return AuditCheck(0, AuditHead(), False, problem)
        checked = 0
        while True:
            check: AuditCheck = await query(self._store.check_audit, after, CHECKED_AT_ONCE)
            checked, after = checked + check.checked, check.last
            if check.is_complete or check.problem or checked >= MAX_CHECKED:
                return replace(check, checked=checked)

    async def watch_head(self) -> None:
        """Log an error if the last known entry was changed or removed, and periodically log the last entry.

        From that line, an administrator can detect that entries were removed later.
        """
        if problem := await self._changed_since_seen():
            log.error("the audit was changed past the daemon", action="audit-changed", error=problem)
        head = await query(self._store.audit_head)
        now = self._clock()
        is_due = self._head_logged_at is None or now - self._head_logged_at >= HEAD_LOG_INTERVAL
        if is_due and (self._head_logged_at is None or head != self._head_logged):
            log.info("the last entry of the audit", action="audit-head", entry=head.id, hash=head.hash)
            self._head_logged_at, self._head_logged = now, head
        self._head = head

    async def _changed_since_seen(self) -> str:
        """Return how the last known entry was changed in the database; empty if it was not."""
        seen = self._head
        if seen is None or seen.id == 0:
            return ""
        hashed = await query(self._store.audit_hash, seen.id)
        if hashed in ("", seen.hash):
            return ""
        return f"entry {seen.id} was {'removed' if hashed is None else 'changed'} since the daemon wrote it"

    async def tidy(self, keep: float | None) -> None:
        """Write waiting entries, and remove entries older than ``keep`` seconds (None removes none)."""
        await self.flush()
        try:
            await self.watch_head()
        except StoreUnavailable as error:
            log.warning("the last entry of the audit was not looked at", action="audit-not-tidied", error=error.message)
        if keep is not None:
            try:
                await run_in_database(self._store.forget_audit, min(self._clock(), time.time()) - keep)
            except KoalaError as error:
                log.error("what is old of the audit was not removed", action="audit-not-tidied", error=error.message)

    async def _refused(self, entry: AuditEntry, status: str) -> None:
        if self._is_first(entry, status):
            await self._write([entry])

    def _is_first(self, entry: AuditEntry, status: str) -> bool:
        """Check whether a rejection is the first of its kind since the last flush; count it if it is not."""
        kind: tuple[str, ...] = (entry.actor, entry.address, entry.action, status)
        if kind not in self._more and len(self._more) >= MAX_KINDS:
            kind, entry = (OTHERS,), replace(entry, actor="", role="", how="", address=OTHERS, action=OTHERS, target="")
        elif kind not in self._more:
            self._more[kind] = replace(entry, times=0)
            return True
        before = self._more.get(kind)
        self._more[kind] = replace(entry, times=before.times + 1 if before else 1)
        return False

    async def _write(self, entries: list[AuditEntry]) -> None:
        if self._is_away:
            self._not_taken(entries, "the database is away")
            self._keep(entries)
            if not self._writing:
                self._write_waiting()
        elif not (await asyncio.wait({self._begin(entries)}, timeout=PATIENCE))[0]:
            self._not_taken(entries, f"the database has not answered for {PATIENCE:g} s")

    async def _until_written(self) -> None:
        while self._writing:
            await asyncio.wait(self._writing)

    def _write_waiting(self) -> None:
        entries, self._waiting = self._waiting, []
        if entries:
            self._begin(entries, again=True)

    def _begin(self, entries: list[AuditEntry], *, again: bool = False) -> "asyncio.Future[None]":
        writing = asyncio.get_running_loop().run_in_executor(_writer, self._store.append_audit, entries)
        self._writing[writing] = entries
        writing.add_done_callback(lambda _: self._end(writing, entries, again))
        return writing

    def _end(self, writing: "asyncio.Future[None]", entries: list[AuditEntry], again: bool) -> None:
        """Handle the result of a write, also when the request that started it no longer waits."""
        if self._writing.pop(writing, None) is None:
            return  # ``give_up`` has logged the entries.
        error = asyncio.CancelledError("the writer has stopped") if writing.cancelled() else writing.exception()
        if error is None:
            self._is_away = False
            self._write_waiting()
        elif isinstance(error, KoalaError):
            self._not_taken([] if again else entries, error.message)
            self._keep(entries)
        else:  # An entry that cannot be written must not block the waiting ones.
            for entry in entries:
                self._tell(entry, str(error))

    def _not_taken(self, entries: Sequence[AuditEntry], reason: str) -> None:
        """Log each entry once, in case the daemon is killed before the database accepts it."""
        self._is_away = True
        for entry in entries:
            log.error("the database does not take the audit", action="audit-not-written", entry=entry, error=reason)

    def _keep_counted(self) -> None:
        counted, self._more = [entry for entry in self._more.values() if entry.times], {}
        self._keep(counted)

    def _keep(self, entries: Sequence[AuditEntry]) -> None:
        for entry in entries:
            if len(self._waiting) >= MAX_WAITING:
                self._tell(entry, f"{MAX_WAITING} wait")
            else:
                self._waiting.append(entry)

    def _tell(self, entry: AuditEntry, reason: str) -> None:
        log.error("an entry of the audit is only here", action="audit-entry", entry=entry, error=reason)
