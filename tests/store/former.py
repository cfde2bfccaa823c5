"""Data of each revision of the database: ``revisions/REVISION.sql``, written by the code of that revision.

After each change of the schema, ``python -m tests.store.former`` writes the data of the present revision.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic.script import ScriptDirectory
from sqlalchemy import JSON, RowMapping, Table, select, update

from koalapy.model.advice import AdvisedPlacement, Option
from koalapy.model.cluster import Drain
from koalapy.model.job import Attempt, ClusterRefusal, Component, ComponentState, Job, JobId, JobState, TimelineEntry
from koalapy.model.job_spec import ClaimingMode, JobSpec, Launcher, MailType, Priority
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.model.replica import Part, Replica, ReplicaState
from koalapy.model.request import (
    Bundle,
    ComponentRequest,
    FixedRequest,
    FlexibleRequest,
    InputFile,
    NonFixedRequest,
    StopWarning,
    WarningSignal,
)
from koalapy.store import tables
from koalapy.store.opening import Stores, alembic_config, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import Batch, ClusterRecord, OutboxEntry, StoredBundle, StoredResult, Submitted
from koalapy.validation.submission import hash_key, hash_spec

REVISIONS = Path(__file__).parent / "revisions"


@dataclass(frozen=True)
class World:
    """The contents of a database, in the order in which they are written."""

    batches: list[Batch]
    replicas: list[Replica]
    bundles: list[StoredBundle]
    results: list[StoredResult]
    measurements: list[Measurement]
    removed: list[JobId]


def make_world() -> World:
    """Return jobs of every state and form, with something in every table."""
    mesh = InputFile(name="climate/mesh", size=5_000_000_000, sites=("west", "south"))
    fields_file = InputFile(
        name="fields", size=300, sites=("south",), distribution="partitioned", part="part-1", target="in"
    )

    def request_of(size: int, cluster: str | None, *inputs: InputFile, **fields: Any) -> ComponentRequest:
        return ComponentRequest(size=size, cluster=cluster, inputs=inputs, **fields)

    plain = JobSpec(request=FlexibleRequest(3), command=("./wave", "-n", "3"), name="wave", owner="ada")
    rich = JobSpec(
        request=FlexibleRequest(6, 2, 3, ((4, 2), (2, 2, 2))),
        command=("python", "-m", "koalapy.apps.poisson", "größe=1"),
        name="poisson 1",
        owner="bob",
        environment=(("OMP_NUM_THREADS", "2"), ("LANG", "")),
        priority=Priority.HIGH,
        policy="auto",
        coallocation=2,
        speed_ratio_min=0.5,
        claiming=ClaimingMode.INCREMENTAL,
        claim_threshold=0.75,
        launcher=Launcher.OPENMPI,
        processes_per_node=4,
        workdir="/home/bob",
        workdir_optional=True,
        output="{scratch}/out",
        walltime=3600.0,
        warning=StopWarning(WarningSignal.USR1, 90.0),
        max_restarts=2,
        max_placement_tries=50,
        max_claiming_tries=5,
        retry_on_exit=(75, 137),
        inputs=(mesh,),
        bundle=Bundle("b" * 64, 12345, 3),
        collect=("*.dat", "log/*"),
        application="poisson",
        communication=0.25,
        mail_type=(MailType.BEGIN, MailType.FAIL),
        mail_user="bob@example.org",
        webhook="https://hooks.example.org/bob",
        home_site="north",
    )
    fixed_spec = JobSpec(
        request=FixedRequest(
            (
                request_of(2, "north", mesh, command=("ocean",), environment=(("ROLE", "sea"),), output="/tmp/sea"),
                request_of(1, "south", fields_file, mesh, command=("air",)),
            )
        ),
        command=(),
        owner="cyd",
        launcher=Launcher.PROCESSES,
    )
    sized = JobSpec(request=NonFixedRequest((request_of(2, None), request_of(1, None, mesh))), command=("true",))
    internal_spec = JobSpec(
        request=FixedRequest((request_of(1, "north"), request_of(1, "south"))),
        command=("pingpong",),
        name="network north-south",
        owner="koala",
        application="-",
        internal=True,
    )

    def component(index: int, cluster: str, size: int, state: ComponentState, **fields: Any) -> Component:
        return Component(index=index, cluster=cluster, size=size, state=state, **fields)

    def attempt(generation: int, *components: Component, **fields: Any) -> Attempt:
        placed: dict[str, Any] = {
            "placed_at": 110.0,
            "start_estimate": 116.0,
            "claim_at": 115.5,
            "nonce": f"5eed{generation}",
        }
        return Attempt(generation=generation, components=components, **placed | fields)

    def job(ident: int, spec: JobSpec, state: JobState, **fields: Any) -> Job:
        generation = fields["attempt"].generation if fields.get("attempt") else 0
        common: dict[str, Any] = {"queue_seq": ident + 100, "generation": generation, "submitted_at": 100.0 + ident}
        return Job(**common | {"id": ident, "spec": spec, "state": state} | fields)

    claimed_times = {"hosts": ("127.0.1.1", "127.0.1.2"), "lrm_job": "7", "submitted_at": 116.0, "claimed_at": 118.5}
    ended_times = claimed_times | {"exit_code": 0, "ended_at": 140.0}
    replaced = component(1, "west", 1, ComponentState.ENDED, error="lost", infrastructure=True, superseded=True)

    def ran(north: int, south: int) -> Attempt:
        parts = [
            component(
                0, "north", north, ComponentState.ENDED, **ended_times, sources=("west", "north"), transfer_time=2.5
            ),
            component(2, "south", south, ComponentState.ENDED, **ended_times, replaces=1, staged=300, stage_size=300),
        ]
        parts.insert(1, replaced)
        return attempt(2, *parts, barrier_at=120.0, launched_at=121.0, ended_at=140.0, exit_code=0)

    first = attempt(
        1,
        component(
            0, "north", 3, ComponentState.ENDED, **claimed_times, error="node gone", infrastructure=True, ended_at=119.0
        ),
        ended_at=119.0,
        end_reason="infrastructure-failure: node gone",
    )
    times = {"placed_at": 110.0, "started_at": 120.0}
    large = 2**32 - 1
    killed = attempt(
        1,
        component(0, "north", 6, ComponentState.ENDED, **claimed_times, ended_at=3720.5),
        barrier_at=120.0,
        launched_at=120.5,
        ended_at=3720.5,
        end_reason="walltime",
    )
    waiting = attempt(
        1,
        component(0, "north", 2, ComponentState.WAITING, lrm_job="9", submitted_at=116.0, staged_at=115.0),
        component(1, "south", 1, ComponentState.SUBMITTED, request_index=1, staging_since=110.0, staged=7),
    )
    claimed = attempt(1, component(0, "north", 3, ComponentState.CLAIMED, **claimed_times), barrier_at=120.0)
    running = attempt(
        2, component(0, "south", 3, ComponentState.RUNNING, **claimed_times), barrier_at=120.0, launched_at=121.0
    )
    away = {"unknown_since": 150.0, "lease": 2400.0, "lost_at": 2604.0}
    unknown = attempt(1, component(0, "west", 3, ComponentState.RUNNING, **claimed_times, **away), barrier_at=120.0)
    ending = attempt(
        1,
        component(0, "north", 3, ComponentState.DELIVERING, **claimed_times, exit_code=3),
        barrier_at=120.0,
        launched_at=121.0,
    )
    placed = attempt(1, component(0, "north", 2, ComponentState.PLACED, request_index=0, sources=("south",)))
    failed = attempt(
        1, component(0, "north", 3, ComponentState.ENDED, **ended_times | {"exit_code": large}), barrier_at=120.0
    )
    refusals = ClusterRefusal("north", "no node hours left", 160.0, 2), ClusterRefusal("south", "too wide", None)
    begun = [
        job(6, plain, JobState.QUEUED, attempt=first, restarts=1, reason="infrastructure-failure"),
        job(8, rich, JobState.RUNNING, attempt=ran(4, 2), **times),
        job(20, plain, JobState.RUNNING, attempt=ran(2, 1), **times),
    ]
    jobs = [
        job(1, plain, JobState.QUEUED, placement_tries=4, counted_scan=6, reason="no cluster has 3 idle nodes"),
        job(2, sized, JobState.HELD, reason="held by ada"),
        job(3, fixed_spec, JobState.PLACED, attempt=placed, placed_at=110.0, placement_tries=1),
        job(4, rich, JobState.CLAIMING, attempt=waiting, placed_at=110.0, claim_factor=0.625, claiming_tries=2),
        job(5, plain, JobState.STARTING, attempt=claimed, **times, first_start_estimate=116.0),
        job(6, plain, JobState.RUNNING, attempt=running, restarts=1, **times),
        job(7, plain, JobState.UNKNOWN, attempt=unknown, **times),
        job(
            8,
            rich,
            JobState.SUCCEEDED,
            attempt=ran(4, 2),
            **times,
            ended_at=141.0,
            exit_code=0,
            first_start_estimate=114.0,
        ),
        job(
            9, fixed_spec, JobState.FAILED, attempt=failed, **times, ended_at=142.0, exit_code=large, reason="exit code"
        ),
        job(10, rich, JobState.FAILED, attempt=killed, **times, ended_at=3721.0, reason="walltime", restarts=2),
        job(11, plain, JobState.CANCELLED, ended_at=130.0, reason="by bob: not needed \N{KOALA}"),
        job(12, plain, JobState.QUEUED, attempt=first, restarts=1, retry_at=160.0, refusals=refusals),
        job(13, internal_spec, JobState.CANCELLED, ended_at=131.0),
        job(14, plain, JobState.RUNNING, attempt=ending, ending=JobState.CANCELLED, reason="cancelled", **times),
        job(20, plain, JobState.SUCCEEDED, attempt=ran(2, 1), **times, ended_at=141.0, exit_code=0),
    ]
    timeline = [
        TimelineEntry(
            job=stored_job.id, at=stored_job.submitted_at, event="submitted", state=JobState.QUEUED, reason=""
        )
        for stored_job in jobs
    ]
    timeline.append(TimelineEntry(6, 119.0, "ended", JobState.QUEUED, "node gone", 1, 0, "north"))
    options = (Option(("north", "south"), 1.5, 0.0, 2.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))
    advised = [
        AdvisedPlacement(8, 2, 110.0, "poisson", 2, options, "co-allocated, since it pays", 18.0),
        AdvisedPlacement(10, 1, 110.0, "poisson", 1, (), "the only one", None),
    ]
    usable = ClusterRecord(
        name="north", kind="slurm", state="usable", total=16, idle=0, used=0, background=0, down=0,
        errors=1, reason="", last_heard=99.0, processes_per_node=1, speed=1.0,
    )  # fmt: skip
    given_up = ClusterRecord(
        name="south", kind="sge", state="unusable", total=8, idle=0, used=0, background=0, down=0,
        errors=3, reason="three errors", last_heard=None, processes_per_node=1, speed=1.0, unusable=True,
        note="three errors", trials=2, drained=Drain(7.0, "ops", "new switch"),
    )  # fmt: skip
    commands = [
        OutboxEntry(11, "north", {"type": "submit", "token": "4.1.0", "id": 11, "nodes": 2}),
        OutboxEntry(12, "south", {"type": "stop", "token": "14.1.0", "id": 12, "reason": "cancelled"}),
        OutboxEntry(13, "west", {"type": "forget", "token": "9.1.0", "id": 13}),
    ]
    link: dict[str, Any] = {"one": "north", "other": "south", "latency": 0.25, "bandwidth": 1e6, "back": 2e6, "job": 13}
    ping: dict[str, Any] = {"kind": MeasurementKind.PINGPONG, "error": ""}
    batches = [
        Batch(at=100.0, epoch=1, jobs={stored_job.id: stored_job for stored_job in begun}, advised=advised[:1]),
        Batch(
            at=150.0,
            epoch=1,
            jobs={stored_job.id: stored_job for stored_job in jobs},
            timeline=timeline,
            outbox=commands,
            submitted=[
                Submitted(hash_key("ada", "key of 1"), 1, hash_spec(plain)),
                Submitted(hash_key("bob", "key of 8"), 8, hash_spec(rich)),
                Submitted(hash_key("cyd", "key of 9"), 9, hash_spec(fixed_spec)),
            ],
            clusters=[usable, given_up],
            scans={Priority.LOW: 9, Priority.HIGH: 3},
            advised=advised[1:],
        ),
        Batch(at=151.0, epoch=1, acknowledged=[13]),
    ]
    return World(
        batches,
        [
            Replica("climate/mesh", "south", "/data/mésh -x.nc", 5_000_000_000, "c0ffee", None, added_at=1.5),
            Replica("fields", "south", "/data/f", 300, "f1", (Part("a b", 100, "aa"), Part("é", 200, "bb"))),
            Replica("fields", "west", "/f", 300, "f1", (), ReplicaState.CHANGED, "2 bytes, not 300", 1.5, 2.5),
        ],
        [StoredBundle("b" * 64, 12345, 3, 101.0)],
        [StoredResult(8, 2, 0, "north", 4096, 2, 141.5), StoredResult(8, 2, 2, "south", 0, 1, 141.5)],
        [
            Measurement(**link, **ping, at=60.0),
            Measurement(**link | {"latency": None, "bandwidth": None}, **ping | {"error": "no way"}, at=61.0),
            Measurement(one="south", other="north", kind=MeasurementKind.TRANSFER, at=62.0, bandwidth=3e6),
        ],
        [20],
    )


def format_script(revision: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows of each table as SQL for every database; bytes as ``X'…'``, see ``read_statements``."""
    text = f"-- What a daemon of revision {revision} left.\n"
    for table, values in rows.items():
        if values:
            columns = ", ".join(f'"{name}"' for name in values[0])
            lines = ",\n".join(f"({', '.join(map(_sql_literal, row.values()))})" for row in values)
            text += f'insert into "{table}" ({columns}) values\n{lines};\n'
    return text


