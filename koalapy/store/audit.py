"""The audit in SQL. Triggers keep its rows as they are; what is too old is removed past them, by us and nobody else."""

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.store.database import Database
from koalapy.store.tables import audit as table

GIVEN = [column.name for column in table.columns if column.name != "id"]
KEPT = "audit_is_kept"
"""The trigger that refuses that rows are removed."""


class SqlAudit:
    """The ``AuditStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        with self._database.writing() as connection:
            write_audit(connection, entries)

    def audit_entries(self, which: AuditFilter) -> list[AuditEntry]:
        query = select(table).where(table.c.id > which.after).order_by(table.c.id).limit(which.limit)
        for column, value in ((table.c.actor, which.actor), (table.c.action, which.action)):
            if value:
                query = query.where(column == value)
        if which.since:
            query = query.where(table.c.at >= which.since)
        return [AuditEntry(**row) for row in self._database.rows(query)]

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


def write_audit(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """As a part of a transaction."""
    if entries:
        connection.execute(insert(table), [{name: getattr(entry, name) for name in GIVEN} for entry in entries])
