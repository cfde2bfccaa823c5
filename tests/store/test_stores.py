"""Job stores in every database."""

import threading
from dataclasses import replace

import pytest

from koalapy.model.cluster import Drain
from koalapy.model.errors import LeaseLost
from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.job_spec import Priority
from koalapy.model.measurement import Measurement, MeasurementKind
from koalapy.model.replica import Replica
from koalapy.store.opening import Stores
from koalapy.store.records import ClusterRecord, JobFilter, OutboxEntry, StoredBundle, StoredResult, Submitted
from tests.store.conftest import OpenAll
from tests.store.jobs import make_batch, make_job, make_running_job


def test_load_returns_unfinished_state(open_stores: OpenAll) -> None:
    store = open_stores().jobs
    ended_job = make_job(3, JobState.SUCCEEDED, ended_at=5.0, exit_code=0)
    entry = OutboxEntry(11, "north", {"type": "submit", "token": "2.1.0"})
    north = ClusterRecord(
        "north",
        "local",
        "drained",
        4,
        4,
        0,
        0,
        0,
        3,
        "by ops: new switch",
        8.0,
        1,
        1.0,
        unusable=True,
        note="three errors",
        trials=2,
        drained=Drain(7.0, "ops", "new switch"),
    )
    queued_job = make_job(1, placement_tries=2, counted_scan=5)
    store.write(
        make_batch(
            queued_job, make_running_job(2), ended_job, outbox=[entry], clusters=[north], scans={Priority.LOW: 7}
        )
    )
    store.write(make_batch(scans={Priority.LOW: 8, Priority.HIGH: 16}))
    saved = open_stores().jobs.load()
    assert {job.id: job for job in saved.jobs} == {1: queued_job, 2: make_running_job(2)}
    assert saved.scans == {Priority.LOW: 8, Priority.HIGH: 16}
    assert saved.outbox == (entry,)
    assert saved.clusters == (replace(north, idle=0),)
    assert saved.next_job == 4


def test_write_of_new_attempt_keeps_old_attempt(stores: Stores) -> None:
    stores.jobs.write(make_batch(make_job(1)))
    stores.jobs.write(make_batch(make_running_job(1)))
    assert stores.jobs.job(1) == make_running_job(1)
    second = make_running_job(1, generation=2)
    stores.jobs.write(make_batch(second))
    assert stores.jobs.job(1) == second
    assert stores.jobs.attempts(1) == [make_running_job(1).attempt, second.attempt]
    assert stores.jobs.attempts(1, last=1) == [second.attempt]
    assert stores.jobs.attempts(2) == []


def test_write_stores_changed_priority(stores: Stores) -> None:
    job = make_job(1)
    stores.jobs.write(make_batch(job))
    new_priority = next(priority for priority in Priority if priority is not job.spec.priority)
    stores.jobs.write(make_batch(raised := replace(job, spec=replace(job.spec, priority=new_priority))))
    assert stores.jobs.job(1) == raised
    assert stores.jobs.load().jobs == (raised,)


def test_write_of_ended_attempt_with_next_keeps_end(stores: Stores) -> None:
    stores.jobs.write(make_batch(make_running_job(1)))
    first = make_running_job(1).attempt
    assert first is not None
    ended = replace(first, ended_at=9.0, components=tuple(replace(c, ended_at=9.0) for c in first.components))
    second = make_running_job(1, generation=2)
    stores.jobs.write(make_batch(second, attempts=[(1, ended)]))
    assert stores.jobs.attempts(1) == [ended, second.attempt]
    assert stores.jobs.job(1) == second


def test_submission_key_belongs_to_first_job(stores: Stores) -> None:
    """A daemon that accepted a key twice must continue."""
    stores.jobs.write(make_batch(make_job(1), submitted=[Submitted("key", 1, "digest")]))
    stores.jobs.write(
        make_batch(make_job(2), make_job(3), submitted=[Submitted("key", 2, "other"), Submitted("new", 3, "digest")])
    )
    assert stores.jobs.submitted({"key", "other"}) == {"key": Submitted("key", 1, "digest")}
    assert set(stores.jobs.submitted(["new", *(f"n{number}" for number in range(1200)), "key"])) == {"new", "key"}
    assert stores.jobs.job(2) == make_job(2)


def test_write_removes_acknowledged_commands(stores: Stores) -> None:
    entries = [OutboxEntry(n, "north", {"type": "stop", "token": f"{n}.1.0"}) for n in (1, 2, 3)]
    stores.jobs.write(make_batch(outbox=entries))
    stores.jobs.write(make_batch(acknowledged=[1, 3, 99]))
    assert [entry.id for entry in stores.jobs.load().outbox] == [2]


