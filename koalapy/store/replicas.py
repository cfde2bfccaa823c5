"""The replica catalogue, the submitters' bundles and the collected results in SQL, beside the jobs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Engine, RowMapping, Table, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from koalapy.model.job import JobId
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import ClusterName
from koalapy.ports import StoredBundle, StoredResult
from koalapy.store import tables
from koalapy.store.engine import reading, unavailable_is_known
from koalapy.store.lease import Lease


class SqlFiles:
    """The ``FileStore`` port on a migrated database, for who holds its lease; ``StoreUnavailable`` when it does not
    answer, ``LeaseLost`` when another daemon has taken over."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._lease = lease
        self._reader = reading(engine)

    # Replicas

    def replicas(self) -> list[Replica]:
        """In order of name and cluster."""
        order = tables.replicas.c.name, tables.replicas.c.cluster
        return [_replica(row) for row in self._read(select(tables.replicas).order_by(*order))]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        self._upsert(tables.replicas, [_replica_row(replica) for replica in replicas])

    def remove_replicas(self, name: str, clusters: Sequence[ClusterName]) -> None:
        replicas = tables.replicas.c
        statement = delete(tables.replicas).where(replicas.name == name, replicas.cluster.in_(clusters))
        with self._lease.writing() as connection:
            connection.execute(statement)

    # Bundles

    def bundles(self) -> list[StoredBundle]:
        return [StoredBundle(**row) for row in self._read(select(tables.bundles))]

    def save_bundles(self, bundles: Sequence[StoredBundle]) -> None:
        self._upsert(tables.bundles, [asdict(bundle) for bundle in bundles])

    def remove_bundle(self, bundle: str) -> None:
        with self._lease.writing() as connection:
            connection.execute(delete(tables.bundles).where(tables.bundles.c.id == bundle))

    # Results

    def results(self, job: JobId, generation: int) -> list[StoredResult]:
        """Of one attempt, in order of rank."""
        results = tables.results.c
        query = select(tables.results).where(results.job_id == job, results.generation == generation)
        return [_result(row) for row in self._read(query.order_by(results.rank))]

    def results_size(self) -> int:
        (row,) = self._read(select(func.coalesce(func.sum(tables.results.c.size), 0).label("size")))
        return int(row["size"])

    def save_result(self, result: StoredResult) -> int:
        results = tables.results.c
        row = asdict(result)
        row |= {"job_id": row.pop("job")}
        same = (results.generation == result.generation) & (results.rank == result.rank)
        replaced = (results.job_id == result.job) & ((results.generation < result.generation) | same)
        with self._lease.writing() as connection:
            size = connection.execute(select(func.coalesce(func.sum(results.size), 0)).where(replaced)).scalar_one()
            connection.execute(delete(tables.results).where(replaced))
            connection.execute(insert(tables.results).values(row))
        return int(size)

    def remove_results(self, before: float, enough: int | None = None) -> dict[JobId, int]:
        results, jobs = tables.results.c, tables.jobs.c
        old = select(results.job_id, func.sum(results.size).label("size")).join(tables.jobs, jobs.id == results.job_id)
        old = old.where(jobs.ended_at < before, results.size > 0).group_by(results.job_id, jobs.ended_at)
        found: dict[JobId, int] = {}
        with self._lease.writing() as connection:
            for row in connection.execute(old.order_by(jobs.ended_at, results.job_id)).all():
                if enough is not None and enough <= 0:
                    break
                found[row.job_id] = int(row.size)
                enough = None if enough is None else enough - found[row.job_id]
            ids = list(found)
            for start in range(0, len(ids), 500):
                some = results.job_id.in_(ids[start : start + 500])
                connection.execute(update(tables.results).where(some).values(size=0))
        return found

    def forget_results(self, jobs: Sequence[JobId]) -> int:
        theirs = tables.results.c.job_id.in_(jobs)
        size = select(func.coalesce(func.sum(tables.results.c.size), 0)).where(theirs)
        with self._lease.writing() as connection:
            found = connection.execute(size).scalar_one()
            connection.execute(delete(tables.results).where(theirs))
        return int(found)

    def _read(self, query: Any) -> Sequence[RowMapping]:
        with unavailable_is_known(), self._reader.connect() as connection:
            return connection.execute(query).mappings().all()

    def _upsert(self, table: Table, values: list[dict[str, Any]]) -> None:
        if not values:
            return
        dialect = sqlite if self._reader.dialect.name == "sqlite" else postgresql
        statement = dialect.insert(table)
        keys = [column.name for column in table.primary_key]
        changed = {name: statement.excluded[name] for name in values[0] if name not in keys}
        with self._lease.writing() as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), values)


def _replica_row(replica: Replica) -> dict[str, Any]:
    row = asdict(replica) | {"state": replica.state.value}
    if replica.parts is not None:
        row["parts"] = [[part.name, part.size, part.checksum] for part in replica.parts]
    return row


def _replica(row: RowMapping) -> Replica:
    parts = None if row["parts"] is None else tuple(Part(*part) for part in row["parts"])
    return Replica(**{**row, "parts": parts, "state": ReplicaState(row["state"])})


def _result(row: RowMapping) -> StoredResult:
    values = dict(row)
    return StoredResult(job=values.pop("job_id"), **values)
