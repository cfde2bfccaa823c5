"""Fill a database with the jobs of a busy year: ``python -m tests.benchmarks.many_jobs sqlite:///koala.db [JOBS]``.

Most jobs have ended; 10,000 are active, some of them among the oldest. Users, names, clusters, policies and states are
unevenly distributed: a few have most of the jobs, and some have a few old ones.
"""

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from sqlalchemy import Engine, Table, insert

from koalapy.model.job import Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store import sql, tables
from koalapy.store.engine import make_engine, writing
from tests.databases import migrate

ENDED, ACTIVE = 1_000_000, 10_000
YEAR_S = 365 * 86400.0
NODES = {"north": 200, "south": 120, "west": 60, "far": 8}
CLUSTERS = ("north", "south", "west")
OWNERS = ["ada", "bob", "cyd", *(f"user{number}" for number in range(60))]
RARE_NAME = "zoe"
"""The owner and name of twenty old jobs."""
APPLICATIONS = [f"app{number}" for number in range(40)]
POLICIES = ("worst-fit", "close-to-files", "flexible-cluster-minimization", "auto")
CHUNK_SIZE = 20_000

TABLES = (
    *(tables.jobs, tables.attempts, tables.components, tables.timeline, tables.advice, tables.results),
    *(tables.history, tables.history_clusters),
)
Row = dict[str, Any]


def make_database(url: str, ended: int = ENDED, active: int = ACTIVE, now: float | None = None) -> None:
    """Fill an empty database with jobs that end at ``now``, in seconds since the epoch."""
    engine = make_engine(url)
    migrate(engine)
    generator = _RowGenerator(ended, active, time.time() if now is None else now)
    with writing(engine).begin() as connection:
        connection.execute(insert(tables.clusters), [generator.cluster(name, nodes) for name, nodes in NODES.items()])
    job_rows = generator.rows()
    while chunk := list(islice(job_rows, CHUNK_SIZE)):
        for table in TABLES:
            _copy(engine, table, [row for rows_of in chunk for row in rows_of.get(table.name, ())])
    audit = generator.audit()
    while entries := list(islice(audit, CHUNK_SIZE)):
        _copy(engine, tables.audit, entries)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("analyze")
    engine.dispose()


def _copy(engine: Engine, table: Table, values: list[Row]) -> None:
    if not values:
        return
    names = list(values[0])
    columns = ", ".join(f'"{name}"' for name in names)
    connection = engine.raw_connection()
    try:
        if engine.dialect.name == "sqlite":
            marks = ", ".join("?" * len(names))
            cursor = connection.cursor()
            cursor.execute("pragma synchronous=off")
            cursor.execute("begin immediate")
            cursor.executemany(
                f"insert into {table.name} ({columns}) values ({marks})", [tuple(row.values()) for row in values]
            )
            cursor.execute("commit")
            return
        with connection.cursor() as cursor, cursor.copy(f"copy {table.name} ({columns}) from stdin") as copy:  # type: ignore[attr-defined]
            for row in values:
                copy.write_row(tuple(row.values()))
        connection.commit()
    finally:
        connection.close()


