"""Restarts, locks and lost connections of a database server."""

import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import inspect, text

from koalapy.model.errors import LeaseLost, StoreUnavailable, UsageError
from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.store import opening
from koalapy.store.database import Database
from koalapy.store.engine import make_engine, writing
from koalapy.store.output import OutputStore
from koalapy.store.records import JobFilter, OutboxEntry, Submitted
from koalapy.store.service_tables import MeasurementStore
from koalapy.store.sql import JobStore
from koalapy.store.standby import LeaseReader
from tests import needs
from tests.databases import migrate
from tests.grid.grid import wait_until
from tests.store.jobs import make_batch, make_job, make_running_job
from tests.store.postgresql import Pooler, Server

pytestmark = pytest.mark.processes


@pytest.fixture
def url(server: Server) -> str:
    return server.new_database()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"])
def test_make_engine_accepts_every_driver_name(url: str, scheme: str) -> None:
    engine = make_engine(url.replace("postgresql", scheme, 1))
    assert engine.dialect.driver == "psycopg"
    with engine.connect() as connection:
        assert connection.execute(text("show server_encoding")).scalar() == "UTF8"
    engine.dispose()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_migrate_with_other_encoding_is_rejected(server: Server, encoding: str) -> None:
    admin = make_engine(server.new_database())
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        options = f"encoding '{encoding}' template template0 lc_collate 'C' lc_ctype 'C'"
        connection.execute(text(f"create database in_{encoding.lower()} {options}"))
    engine = make_engine(admin.url.set(database=f"in_{encoding.lower()}").render_as_string(hide_password=False))
    with pytest.raises(UsageError, match=f"has the encoding {encoding}, .* must be UTF8") as rejection:
        migrate(engine)
    assert rejection.value.field == "database"
    assert "createdb --encoding=UTF8 --template=template0" in rejection.value.hint
    for opened_engine in (engine, admin):
        opened_engine.dispose()


@pytest.fixture
def start_pooler(server: Server) -> Iterator[Callable[..., Pooler]]:
    if not needs.PGBOUNCER.is_met:
        pytest.skip(needs.PGBOUNCER.reason)
    poolers = list[Pooler]()

    def start(mode: str, **options: str) -> Pooler:
        poolers.append(Pooler(server, mode, **options))
        return poolers[-1]

    yield start
    for pooler in poolers:
        pooler.remove()


def test_open_stores_behind_transaction_pooler_is_rejected(
    start_pooler: Callable[..., Pooler], url: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a pooler gives each transaction another session") as rejection:
        opening.open_stores(start_pooler("transaction").url_of(url), OutputStore(tmp_path, 1000))
    assert "pool_mode = session" in rejection.value.hint
    engine = make_engine(url)
    assert not inspect(engine).get_table_names()
    engine.dispose()


def test_pooler_that_rejects_options_names_remedy(start_pooler: Callable[..., Pooler], url: str) -> None:
    with pytest.raises(StoreUnavailable) as unavailable:
        migrate(make_engine(start_pooler("session", ignored="").url_of(url)))
    assert "ignore_startup_parameters = options" in unavailable.value.hint


def test_store_behind_session_pooler_continues_after_its_restart(
    start_pooler: Callable[..., Pooler], url: str, tmp_path: Path
) -> None:
    pooler, reader = start_pooler("session"), LeaseReader(url)
    store = opening.open_stores(pooler.url_of(url), OutputStore(tmp_path, 1000)).jobs
    try:
        store.write(make_batch(make_job(1)))
        assert reader.read().is_locked
        pooler.stop()
        with pytest.raises(StoreUnavailable):
            store.renew_lease(1000.0)
        wait_until(lambda: not reader.read().is_locked, "the lock of the holder ends with its session")
        pooler.start()
        store.write(make_batch(make_job(2)))
        store.renew_lease(1000.0)
        assert reader.read().is_locked
        assert [job.id for job in store.page(JobFilter()).jobs] == [2, 1]
    finally:
        reader.close()
        store.close()


def test_store_after_server_restart_continues(store: JobStore, server: Server) -> None:
    store.write(make_batch(make_job(1)))
    server.stop()
    operations = (
        lambda: store.write(make_batch(make_job(1, reason="changed"), make_job(2))),
        lambda: store.renew_lease(1.0),
        lambda: store.release_lease(),
        lambda: store.load(),
        lambda: store.job(1),
        lambda: store.page(JobFilter()),
        lambda: store.timeline(1),
        lambda: store.submitted(["key"]),
    )
    try:
        for operation in operations:
            with pytest.raises(StoreUnavailable, match="does not answer") as error:
                operation()
            assert "\n" not in error.value.message
    finally:
        server.start()
    store.write(make_batch(make_job(1, reason="changed"), make_job(2)))
    assert [job.id for job in store.page(JobFilter()).jobs] == [2, 1]
    store.renew_lease(1.0)
    server.stop()
    server.start()
    assert store.job(1) == make_job(1, reason="changed"), "a restart between two queries goes unnoticed"
    store.write(make_batch(make_running_job(2)))
    assert store.job(2) == make_running_job(2)


def test_write_after_read_to_read_only_server_raises_store_unavailable(store: JobStore, server: Server) -> None:
    server.execute("alter system set default_transaction_read_only = on")
    server.execute("select pg_reload_conf()")
    try:
        with make_engine(store.database.engine.url.render_as_string(False)).connect() as connection:
            while connection.execute(text("show default_transaction_read_only")).scalar() == "off":
                connection.rollback()
        assert store.job(1) is None
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            store.write(make_batch(make_job(1)))
        assert store.job(1) is None
    finally:
        server.execute("alter system reset default_transaction_read_only")
        server.execute("select pg_reload_conf()")


def test_migrate_without_server_raises_store_unavailable(url: str, server: Server) -> None:
    server.stop()
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            migrate(make_engine(url))
    finally:
        server.start()


def test_lease_takeover_waits_for_open_transaction(store: JobStore, url: str) -> None:
    successor: list[JobStore] = []
    with writing(store.database.engine).begin() as connection:
        connection.execute(text("update lease set holder = 'elsewhere:1:1', expires_at = 0"))
    taking_over = threading.Thread(
        target=lambda: successor.append(JobStore(Database(make_engine(url), lambda: 2000.0)))
    )
    with store.database.lease.writing() as connection:
        taking_over.start()
        with store.database.engine.connect() as watching:
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
        store.write(make_batch(outbox=[OutboxEntry(78, "north", {})]))
    successor[0].close()


class CuttingProxy(threading.Thread):
    """A proxy of a server's socket. While ``armed``, it closes the connection after the next executed commit."""

    def __init__(self, server: Path) -> None:
        super().__init__(daemon=True)
        self.armed = threading.Event()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self._server / ".s.PGSQL.5432"))
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client and b"COMMIT" in data and self.armed.is_set():
                        self.armed.clear()
                        server.sendall(data)
                        server.recv(65536)
                        return  # executed, but the response is lost
                    (server if ready is client else client).sendall(data)


