"""Migrations create the tables and keep the data of earlier revisions."""

from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect
from sqlalchemy.exc import IntegrityError

from koalapy.model.errors import UsageError
from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.store.engine import make_engine
from koalapy.store.opening import alembic_config, migrate, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import Batch
from koalapy.store.tables import metadata
from tests.memory_stores import memory_stores
from tests.store.answers import read_contents, read_history, read_statistics
from tests.store.former import REVISIONS, make_world, read_statements, write_world


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
    """Data are written by the code of the revision before a new one; see ``tests.store.former``."""
    earlier = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][1:]
    assert {path.stem for path in REVISIONS.iterdir()} >= set(earlier)


def fill_database(engine: Engine, revision: str) -> None:
    migrate(engine, revision)
    with engine.begin() as connection:
        for statement in read_statements(revision, connection.dialect.name):
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize("revision", sorted(path.stem for path in REVISIONS.glob("*.sql")))
def test_migrated_revision_equals_new_database(url: str, tmp_path: Path, revision: str) -> None:
    engine = make_engine(url)
    fill_database(engine, revision)
    engine.dispose()
    migrated = open_stores(url, OutputStore(tmp_path / "output", 1000))
    expected = write_world(memory_stores(), make_world())
    assert read_contents(migrated) == read_contents(expected)
    assert read_statistics(migrated) == read_statistics(expected)
    assert read_history(migrated) == read_history(expected)
    assert (migrated.jobs.instance, migrated.jobs.epoch) == ("0123abcd", 2)
    next_batch = Batch(
        at=1000.0,
        epoch=2,
        jobs={job.id: replace(job, reason="goes on") for job in migrated.jobs.load().jobs},
        timeline=[TimelineEntry(1, 1000.0, "placed", JobState.PLACED)],
        acknowledged=[11],
    )
    for stores in (migrated, expected):
        stores.jobs.write(replace(next_batch))
        stores.measurements.add(Measurement("north", "west", MeasurementKind.TRANSFER, 1000.0, bandwidth=1e6))
    assert read_contents(migrated) == read_contents(expected)
    migrated.jobs.close()


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
