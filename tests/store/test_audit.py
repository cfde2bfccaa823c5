"""The audit in every store: added to, told in order, and removed only when it is old."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.ports import Batch
from koalapy.store.engine import make_engine
from koalapy.store.migrate import migrate
from koalapy.store.opening import Stores


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


@pytest.mark.parametrize(
    "statement", ["delete from audit", "update audit set actor = 'eve'", "delete from audit where id = 1"]
)
def test_the_audit_is_append_only(url: str, statement: str) -> None:
    engine = make_engine(url)
    migrate(engine)
    row = "insert into audit values (1, 1.0, 'ada', 'user', '', '', 'submit_job', 'job 7', 'done', '', 1)"
    with engine.begin() as connection:
        connection.exec_driver_sql(row)
    refused(engine, statement)
    if engine.dialect.name == "postgresql":
        refused(engine, "truncate audit")


def refused(engine: Engine, statement: str) -> None:
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select actor from audit").scalars().all() == ["ada"]
