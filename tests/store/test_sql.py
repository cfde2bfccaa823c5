"""What is written is there: after a restart, all of a batch or nothing, by pages, once."""

import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from koalapy.model.cluster import Drain
from koalapy.model.errors import ConflictError, KoalaError, LeaseLost, StoreUnavailable, UsageError
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState, Priority, TimelineEntry
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch, ClusterRecord, JobFilter, OutboxEntry, Submitted
from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine
from koalapy.store.tables import metadata
from tests.store.conftest import stores

Open = Callable[[], SqlStore]


def a_job(ident: int, state: JobState = JobState.QUEUED, **changes: object) -> Job:
    spec = JobSpec(FlexibleRequest(3), ("true",), name=f"n{ident % 2}", owner="ada" if ident % 3 else "bob")
    return replace(Job(ident, spec, 100.0 + ident, state, queue_seq=ident), **changes)  # type: ignore[arg-type]


def running(ident: int, generation: int = 1) -> Job:
    components = (
        Component(
            0,
            "north",
            2,
            ComponentState.RUNNING,
            hosts=("127.0.1.1", "127.0.1.2"),
            lrm_job="7",
            submitted_at=1.5,
            claimed_at=3.5,
        ),
        Component(
            1,
            "south",
            1,
            ComponentState.STOPPING,
            error="lost",
            infrastructure=True,
            unknown_since=9.0,
            superseded=True,
        ),
        Component(2, "west", 1, ComponentState.PLACED, sources=("south",), transfer_time=2.5, replaces=1),
    )
    attempt = Attempt(
        generation,
        components,
        placed_at=1.0,
        start_estimate=6.0,
        claim_at=4.5,
        barrier_at=2.0,
        launched_at=3.0,
        end_reason="because",
        nonce="5eed",
    )
    return a_job(
        ident,
        JobState.RUNNING,
        generation=generation,
        attempt=attempt,
        ending=JobState.QUEUED,
        claim_factor=0.625,
        first_start_estimate=5.5,
    )


def batch(*jobs: Job, **more: object) -> Batch:
    return Batch(at=1.0, epoch=1, jobs={job.id: job for job in jobs}, **more)  # type: ignore[arg-type]


