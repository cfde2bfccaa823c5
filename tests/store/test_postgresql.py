"""What only a database server does: go away and come back, and hold two daemons apart."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from koalapy.model.errors import LeaseLost, StoreUnavailable
from koalapy.ports import JobFilter, OutboxEntry
from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine
from tests.store.conftest import Open, stores
from tests.store.postgresql import Server
from tests.store.test_sql import a_job, batch, running


@pytest.fixture
def url(server: Server) -> str:
    return server.new_database()


@pytest.fixture
def open_store(url: str) -> Iterator[Open]:
    yield from stores(url)


@pytest.fixture
def store(open_store: Open) -> SqlStore:
    return open_store()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_name_of_the_driver_is_understood(url: str, scheme: str) -> None:
    engine = make_engine(url.replace("postgresql", scheme, 1))
    assert engine.dialect.driver == "psycopg"
    with engine.connect() as connection:
        assert connection.execute(text("show server_encoding")).scalar() == "UTF8"
    engine.dispose()


def test_a_restart_under_a_running_store(store: SqlStore, server: Server) -> None:
    store.write(batch(a_job(1)))
    server.stop()
    questions = (
        lambda: store.write(batch(a_job(1, reason="changed"), a_job(2))),
        lambda: store.renew_lease(1.0),
        lambda: store.release_lease(),
        lambda: store.load(),
        lambda: store.job(1),
        lambda: store.jobs(JobFilter()),
        lambda: store.timeline(1),
        lambda: store.output(1, 1, {}),
        lambda: store.output_size(1, 1, 0),
        lambda: store.submitted("key"),
    )
    try:
        for question in questions:
            with pytest.raises(StoreUnavailable, match="does not answer") as error:
                question()
            assert "\n" not in error.value.message
    finally:
        server.start()
    store.write(batch(a_job(1, reason="changed"), a_job(2)))
    assert [job.id for job in store.jobs(JobFilter())] == [2, 1]
    store.renew_lease(1.0)
    server.stop()
    server.start()
    assert store.job(1) == a_job(1, reason="changed"), "nobody asked while it was away"
    store.write(batch(running(2)))
    assert store.job(2) == running(2)


def test_a_daemon_that_finds_no_server_says_so(url: str, server: Server) -> None:
    server.stop()
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            migrate(make_engine(url))
    finally:
        server.start()


def test_nobody_takes_over_while_a_transaction_is_written(store: SqlStore, url: str) -> None:
    """The successor waits for it, and finds it written."""
    successor: list[SqlStore] = []
    with store._writer.begin() as connection:
        connection.execute(text("update lease set holder = 'elsewhere:1:1', expires_at = 0"))
    taking_over = threading.Thread(target=lambda: successor.append(SqlStore(make_engine(url), now=2000.0)))
    with store._writer.begin() as connection:
        store._lease.check(connection)
        taking_over.start()
        with store._engine.connect() as watching:
            waits = text(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            while watching.execute(waits).scalar() == 0:
                watching.rollback()
                assert taking_over.is_alive()
        assert successor == []
        connection.execute(text("insert into outbox values (77, 'north', '{}', 1.0)"))
    taking_over.join(60)
    assert [entry.id for entry in successor[0].load().outbox] == [77]
    with pytest.raises(LeaseLost):
        store.write(batch(outbox=[OutboxEntry(78, "north", {})]))
    successor[0].close()
