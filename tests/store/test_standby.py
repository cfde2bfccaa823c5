"""The decision of a standby daemon to take the lease of another one."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Pool, event, text

from koalapy.model.errors import ConflictError, LeaseLost, StoreUnavailable
from koalapy.store.database import LEASE_SECONDS, Claim, Database, current_holder
from koalapy.store.engine import make_engine
from koalapy.store.opening import open_stores, upgrade
from koalapy.store.output import OutputStore
from koalapy.store.sql import JobStore
from koalapy.store.standby import MAX_GAP_S, NO_LEASE, UNLOCKED_SECONDS, LeaseReader, LeaseState, LeaseWatch
from tests.databases import migrate
from tests.grid.grid import wait_until
from tests.store.conftest import INSTALLED
from tests.store.jobs import make_batch, make_job

HELD = LeaseState(3, 7, "head:1", "", 1000.0, is_locked=True, may_live=True, has_schema=True)
UNLOCKED = replace(HELD, is_locked=False)
STEP_S = 1.0


def watch_states(*states: LeaseState | None, watch: LeaseWatch | None = None, began: float = 100.0) -> list[str]:
    """Return the reason after each read of the lease; None: a failed read."""
    watch, reasons, now = watch or LeaseWatch(), [], began
    for state in states:
        now += STEP_S
        if state is None:
            watch.forget()
        else:
            reasons.append(watch.find_reason(state, now))
    return reasons


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([NO_LEASE], "it was released"),
        ([HELD, replace(HELD, expires_at=0.0)], "it was released"),
        ([HELD, UNLOCKED], "its session has ended"),
        ([replace(UNLOCKED, may_live=False)], "its process has ended"),
        ([replace(HELD, may_live=False)] * 3, ""),
        ([UNLOCKED, UNLOCKED], ""),
        ([HELD, None, UNLOCKED, UNLOCKED], ""),
        ([HELD, None, UNLOCKED, HELD, UNLOCKED], "its session has ended"),
        ([HELD, replace(UNLOCKED, epoch=4)], ""),
        ([HELD] * int(LEASE_SECONDS / STEP_S), ""),
        ([HELD] * int(LEASE_SECONDS / STEP_S + 1), "it was not renewed for 30 s"),
        ([UNLOCKED] * int(UNLOCKED_SECONDS / STEP_S + 1), "it was not renewed for 15 s"),
        ([HELD, None, *[UNLOCKED] * int(UNLOCKED_SECONDS / STEP_S + 1)], "it was not renewed for 15 s"),
        ([replace(UNLOCKED, expires_at=1000.0 + number // 10) for number in range(60)], ""),
        ([*[HELD] * 20, None, *[HELD] * 20], ""),
        ([replace(HELD, expires_at=1000.0 + number) for number in range(60)], ""),
    ],
)
def test_watch_finds_reason_only_if_holder_has_ended_or_hangs(states: list[LeaseState | None], reason: str) -> None:
    *earlier, last = watch_states(*states)
    assert (set(earlier) <= {""}, last) == (True, reason)


def test_watch_that_was_suspended_counts_anew() -> None:
    watch = LeaseWatch()
    watch_states(*[HELD] * 20, watch=watch)
    assert watch_states(*[HELD] * 20, watch=watch, began=120.0 + MAX_GAP_S) == [""] * 20


@pytest.mark.parametrize("was_renewed", [False, True])
def test_claim_takes_lease_unless_it_was_renewed(store: JobStore, url: str, was_renewed: bool) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1'")
        expiry = connection.exec_driver_sql("select expires_at from lease").scalar_one()
    if was_renewed:
        with store.database.engine.begin() as connection:
            connection.exec_driver_sql("update lease set expires_at = expires_at + 1")
        with pytest.raises(ConflictError, match="another daemon"):
            Database(make_engine(url), lambda: 1001.0, claim=Claim("", expiry))
        return
    successor = Database(make_engine(url), lambda: 1001.0, claim=Claim("", expiry))
    assert successor.lease.epoch == store.epoch + 1
    with pytest.raises(LeaseLost, match="another daemon"):
        store.write(make_batch(make_job(1)))
    successor.close()


def test_database_without_claim_is_read_only_and_leaves_lease(store: JobStore, url: str) -> None:
    store.write(make_batch(make_job(1)))
    reader = JobStore(Database(make_engine(url), lambda: 1000.0, claim=None))
    assert reader.instance == store.instance
    assert reader.job(1) is not None
    with pytest.raises(LeaseLost):
        reader.write(make_batch(make_job(2)))
    store.write(make_batch(make_job(2)))
    reader.close()


@pytest.fixture
def lease_reader(postgresql_url: str) -> Iterator[LeaseReader]:
    reader = LeaseReader(postgresql_url)
    yield reader
    reader.close()


@pytest.fixture
def postgresql_url(request: pytest.FixtureRequest) -> str:
    if not INSTALLED:
        pytest.skip("PostgreSQL missing")
    url: str = request.getfixturevalue("server").new_database()
    return url


@pytest.mark.processes
def test_reader_sees_lock_until_session_of_holder_ends(postgresql_url: str, lease_reader: LeaseReader) -> None:
    assert lease_reader.read() == NO_LEASE
    engine = make_engine(postgresql_url)
    migrate(engine)
    database = Database(engine, lambda: 1000.0, claim=Claim("http://head:1"))
    state = lease_reader.read()
    assert (state.epoch, state.address, state.is_locked, state.has_schema) == (1, "http://head:1", True, True)
    database.lease.raise_epoch(9)
    assert not lease_reader.read().is_locked
    database.lease.renew(1001.0)
    assert lease_reader.read().is_locked
    with make_engine(postgresql_url).connect() as admin:
        admin.execute(text("select pg_terminate_backend(pid, 10000) from pg_locks where locktype = 'advisory'"))
    assert not lease_reader.read().is_locked
    database.lease.renew(1002.0)
    assert lease_reader.read().is_locked
    database.close()
    wait_until(lambda: not lease_reader.read().is_locked, "the server to end the session")


@pytest.mark.processes
def test_holder_whose_lock_a_pooler_dropped_locks_again_at_renewal(
    postgresql_url: str, lease_reader: LeaseReader
) -> None:
    engine, sessions = make_engine(postgresql_url), list[Any]()
    event.listen(engine, "connect", lambda connection, _: sessions.append(connection))
    migrate(engine)
    database = Database(engine, lambda: 1000.0)
    for session in sessions:  # its connection goes on in another session of the server
        session.execute("select pg_advisory_unlock_all()")
        session.commit()
    assert not lease_reader.read().is_locked
    database.lease.renew(1001.0)
    assert lease_reader.read().is_locked
    database.close()


@pytest.mark.processes
def test_reader_of_read_only_database_raises_store_unavailable(postgresql_url: str, lease_reader: LeaseReader) -> None:
    Database(make_engine(postgresql_url), lambda: 1000.0, upgrade=upgrade).close()
    assert lease_reader.read().epoch == 1
    with make_engine(postgresql_url).connect().execution_options(isolation_level="AUTOCOMMIT") as admin:
        name = admin.engine.url.database
        admin.execute(text(f"alter database {name} set default_transaction_read_only = on"))
    lease_reader.close()
    with pytest.raises(StoreUnavailable, match="accepts no changes"):
        lease_reader.read()


@pytest.mark.processes
def test_reader_of_tables_of_earlier_version_has_no_schema(postgresql_url: str, lease_reader: LeaseReader) -> None:
    engine = make_engine(postgresql_url)
    migrate(engine, "0005_reservation_changes")
    with engine.begin() as connection:
        connection.execute(text("insert into lease values (1, 'abcdef01', 4, 'elsewhere:1:1', 5.0, 0, 0)"))
    state = lease_reader.read()
    assert (state.epoch, state.holder, state.address, state.has_schema) == (4, "elsewhere:1", "", False)
    engine.dispose()


@pytest.mark.parametrize("dead", [None, 1030.0])
def test_newer_daemon_migrates_under_older_one_only_if_that_is_dead(
    url: str, tmp_path: Path, dead: float | None
) -> None:
    engine, output = make_engine(url), OutputStore(tmp_path / "output", 1000)
    migrate(engine, "0005_reservation_changes")
    with engine.begin() as connection:
        connection.execute(text("insert into lease values (1, 'abcdef01', 4, 'elsewhere:1:1', 1030.0, 0, 0)"))
    if dead is None:
        with pytest.raises(ConflictError, match="another daemon"):
            open_stores(url, output, lambda: 1000.0)
        with engine.connect() as connection:
            assert MigrationContext.configure(connection).get_current_revision() == "0005_reservation_changes"
    else:
        stores = open_stores(url, output, lambda: 1000.0, claim=Claim("", dead))
        assert stores.jobs.epoch == 5
        stores.jobs.close()
    engine.dispose()


def test_older_daemon_that_wakes_during_migration_has_lost_its_lease(url: str, tmp_path: Path) -> None:
    """It renews its lease in each moment in which the newer daemon has no transaction."""
    migrate(engine := make_engine(url), "0005_reservation_changes")
    with engine.begin() as connection:
        connection.execute(text("insert into lease values (1, 'abcdef01', 4, 'elsewhere:1:1', 1030.0, 0, 0)"))
    before_lease = 2 if engine.dialect.name == "postgresql" else 0  # which find out whether there is a pooler
    beginnings, renewals = [0], list[int]()

    def renew(*_: object) -> None:
        beginnings[0] += 1
        if beginnings[0] == before_lease + 2:
            with engine.begin() as older:
                renewals.append(older.execute(text("update lease set expires_at = 1040 where epoch = 4")).rowcount)

    event.listen(Pool, "checkout", renew)
    try:
        stores = open_stores(url, OutputStore(tmp_path / "output", 1000), lambda: 1000.0, claim=Claim("", 1030.0))
    finally:
        event.remove(Pool, "checkout", renew)
    assert (stores.jobs.epoch, renewals) == (5, [0])
    stores.jobs.close()
    engine.dispose()


def test_lease_begins_after_a_migration_that_takes_longer(url: str) -> None:
    now = [1000.0]

    def upgrade_slowly(connection: Connection) -> None:
        upgrade(connection)
        now[0] += 60.0

    database = Database(engine := make_engine(url), lambda: now[0], upgrade=upgrade_slowly)
    with engine.connect() as connection:
        assert connection.execute(text("select expires_at from lease")).scalar_one() > now[0]
    database.close()


@pytest.mark.parametrize("is_renewed", [True, False])
def test_lease_of_older_version_far_ahead_is_watched_before_migration(url: str, is_renewed: bool) -> None:
    migrate(engine := make_engine(url), "0005_reservation_changes")
    with engine.begin() as connection:
        connection.execute(text("insert into lease values (1, 'abcdef01', 4, 'elsewhere:1:1', 9000.0, 0, 0)"))

    def renew(_: float) -> None:
        if is_renewed:
            with engine.begin() as older:
                older.execute(text("update lease set expires_at = expires_at + 1"))

    if is_renewed:
        with pytest.raises(ConflictError, match="another daemon"):
            Database(make_engine(url), lambda: 1000.0, renew, upgrade=upgrade)
        with engine.connect() as connection:
            assert MigrationContext.configure(connection).get_current_revision() == "0005_reservation_changes"
    else:
        database = Database(make_engine(url), lambda: 1000.0, renew, upgrade=upgrade)
        assert database.lease.epoch == 5
        database.close()
    engine.dispose()


@pytest.mark.processes
@pytest.mark.parametrize("is_renewed", [True, False])
def test_locked_lease_that_has_expired_by_this_clock_is_watched(postgresql_url: str, is_renewed: bool) -> None:
    migrate(engine := make_engine(postgresql_url))
    holder = Database(engine, lambda: 1000.0)
    late = 1001.0 + LEASE_SECONDS

    def renew(_: float) -> None:
        if is_renewed:
            holder.lease.renew(1002.0)

    if is_renewed:
        with pytest.raises(ConflictError, match="another daemon"):
            Database(make_engine(postgresql_url), lambda: late, renew)
    else:
        successor = Database(make_engine(postgresql_url), lambda: late, renew)
        assert successor.lease.epoch == 2
        successor.close()
    holder.close()


def test_claim_of_lease_that_was_renewed_by_slower_clock_is_rejected(store: JobStore, url: str) -> None:
    store.renew_lease(1002.0)
    with pytest.raises(ConflictError, match="another daemon"):
        Database(make_engine(url), lambda: 5000.0, claim=Claim("", 1000.0 + LEASE_SECONDS))


@pytest.mark.processes
def test_lease_of_process_with_same_name_in_another_container_is_kept_while_locked(postgresql_url: str) -> None:
    engine = make_engine(postgresql_url)
    migrate(engine)
    holder = Database(engine, lambda: 1000.0)
    with engine.begin() as connection:
        connection.execute(text("update lease set holder = :name"), {"name": f"{socket.gethostname()}:1:another"})
    with pytest.raises(ConflictError, match="another daemon"):
        Database(make_engine(postgresql_url), lambda: 1001.0)
    holder.lease.close()
    wait_until(lambda: not current_holder(engine, 1001.0), "the server to release the lock")
    successor = Database(make_engine(postgresql_url), lambda: 1001.0)
    assert successor.lease.epoch == 2
    successor.close()
    holder.close()
