"""The audit in SQL. Triggers prevent changes of rows, and a hash chain reveals changes that bypass the triggers.

Old rows are deleted from the first on, with the trigger disabled. The hash of the last deleted row is stored, so that
the remaining chain can be checked.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Float, Row, Select, bindparam, delete, func, select, update
from sqlalchemy.types import TypeDecorator

from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead, ChainChecker, chain_hash
from koalapy.store.database import DatabaseStore, insert_rows
from koalapy.store.tables import audit as table
from koalapy.store.tables import audit_chain as chain

ENTRY = [column for column in table.columns if column.name != "hash"]
"""Columns of ``AuditEntry``."""
KEPT = "audit_is_kept"
"""Name of the trigger that prevents deletions."""
MAX_LATE = 2000
"""Maximum entries that may be written after newer ones."""


class AuditStore(DatabaseStore):
    """The append-only audit."""

    def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        with self._database.writing() as connection:
            write_audit(connection, entries)

    def audit_entries(self, audit_filter: AuditFilter) -> list[AuditEntry]:
        """Return the entries that match a filter, oldest first unless it has ``newest_first``."""
        order = table.c.id.desc() if audit_filter.newest_first else table.c.id
        query, lower_id = select(*ENTRY).order_by(order).limit(audit_filter.limit), audit_filter.after
        for name in ("actor", "action", "target", "outcome"):
            if value := getattr(audit_filter, name):
                query = query.where(table.c[name] == value)
        if audit_filter.until:
            query = query.where(table.c.at < audit_filter.until)
        if audit_filter.before:
            query = query.where(table.c.id < audit_filter.before)
        with self._database.reading() as connection:
            if audit_filter.since:
                first = connection.execute(_first_of(audit_filter.since)).scalar()
                if first is None:
                    return []
                query, lower_id = query.where(table.c.at >= audit_filter.since), max(lower_id, first - 1)
            return [AuditEntry(**row) for row in connection.execute(query.where(table.c.id > lower_id)).mappings()]

    def forget_audit(self, before: float) -> int:
        """Delete the first entries, up to the first one since ``before``, and return their number."""
        if not self._database.rows(select(table.c.id).where(table.c.at < before).limit(1)):
            return 0
        with self._database.writing() as connection:
            # Lock the chain before the table, in the same order as ``write_audit``.
            _read_chain_ends(connection, to_change=True)
            first_kept = connection.execute(select(func.min(table.c.id)).where(table.c.at >= before)).scalar()
            old = table.c.id >= 0 if first_kept is None else table.c.id < first_kept
            last = connection.execute(select(table.c.id, table.c.hash).where(old).order_by(table.c.id.desc()).limit(1))
            if (removed := last.one_or_none()) is None:
                return 0
            if self._database.is_sqlite:
                trigger_query = "select sql from sqlite_master where type = 'trigger' and name = ?"
                trigger = connection.exec_driver_sql(trigger_query, (KEPT,)).scalar_one()
                off, on = f"drop trigger {KEPT}", str(trigger)
            else:
                off, on = (f"alter table audit {change} trigger {KEPT}" for change in ("disable", "enable"))
            connection.exec_driver_sql(off)
            count = connection.execute(delete(table).where(old)).rowcount
            connection.exec_driver_sql(on)
            connection.execute(update(chain).values(removed_id=removed.id, removed_hash=removed.hash))
        return count

    def audit_head(self) -> AuditHead:
        """Return the id and hash of the last entry."""
        with self._database.reading() as connection:
            noted = _read_chain_ends(connection)
            return AuditHead(noted.head_id, noted.head_hash)

    def audit_hash(self, entry: int) -> str | None:
        """Return the hash of an entry; None if it does not exist, empty if it was deleted by age."""
        with self._database.reading() as connection:
            if entry <= _read_chain_ends(connection).removed_id:
                return ""
            stored_hash: str | None = connection.execute(select(table.c.hash).where(table.c.id == entry)).scalar()
            return stored_hash

    def check_audit(self, checked: AuditHead | None, limit: int) -> AuditCheck:
        """Check the hashes of at most ``limit`` entries after a checked one; None: from the first entry."""
        with self._database.reading() as connection:
            noted = _read_chain_ends(connection)
            removed, head = AuditHead(noted.removed_id, noted.removed_hash), AuditHead(noted.head_id, noted.head_hash)
            checker = ChainChecker(removed if checked is None or checked.id < removed.id else checked)
            query = select(*ENTRY, table.c.hash).where(table.c.id > (0 if checked is None else checker.last.id))
            rows = connection.execute(query.order_by(table.c.id).limit(limit)).all()
            for row in rows:
                *values, hashed = row
                if problem := checker.problem_of(AuditEntry(**dict(zip(NAMES, values, strict=True))), hashed):
                    return checker.result(head, is_end=False, problem=problem)
            return checker.result(head, is_end=len(rows) < limit)


def _stored_form(kind: object) -> Callable[[Any, Dialect], Any]:
    """Return the function that converts a value to what a column of this type returns later.

    Texts are truncated to their columns, with invalid characters replaced.
    """
    if isinstance(kind, TypeDecorator):
        return kind.process_bind_param
    return _as_float if isinstance(kind, Float) else lambda value, _: value


def _as_float(value: Any, _: Dialect) -> Any:
    return float(value) if isinstance(value, int) else value


NAMES = [column.name for column in ENTRY]
_TO_STORED = [(column.name, _stored_form(column.type)) for column in ENTRY]
_CHAIN_ENDS, _CHAIN_ENDS_TO_CHANGE = select(chain), select(chain).with_for_update()
_LAST_ID = select(func.max(table.c.id))
_NOTE_HEAD = update(chain).values(head_id=bindparam("last"), head_hash=bindparam("hashed"))
"""Statements of each transaction. To build one takes longer than to run it."""


def _read_chain_ends(connection: Connection, *, to_change: bool = False) -> Row[tuple[int, int, str, int, str]]:
    return connection.execute(_CHAIN_ENDS_TO_CHANGE if to_change else _CHAIN_ENDS).one()


def _first_of(since: float) -> Select[int]:
    """Return the query for the first entry to search for entries since a time.

    Ids follow the times of their entries, except for entries that waited until the database was available.
    """
    first = select(table.c.id).where(table.c.at >= since).order_by(table.c.at).limit(MAX_LATE).subquery()
    return select(func.min(first.c.id))


def write_audit(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """Append entries as part of a transaction. Such transactions run one after the other."""
    if not entries:
        return
    noted = _read_chain_ends(connection, to_change=True)
    last: int = connection.execute(_LAST_ID).scalar() or 0
    first, hashed = max(noted.head_id, last) + 1, noted.head_hash
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, first):
        row = {name: convert(getattr(entry, name), connection.dialect) for name, convert in _TO_STORED}
        row["id"] = number
        hashed = chain_hash(hashed, AuditEntry(**row))
        rows.append(row | {"hash": hashed})
    insert_rows(connection, table, rows)
    connection.execute(_NOTE_HEAD, {"last": rows[-1]["id"], "hashed": hashed})
