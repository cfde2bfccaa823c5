"""Who may write, and that each thing is written once: whatever clocks say, and whichever answers are lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.model.errors import ConflictError, LeaseLost
from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.model.replica import Replica
from koalapy.ports import StoredBundle, StoredResult
from koalapy.store.lease import LEASE_SECONDS
from koalapy.store.measurements import SqlMeasurements
from koalapy.store.replicas import SqlFiles
from koalapy.store.sql import SqlStore, make_engine
from tests.store.conftest import Open
from tests.store.test_sql import a_job, batch


def test_a_batch_is_stored_once_however_often_it_comes(store: SqlStore) -> None:
    first = batch(timeline=[TimelineEntry(1, 5.0, "error", JobState.QUEUED)])
    store.write(batch(a_job(1)))
    store.write(first)
    store.write(first)
    assert len(store.timeline(1)) == 1
    second = batch(timeline=[TimelineEntry(1, 5.0, "error", JobState.QUEUED)])
    store.write(second)
    assert len(store.timeline(1)) == 2, "the same words in another batch are another thing"


def test_the_batches_of_the_next_daemon_are_not_taken_for_those_of_the_last(open_store: Open) -> None:
    first = open_store()
    for ident in range(1, 5):
        first.write(batch(a_job(ident)))
    second = open_store()
    second.load()
    second.write(batch(a_job(5)))
    assert second.load().next_job == 6


def watching(url: str, now: float, look: Callable[[], None] = lambda: None) -> tuple[SqlStore | None, list[float]]:
    """A daemon that starts while another may hold the lease, and the pauses in which it watched."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        look()

    try:
        return SqlStore(make_engine(url), now=now, sleep=sleep), waited
    except ConflictError:
        return None, waited


def test_a_lease_from_a_clock_that_was_ahead_holds_for_as_long_as_any_other(store: SqlStore, url: str) -> None:
    with store._engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1', expires_at = 5000.0")
    successor, waited = watching(url, now=1000.0)
    assert successor is not None
    assert successor.epoch == store.epoch + 1
    assert sum(waited) == LEASE_SECONDS
    assert watching(url, now=1001.0) == (None, []), "it has a lease as good as any"


def test_a_daemon_whose_clock_is_ahead_is_not_pushed_aside_while_it_renews(store: SqlStore, url: str) -> None:
    with store._engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1', expires_at = 5000.0")
    looks = iter(range(100))
    successor, waited = watching(url, 1000.0, lambda: store.renew_lease(5000.0) if next(looks) == 9 else None)
    assert successor is None
    assert len(waited) == 10
    released, waited = watching(url, 1000.0, store.release_lease)
    assert released is not None
    assert len(waited) == 1


def test_what_is_beside_the_jobs_is_written_by_the_holder_only(store: SqlStore, open_store: Open, url: str) -> None:
    files, measurements = SqlFiles(make_engine(url), store.lease), SqlMeasurements(make_engine(url), store.lease)
    store.write(batch(a_job(1)))
    result = StoredResult(1, 1, 0, "north", 5, 1, 1.0)
    open_store()
    for write in (
        lambda: files.save_replicas([Replica("a", "north", "/a", 1, "c")]),
        lambda: files.remove_replicas("a", ["north"]),
        lambda: files.save_bundles([StoredBundle("b", 1, 1, 1.0)]),
        lambda: files.remove_bundle("b"),
        lambda: files.save_result(result),
        lambda: files.remove_results(before=1e12),
        lambda: measurements.add(Measurement("north", "south", MeasurementKind.PINGPONG, 1.0, 1.0, 1.0)),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert (files.replicas(), files.bundles(), files.results(1, 1), measurements.latest()) == ([], [], [], [])


def test_the_holder_may_take_a_higher_epoch(store: SqlStore, open_store: Open) -> None:
    store.raise_epoch(7)
    assert store.epoch == 7
    store.write(batch(a_job(1)))
    store.renew_lease(1001.0)
    store.raise_epoch(9)
    store.lease.epoch = 7  # as when it was committed, and nobody was told
    store.renew_lease(1002.0)
    store.raise_epoch(9)
    store.write(batch(a_job(2)))
    successor = open_store()
    assert successor.epoch == 10
    with successor._engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1'")
    for change in (lambda: store.raise_epoch(10), lambda: store.raise_epoch(11), lambda: store.write(batch(a_job(3)))):
        with pytest.raises(LeaseLost):
            change()


def test_what_is_committed_is_on_the_disk(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'koala.db'}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2, "FULL"