def test_migrations_make_exactly_the_tables(url: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_migrations_can_be_taken_back(url: str) -> None:
    from alembic import command

    from koalapy.store.migrate import alembic_config

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
    from alembic import command

    from koalapy.store.migrate import alembic_config

    engine = make_engine(url)
    migrate(engine, "0001")
    with engine.begin() as connection:
        for statement in FIRST.split(";"):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    migrate(engine)
    store = SqlStore(engine, now=1000.0)
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


def test_a_new_daemon_finds_what_is_not_over(open_store: Open) -> None:
    store = open_store()
    over = a_job(3, JobState.SUCCEEDED, ended_at=5.0, exit_code=0)
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
    waits = a_job(1, placement_tries=2, counted_scan=5)
    store.write(batch(waits, running(2), over, outbox=[entry], clusters=[north], scans={Priority.LOW: 7}))
    store.write(batch(scans={Priority.LOW: 8, Priority.HIGH: 16}))
    saved = open_store().load()
    assert {job.id: job for job in saved.jobs} == {1: waits, 2: running(2)}
    assert saved.scans == {Priority.LOW: 8, Priority.HIGH: 16}
    assert saved.outbox == (entry,)
    assert saved.clusters == (replace(north, idle=0),)
    assert saved.next_job == 4


def test_a_job_is_updated_and_a_new_attempt_leaves_the_old_one_alone(store: SqlStore) -> None:
    store.write(batch(a_job(1)))
    store.write(batch(running(1)))
    assert store.job(1) == running(1)
    second = running(1, generation=2)
    store.write(batch(second))
    assert store.job(1) == second
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("select count(*) from components where job_id = 1").scalar() == 6
    assert store.attempts(1) == [running(1).attempt, second.attempt]
    assert store.attempts(1, last=1) == [second.attempt]
    assert store.attempts(2) == []


def test_an_attempt_that_ended_as_the_next_began_is_kept_as_it_ended(store: SqlStore) -> None:
    store.write(batch(running(1)))
    first = running(1).attempt
    assert first is not None
    ended = replace(first, ended_at=9.0, components=tuple(replace(c, ended_at=9.0) for c in first.components))
    second = running(1, generation=2)
    store.write(batch(second, attempts=[(1, ended)]))
    assert store.attempts(1) == [ended, second.attempt]
    assert store.job(1) == second


def test_a_batch_is_written_whole_or_not_at_all(store: SqlStore) -> None:
    store.write(batch(a_job(1), outbox=[OutboxEntry(1, "north", {})]))
    twice = batch(a_job(2), submitted=[Submitted("key", 2, "digest")], outbox=[OutboxEntry(1, "north", {})])
    with pytest.raises(IntegrityError):
        store.write(twice)
    assert store.job(2) is None
    assert store.submitted(["key"]) == {}


def test_a_key_stays_the_first_jobs_and_stops_nothing(store: SqlStore) -> None:
    """A daemon that let two through must not end by it."""
    store.write(batch(a_job(1), submitted=[Submitted("key", 1, "digest")]))
    store.write(batch(a_job(2), a_job(3), submitted=[Submitted("key", 2, "other"), Submitted("new", 3, "digest")]))
    assert store.submitted({"key", "other"}) == {"key": Submitted("key", 1, "digest")}
    assert set(store.submitted(["new", *(f"n{number}" for number in range(1200)), "key"])) == {"new", "key"}
    assert store.job(2) == a_job(2)


def test_a_job_whose_batch_failed_can_be_written_again(tmp_path: Path) -> None:
    """SQLite: while another process writes. For PostgreSQL see there."""
    path = tmp_path / "koala.db"
    opened = stores(f"sqlite:///{path}")
    store = next(opened)()
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=1")
    store.write(batch(a_job(1)))
    other = sqlite3.connect(path, timeout=0)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        store.write(batch(a_job(1, reason="changed"), a_job(2)))
    other.rollback()
    other.close()
    store.write(batch(a_job(1, reason="changed"), a_job(2)))
    assert store.job(2) == a_job(2)
    assert store.job(1) == a_job(1, reason="changed")
    next(opened, None)


def test_a_job_is_new_until_its_transaction_is_through(store: SqlStore) -> None:
    clash = batch(a_job(1), outbox=[OutboxEntry(1, "north", {}), OutboxEntry(1, "north", {})])
    with pytest.raises(IntegrityError):
        store.write(clash)
    store.write(batch(a_job(1)))
    assert store.job(1) == a_job(1)


def test_lone_surrogates_neither_go_in_nor_come_out(store: SqlStore, url: str) -> None:
    """An older daemon let them in: they would spoil every answer and message that they are in."""
    store.write(batch(a_job(1), outbox=[OutboxEntry(1, "north", {"reason": "odd \ud800 😀"})]))
    engine = make_engine(url)
    with engine.begin() as connection:
        assert "ud800" not in connection.execute(text("select cast(payload as text) from outbox")).scalar_one()
        spec = connection.execute(text("select cast(spec as text) from jobs")).scalar_one()
        odd = spec.replace('"true"', r'"\uD800", "\ud83d\ude00", "a\udfff"')
        connection.execute(text("update jobs set spec = :odd"), {"odd": odd})
    engine.dispose()
    saved = store.load()
    assert [entry.payload for entry in saved.outbox] == [{"reason": "odd ? 😀"}]
    for job in (store.job(1), *store.jobs(JobFilter()), *saved.jobs):
        assert job is not None
        assert job.spec.command == ("?", "😀", "a?")


def test_acknowledged_commands_leave_the_outbox(store: SqlStore) -> None:
    entries = [OutboxEntry(n, "north", {"type": "stop", "token": f"{n}.1.0"}) for n in (1, 2, 3)]
    store.write(batch(outbox=entries))
    store.write(batch(acknowledged=[1, 3, 99]))
    assert [entry.id for entry in store.load().outbox] == [2]


def test_pages_cover_everything_once_newest_first(store: SqlStore) -> None:
    store.write(batch(*(a_job(n) for n in range(1, 26))))
    seen: list[int] = []
    before = None
    while page := store.jobs(JobFilter(before=before, limit=10)):
        seen += [job.id for job in page]
        before = page[-1].id
    assert seen == list(range(25, 0, -1))


def test_filters(store: SqlStore) -> None:
    store.write(batch(a_job(1), a_job(2, JobState.FAILED), a_job(3), running(4)))

    def ids(**which: object) -> list[int]:
        return [job.id for job in store.jobs(JobFilter(**which))]  # type: ignore[arg-type]

    assert ids(states=("failed", "running")) == [4, 2]
    assert ids(owner="bob") == [3]
    assert ids(name="n1") == [3, 1]
    assert ids(cluster="west") == [4]
    assert ids(cluster="south") == ids(cluster="east") == []


def test_the_timeline_keeps_its_order(store: SqlStore) -> None:
    entries = [
        TimelineEntry(1, 5.0, "submitted", JobState.QUEUED),
        TimelineEntry(1, 5.0, "claimed", JobState.CLAIMING, "2 nodes", 1, 0, "north"),
    ]
    store.write(batch(a_job(1), timeline=entries))
    assert store.timeline(1) == entries


def test_only_one_daemon_at_a_time(store: SqlStore, url: str) -> None:
    with pytest.raises(ConflictError, match="another daemon"):
        SqlStore(make_engine(url), now=1001.0)


def test_a_daemon_that_died_is_followed_at_once(store: SqlStore, url: str) -> None:
    dead = store.lease.holder.rsplit(":", 1)[0] + ":0"
    with store._engine.begin() as connection:
        connection.execute(text("update lease set holder = :dead"), {"dead": dead})
    successor = SqlStore(make_engine(url), now=1001.0)
    assert (successor.epoch, successor.instance) == (store.epoch + 1, store.instance)


def test_a_daemon_of_another_machine_is_followed_when_its_lease_has_run_out(store: SqlStore, url: str) -> None:
    with store._engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1'")
    with pytest.raises(ConflictError, match="elsewhere"):
        SqlStore(make_engine(url), now=1001.0)
    store.renew_lease(1020.0)
    with pytest.raises(ConflictError, match="elsewhere"):
        SqlStore(make_engine(url), now=1049.0)
    assert SqlStore(make_engine(url), now=1051.0).epoch == store.epoch + 1


def test_a_daemon_that_was_followed_writes_no_more(store: SqlStore, open_store: Open) -> None:
    successor = open_store()
    with pytest.raises(LeaseLost):
        store.write(batch(a_job(1)))
    assert successor.job(1) is None
    with pytest.raises(LeaseLost):
        store.renew_lease(1.0)


def test_whatever_text_comes_in_is_kept_as_far_as_can_be(store: SqlStore) -> None:
    nasty = "a\0b\ud800 ü€😀\n"
    components = (Component(0, "north", 1, error=nasty, hosts=(nasty,), lrm_job="9" * 300),)
    attempt = Attempt(1, components, placed_at=1.0, end_reason=nasty)
    spec = JobSpec(FlexibleRequest(1), ("sh", nasty), workdir=nasty)
    job = replace(a_job(1, JobState.RUNNING, generation=1, attempt=attempt, reason=nasty), spec=spec)
    entry = TimelineEntry(1, 5.0, "ending", JobState.RUNNING, nasty)
    command = OutboxEntry(1, "north", {"type": "stop", "token": "1.1.0", "reason": nasty})
    store.write(batch(job, timeline=[entry], outbox=[command]))
    kept = "a�b? ü€😀\n"
    found = store.job(1)
    assert found is not None
    assert found.attempt is not None
    assert (found.reason, found.attempt.end_reason, found.attempt.components[0].error) == (kept, kept, kept)
    assert found.attempt.components[0].lrm_job == "9" * 100
    sendable = nasty.replace("\ud800", "?")
    assert found.spec == replace(spec, command=("sh", sendable), workdir=sendable)
    assert found.attempt.components[0].hosts == (sendable,)
    assert store.timeline(1)[0].reason == kept
    assert store.load().outbox == (replace(command, payload=command.payload | {"reason": sendable}),)
    assert store.jobs(JobFilter(name="\0", owner="\ud800", states=("\0",), cluster="\0")) == []


def test_large_numbers(store: SqlStore) -> None:
    ident = 2**40
    store.write(batch(a_job(ident), outbox=[OutboxEntry(2**50, "north", {"type": "stop", "token": "1.1.0"})]))
    assert store.load().next_job == ident + 1


def test_a_page_is_of_one_moment_while_jobs_are_started_anew(open_store: Open) -> None:
    """A job is never shown without the attempt that its state speaks of."""
    store = open_store()
    store.write(batch(*(running(n, 1) for n in range(1, 20))))
    going_on = threading.Event()

    def start_anew() -> None:
        for generation in range(2, 60):
            store.write(batch(*(running(n, generation) for n in range(1, 20))))
        going_on.set()

    writer = threading.Thread(target=start_anew)
    writer.start()
    try:
        while not going_on.is_set():
            for job in store.jobs(JobFilter(limit=50)):
                assert job.attempt is not None
                assert job.attempt.generation == job.generation
    finally:
        writer.join(60)


def test_two_daemons_that_start_at_the_same_moment(url: str) -> None:
    """One of them serves; the other is told."""
    at_once = threading.Barrier(2)
    stores: list[SqlStore] = []
    refused: list[KoalaError] = []

    def start() -> None:
        engine = make_engine(url)
        at_once.wait(60)
        try:
            migrate(engine)
            stores.append(SqlStore(engine, now=1000.0))
        except (ConflictError, StoreUnavailable) as error:  # SQLite may be busy becoming what it is to be
            refused.append(error)

    daemons = [threading.Thread(target=start) for _ in range(2)]
    for daemon in daemons:
        daemon.start()
    for daemon in daemons:
        daemon.join(60)
    assert (len(stores), len(refused)) == (1, 1)
    stores[0].close()


def test_what_is_no_database_is_said_in_one_line() -> None:
    for url in ("mysql://localhost/koala", "oracle:x", "nonsense", ""):
        with pytest.raises(UsageError) as error:
            make_engine(url)
        assert error.value.field == "database"
        assert "secret" not in error.value.message


@pytest.mark.parametrize("code", [2**31, -(2**31) - 1, 2**32 - 1, 2**63, -(2**80)])
def test_an_exit_code_of_any_size_is_kept_as_far_as_can_be(store: SqlStore, code: int) -> None:
    """Windows' 0xC0000005 and what a hostile agent says; the database's own limit is what is beyond it."""
    kept = max(-(2**63) + 1, min(2**63 - 1, code))
    components = (Component(0, "north", 1, exit_code=code, staged=code, stage_size=code),)
    attempt = Attempt(1, components, placed_at=1.0, exit_code=code)
    store.write(batch(a_job(1, generation=1, attempt=attempt, exit_code=code)))
    job = store.job(1)
    assert job is not None
    assert job.attempt is not None
    found = job.attempt.components[0]
    assert (job.exit_code, job.attempt.exit_code, found.exit_code) == (kept, kept, kept)
    assert (found.staged, found.stage_size) == (kept, kept)


def test_a_cluster_of_more_nodes_than_a_column_holds_is_kept(store: SqlStore) -> None:
    record = ClusterRecord("north", "local", "usable", 2**63, 0, 0, 0, 0, 0, "", None, 1, 1.0)
    store.write(batch(clusters=[record]))
    assert store.load().clusters[0].total == 2**31 - 1
