"""SQL tables of the daemon's services: login tokens, undelivered notifications and link measurements."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select

from koalapy.model.alert import AlertKey, AlertKind, AlertMark, MarkAction
from koalapy.model.history import KEPT_S, LOAD_KEPT_S, LOAD_SLOT_S, LocalLoad, Sample
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.notification import Notification
from koalapy.model.request import ClusterName
from koalapy.ports import StoredToken
from koalapy.store import tables
from koalapy.store.database import Database, chunks, upsert

MAX_RETAINED = 1000
"""Maximum stored measurements of each pair of clusters and kind."""

_columns = tables.measurements.c


class SqlTokens:
    """The ``TokenStore`` port on a database. It stores digests of tokens, never the tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tokens(self) -> list[StoredToken]:
        query = select(tables.tokens).order_by(tables.tokens.c.id)
        return [StoredToken(**row) for row in self._database.rows(query)]

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        with self._database.writing() as connection:
            upsert(connection, tables.tokens, [asdict(token) for token in tokens])

    def remove_tokens(self, tokens: Collection[int]) -> None:
        with self._database.writing() as connection:
            for chunk in chunks(tokens):
                connection.execute(delete(tables.tokens).where(tables.tokens.c.id.in_(chunk)))


class SqlNotifications:
    """The ``NotificationStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def notifications(self) -> list[Notification]:
        query = select(tables.notifications).order_by(tables.notifications.c.id)
        return [Notification(**row) for row in self._database.rows(query)]

    def save_notifications(self, notifications: Sequence[Notification]) -> None:
        """Insert or replace notifications in one transaction."""
        with self._database.writing() as connection:
            write_notifications(connection, notifications)

    def remove_notifications(self, notifications: Collection[int]) -> None:
        """Delete notifications by id."""
        with self._database.writing() as connection:
            for chunk in chunks(notifications):
                connection.execute(delete(tables.notifications).where(tables.notifications.c.id.in_(chunk)))


def write_notifications(connection: Connection, notifications: Sequence[Notification]) -> None:
    """Insert or replace notifications as part of a transaction."""
    upsert(connection, tables.notifications, [asdict(notification) for notification in notifications])


class SqlSamples:
    """The ``SampleStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_sample(self, sample: Sample) -> None:
        with self._database.writing() as connection:
            connection.execute(delete(tables.samples).where(tables.samples.c.at < sample.at - KEPT_S))
            upsert(connection, tables.samples, [asdict(sample)])

    def samples(self, since: float) -> list[Sample]:
        query = select(tables.samples).where(tables.samples.c.at >= since).order_by(tables.samples.c.at)
        return [Sample(**row) for row in self._database.rows(query)]

    def add_local_load(self, loads: Sequence[LocalLoad]) -> None:
        table, oldest = tables.local_load, max(load.slot for load in loads) - int(LOAD_KEPT_S // LOAD_SLOT_S)
        with self._database.writing() as connection:
            connection.execute(delete(table).where(table.c.slot < oldest))
            upsert(connection, table, [asdict(load) for load in loads])

    def local_load(self, first_slot: int, joined_slots: int) -> list[LocalLoad]:
        columns = tables.local_load.c
        slot = (columns.slot // joined_slots).label("slot")
        means = (func.avg(columns.local).label("local"), func.avg(columns.total).label("total"))
        query = select(slot, columns.cluster, *means).where(columns.slot >= first_slot)
        rows = self._database.rows(query.group_by(columns.cluster, slot).order_by(columns.cluster, slot))
        return [LocalLoad(**row) for row in rows]


class SqlAlertMarks:
    """The ``AlertMarkStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def alert_marks(self) -> list[AlertMark]:
        rows = self._database.rows(select(tables.alert_marks))
        return [
            AlertMark(**{**row, "kind": AlertKind(row["kind"]), "action": MarkAction(row["action"])})
            for row in rows
            if row["kind"] in set(AlertKind)
        ]

    def save_alert_marks(self, marks: Sequence[AlertMark], removed: Collection[AlertKey], now: float) -> None:
        columns = tables.alert_marks.c
        with self._database.writing() as connection:
            connection.execute(delete(tables.alert_marks).where(columns.until <= now))
            for kind, target in removed:
                connection.execute(
                    delete(tables.alert_marks).where(columns.kind == kind.value, columns.target == target)
                )
            upsert(connection, tables.alert_marks, [asdict(mark) for mark in marks])


class SqlMeasurements:
    """The ``MeasurementStore`` port on a database."""

    def __init__(self, database: Database, max_retained: int = MAX_RETAINED) -> None:
        self._database, self._max_retained = database, max_retained

    def add(self, measurement: Measurement) -> None:
        """Store a measurement, and delete the oldest of its pair and kind beyond ``max_retained``."""
        row = asdict(measurement)
        row |= {"kind": measurement.kind.value, "job_id": row.pop("job")}
        same_series = (
            (_columns.one == measurement.one)
            & (_columns.other == measurement.other)
            & (_columns.kind == measurement.kind.value)
        )
        newest_first = select(_columns.id).where(same_series).order_by(_columns.id.desc())
        with self._database.writing() as connection:
            # The response to a commit may be lost, so this may be a retry.
            duplicate = select(_columns.id).where(same_series, _columns.at == measurement.at)
            if connection.execute(duplicate).first() is not None:
                return
            connection.execute(insert(tables.measurements).values(row))
            oldest_id = connection.execute(newest_first.offset(self._max_retained).limit(1)).scalar()
            if oldest_id is not None:
                connection.execute(delete(tables.measurements).where(same_series, _columns.id <= oldest_id))

    def latest(self) -> list[Measurement]:
        """Return the newest measurements of each pair and kind; see ``MeasurementStore.latest``."""
        series = (_columns.one, _columns.other, _columns.kind, _columns.error != "")
        rank = func.row_number().over(partition_by=series, order_by=_columns.id.desc()).label("rank")
        ranked = select(_columns.id, _columns.kind, _columns.error, rank).subquery()
        kinds = (MeasurementKind.PINGPONG.value, MeasurementKind.RELAYED.value)
        is_good = ranked.c.kind.in_(kinds) & (ranked.c.error == "")
        newest = select(ranked.c.id).where((ranked.c.rank == 1) | (is_good & (ranked.c.rank <= MAX_PINGPONGS)))
        return self._read_measurements(select(tables.measurements).where(_columns.id.in_(newest)).order_by(_columns.id))

    def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        forward = (_columns.one == one) & (_columns.other == other)
        backward = (_columns.one == other) & (_columns.other == one)
        query = select(tables.measurements).where(forward | backward)
        return self._read_measurements(query.order_by(_columns.id.desc()).limit(limit))

    def _read_measurements(self, query: Any) -> list[Measurement]:
        return [_to_measurement(row) for row in self._database.rows(query)]


def _to_measurement(row: RowMapping) -> Measurement:
    values = {name: value for name, value in row.items() if name not in ("id", "job_id", "kind")}
    return Measurement(**values, kind=MeasurementKind(row["kind"]), job=row["job_id"])