@pytest.fixture
def cutting_proxy(server: Server) -> Iterator[CuttingProxy]:
    cut = CuttingProxy(server.home)
    cut.start()
    yield cut
    cut.close()


def test_commit_with_lost_response_is_written_once(store: JobStore, url: str, cutting_proxy: CuttingProxy) -> None:
    through = re.sub(
        r"@/(\w+)\?host=.*", rf"@127.0.0.1:{cutting_proxy.port}/\1?sslmode=disable&gssencmode=disable", url
    )
    store.release_lease()
    engine = make_engine(through)
    daemon = JobStore(Database(engine, lambda: 2000.0))
    measurements = MeasurementStore(daemon.database)
    measured = Measurement("north", "south", MeasurementKind.PINGPONG, 1.0, 1.0, 1.0)
    timeline = [TimelineEntry(1, 5.0, "error", JobState.QUEUED)]
    writes: list[Callable[[], None]] = [
        partial(daemon.write, make_batch(make_job(1), submitted=[Submitted("key", 1, "d")])),
        partial(daemon.write, make_batch(timeline=timeline)),
        partial(measurements.add, measured),
    ]
    for write in writes:
        cutting_proxy.armed.set()
        with pytest.raises(StoreUnavailable):
            write()
        assert not cutting_proxy.armed.is_set(), "the proxy must have executed the commit"
        write()
    assert daemon.submitted(["key"]) == {"key": Submitted("key", 1, "d")}
    assert daemon.timeline(1) == timeline
    assert measurements.history("north", "south", 10) == [measured]
    daemon.write(make_batch(make_job(1, reason="known since"), make_job(2)))
    assert [job.id for job in daemon.page(JobFilter()).jobs] == [2, 1]
    daemon.close()


def test_lease_row_locked_too_long_raises_store_unavailable(store: JobStore, url: str) -> None:
    """Such as a transaction of a lost client, until the server ends it."""
    with store.database.engine.connect() as connection:
        assert connection.execute(text("show lock_timeout")).scalar() == "5s"
        assert connection.execute(text("show idle_in_transaction_session_timeout")).scalar() == "30s"
    impatient = copy(store.database.lease)
    impatient._engine = make_engine(f"{url}&options=-c%20lock_timeout%3D50")
    with writing(store.database.engine).begin() as stuck:
        stuck.execute(text("update lease set expires_at = 1"))
        with pytest.raises(StoreUnavailable, match="lock timeout"), impatient.writing():
            pass
    with impatient.writing():
        pass
    impatient._engine.dispose()
