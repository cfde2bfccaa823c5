"""The lease of a database with wrong clocks and lost responses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event

from koalapy.model.errors import ConflictError, LeaseLost
from koalapy.store.database import LEASE_SECONDS, Database
from koalapy.store.engine import make_engine
from koalapy.store.sql import JobStore
from tests.store.conftest import Open
from tests.store.jobs import make_batch, make_job


def start_watching_daemon(
    url: str, now: float, look: Callable[[], None] = lambda: None
) -> tuple[JobStore | None, list[float]]:
    """Start a daemon while another may hold the lease; return its store and the pauses in which it watched."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        look()

    try:
        return JobStore(Database(make_engine(url), lambda: now + sum(waited), sleep)), waited
    except ConflictError:
        return None, waited


def test_lease_of_clock_ahead_expires_after_watching(store: JobStore, url: str) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1', expires_at = 5000.0")
    successor, waited = start_watching_daemon(url, now=1000.0)
    assert successor is not None
    assert successor.epoch == store.epoch + 1
    assert sum(waited) == LEASE_SECONDS
    assert start_watching_daemon(url, now=1001.0 + LEASE_SECONDS) == (None, []), "its lease is a normal one"


def test_lease_after_watching_begins_at_acquisition(store: JobStore, url: str) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1', expires_at = 5000.0")
    assert start_watching_daemon(url, now=1000.0)[0] is not None
    with store.database.engine.connect() as connection:
        expires = connection.exec_driver_sql("select expires_at from lease").scalar_one()
    assert expires == 1000.0 + 2 * LEASE_SECONDS


def test_lease_renewed_during_start_is_not_watched(url: str, open_store: Open) -> None:
    store = open_store()
    beginning = make_engine(url)
    now = [1000.0]

    def passes(*_: object) -> None:
        if now[0] == 1000.0:
            now[0] = 1020.0
            store.renew_lease(now[0])

    event.listen(beginning, "connect", passes)
    with pytest.raises(ConflictError, match="another daemon"):
        Database(beginning, lambda: now[0], lambda _: pytest.fail("it is watched"))
    assert now == [1020.0]


def test_lease_of_clock_ahead_is_kept_while_renewed(store: JobStore, url: str) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1', expires_at = 5000.0")
    looks = iter(range(100))
    successor, waited = start_watching_daemon(
        url, 1000.0, lambda: store.renew_lease(5000.0) if next(looks) == 9 else None
    )
    assert successor is None
    assert len(waited) == 10
    released, waited = start_watching_daemon(url, 1000.0, store.release_lease)
    assert released is not None
    assert len(waited) == 1


def test_raise_epoch_by_holder_may_be_repeated(store: JobStore, open_store: Open) -> None:
    store.raise_epoch(7)
    assert store.epoch == 7
    store.write(make_batch(make_job(1)))
    store.renew_lease(1001.0)
    store.raise_epoch(9)
    store.database.lease.epoch = 7  # as if the response to the commit was lost
    store.renew_lease(1002.0)
    store.raise_epoch(9)
    store.write(make_batch(make_job(2)))
    successor = open_store()
    assert successor.epoch == 10
    with successor.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1'")
    for change in (
        lambda: store.raise_epoch(10),
        lambda: store.raise_epoch(11),
        lambda: store.write(make_batch(make_job(3))),
    ):
        with pytest.raises(LeaseLost):
            change()


def test_sqlite_commits_are_synchronous(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'koala.db'}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2, "FULL"
