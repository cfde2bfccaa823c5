"""Migrations create the tables and keep the data of earlier revisions."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, func, inspect, select
from sqlalchemy.exc import IntegrityError

from koalapy.model.cluster import Drain
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.store.engine import make_engine
from koalapy.store.opening import alembic_config, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import Batch
from koalapy.store.sql import spec_to_json
from koalapy.store.tables import jobs, metadata, use_sums
from tests.databases import migrate

REVISIONS = Path(__file__).parent / "revisions"
"""What a daemon of each revision left, as ``REVISION.sql``: an ``insert`` for each table. A change of the schema adds
such a file, written by the code before the change; bytes are ``X'…'``."""


def test_migrations_create_exactly_the_tables(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_downgrade_to_base_removes_tables(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}


def test_every_earlier_revision_has_test_data() -> None:
    earlier = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][1:]
    assert {path.stem for path in REVISIONS.iterdir()} >= set(earlier)


def read_statements(revision: str, dialect: str) -> list[str]:
    text = (REVISIONS / f"{revision}.sql").read_text(encoding="utf-8")
    statements = [f"insert into{statement}" for statement in text.split("insert into")[1:]]
    if dialect == "sqlite":
        return statements
    # The next numbers of the sequences must exceed those of the inserted rows.
    numbers = [
        f"select setval(pg_get_serial_sequence('{table}', 'id'), 1000)"
        for table in ("timeline", "measurements")
        if f'insert into "{table}"' in text
    ]
    return [re.sub(r"\bX'([0-9a-f]*)'", r"'\\x\1'", statement) for statement in statements] + numbers


def fill_database(engine: Engine, revision: str) -> None:
    migrate(engine, revision)
    with engine.begin() as connection:
        for statement in read_statements(revision, connection.dialect.name):
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize("revision", sorted(path.stem for path in REVISIONS.glob("*.sql")))
def test_migrated_revision_is_read_and_continued(url: str, tmp_path: Path, revision: str) -> None:
    engine = make_engine(url)
    fill_database(engine, revision)
    migrate(engine)
    with engine.connect() as connection:
        stored = {row.id: row for row in connection.execute(select(jobs.c.id, jobs.c.state, jobs.c.spec))}
        counts = {t.name: connection.scalar(select(func.count()).select_from(t)) for t in metadata.sorted_tables}
    engine.dispose()
    stores = open_stores(url, OutputStore(tmp_path / "output", 1000))
    assert (stores.jobs.instance, stores.jobs.epoch) == ("0123abcd", 2)
    read = {ident: stores.jobs.job(ident) for ident in stored}
    assert {ident: (job.state, spec_to_json(job.spec)) for ident, job in read.items() if job} == {
        ident: (row.state, row.spec) for ident, row in stored.items()
    }
    saved, services = stores.jobs.load(), stores.files
    assert {job.id for job in saved.jobs} == {ident for ident, job in read.items() if job and not job.state.is_final}
    assert (len(saved.outbox), len(saved.clusters)) == (counts["outbox"], counts["clusters"]) == (2, 2)
    assert {cluster.name: cluster.drained for cluster in saved.clusters} == {
        "north": None,
        "south": Drain(7.0, "ops", "new switch"),
    }
    assert (len(services.replicas()), len(services.bundles()), len(services.results(8, 2))) == (3, 1, 2)
    assert (len(stores.advice.record("", 10)), len(stores.measurements.history("north", "south", 10))) == (2, 3)
    assert [each.changed_at for each in stores.reservations.load()] == [900.5] * counts["reservations"]
    assert stores.jobs.attempts(8)[-1].components[0].transfer_time == 2.5
    stores.jobs.write(
        Batch(
            at=1000.0,
            epoch=2,
            jobs={job.id: replace(job, reason="goes on") for job in saved.jobs},
            timeline=[TimelineEntry(1, 1000.0, "placed", JobState.PLACED)],
            acknowledged=[11],
        )
    )
    stores.measurements.add(Measurement("north", "west", MeasurementKind.TRANSFER, 1000.0, bandwidth=1e6))
    assert {job.reason for job in stores.jobs.load().jobs} == {"goes on"}
    assert stores.jobs.timeline(1)[-1].event == "placed"
    stores.jobs.close()


@pytest.mark.parametrize("table", ["jobs", "components", "queues"])
def test_database_rejects_unknown_states_and_priorities(url: str, table: str) -> None:
    engine = make_engine(url)
    fill_database(engine, "0001_schema")
    column = "priority" if table == "queues" else "state"
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.exec_driver_sql(f"update {table} set {column} = 'odd'")


def test_migrate_of_unknown_revision_is_rejected(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/koala.db")
    migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '9999_other'")
    with pytest.raises(UsageError, match=r"of another version of koalapy \(revision 9999_other\)"):
        migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select version_num from alembic_version").scalar() == "9999_other"


def test_migration_of_samples_keeps_sums_of_all_clusters(url: str) -> None:
    engine = make_engine(url)
    fill_database(engine, "0009_skipped_jobs")
    migrate(engine)
    query = select(use_sums.c["length", "start", "samples", "ours", "queued", "started", "startup"])
    with engine.connect() as connection:
        rows = connection.execute(query.where(use_sums.c.cluster == "").order_by("length")).all()
    assert [tuple(row) for row in rows] == [
        (60, 600, 2, 12, 4, 2, 3.0),
        (600, 600, 2, 12, 4, 2, 3.0),
        (3600, 0, 2, 12, 4, 2, 3.0),
    ]
