"""Insertions of rows by compiled statements."""

import pytest
from sqlalchemy import insert, select

from koalapy.store.database import insert_rows
from koalapy.store.engine import make_engine
from koalapy.store.tables import measurements as table
from tests.databases import migrate

ROW = {"one": "north", "other": "south", "kind": "latency", "at": 1, "latency": 0.5, "bandwidth": None, "error": ""}


@pytest.mark.parametrize(
    "changes",
    [[], [{}], [{"latency": None}, {"bandwidth": 2}], [{"error": "a\0b\ud800"}, {"one": "n" * 200}, {"job_id": 7}]],
    ids=["none", "one", "some values missing", "invalid texts"],
)
def test_insert_rows_stores_what_sqlalchemy_stores(url: str, changes: list[dict[str, object]]) -> None:
    engine = make_engine(url)
    migrate(engine)
    rows = [{"job_id": None, **ROW, **change} for change in changes]
    query = select(*(column for column in table.c if column.name != "id")).order_by(table.c.id)
    with engine.begin() as connection:
        insert_rows(connection, table, rows)
        stored = connection.execute(query).all()
        for row in rows:
            connection.execute(insert(table), row)
        assert connection.execute(query).all() == [*stored, *stored]
    assert len(stored) == len(rows)
    engine.dispose()
