"""Job stores with busy databases, column limits and several daemons."""

import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from koalapy.model.errors import ConflictError, KoalaError, StoreUnavailable, UsageError
from koalapy.model.job import Attempt, Component, Job, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.protocol.frames import Plan, command_frames
from koalapy.store import listing
from koalapy.store.database import Database, current_holder
from koalapy.store.engine import make_engine
from koalapy.store.opening import upgrade
from koalapy.store.records import ClusterRecord, JobFilter, OutboxEntry, Submitted
from koalapy.store.sql import JobStore
from tests.databases import migrate
from tests.grid.grid import wait_until
from tests.store.jobs import make_batch, make_job, make_running_job

Open = Callable[[], JobStore]


def test_write_after_busy_database_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "koala.db"
    engine = make_engine(f"sqlite:///{path}")
    migrate(engine)
    store = JobStore(Database(engine))
    with store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=1")
    store.write(make_batch(make_job(1)))
    blocker = sqlite3.connect(path, timeout=0)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        store.write(make_batch(make_job(1, reason="changed"), make_job(2)))
    blocker.rollback()
    blocker.close()
    store.write(make_batch(make_job(1, reason="changed"), make_job(2)))
    assert store.job(2) == make_job(2)
    assert store.job(1) == make_job(1, reason="changed")
    store.close()


def test_lease_of_dead_process_is_taken_at_once(store: JobStore, url: str) -> None:
    dead = store.database.lease.holder.rsplit(":", 1)[0] + ":0"
    with store.database.engine.begin() as connection:
        connection.execute(text("update lease set holder = :dead"), {"dead": dead})
    store.database.lease.close()  # the session in PostgreSQL has ended with its process
    wait_until(lambda: not current_holder(store.database.engine, 1001.0), "PostgreSQL to release its lock")
    successor = JobStore(Database(make_engine(url), lambda: 1001.0))
    assert (successor.epoch, successor.instance) == (store.epoch + 1, store.instance)


def test_lease_of_other_host_is_taken_after_expiry(store: JobStore, url: str) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("update lease set holder = 'elsewhere:1:1'")
    with pytest.raises(ConflictError, match="elsewhere"):
        JobStore(Database(make_engine(url), lambda: 1001.0))
    store.renew_lease(1020.0)
    with pytest.raises(ConflictError, match="elsewhere"):
        JobStore(Database(make_engine(url), lambda: 1049.0))
    assert JobStore(Database(make_engine(url), lambda: 1051.0)).epoch == store.epoch + 1


def test_write_stores_invalid_text_as_far_as_possible(store: JobStore) -> None:
    text = "a\0b\ud800 ü€😀\n"
    components = (Component(0, "north", 1, error=text, hosts=(text,), lrm_job="9" * 300),)
    attempt = Attempt(1, components, placed_at=1.0, end_reason=text)
    spec = JobSpec(FlexibleRequest(1), ("sh", text), workdir=text)
    job = replace(make_job(1, JobState.RUNNING, generation=1, attempt=attempt, reason=text), spec=spec)
    entry = TimelineEntry(1, 5.0, "ending", JobState.RUNNING, text)
    command = OutboxEntry(1, "north", {"type": "stop", "token": "1.1.0", "reason": text})
    store.write(make_batch(job, timeline=[entry], outbox=[command]))
    stored_text = "a�b? ü€😀\n"
    job_read = store.job(1)
    assert job_read is not None
    assert job_read.attempt is not None
    assert (job_read.reason, job_read.attempt.end_reason, job_read.attempt.components[0].error) == (
        stored_text,
        stored_text,
        stored_text,
    )
    assert job_read.attempt.components[0].lrm_job == "9" * 100
    sendable = text.replace("\ud800", "?")
    assert job_read.spec == replace(spec, command=("sh", sendable), workdir=sendable)
    assert job_read.attempt.components[0].hosts == (sendable,)
    assert store.timeline(1)[0].reason == stored_text
    assert store.load().outbox == (replace(command, payload=command.payload | {"reason": sendable}),)
    assert store.page(JobFilter(name="\0", owner="\ud800", states=("\0",), cluster="\0")).jobs == []


def test_store_started_twice_at_once_rejects_one(url: str) -> None:
    barrier = threading.Barrier(2)
    stores: list[JobStore] = []
    errors: list[KoalaError] = []

    def start() -> None:
        engine = make_engine(url)
        barrier.wait(60)
        try:
            stores.append(JobStore(Database(engine, lambda: 1000.0, upgrade=upgrade)))
        except (ConflictError, StoreUnavailable) as error:  # SQLite may be busy with the migration
            errors.append(error)

    daemons = [threading.Thread(target=start) for _ in range(2)]
    for daemon in daemons:
        daemon.start()
    for daemon in daemons:
        daemon.join(60)
    assert (len(stores), len(errors)) == (1, 1)
    stores[0].close()


