"""The audit in SQL. Triggers keep its rows as they are; what is too old is removed past them, by us and nobody else."""

from collections.abc import Sequence

from sqlalchemy import Connection, Select, delete, func, insert, select

from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.store.database import Database
from koalapy.store.tables import audit as table

GIVEN = [column.name for column in table.columns if column.name != "id"]
KEPT = "audit_is_kept"
"""The trigger that refuses that rows are removed."""
MAX_LATE = 2000
"""Entries that may be written after such as are newer."""


class SqlAudit:
    """The ``AuditStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        with self._database.writing() as connection:
            write_audit(connection, entries)

    def audit_entries(self, which: AuditFilter) -> list[AuditEntry]:
        order = table.c.id.desc() if which.newest_first else table.c.id
        query, after = select(table).order_by(order).limit(which.limit), which.after
        for name in ("actor", "action", "target", "outcome"):
            if value := getattr(which, name):
                query = query.where(table.c[name] == value)
        if which.before:
            query = query.where(table.c.id < which.before)
        with self._database.reading() as connection:
            if which.since:
                first = connection.execute(_first_of(which.since)).scalar()
                if first is None:
                    return []
                query, after = query.where(table.c.at >= which.since), max(after, first - 1)
            return [AuditEntry(**row) for row in connection.execute(query.where(table.c.id > after)).mappings()]

    def forget_audit(self, before: float) -> int:
        old = table.c.at < before
        if not self._database.rows(select(table.c.id).where(old).limit(1)):
            return 0
        with self._database.writing() as connection:
            if self._database.is_sqlite:
                made = "select sql from sqlite_master where type = 'trigger' and name = ?"
                trigger = connection.exec_driver_sql(made, (KEPT,)).scalar_one()
                off, on = f"drop trigger {KEPT}", str(trigger)
            else:
                off, on = (f"alter table audit {what} trigger {KEPT}" for what in ("disable", "enable"))
            connection.exec_driver_sql(off)
            gone = connection.execute(delete(table).where(old)).rowcount
            connection.exec_driver_sql(on)
        return gone


def _first_of(since: float) -> Select[int]:
    """From which number on to look for what is of after a moment.

    Numbers follow the times of their entries, but for some that waited until the database took them.
    """
    first = select(table.c.id).where(table.c.at >= since).order_by(table.c.at).limit(MAX_LATE).subquery()
    return select(func.min(first.c.id))


def write_audit(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """As a part of a transaction."""
    if entries:
        connection.execute(insert(table), [{name: getattr(entry, name) for name in GIVEN} for entry in entries])