def _sql_literal(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("'", "''") + "'"


def read_statements(revision: str, dialect: str) -> list[str]:
    text = (REVISIONS / f"{revision}.sql").read_text(encoding="utf-8")
    rows = text.split("insert into")[1:]
    if dialect == "sqlite":
        return [f"insert into{statement}" for statement in rows]
    # The next numbers of the sequences must exceed those of the inserted rows.
    numbers = [
        f"select setval(pg_get_serial_sequence('{table}', 'id'), 1000)"
        for table in ("timeline", "measurements")
        if f'insert into "{table}"' in text
    ]
    return [re.sub(r"\bX'([0-9a-f]*)'", r"'\\x\1'", f"insert into{statement}") for statement in rows] + numbers


def write_world(stores: Stores, world: World) -> Stores:
    for batch in world.batches:
        stores.jobs.write(batch)
    stores.files.save_replicas(world.replicas)
    stores.files.save_bundles(world.bundles)
    for result in world.results:
        stores.files.save_result(result)
    for measurement in world.measurements:
        stores.measurements.add(measurement)
    if world.removed:
        stores.history.remove(world.removed)
    return stores


def _write_present() -> None:
    """Write the data of the newest revision, as the present code stores them in SQLite."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head() or ""
    with tempfile.TemporaryDirectory() as folder:
        stores = open_stores(f"sqlite:///{folder}/koala.db", OutputStore(Path(folder) / "output", 1000))
        write_world(stores, make_world())
        with stores.jobs.database.engine.begin() as connection:
            connection.execute(
                update(tables.lease).values(holder="elsewhere:1:1", expires_at=50.0, instance="0123abcd")
            )
            rows = {
                table.name: [_with_json(table, row) for row in connection.execute(select(table)).mappings()]
                for table in tables.metadata.sorted_tables
                if table is not tables.audit_chain  # its row is inserted by the migration
            }
        stores.jobs.close()
    (REVISIONS / f"{revision}.sql").write_text(format_script(revision, rows), encoding="utf-8")


def _with_json(table: Table, row: RowMapping) -> dict[str, Any]:
    is_json = {column.name for column in table.columns if isinstance(column.type, JSON)}
    return {name: json.dumps(value) if name in is_json and value is not None else value for name, value in row.items()}


if __name__ == "__main__":
    _write_present()
