"""What migrations make of the rows that earlier versions left."""

import json

from sqlalchemy import Engine

from koalapy.model.advice import Run, Size
from koalapy.store.advice import SqlAdvice
from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine

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
    SqlStore(engine, now=1000.0).close()
    assert SqlAdvice(engine).runs(10) == [Run("koalapy.apps.wave", Size(3), ("north",), 10.0)]


def test_many_are_taken_some_at_a_time(url: str) -> None:
    engine = make_engine(url)
    migrate(engine, "0006")
    put(engine, 1, [{"request": REQUEST, "command": [f"wave{ident}"]} for ident in range(2100)])
    migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select count(distinct application) from jobs").scalar() == 2100
