"""SQL storage of the replica catalogue, of uploaded bundles and of collected results."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, delete, func, insert, literal_column, select, update

from koalapy.model.job import JobId
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import ClusterName
from koalapy.ports import StoredBundle, StoredResult
from koalapy.store import tables
from koalapy.store.database import Database, chunks, upsert


class SqlFiles:
    """The ``FileStore`` port on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Replicas

    def replicas(self) -> list[Replica]:
        order = tables.replicas.c.name, tables.replicas.c.cluster
        return [_to_replica(row) for row in self._database.rows(select(tables.replicas).order_by(*order))]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        with self._database.writing() as connection:
            upsert(connection, tables.replicas, [_replica_row(replica) for replica in replicas])

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
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
        results = tables.results.c
        query = select(tables.results).where(results.job_id == job, results.generation == generation)
        return [_to_result(row) for row in self._database.rows(query.order_by(results.rank))]

    def results_sizes(self) -> dict[str, int]:
        results, jobs = tables.results.c, tables.jobs.c
        # Sums by job first, by the index of stored results, since most jobs have none.
        sizes = select(results.job_id, func.sum(results.size).label("size")).where(results.size > literal_column("0"))
        by_job = sizes.group_by(results.job_id).subquery()
        query = select(jobs.owner, func.sum(by_job.c.size).label("size")).select_from(by_job)
        query = query.join(tables.jobs, jobs.id == by_job.c.job_id).group_by(jobs.owner)
        return {row["owner"]: int(row["size"]) for row in self._database.rows(query)}

    def save_result(self, result: StoredResult) -> int:
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
        results, bytes_gone = tables.results.c, 0
        with self._database.writing() as connection:
            for ids in chunks(jobs):
                theirs = results.job_id.in_(ids)
                size = select(func.coalesce(func.sum(results.size), 0)).where(theirs)
                bytes_gone += int(connection.execute(size).scalar_one())
                connection.execute(update(tables.results).where(theirs).values(size=0))
        return bytes_gone

    def forget_results(self, jobs: Sequence[JobId]) -> int:
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