def test_make_engine_with_invalid_url_is_rejected() -> None:
    for url in ("mysql://koala:secret@localhost/koala", "oracle:secret", "nonsense", ""):
        with pytest.raises(UsageError) as error:
            make_engine(url)
        assert error.value.field == "database"
        assert "secret" not in error.value.message


@pytest.mark.parametrize("code", [2**31, -(2**31) - 1, 2**32 - 1, 2**63, -(2**80)])
def test_write_limits_large_exit_codes(store: JobStore, code: int) -> None:
    """Includes 0xC0000005 of Windows and values of a hostile agent beyond the limits of the column."""
    stored_code = max(-(2**63) + 1, min(2**63 - 1, code))
    components = (Component(0, "north", 1, exit_code=code, staged=code, stage_size=code),)
    attempt = Attempt(1, components, placed_at=1.0, exit_code=code)
    store.write(make_batch(make_job(1, generation=1, attempt=attempt, exit_code=code)))
    job = store.job(1)
    assert job is not None
    assert job.attempt is not None
    component = job.attempt.components[0]
    assert (job.exit_code, job.attempt.exit_code, component.exit_code) == (stored_code, stored_code, stored_code)
    assert (component.staged, component.stage_size) == (stored_code, stored_code)


def test_write_limits_large_node_counts(store: JobStore) -> None:
    record = ClusterRecord("north", "local", "usable", 2**63, 0, 0, 0, 0, 0, "", None, 1, 1.0)
    store.write(make_batch(clusters=[record]))
    assert store.load().clusters[0].total == 2**31 - 1


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_pages_of_any_filter_cover_jobs_once(store: JobStore, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    for name, value in (("FIRST_WINDOW", window), ("WINDOW", window), ("MAX_LOOKED_AT", 2 * window)):
        monkeypatch.setattr(listing, name, value)
    states = (JobState.QUEUED, JobState.FAILED, JobState.SUCCEEDED)
    jobs = [make_running_job(n) if n % 5 == 0 else make_job(n, states[n % 7 % 3]) for n in range(1, 41)]
    jobs = [replace(job, spec=replace(job.spec, home_site=("", "north", "south")[job.id % 11 % 3])) for job in jobs]
    store.write(make_batch(*jobs))

    def ids(**filters: Any) -> list[int]:
        job_ids: list[int] = []
        page = store.page(JobFilter(limit=4, **filters))
        while page.before is not None:
            job_ids += [job.id for job in page.jobs]
            page = store.page(JobFilter(limit=4, before=page.before, **filters))
        return job_ids + [job.id for job in page.jobs]

    def is_on(job: Job, cluster: str) -> bool:
        return not cluster or (job.attempt is not None and any(c.cluster == cluster for c in job.attempt.gang))

    state_filters = ((), ("failed",), ("queued", "running"))
    combinations = product(("", "ada", "cyd"), ("", "n0"), state_filters, ("", "west"), ("", "north"))
    for owner, name, state_filter, cluster, home in combinations:
        expected = [
            job.id
            for job in reversed(jobs)
            if owner in ("", job.spec.owner)
            and name in ("", job.spec.name)
            and (not state_filter or job.state in state_filter)
            if is_on(job, cluster) and home in ("", job.spec.home_site)
        ]
        filters = {"owner": owner, "name": name, "states": state_filter, "cluster": cluster, "home_site": home}
        assert ids(**filters) == expected, filters


@pytest.mark.parametrize("window", [1, 1000])
def test_pages_by_size_have_all_jobs_of_the_size(store: JobStore, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    for name, value in (("FIRST_WINDOW", window), ("WINDOW", window)):
        monkeypatch.setattr(listing, name, value)
    fixed = FixedRequest((ComponentRequest(1, "north"), ComponentRequest(1, "south")))
    requests = {number: FlexibleRequest(number) for number in range(1, 9)} | {9: fixed}
    store.write(
        make_batch(*(make_job(n, spec=replace(make_job(n).spec, request=request)) for n, request in requests.items()))
    )

    def ids(**bounds: int) -> list[int]:
        return [job.id for job in store.page(JobFilter(**bounds)).jobs]  # type: ignore[arg-type]

    assert ids(min_size=6) == [8, 7, 6]
    assert ids(max_size=2) == [9, 2, 1]
    assert ids(min_size=2, max_size=3) == [9, 3, 2]
    assert ids(min_size=2**40) == []


def test_pages_of_large_jobs_are_limited_by_bytes(store: JobStore) -> None:
    large = tuple((f"V{n}", "x" * 1000) for n in range(20))
    jobs = [make_job(n, spec=replace(make_job(n).spec, environment=large if n % 2 else ())) for n in range(1, 12)]
    store.write(make_batch(*jobs))
    store = JobStore(store.database, max_page_bytes=50_000)
    lengths, job_ids, next_before = [], [], None
    while True:
        page = store.page(JobFilter(before=next_before, limit=10))
        lengths.append(len(page.jobs))
        job_ids += [job.id for job in page.jobs]
        if (next_before := page.before) is None:
            break
    assert job_ids == list(range(11, 0, -1))
    assert lengths == [4, 4, 3]  # two large jobs in each, and small ones
    ids = tuple(range(1, 12))
    first = store.page(JobFilter(limit=11, ids=ids))
    assert [job.id for job in first.jobs] == [11, 10, 9, 8]
    assert first.before == 8
    second = store.page(JobFilter(limit=2, ids=ids, before=first.before))
    assert ([job.id for job in second.jobs], second.before) == ([7, 6], 6)
    assert store.page(JobFilter(limit=2, ids=ids, before=3)).before is None


def test_page_with_too_large_job_has_that_job(store: JobStore) -> None:
    store.write(make_batch(make_running_job(1), make_running_job(2)))
    page = JobStore(store.database, max_page_bytes=1).page(JobFilter())
    assert [job.id for job in page.jobs] == [2]
    assert page.before == 2


def test_write_with_changed_component_writes_only_its_row(store: JobStore) -> None:
    job = make_running_job(1)
    store.write(make_batch(job))
    written: list[tuple[int, ...]] = []

    def note(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if "INTO components" in statement:
            written.append(len(parameters) if isinstance(parameters, list) else 1)

    event.listen(store.database.engine, "before_cursor_execute", note)
    assert job.attempt is not None
    first, *unchanged = job.attempt.components
    changed = replace(job, attempt=replace(job.attempt, components=(replace(first, lrm_job="8"), *unchanged)))
    store.write(make_batch(changed))
    store.write(make_batch(replace(changed, reason="only the job")))
    event.remove(store.database.engine, "before_cursor_execute", note)
    assert written == [1]
    assert store.job(1) == replace(changed, reason="only the job")


def test_write_after_failed_write_stores_all_changes(store: JobStore) -> None:
    job = make_running_job(1)
    store.write(make_batch(job))
    assert job.attempt is not None
    first, *unchanged = job.attempt.components
    changed = replace(job, attempt=replace(job.attempt, components=(replace(first, lrm_job="8"), *unchanged)))
    entry, used = OutboxEntry(1, "north", {"type": "stop", "token": "1.1.0"}), [Submitted("key", 2, "digest")]
    with pytest.raises(IntegrityError):
        store.write(make_batch(changed, make_job(2), submitted=used, outbox=[entry, entry]))
    assert (store.job(1), store.job(2), store.submitted(["key"])) == (job, None, {})
    store.write(make_batch(changed, make_job(2)))
    assert (store.job(1), store.job(2)) == (changed, make_job(2))


def open_commands(plan: Plan, *idents: int) -> list[OutboxEntry]:
    return [
        OutboxEntry(ident, "north", {"type": "open", "id": ident, "epoch": 1, "token": f"7.1.{ident}", "plan": plan})
        for ident in idents
    ]


def test_plan_is_stored_once_until_commands_are_acknowledged(open_store: Open) -> None:
    store = open_store()
    content = {"job": 7, "generation": 1, "head": "7.1.1", "nodes": [{"host": "ä"}], "contexts": []}
    plan, other_plan = Plan.of(content), Plan.of(content | {"generation": 2})
    entries = open_commands(plan, *range(1, 101))
    store.write(make_batch(outbox=[*entries, *open_commands(other_plan, 200)]))

    def count(expression: str) -> int:
        with store.database.engine.connect() as connection:
            return int(connection.execute(text(f"select {expression}")).scalar_one())

    assert count("count(*) from plans") == 2
    assert count("max(length(cast(payload as text))) from outbox") < 100
    loaded = store.load().outbox
    assert loaded == (*entries, *open_commands(other_plan, 200))
    assert [message["head"] for message in json.loads(next(command_frames(e.payload for e in loaded)))] == [
        "7.1.1"
    ] * 101
    store.write(make_batch(acknowledged=list(range(1, 100))))
    assert count("count(*) from plans") == 2
    store.write(make_batch(acknowledged=[100]))
    assert count("count(*) from plans where generation = 1") == 0
    store.release_lease()
    store = open_store()
    assert store.load().outbox == tuple(open_commands(other_plan, 200))
    store.write(make_batch(acknowledged=[200]))
    assert count("count(*) from plans") == 0
