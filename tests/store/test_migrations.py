"""What migrations make of the rows that earlier versions left."""

import json

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect

from koalapy.model.advice import Run, Size
from koalapy.model.job import Attempt, Component, ComponentState, JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.advice import SqlAdvice
from koalapy.store.database import Database
from koalapy.store.engine import make_engine
from koalapy.store.migrate import alembic_config, migrate
from koalapy.store.sql import SqlStore
from koalapy.store.tables import metadata

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
    assert SqlAdvice(Database(engine, now=1000.0)).runs(10) == [Run("koalapy.apps.wave", Size(3), ("north",), 10.0)]


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


FIRST = """
insert into jobs values (1, 'n', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3,
    "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["true"]}',
    'running', '', null, 1, 1, 0, 1, 1, 100.0, 101.0, 102.0, null, null);
insert into attempts values (1, 1, 101.0, 102.0, null, null, null, '');
insert into components values (1, 1, 0, 'north', 3, 'claimed', null, '["a"]', '7', null, '', false, null, 102.0, null);
insert into timeline values (1, 1, 100.0, 'submitted', 'queued', '', 0, null, null);
insert into clusters values ('north', 'local', 'unusable', 'three errors', 4, 3, true, 99.0);
insert into clusters values ('south', 'local', 'usable', '', 4, 0, false, 99.0)
"""
"""Rows of revision 0001."""


def test_a_database_of_the_first_daemons_is_brought_up_and_back(url: str) -> None:
    engine = make_engine(url)
    migrate(engine, "0001")
    with engine.begin() as connection:
        for statement in FIRST.split(";"):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    migrate(engine)
    store = SqlStore(Database(engine, now=1000.0))
    saved = store.load()
    component = Component(0, "north", 3, ComponentState.CLAIMED, hosts=("a",), lrm_job="7", claimed_at=102.0)
    assert saved.jobs[0].attempt == Attempt(1, (component,), placed_at=101.0, barrier_at=102.0)
    assert saved.jobs[0].spec == JobSpec(FlexibleRequest(3), ("true",))
    assert len(store.timeline(1)) == 1
    assert {c.name: (c.unusable, c.note, c.trials, c.drained) for c in saved.clusters} == {
        "north": (True, "three errors", 0, None),
        "south": (False, "", 0, None),
    }
    store.close()
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        counts = {
            name: connection.exec_driver_sql(f"select count(*) from {name}").scalar()
            for name in ("jobs", "attempts", "components", "timeline", "clusters")
        }
    assert counts == {"jobs": 1, "attempts": 1, "components": 1, "timeline": 1, "clusters": 2}
