"""The history of the links between clusters in SQL, beside the jobs."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, delete, func, insert, select

from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.request import ClusterName
from koalapy.store import tables
from koalapy.store.database import Database

MAX_RETAINED = 1000
"""Measurements of each pair and kind."""

_columns = tables.measurements.c


class SqlMeasurements:
    """The ``MeasurementStore`` port on a database."""

    def __init__(self, database: Database, max_retained: int = MAX_RETAINED) -> None:
        self._database, self._max_retained = database, max_retained

    def add(self, measurement: Measurement) -> None:
        row = asdict(measurement)
        row |= {"kind": measurement.kind.value, "job_id": row.pop("job")}
        same = (
            (_columns.one == measurement.one)
            & (_columns.other == measurement.other)
            & (_columns.kind == measurement.kind.value)
        )
        newest = select(_columns.id).where(same).order_by(_columns.id.desc())
        with self._database.writing() as connection:
            # The answer to a commit may be lost: this may be the second try.
            if connection.execute(select(_columns.id).where(same, _columns.at == measurement.at)).first() is not None:
                return
            connection.execute(insert(tables.measurements).values(row))
            first_too_old = connection.execute(newest.offset(self._max_retained).limit(1)).scalar()
            if first_too_old is not None:
                connection.execute(delete(tables.measurements).where(same, _columns.id <= first_too_old))

    def latest(self) -> list[Measurement]:
        sort = (_columns.one, _columns.other, _columns.kind, _columns.error != "")
        place = func.row_number().over(partition_by=sort, order_by=_columns.id.desc()).label("place")
        placed = select(_columns.id, _columns.kind, _columns.error, place).subquery()
        good = (placed.c.kind == MeasurementKind.PINGPONG.value) & (placed.c.error == "")
        chosen = select(placed.c.id).where((placed.c.place == 1) | (good & (placed.c.place <= MAX_PINGPONGS)))
        return self._read(select(tables.measurements).where(_columns.id.in_(chosen)).order_by(_columns.id))

    def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        there = (_columns.one == one) & (_columns.other == other)
        back = (_columns.one == other) & (_columns.other == one)
        query = select(tables.measurements).where(there | back)
        return self._read(query.order_by(_columns.id.desc()).limit(limit))

    def _read(self, query: Any) -> list[Measurement]:
        return [_measurement(row) for row in self._database.rows(query)]


def _measurement(row: RowMapping) -> Measurement:
    values = {name: value for name, value in row.items() if name not in ("id", "job_id", "kind")}
    return Measurement(**values, kind=MeasurementKind(row["kind"]), job=row["job_id"])
