"""The audit in every store: added to, told in order, and removed only when it is old."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.ports import Batch
from koalapy.store.audit import SqlAudit
from koalapy.store.engine import make_engine
from koalapy.store.opening import Stores, migrate
from koalapy.store.sql import SqlStore


def entry(at: float, actor: str = "ada", action: str = "submit_job") -> AuditEntry:
    return AuditEntry(at, actor, "user", "token 3", "192.0.2.7", action, "job 7", "done", "detail", 2)


def test_entries_are_told_in_order_by_who_what_and_when(stores: Stores) -> None:
    stores.audit.append_audit([entry(100.0), entry(101.0, "bob"), entry(102.0, "ada", "cancel_job")])
    stores.jobs.write(Batch(at=103.0, epoch=1, audit=[entry(103.0)]))
    found = stores.audit.audit_entries(AuditFilter())
    assert [(each.at, each.actor, each.action) for each in found] == [
        (100.0, "ada", "submit_job"),
        (101.0, "bob", "submit_job"),
        (102.0, "ada", "cancel_job"),
        (103.0, "ada", "submit_job"),
    ]
    assert [each.id for each in found] == sorted({each.id for each in found})
    assert found[0] == entry(100.0).__class__(**{**_fields(entry(100.0)), "id": found[0].id})

    def ats(**which: object) -> list[float]:
        return [each.at for each in stores.audit.audit_entries(AuditFilter(**which))]  # type: ignore[arg-type]

    assert ats(actor="bob") == [101.0]
    assert ats(action="submit_job", actor="ada") == [100.0, 103.0]
    assert ats(since=101.5) == [102.0, 103.0]
    assert ats(limit=2) == [100.0, 101.0]
    assert ats(after=found[1].id) == [102.0, 103.0]
    assert ats(newest_first=True, limit=2) == [103.0, 102.0]
    assert ats(newest_first=True, before=found[2].id) == [101.0, 100.0]
    assert ats(newest_first=True, since=100.5, actor="ada") == [103.0, 102.0]
    assert (len(ats(target="job 7", outcome="done")), ats(target="job 8"), ats(outcome="refused")) == (4, [], [])


def _fields(of: AuditEntry) -> dict[str, object]:
    return {name: getattr(of, name) for name in AuditEntry.__dataclass_fields__}


def test_what_is_old_is_removed_and_nothing_else(stores: Stores) -> None:
    stores.audit.append_audit([entry(float(at)) for at in range(5)])
    assert stores.audit.forget_audit(0.0) == 0
    assert stores.audit.forget_audit(3.0) == 3
    assert [each.at for each in stores.audit.audit_entries(AuditFilter())] == [3.0, 4.0]
    last = stores.audit.audit_entries(AuditFilter())[-1].id
    stores.audit.append_audit([entry(5.0)])
    assert stores.audit.audit_entries(AuditFilter(after=last))[0].at == 5.0


@pytest.mark.evidence("C9")
@pytest.mark.parametrize(
    "statement", ["delete from audit", "update audit set actor = 'eve'", "delete from audit where id = 1"]
)
def test_audit_with_statement_that_removes_or_changes_rows_refuses_it(url: str, statement: str) -> None:
    engine = engine_with_a_row(url)
    refused(engine, statement)
    if engine.dialect.name == "postgresql":
        refused(engine, "truncate audit")


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
def test_audit_with_replaced_row_refuses_it(tmp_path: Path, statement: str) -> None:
    engine = engine_with_a_row(f"sqlite:///{tmp_path}/koala.db")
    refused(engine, statement)


def engine_with_a_row(url: str) -> Engine:
    engine = make_engine(url)
    migrate(engine)
    row = "insert into audit values (1, 1.0, 'ada', 'user', '', '', 'submit_job', 'job 7', 'done', '', 1, '')"
    with engine.begin() as connection:
        connection.exec_driver_sql(row)
    return engine


def refused(engine: Engine, statement: str) -> None:
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select actor from audit").scalars().all() == ["ada"]


def check_all(stores: Stores, limit: int = 1000) -> AuditCheck:
    """Check the whole audit, in parts."""
    total, after = 0, None
    while True:
        check = stores.audit.check_audit(after, limit)
        total += check.checked
        if check.is_complete or check.problem:
            return replace(check, checked=total)
        after = check.last


def test_check_audit_of_untouched_entries_finds_them_all(stores: Stores) -> None:
    assert check_all(stores) == AuditCheck(0, AuditHead(), True)
    stores.audit.append_audit([entry(100.0), entry(101.0, "b\0b")])
    stores.jobs.write(Batch(at=103.0, epoch=1, audit=[replace(entry(103), actor="a" * 500, target="ä\ud800" * 200)]))
    for limit in (1, 2, 3, 1000):
        check = check_all(stores, limit)
        assert (check.checked, check.problem, check.last) == (3, "", stores.audit.audit_head())
    last = check.last.id
    assert [stores.audit.audit_hash(number) for number in (last, last + 1)] == [check.last.hash, None]


def test_check_audit_after_old_entries_were_removed_begins_with_the_rest(stores: Stores) -> None:
    stores.audit.append_audit([entry(float(at)) for at in (0, 1, 7, 2, 8)])
    whole = check_all(stores)
    assert stores.audit.forget_audit(5.0) == 2  # the late entry 2.0 stays behind 7.0
    assert check_all(stores) == replace(whole, checked=3)
    assert stores.audit.check_audit(AuditHead(1, "of an entry that is gone"), 10).checked == 3
    assert stores.audit.audit_hash(1) == ""
    assert stores.audit.forget_audit(9.0) == 3
    assert check_all(stores) == replace(whole, checked=0)
    stores.audit.append_audit([entry(9.0)])
    assert check_all(stores).checked == 1
    assert stores.audit.audit_head().id == whole.last.id + 1


def without_triggers(engine: Engine, *statements: str) -> None:
    """Do what an owner of the database can do."""
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
def test_check_audit_of_touched_entries_names_the_first(
    store: SqlStore, statement: str, checked: int, problem: str
) -> None:
    audit = SqlAudit(store.database)
    audit.append_audit([entry(100.0 + n) for n in range(3)])
    without_triggers(store.database.engine, statement)
    check = audit.check_audit(None, 1000)
    assert (check.checked, check.is_complete) == (checked, False)
    assert problem in check.problem
    audit.append_audit([entry(110.0)])  # goes on, whatever is there
    assert audit.check_audit(None, 1000).problem


def test_append_audit_from_several_threads_keeps_the_chain(store: SqlStore) -> None:
    audit = SqlAudit(store.database)

    def append(number: int) -> None:
        audit.append_audit([entry(float(number)), entry(number + 0.5)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(20)))
    check = audit.check_audit(None, 1000)
    assert (check.checked, check.is_complete) == (40, True)
