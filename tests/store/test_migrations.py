"""What migrations make of the rows that earlier versions left."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect

from koalapy.model.advice import Run, Size
from koalapy.model.digest import digest_of, has_digest
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState, TimelineEntry, token_of
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.ports import Batch
from koalapy.store.advice import SqlAdvice
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.memory import Memory
from koalapy.store.migrate import alembic_config, migrate
from koalapy.store.opening import open_stores, stores_in_memory
from koalapy.store.output import FileOutput
from koalapy.store.tables import metadata
from tests.store.answers import KEYS, answers, history, statistics
from tests.store.former import REVISIONS, World, statements, world, write

REQUEST = {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": None, "split_options": []}
FIXED = {
    "type": "fixed",
    "components": [
        {"size": size, "cluster": name, "command": command, "environment": [], "output": None, "input": None}
        for size, name, command in ((2, "north", ["ocean"]), (1, "south", ["/opt/air", "-v"]))
    ],
}
SPECS = [
    ({"request": REQUEST, "command": ["python", "-m", "koalapy.apps.wave"]}, "koalapy.apps.wave"),
    ({"request": REQUEST, "command": ["./wave"], "application": "mine"}, "mine"),
    ({"request": REQUEST, "command": ["./wave"], "application": "-"}, ""),
    ({"request": REQUEST, "command": ["sh", "-c", "x"]}, ""),
    ({"request": FIXED, "command": []}, "ocean+air"),
    ({"request": {"type": "of another world"}}, ""),
    ({"request": REQUEST, "command": ["\ud83d\udc28" * 150]}, "\N{KOALA}" * 150),
]


def put(engine: Engine, first: int, specs: list[dict[str, object]]) -> None:
    """Jobs that succeeded, as revision 0001 had them."""
    with engine.begin() as connection:
        for ident, spec in enumerate(specs, first):
            connection.exec_driver_sql(_insert(ident, json.dumps(spec).replace("%", "%%")))


def _insert(ident: int, spec: str) -> str:
    return (
        "insert into jobs (id, name, owner, priority, spec, state, reason, queue_seq, generation, restarts,"
        f" placement_tries, claiming_tries, submitted_at) values ({ident}, 'n', 'ada', 'low', '{spec}', 'succeeded',"
        " '', 1, 1, 0, 1, 1, 100.0)"
    )


def test_earlier_jobs_teach_what_they_ran(url: str) -> None:
    engine = make_engine(url)
    migrate(engine, "0001")
    put(engine, 1, [spec for spec, _ in SPECS])
    with engine.begin() as connection:
        for statement in (
            "insert into attempts values (1, 1, 101.0, 102.0, null, 112.0, 0, '')",
            "insert into components values (1, 1, 0, 'north', 3, 'ended', null, '[]', '7', 0, '', false, null, 102.0,"
            " 112.0)",
        ):
            connection.exec_driver_sql(statement)
    migrate(engine, "0003")
    migrate(engine)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("select application from jobs order by id").scalars().all()
    assert found == [name for _, name in SPECS]
    assert SqlAdvice(Database(engine, lambda: 1000.0)).runs(10) == [Run("koalapy.apps.wave", Size(3), ("north",), 10.0)]


def test_many_are_taken_some_at_a_time(url: str) -> None:
    engine = make_engine(url)
    migrate(engine, "0006")
    put(engine, 1, [{"request": REQUEST, "command": [f"wave{ident}"]} for ident in range(2100)])
    migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select count(distinct application) from jobs").scalar() == 2100


def test_migrations_make_exactly_the_tables(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_migrations_can_be_taken_back(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}


def test_databases_of_every_earlier_revision_are_here() -> None:
    """One that was made by the code of the revision before a new one; see ``tests.store.former``."""
    earlier = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][1:]
    assert {path.stem for path in REVISIONS.iterdir()} >= set(earlier)


def fill(engine: Engine, revision: int) -> None:
    migrate(engine, f"{revision:04d}")
    with engine.begin() as connection:
        for statement in statements(revision, connection.dialect.name):
            connection.exec_driver_sql(statement)


def as_far_as_it_is_there(revision: int) -> World:
    """Without jobs that were gone before days were summed up; with attempts as the scheduler tells of their ends."""
    whole = world(revision, digest_of, own_jobs_known=True)
    left = [
        replace(batch, jobs={ident: job for ident, job in batch.jobs.items() if ident not in whole.removed})
        for batch in whole.batches
    ]
    again = [(6, attempt)] if (attempt := left[0].jobs[6].attempt) else []
    return replace(whole, batches=[left[0], replace(left[1], attempts=again), *left[2:]], removed=[])


@pytest.mark.parametrize("revision", range(1, 13))
def test_what_a_revision_left_is_read_as_it_was_written(url: str, tmp_path: Path, revision: int) -> None:
    """And is written on."""
    engine = make_engine(url)
    fill(engine, revision)
    engine.dispose()
    output = FileOutput(tmp_path / "output", 1000)
    migrated = open_stores(url, output)
    earlier = world(revision, digest_of)
    expected = write(stores_in_memory(Memory(), output), earlier)
    assert answers(migrated) == answers(expected)
    marked = write(stores_in_memory(Memory(), output), world(revision, digest_of, own_jobs_known=True))
    assert statistics(migrated) == statistics(marked)
    assert history(migrated) == history(write(stores_in_memory(Memory(), output), as_far_as_it_is_there(revision)))
    assert (migrated.jobs.instance, migrated.jobs.epoch) == ("0123abcd", 2)
    for (job, generation, component), text in earlier.output.items():
        pieces = output.read(token_of(job, generation, component, ""), 0, to_the_end=True)
        assert b"".join(piece.data for piece in pieces) == text
    if revision >= 3:
        known = migrated.jobs.submitted(KEYS)
        assert len(known) == len(KEYS)
        for key, used in known.items():
            job = migrated.jobs.job(used.job)
            assert job is not None
            assert has_digest(job.spec, used.digest), f"{key} is not known again"
    going_on = Batch(
        at=1000.0,
        epoch=2,
        jobs={job.id: replace(job, reason="goes on") for job in migrated.jobs.load().jobs},
        timeline=[TimelineEntry(1, 1000.0, "placed", JobState.PLACED)],
        acknowledged=[11],
    )
    for stores in (migrated, expected):
        stores.jobs.write(replace(going_on))
        stores.measurements.add(Measurement("north", "west", MeasurementKind.TRANSFER, 1000.0, bandwidth=1e6))
    assert answers(migrated) == answers(expected)
    migrated.jobs.close()


def test_what_is_brought_up_can_be_taken_back(url: str) -> None:
    engine = make_engine(url)
    fill(engine, 1)
    tables = ("jobs", "attempts", "components", "timeline", "clusters")

    def counts() -> list[int]:
        with engine.connect() as connection:
            return [connection.exec_driver_sql(f"select count(*) from {name}").scalar_one() for name in tables]

    before = counts()
    migrate(engine)
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    assert counts() == before


def test_a_database_of_a_later_version_is_refused_and_stays(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/koala.db")
    migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '9999'")
    with pytest.raises(UsageError, match=r"of a later version of koalapy \(revision 9999\)"):
        migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select version_num from alembic_version").scalar() == "9999"
