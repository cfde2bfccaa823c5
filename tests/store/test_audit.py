"""The audit in every database."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.store.audit import AuditStore
from koalapy.store.engine import make_engine
from koalapy.store.opening import Stores
from koalapy.store.records import Batch
from koalapy.store.sql import JobStore
from tests.databases import migrate


def make_entry(timestamp: float, actor: str = "ada", action: str = "submit_job") -> AuditEntry:
    return AuditEntry(timestamp, actor, "user", "token 3", "192.0.2.7", action, "job 7", "done", "detail", 2)


def test_audit_entries_are_ordered_and_filtered(stores: Stores) -> None:
    stores.audit.append_audit([make_entry(100.0), make_entry(101.0, "bob"), make_entry(102.0, "ada", "cancel_job")])
    stores.jobs.write(Batch(at=103.0, epoch=1, audit=[make_entry(103.0)]))
    entries = stores.audit.audit_entries(AuditFilter())
    assert [(audit_entry.at, audit_entry.actor, audit_entry.action) for audit_entry in entries] == [
        (100.0, "ada", "submit_job"),
        (101.0, "bob", "submit_job"),
        (102.0, "ada", "cancel_job"),
        (103.0, "ada", "submit_job"),
    ]
    assert [audit_entry.id for audit_entry in entries] == sorted({audit_entry.id for audit_entry in entries})
    assert entries[0] == make_entry(100.0).__class__(**{**_fields_of(make_entry(100.0)), "id": entries[0].id})

    def ats(**filters: object) -> list[float]:
        return [audit_entry.at for audit_entry in stores.audit.audit_entries(AuditFilter(**filters))]  # type: ignore[arg-type]

    assert ats(actor="bob") == [101.0]
    assert ats(action="submit_job", actor="ada") == [100.0, 103.0]
    assert ats(since=101.5) == [102.0, 103.0]
    assert ats(since=100.5, until=102.0) == [101.0]
    assert ats(limit=2) == [100.0, 101.0]
    assert ats(after=entries[1].id) == [102.0, 103.0]
    assert ats(newest_first=True, limit=2) == [103.0, 102.0]
    assert ats(newest_first=True, before=entries[2].id) == [101.0, 100.0]
    assert ats(newest_first=True, since=100.5, actor="ada") == [103.0, 102.0]
    assert (len(ats(target="job 7", outcome="done")), ats(target="job 8"), ats(outcome="refused")) == (4, [], [])


def _fields_of(audit_entry: AuditEntry) -> dict[str, object]:
    return {name: getattr(audit_entry, name) for name in AuditEntry.__dataclass_fields__}


def test_forget_audit_removes_only_old_entries(stores: Stores) -> None:
    stores.audit.append_audit([make_entry(float(timestamp)) for timestamp in range(5)])
    assert stores.audit.forget_audit(0.0) == 0
    assert stores.audit.forget_audit(3.0) == 3
    assert [audit_entry.at for audit_entry in stores.audit.audit_entries(AuditFilter())] == [3.0, 4.0]
    last = stores.audit.audit_entries(AuditFilter())[-1].id
    stores.audit.append_audit([make_entry(5.0)])
    assert stores.audit.audit_entries(AuditFilter(after=last))[0].at == 5.0


@pytest.mark.evidence("C9")
@pytest.mark.parametrize(
    "statement", ["delete from audit", "update audit set actor = 'eve'", "delete from audit where id = 1"]
)
def test_audit_table_rejects_update_and_delete(url: str, statement: str) -> None:
    engine = make_engine_with_row(url)
    assert_rejected(engine, statement)
    if engine.dialect.name == "postgresql":
        assert_rejected(engine, "truncate audit")


VALUES = "(1, 1.0, 'eve', 'user', '', '', 'nothing', '', 'done', '', 1, '')"


@pytest.mark.parametrize(
    "statement",
    [
        f"insert or replace into audit values {VALUES}",
        f"replace into audit values {VALUES}",
        f"insert or replace into audit values {VALUES.replace('(1,', '(1.0,')}",
        f"""insert or replace into audit values {VALUES.replace("(1,", "('1',")}""",
        f"""insert or replace into audit values {VALUES.replace("(1,", "(' 1 ',")}""",
        f"insert or replace into audit values {VALUES.replace('(1,', '(0 + 1,')}",
        f"insert into audit values {VALUES} on conflict (id) do update set actor = 'eve'",
        "update or replace audit set id = 1, actor = 'eve'",
    ],
)
def test_audit_table_rejects_replaced_row(tmp_path: Path, statement: str) -> None:
    engine = make_engine_with_row(f"sqlite:///{tmp_path}/koala.db")
    assert_rejected(engine, statement)


def make_engine_with_row(url: str) -> Engine:
    engine = make_engine(url)
    migrate(engine)
    row = "insert into audit values (1, 1.0, 'ada', 'user', '', '', 'submit_job', 'job 7', 'done', '', 1, '')"
    with engine.begin() as connection:
        connection.exec_driver_sql(row)
    return engine


def assert_rejected(engine: Engine, statement: str) -> None:
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select actor from audit").scalars().all() == ["ada"]


def check_whole_audit(stores: Stores, limit: int = 1000) -> AuditCheck:
    """Check the complete audit in parts of ``limit`` entries."""
    total, head = 0, None
    while True:
        check = stores.audit.check_audit(head, limit)
        total += check.checked
        if check.is_complete or check.problem:
            return replace(check, checked=total)
        head = check.last


def test_check_audit_of_unchanged_entries_finds_no_problem(stores: Stores) -> None:
    assert check_whole_audit(stores) == AuditCheck(0, AuditHead(), True)
    stores.audit.append_audit([make_entry(100.0), make_entry(101.0, "b\0b")])
    stores.jobs.write(
        Batch(at=103.0, epoch=1, audit=[replace(make_entry(103), actor="a" * 500, target="ä\ud800" * 200)])
    )
    for limit in (1, 2, 3, 1000):
        check = check_whole_audit(stores, limit)
        assert (check.checked, check.problem, check.last) == (3, "", stores.audit.audit_head())
    last = check.last.id
    assert [stores.audit.audit_hash(number) for number in (last, last + 1)] == [check.last.hash, None]


def test_check_audit_after_removal_begins_at_first_kept(stores: Stores) -> None:
    stores.audit.append_audit([make_entry(float(timestamp)) for timestamp in (0, 1, 7, 2, 8)])
    full_check = check_whole_audit(stores)
    assert stores.audit.forget_audit(5.0) == 2  # the late entry 2.0 stays behind 7.0
    assert check_whole_audit(stores) == replace(full_check, checked=3)
    assert stores.audit.check_audit(AuditHead(1, "of an entry that is gone"), 10).checked == 3
    assert stores.audit.audit_hash(1) == ""
    assert stores.audit.forget_audit(9.0) == 3
    assert check_whole_audit(stores) == replace(full_check, checked=0)
    stores.audit.append_audit([make_entry(9.0)])
    assert check_whole_audit(stores).checked == 1
    assert stores.audit.audit_head().id == full_check.last.id + 1


def execute_without_triggers(engine: Engine, *statements: str) -> None:
    """Execute statements without the triggers, as an owner of the database can."""
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            for name in ("audit_is_kept", "audit_is_unchanged", "audit_is_not_replaced"):
                connection.exec_driver_sql(f"drop trigger {name}")
        else:
            connection.exec_driver_sql("alter table audit disable trigger all")
        for statement in statements:
            connection.exec_driver_sql(statement)


INSERTED = "(4, 1.0, 'eve', 'user', '', '', 'nothing', '', 'done', '', 1, '')"


@pytest.mark.evidence("C9")
@pytest.mark.parametrize(
    ("statement", "checked", "problem"),
    [
        ("update audit set actor = 'eve' where id = 2", 1, "entry 2 is not as it was written"),
        ("update audit set at = 100.5 where id = 3", 2, "entry 3 is not as it was written"),
        ("update audit set hash = '' where id = 1", 0, "entry 1 is not as it was written"),
        ("delete from audit where id = 1", 0, "entry 2 is not as it was written"),
        ("delete from audit where id = 2", 1, "entries between 1 and 3 were removed"),
        ("delete from audit where id = 3", 2, "entries after 2 were removed: the last that was written is 3"),
        ("delete from audit", 0, "entries after 0 were removed: the last that was written is 3"),
        (f"insert into audit values {INSERTED}", 3, "entry 4 is not as it was written, was not written by the daemon"),
    ],
)
def test_check_audit_names_first_changed_entry(store: JobStore, statement: str, checked: int, problem: str) -> None:
    audit = AuditStore(store.database)
    audit.append_audit([make_entry(100.0 + n) for n in range(3)])
    execute_without_triggers(store.database.engine, statement)
    check = audit.check_audit(None, 1000)
    assert (check.checked, check.is_complete) == (checked, False)
    assert problem in check.problem
    audit.append_audit([make_entry(110.0)])  # appending continues
    assert audit.check_audit(None, 1000).problem


def test_append_audit_from_threads_keeps_chain(store: JobStore) -> None:
    audit = AuditStore(store.database)

    def append(number: int) -> None:
        audit.append_audit([make_entry(float(number)), make_entry(number + 0.5)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(20)))
    check = audit.check_audit(None, 1000)
    assert (check.checked, check.is_complete) == (40, True)
