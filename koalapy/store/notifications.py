"""Notifications that are not delivered yet."""

from collections.abc import Collection, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, delete, select

from koalapy.model.notification import Notification
from koalapy.store.database import Database, chunks, upsert
from koalapy.store.tables import notifications as table


class SqlNotifications:
    """The ``NotificationStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def notifications(self) -> list[Notification]:
        return [Notification(**row) for row in self._database.rows(select(table).order_by(table.c.id))]

    def save_notifications(self, notifications: Sequence[Notification]) -> None:
        with self._database.writing() as connection:
            write_notifications(connection, notifications)

    def remove_notifications(self, notifications: Collection[int]) -> None:
        with self._database.writing() as connection:
            for some in chunks(notifications):
                connection.execute(delete(table).where(table.c.id.in_(some)))


def write_notifications(connection: Connection, notifications: Sequence[Notification]) -> None:
    """As a part of a transaction."""
    upsert(connection, table, [asdict(notification) for notification in notifications])