def test_page_by_application_priority_and_restarts_is_exact(stores: Stores) -> None:
    jobs = []
    for number in range(1, 31):
        plain = make_job(number, JobState.SUCCEEDED if number % 3 else JobState.QUEUED, restarts=number % 5)
        priority = Priority.HIGH if number % 4 == 0 else Priority.LOW
        jobs.append(replace(plain, spec=replace(plain.spec, application=f"app{number % 2}", priority=priority)))
    stores.jobs.write(make_batch(*jobs))

    def ids(**filters: object) -> list[int]:
        return [job.id for job in stores.jobs.page(JobFilter(**filters)).jobs]  # type: ignore[arg-type]

    for states in ((), ("succeeded",)):
        numbers = [number for number in range(30, 0, -1) if not states or number % 3]
        assert ids(application="app1", states=states) == [number for number in numbers if number % 2]
        assert ids(priority="high", states=states) == [number for number in numbers if number % 4 == 0]
        assert ids(min_restarts=3, states=states) == [number for number in numbers if number % 5 >= 3]
        both = [number for number in numbers if number % 2 == 0 and number % 5 >= 1]
        assert ids(min_restarts=1, application="app0", states=states) == both
        exactly = [number for number in numbers if number % 5 == 3]
        assert ids(min_restarts=3, max_restarts=3, states=states) == exactly
        assert ids(max_restarts=1, states=states) == [number for number in numbers if number % 5 <= 1]
    assert ids(min_restarts=2, max_restarts=1) == []
    assert ids(min_restarts=5) == ids(application="app2") == []
    assert ids(min_restarts=3, limit=2) == [29, 28]
    assert ids(min_restarts=3, limit=2, before=28) == [24, 23]


def test_write_stores_large_job_and_command_ids(stores: Stores) -> None:
    ident = 2**40
    stores.jobs.write(
        make_batch(make_job(ident), outbox=[OutboxEntry(2**50, "north", {"type": "stop", "token": "1.1.0"})])
    )
    assert stores.jobs.load().next_job == ident + 1


def test_page_during_writes_is_consistent(open_stores: OpenAll) -> None:
    store = open_stores().jobs
    store.write(make_batch(*(make_running_job(n, 1) for n in range(1, 20))))
    is_written = threading.Event()

    def write_new_attempts() -> None:
        for generation in range(2, 60):
            store.write(make_batch(*(make_running_job(n, generation) for n in range(1, 20))))
        is_written.set()

    writer = threading.Thread(target=write_new_attempts)
    writer.start()
    try:
        while not is_written.is_set():
            for job in store.page(JobFilter(limit=50)).jobs:
                assert job.attempt is not None
                assert job.attempt.generation == job.generation
    finally:
        writer.join(60)


def test_write_after_takeover_raises_lease_lost(stores: Stores, open_stores: OpenAll) -> None:
    successor = open_stores().jobs
    with pytest.raises(LeaseLost):
        stores.jobs.write(make_batch(make_job(1)))
    assert successor.job(1) is None
    with pytest.raises(LeaseLost):
        stores.jobs.renew_lease(1.0)


def test_write_of_repeated_batch_is_stored_once(stores: Stores) -> None:
    first = make_batch(timeline=[TimelineEntry(1, 5.0, "error", JobState.QUEUED)])
    stores.jobs.write(make_batch(make_job(1)))
    stores.jobs.write(first)
    stores.jobs.write(first)
    assert len(stores.jobs.timeline(1)) == 1
    second = make_batch(timeline=[TimelineEntry(1, 5.0, "error", JobState.QUEUED)])
    stores.jobs.write(second)
    assert len(stores.jobs.timeline(1)) == 2, "equal entries of another batch are stored too"


def test_batch_numbers_restart_with_each_daemon(open_stores: OpenAll) -> None:
    first = open_stores().jobs
    for ident in range(1, 5):
        first.write(make_batch(make_job(ident)))
    second = open_stores().jobs
    second.load()
    second.write(make_batch(make_job(5)))
    assert second.load().next_job == 6


def test_other_stores_after_takeover_raise_lease_lost(stores: Stores, open_stores: OpenAll) -> None:
    files, measurements = stores.files, stores.measurements
    stores.jobs.write(make_batch(make_job(1)))
    result = StoredResult(1, 1, 0, "north", 5, 1, 1.0)
    open_stores()
    for write in (
        lambda: files.save_replicas([Replica("a", "north", "/a", 1, "c")]),
        lambda: files.remove_replicas("a", ["north"]),
        lambda: files.save_bundles([StoredBundle("b", 1, 1, 1.0)]),
        lambda: files.remove_bundle("b"),
        lambda: files.save_result(result),
        lambda: files.old_results(before=1e12),
        lambda: files.clear_results([1]),
        lambda: measurements.add(Measurement("north", "south", MeasurementKind.PINGPONG, 1.0, 1.0, 1.0)),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert (files.replicas(), files.bundles(), files.results(1, 1), measurements.latest()) == ([], [], [], [])
