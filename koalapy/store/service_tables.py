"""SQL tables of the daemon's services: tokens, notifications, alert marks, measurements and files."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, RowMapping, cast, delete, func, insert, literal_column, select, update

from koalapy.model.alert import AlertKey, AlertKind, AlertMark, MarkAction
from koalapy.model.history import CLUSTER_SLOT_S, SLOTS_KEPT_S, UseSum
from koalapy.model.job import JobId
from koalapy.model.limits import ShareWeight
from koalapy.model.measurement import MAX_PINGPONGS, Measurement, MeasurementKind
from koalapy.model.notification import Notification
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation
from koalapy.store import tables
from koalapy.store.database import Database, DatabaseStore, chunks, upsert
from koalapy.store.records import StoredBundle, StoredResult, StoredToken

MAX_RETAINED = 1000
"""Maximum stored measurements of each pair of clusters and kind."""

_columns = tables.measurements.c


class TokenStore(DatabaseStore):
    """The digests of issued tokens, never the tokens."""

    def tokens(self) -> list[StoredToken]:
        """Return all tokens in order of their ids."""
        query = select(tables.tokens).order_by(tables.tokens.c.id)
        return [StoredToken(**row) for row in self._database.rows(query)]

    def save_tokens(self, tokens: Sequence[StoredToken]) -> None:
        """Insert or replace tokens in one transaction."""
        with self._database.writing() as connection:
            upsert(connection, tables.tokens, [asdict(token) for token in tokens])

    def remove_tokens(self, tokens: Collection[int]) -> None:
        """Delete tokens by id."""
        with self._database.writing() as connection:
            for chunk in chunks(tokens):
                connection.execute(delete(tables.tokens).where(tables.tokens.c.id.in_(chunk)))


class NotificationStore(DatabaseStore):
    """The undelivered notifications."""

    def notifications(self) -> list[Notification]:
        """Return all undelivered notifications in order of their ids."""
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


_RESERVATION = TypeAdapter(Reservation)


class ReservationStore(DatabaseStore):
    """The reservations, also ended ones."""

    def load(self) -> list[Reservation]:
        """Return all reservations in order of their ids."""
        rows = self._database.rows(select(tables.reservations).order_by(tables.reservations.c.id))
        return [_RESERVATION.validate_python(dict(row)) for row in rows]

    def save(self, reservation: Reservation) -> None:
        """Insert or replace a reservation."""
        with self._database.writing() as connection:
            upsert(connection, tables.reservations, [asdict(reservation)])

    def remove(self, ids: Collection[int]) -> None:
        with self._database.writing() as connection:
            for chunk in chunks(ids):
                connection.execute(delete(tables.reservations).where(tables.reservations.c.id.in_(chunk)))


class ShareWeightStore(DatabaseStore):
    """The weights in fair share that operators have set."""

    def load(self) -> list[ShareWeight]:
        return [ShareWeight(**row) for row in self._database.rows(select(tables.share_weights))]

    def save(self, weight: ShareWeight) -> None:
        """Insert or replace the weight of a user."""
        with self._database.writing() as connection:
            upsert(connection, tables.share_weights, [asdict(weight)])


class SampleStore(DatabaseStore):
    """The sums of samples of the nodes and jobs."""

    def add(self, samples: Sequence[UseSum], now: float) -> None:
        """Add the samples of one time to the sums of their slots, and delete old sums.

        ``samples`` are sums of one sample each; their ``start`` is ignored.
        """
        rows = [
            {"length": length, "start": int(now // length) * length, "cluster": sample.cluster}
            | {name: getattr(sample, name) for name in _SUMMED}
            for length in SLOTS_KEPT_S
            for sample in samples
            if length >= CLUSTER_SLOT_S or not sample.cluster
        ]
        with self._database.writing() as connection:
            for length, kept_s in SLOTS_KEPT_S.items():
                connection.execute(delete(_sums).where(_sums.c.length == length, _sums.c.start < now - kept_s))
            upsert(connection, _sums, rows, add=True)

    def read(
        self, length: int, joined: int, since: float, until: float, clusters: Collection[ClusterName]
    ) -> list[UseSum]:
        """Return the sums of slots of ``joined`` seconds from those of a stored length, by cluster and time.

        ``clusters``: those to return, ``""`` for all together; empty for each single one.
        """
        columns = _sums.c
        start = (columns.start - columns.start % joined).label("start")
        sums = [cast(func.sum(columns[name]), columns[name].type).label(name) for name in _SUMMED]
        query = select(columns.cluster, start, *sums).where(
            columns.length == length,
            columns.start >= since,
            columns.start < until,
            columns.cluster.in_(clusters) if clusters else columns.cluster != "",
        )
        rows = self._database.rows(query.group_by(columns.cluster, start).order_by(columns.cluster, start))
        return [UseSum(**row) for row in rows]


_sums = tables.use_sums
_SUMMED = [column.name for column in _sums.columns if not column.primary_key]


class AlertMarkStore(DatabaseStore):
    """The acknowledgements and silences of alerts."""

    def alert_marks(self) -> list[AlertMark]:
        """Return all marks, including expired ones."""
        rows = self._database.rows(select(tables.alert_marks))
        return [
            AlertMark(**{**row, "kind": AlertKind(row["kind"]), "action": MarkAction(row["action"])})
            for row in rows
            if row["kind"] in set(AlertKind)
        ]

    def save_alert_marks(self, marks: Sequence[AlertMark], removed: Collection[AlertKey], now: float) -> None:
        """Insert or replace marks, and remove others and expired ones, in one transaction."""
        columns = tables.alert_marks.c
        with self._database.writing() as connection:
            connection.execute(delete(tables.alert_marks).where(columns.until <= now))
            for kind, target in removed:
                connection.execute(
                    delete(tables.alert_marks).where(columns.kind == kind.value, columns.target == target)
                )
            upsert(connection, tables.alert_marks, [asdict(mark) for mark in marks])


class MeasurementStore(DatabaseStore):
    """The measurements of links."""

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

    def history(self, first: ClusterName, second: ClusterName, limit: int) -> list[Measurement]:
        """Return the measurements between two clusters in both directions, newest first."""
        forward = (_columns.one == first) & (_columns.other == second)
        backward = (_columns.one == second) & (_columns.other == first)
        query = select(tables.measurements).where(forward | backward)
        return self._read_measurements(query.order_by(_columns.id.desc()).limit(limit))

    def _read_measurements(self, query: Any) -> list[Measurement]:
        return [_to_measurement(row) for row in self._database.rows(query)]


def _to_measurement(row: RowMapping) -> Measurement:
    values = {name: value for name, value in row.items() if name not in ("id", "job_id", "kind")}
    return Measurement(**values, kind=MeasurementKind(row["kind"]), job=row["job_id"])


class FileStore(DatabaseStore):
    """The replicas, uploaded bundles and results."""

    # Replicas

    def replicas(self) -> list[Replica]:
        """Return all replicas in order of name and cluster."""
        order = tables.replicas.c.name, tables.replicas.c.cluster
        return [_to_replica(row) for row in self._database.rows(select(tables.replicas).order_by(*order))]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        """Insert or replace replicas, by name and cluster, in one transaction."""
        with self._database.writing() as connection:
            upsert(connection, tables.replicas, [_replica_row(replica) for replica in replicas])

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
        """Delete replicas of a logical file; ignore those that do not exist."""
        replicas = tables.replicas.c
        statement = delete(tables.replicas).where(replicas.name == name, replicas.cluster.in_(clusters))
        with self._database.writing() as connection:
            connection.execute(statement)

    # Bundles

    def bundles(self) -> list[StoredBundle]:
        rows = self._database.rows(select(tables.bundles))
        return [StoredBundle(**{**row, "owners": tuple(row["owners"])}) for row in rows]

    def save_bundles(self, bundles: Sequence[StoredBundle]) -> None:
        with self._database.writing() as connection:
            upsert(connection, tables.bundles, [asdict(bundle) for bundle in bundles])

    def remove_bundle(self, bundle: str) -> None:
        with self._database.writing() as connection:
            connection.execute(delete(tables.bundles).where(tables.bundles.c.id == bundle))

    # Results

    def results(self, job: JobId, generation: int) -> list[StoredResult]:
        """Return the results of one attempt in order of rank."""
        results = tables.results.c
        query = select(tables.results).where(results.job_id == job, results.generation == generation)
        return [_to_result(row) for row in self._database.rows(query.order_by(results.rank))]

    def results_sizes(self) -> dict[str, int]:
        """Return the bytes of stored results, by owner."""
        results, jobs = tables.results.c, tables.jobs.c
        # Sums by job first, by the index of stored results, since most jobs have none.
        sizes = select(results.job_id, func.sum(results.size).label("size")).where(results.size > literal_column("0"))
        by_job = sizes.group_by(results.job_id).subquery()
        query = select(jobs.owner, func.sum(by_job.c.size).label("size")).select_from(by_job)
        query = query.join(tables.jobs, jobs.id == by_job.c.job_id).group_by(jobs.owner)
        return {row["owner"]: int(row["size"]) for row in self._database.rows(query)}

    def save_result(self, result: StoredResult) -> int:
        """Store a result, and return the bytes of the results that it replaces.

        It replaces the component's earlier result and those of all earlier attempts.
        """
        results = tables.results.c
        row = asdict(result)
        row |= {"job_id": row.pop("job")}
        same = (results.generation == result.generation) & (results.rank == result.rank)
        replaced = (results.job_id == result.job) & ((results.generation < result.generation) | same)
        with self._database.writing() as connection:
            size = connection.execute(select(func.coalesce(func.sum(results.size), 0)).where(replaced)).scalar_one()
            connection.execute(delete(tables.results).where(replaced))
            connection.execute(insert(tables.results).values(row))
        return int(size)

    def old_results(self, before: float, owners: Collection[str] | None = None) -> dict[JobId, int]:
        """Return the bytes of stored results by job, for jobs that ended before a time, oldest end first.

        ``owners=None``: jobs of all owners. Raise ``LeaseLost`` like a writing call, since the caller deletes the
        files.
        """
        results, jobs = tables.results.c, tables.jobs.c
        old = select(results.job_id, func.sum(results.size).label("size")).join(tables.jobs, jobs.id == results.job_id)
        old = old.where(jobs.ended_at < before, results.size > literal_column("0")).group_by(
            results.job_id, jobs.ended_at
        )
        if owners is not None:
            old = old.where(jobs.owner.in_(owners))
        with self._database.writing() as connection:  # only the lease holder may delete the files of these results
            sizes = connection.execute(old.order_by(jobs.ended_at, results.job_id)).all()
        return {row.job_id: int(row.size) for row in sizes}

    def clear_results(self, jobs: Collection[JobId]) -> int:
        """Set the size of these jobs' results to 0, and return the bytes that they had.

        The caller deletes the files.
        """
        results, bytes_gone = tables.results.c, 0
        with self._database.writing() as connection:
            for ids in chunks(jobs):
                theirs = results.job_id.in_(ids)
                size = select(func.coalesce(func.sum(results.size), 0)).where(theirs)
                bytes_gone += int(connection.execute(size).scalar_one())
                connection.execute(update(tables.results).where(theirs).values(size=0))
        return bytes_gone

    def forget_results(self, jobs: Sequence[JobId]) -> int:
        """Delete the results of these jobs, and return the bytes that they had."""
        theirs = tables.results.c.job_id.in_(jobs)
        size = select(func.coalesce(func.sum(tables.results.c.size), 0)).where(theirs)
        with self._database.writing() as connection:
            bytes_gone = connection.execute(size).scalar_one()
            connection.execute(delete(tables.results).where(theirs))
        return int(bytes_gone)


def _replica_row(replica: Replica) -> dict[str, Any]:
    row = asdict(replica) | {"state": replica.state.value}
    if replica.parts is not None:
        row["parts"] = [[part.name, part.size, part.checksum] for part in replica.parts]
    return row


def _to_replica(row: RowMapping) -> Replica:
    parts = None if row["parts"] is None else tuple(Part(*part) for part in row["parts"])
    return Replica(**{**row, "parts": parts, "state": ReplicaState(row["state"])})


def _to_result(row: RowMapping) -> StoredResult:
    values = dict(row)
    return StoredResult(job=values.pop("job_id"), **values)