class _RowGenerator:
    def __init__(self, ended: int, active: int, now: float) -> None:
        self._ended, self._count, self._now = ended, ended + active, now
        self._random = random.Random(7)
        self._specs = [self._spec(number) for number in range(400)]
        # One in ten active jobs is old.
        old = set(self._random.sample(range(1, ended + 1), active // 10))
        self._active = old | set(range(self._count - active + len(old) + 1, self._count + 1))

    def _spec(self, number: int) -> tuple[JobSpec, Row, str]:
        policy = POLICIES[number % 7 % len(POLICIES)]
        spec = JobSpec(
            FlexibleRequest(1 + number % 24),
            ("mpirun-like", "./program", f"--case={number}"),
            name=f"study-{number % 120}",
            policy=policy,
            walltime=3600.0,
            application=APPLICATIONS[number % len(APPLICATIONS)],
            internal=number % 200 == 199,
        )
        return spec, sql.new_job_to_row(Job(0, spec, 0.0)), json.dumps(sql.spec_to_json(spec))

    def cluster(self, name: str, nodes: int) -> Row:
        return {"name": name, "kind": "local", "state": "up", "reason": "", "total": nodes, "errors": 0} | {
            "unusable": False
        }

    def rows(self) -> Iterator[dict[str, list[Row]]]:
        for ident in range(1, self._count + 1):
            yield self._rows(ident)

    def _state(self, ident: int) -> JobState:
        draw = self._random.random()
        if ident not in self._active:
            if draw < 0.9:
                return JobState.SUCCEEDED
            return JobState.FAILED if draw < 0.97 else JobState.CANCELLED
        if draw < 0.85:
            return JobState.QUEUED
        if draw < 0.86:
            return JobState.HELD
        return JobState.RUNNING if draw < 0.98 else JobState.CLAIMING

    def _rows(self, ident: int) -> dict[str, list[Row]]:
        draw = self._random
        spec, plain, text = self._specs[int(draw.random() ** 2 * len(self._specs))]
        state = self._state(ident)
        rare = 1000 <= ident < 1020
        submitted = self._now - YEAR_S * (1 - ident / self._count) - 7200
        waited, ran = draw.expovariate(1 / 900), draw.expovariate(1 / 1800)
        has_run = state in (JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING, JobState.CLAIMING)
        placed = submitted + waited if has_run else None
        started = submitted + waited + 2 if has_run and state is not JobState.CLAIMING else None
        ended = min(self._now, submitted + waited + ran + 2) if state.is_final else None
        job = plain | {
            "id": ident,
            "owner": RARE_NAME if rare else OWNERS[int(draw.random() ** 3 * len(OWNERS))],
            "name": RARE_NAME if rare else plain["name"],
            "spec": text,
            "state": state.value,
            "reason": "" if state is JobState.SUCCEEDED else "no cluster has that many idle nodes",
            "queue_seq": ident,
            "generation": int(has_run),
            "placement_tries": 1,
            "submitted_at": submitted,
            "placed_at": placed,
            "started_at": started,
            "ended_at": ended,
            "exit_code": 0 if state is JobState.SUCCEEDED else None,
        }
        rows_by_table: dict[str, list[Row]] = {"jobs": [{name: _to_driver_value(value) for name, value in job.items()}]}
        rows_by_table["timeline"] = list(self._timeline(job, submitted, placed, started, ended))
        parts = [] if placed is None else list(self._components(ident, spec, state, placed, started, ended))
        if ended is not None and not spec.internal:
            clusters = sorted({part["cluster"] for part in parts})
            rows_by_table["history"] = [self._history(job, clusters, sum(part["size"] for part in parts), ended)]
            rows_by_table["history_clusters"] = [
                {"job_id": ident, "cluster": cluster, "ended_at": ended} for cluster in clusters
            ]
        if placed is None:
            return rows_by_table
        rows_by_table["attempts"] = [
            {"job_id": ident, "generation": 1, "placed_at": placed, "barrier_at": started, "launched_at": started}
            | {"ended_at": ended, "exit_code": job["exit_code"], "end_reason": "", "nonce": "5eed"}
        ]
        rows_by_table["components"] = parts
        if ident % 10 == 0:
            rows_by_table["advice"] = [
                {"job_id": ident, "generation": 1, "application": spec.application, "at": placed, "clusters": 1}
                | {"predicted": 1800.0, "options": "[]", "reason": "north had the most idle nodes", "actual": ran}
            ]
        if ident % 5 == 0 and state is JobState.SUCCEEDED:
            has_files = ident % 50 == 0 or ident > self._count - 20_000
            rows_by_table["results"] = [
                {"job_id": ident, "generation": 1, "rank": 0, "cluster": "north", "size": 4096 if has_files else 0}
                | {"files": 2, "at": ended}
            ]
        return rows_by_table

    def _components(
        self, ident: int, spec: JobSpec, state: JobState, placed: float, started: float | None, ended: float | None
    ) -> Iterator[Row]:
        draw = self._random.random()
        first = 0 if draw < 0.55 else 1 if draw < 0.85 else 2
        clusters = [CLUSTERS[first]] if ident % 3 else [CLUSTERS[first], CLUSTERS[(first + 1) % 3]]
        if 2000 <= ident < 2040:
            clusters = ["far"]
        size = spec.request.total_size if isinstance(spec.request, FlexibleRequest) else 1
        component_state = ComponentState.ENDED if state.is_final else ComponentState.RUNNING
        for index, cluster in enumerate(clusters):
            nodes = size if len(clusters) == 1 else max(1, size // 2)
            component = Component(
                index, cluster, nodes, component_state, hosts=("127.0.0.1",), claimed_at=started, submitted_at=placed
            )
            row = sql.component_to_row(ident, 1, component) | {"ended_at": ended, "lrm_job": str(ident)}
            yield {name: _to_driver_value(value) for name, value in row.items()}

    def _history(self, job: Row, clusters: list[str], nodes: int, ended: float) -> Row:
        """Return the row of an ended job, in which one job in twenty has no measurements."""
        started, ran = job["started_at"], ended - (job["started_at"] or ended)
        known = started is not None and self._random.random() < 0.95
        return {
            **{name: job[name] for name in ("owner", "name", "state")},
            "job_id": job["id"],
            "ended_at": ended,
            "clusters": json.dumps(clusters),
            "nodes": nodes,
            "wait_time": None if started is None else started - job["submitted_at"],
            "run_time": None if started is None else ran,
            "node_seconds": nodes * ran,
            "measured_nodes": nodes if known else 0,
            "cpu_time": nodes * 16 * ran * self._random.random() if known else None,
            "cpu_available": nodes * 16 * ran if known else None,
            "peak_memory": int(self._random.expovariate(1 / 8e9)) if known else None,
        }

    def _timeline(self, job: Row, *times: float | None) -> Iterator[Row]:
        events = ("submitted", "placed", "started", "ended")
        for event, time_s in zip(events, times, strict=True):
            if time_s is not None:
                yield {
                    "job_id": job["id"],
                    "at": time_s,
                    "event": event,
                    "state": job["state"],
                    "reason": job["reason"],
                } | {
                    "generation": 1,
                    "component": None,
                    "cluster": None,
                    "actor": job["owner"] if event == "submitted" else "",
                }

    def audit(self) -> Iterator[Row]:
        for ident in range(1, self._count + 1):
            time_s = self._now - YEAR_S * (1 - ident / self._count) - 7200
            rare = 1000 <= ident < 1020
            yield {
                "at": time_s,
                "actor": RARE_NAME if rare else OWNERS[int(self._random.random() ** 3 * len(OWNERS))],
                "role": "user",
                "how": "token 7",
                "address": "127.0.0.1",
                "action": "drain_cluster" if rare else "submit_job" if ident % 9 else "cancel_job",
                "target": f"job {ident}",
                "outcome": "done",
                "detail": "",
                "times": 1,
            }


def _to_driver_value(value: Any) -> Any:
    """Convert a value for both database drivers, without SQLAlchemy."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return getattr(value, "value", value)


def main(arguments: Iterable[str]) -> None:
    url, *counts = arguments
    began = time.monotonic()
    make_database(url, *(int(number) for number in counts))
    print(f"written in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
