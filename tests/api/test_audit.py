"""Who did what, from where: every change and every refusal is written down, and no secret ever."""

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from koalapy.daemon.observability.audit import MAX_KINDS, Audit
from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.model.errors import StoreUnavailable
from tests.api.test_access import BODY, BUNDLE, SECRET, Api, opened
from tests.serving import AGENT_TOKENS, NO_PAGE, URL
from tests.signals import hanging_threads

Json = dict[str, Any]


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with opened(tmp_path) as found:
        yield found


async def entries(api: Api, **query: Any) -> list[Json]:
    answer = await api.ask("root", "GET", "/api/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    found: list[Json] = answer.json()["entries"]
    return found


def told(found: list[Json]) -> list[tuple[str, ...]]:
    return [(one["actor"], one["role"], one["action"], one["target"], one["outcome"]) for one in found]


@pytest.mark.evidence("C9")
async def test_changes_tell_who_what_where_and_what_became_of_it(api: Api) -> None:
    await api.submit("ada")
    await api.ask("ada", "POST", "/api/v1/jobs/1/hold")
    await api.ask("director", "POST", "/api/v1/jobs/1/cancel", json={"reason": "enough"})
    await api.ask("director", "POST", "/api/v1/clusters/north/drain")
    await api.ask("director", "POST", "/api/v1/replicas", json={"name": "m", "cluster": "north", "path": "/m"})
    await api.ask("ada", "POST", "/api/v1/bundles", content=BUNDLE)
    made = await api.ask("ada", "POST", "/api/v1/tokens", json={})
    assert made.status_code == 201
    found = await entries(api)
    assert [one[:3] + one[4:] for one in told(found)] == [
        ("ada", "user", "submit_job", "done"),
        ("ada", "user", "hold_job", "done"),
        ("director", "operator", "cancel_job", "done"),
        ("director", "operator", "drain_cluster", "done"),
        ("director", "operator", "add_replica", "done"),
        ("ada", "user", "upload_bundle", "done"),
        ("ada", "user", "create_token", "done"),
    ]
    targets = [one["target"] for one in found]
    assert targets[:5] == ["job 1", "job 1", "job 1", "cluster north", "m on north"]
    assert targets[5].startswith("bundle ")
    assert targets[6].startswith("token ")
    assert {one["how"] for one in found} == {"a test"}
    assert all(one["address"].startswith("192.0.2.") for one in found)
    assert made.json()["token"] not in json.dumps(found)


async def test_who_looks_is_not_written_down_but_who_is_refused(api: Api) -> None:
    await api.submit("ada")
    for who, method, path in (
        ("ada", "GET", "/api/v1/jobs"),
        ("ada", "POST", "/api/v1/explain"),
        ("bob", "GET", "/api/v1/jobs/1"),
        ("bob", "GET", "/api/v1/jobs/1/logs"),
        ("bob", "POST", "/api/v1/jobs/1/cancel"),
        ("bob", "GET", "/api/v1/audit"),
        ("nobody", "GET", "/api/v1/jobs"),
        ("agent", "POST", "/api/v1/jobs"),
    ):
        await api.ask(who, method, path, json=BODY if method == "POST" and "cancel" not in path else None)
    found = (await entries(api))[1:]
    assert told(found) == [
        ("bob", "user", "read_logs", "job 1", "refused"),
        ("bob", "user", "cancel_job", "job 1", "refused"),
        ("bob", "user", "list_audit", "", "refused"),
        ("", "", "GET", "/api/v1/jobs", "refused"),
        ("", "", "POST", "/api/v1/jobs", "refused"),
    ]
    assert [one["detail"][:4] for one in found] == ["403 ", "403 ", "403 ", "401 ", "401 "]
    assert "not yours" in found[0]["detail"]


async def test_agents_that_are_refused_are_written_down_without_what_they_show(api: Api) -> None:
    path = "/api/v1/agents/north/results/1.1.0.nonce"
    answer = await api.ask("bob", "PUT", path, content=b"")
    assert answer.status_code == 401
    assert [(one["action"], one["target"], one["outcome"]) for one in await entries(api)] == [
        ("put", "cluster north", "refused")
    ]
    assert AGENT_TOKENS["north"] not in json.dumps(await entries(api))


async def test_of_many_jobs_it_is_told_which_were_not_theirs(api: Api) -> None:
    await api.submit("ada")
    await api.submit("bob")
    await api.ask("bob", "POST", "/api/v1/jobs/cancel", json={"jobs": [1, 2]})
    last = (await entries(api))[-1]
    assert (last["action"], last["target"], last["detail"]) == ("cancel_jobs", "jobs 1, 2", "not bob's: 1")


async def test_entries_are_found_by_user_action_and_page(api: Api) -> None:
    for who in ("ada", "bob", "ada"):
        await api.submit(who)
    await api.ask("ada", "POST", "/api/v1/jobs/1/hold")
    assert [one["target"] for one in await entries(api, user="ada")] == ["job 1", "job 3", "job 1"]
    assert [one["target"] for one in await entries(api, action="submit_job", user="bob")] == ["job 2"]
    first = (await api.ask("root", "GET", "/api/v1/audit", params={"limit": 2})).json()
    rest = (await api.ask("root", "GET", "/api/v1/audit", params={"after": first["next"]})).json()
    assert [one["target"] for one in rest["entries"]] == ["job 3", "job 1"]
    none = (await api.ask("root", "GET", "/api/v1/audit", params={"after": rest["next"]})).json()
    assert none == {"entries": [], "next": rest["next"]}
    assert len(await entries(api, since=3600)) == 4


async def test_a_change_and_its_entry_are_one_transaction(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written for it afterwards: who ends at any moment loses both or neither."""
    audit: Audit = api.app.state.audit

    def refuse(_: object) -> None:
        raise AssertionError("written by itself")

    monkeypatch.setattr(audit._store, "append_audit", refuse)
    await api.submit("ada")
    for path in ("jobs/1/hold", "jobs/1/release", "jobs/1/cancel"):
        assert (await api.ask("ada", "POST", f"/api/v1/{path}")).status_code == 200
    for path in ("drain", "resume", "clear"):
        assert (await api.ask("director", "POST", f"/api/v1/clusters/north/{path}")).status_code == 200
    assert len(await entries(api)) == 7


async def test_what_the_database_does_not_take_is_written_later(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit

    def away(_: object) -> None:
        raise StoreUnavailable("it is away")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(audit._store, "append_audit", away)
        assert (await api.ask("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
        assert (await api.ask("nobody", "GET", "/api/v1/jobs")).status_code == 401
        await audit.flush()
    told = [log["entry"].action for log in logs if log["action"] == "audit-not-written"]
    assert told == ["upload_bundle", "GET"], "each once, should the daemon be killed now"
    assert await entries(api) == []
    await audit.flush()
    assert [one["action"] for one in await entries(api)] == ["upload_bundle", "GET"]


async def test_nobody_waits_for_the_audit_while_the_database_hangs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each who was refused waited for ever, and had a thread that everything else lacked."""
    audit: Audit = api.app.state.audit
    append, goes_on = audit._store.append_audit, threading.Event()

    def hanging(written: Sequence[AuditEntry]) -> None:
        goes_on.wait()
        append(written)

    monkeypatch.setattr(audit._store, "append_audit", hanging)
    try:
        with hanging_threads():
            await asyncio.gather(
                *(api.ask("nobody", "GET", path) for path in 20 * ["/api/v1/jobs", "/api/v1/clusters"]),
                *(audit.record("login", None, origin=f"192.0.2.{number}") for number in range(20)),
            )
            await audit.flush()
        assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
    finally:
        goes_on.set()
    await audit.flush()
    await audit.flush()
    found = await entries(api, limit=1000)
    assert sum(one["times"] for one in found if one["action"] == "GET") == 40
    assert sum(one["action"] == "login" for one in found) == 20


@contextmanager
def held(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have the database take nothing until the event is set; only in this context does time pass meanwhile."""
    append, goes_on = audit._store.append_audit, threading.Event()
    with monkeypatch.context() as patched, hanging_threads():
        patched.setattr(audit._store, "append_audit", lambda written: (goes_on.wait(), append(written)))
        try:
            yield goes_on
        except BaseException:
            goes_on.set()
            raise


async def test_at_the_end_what_waits_behind_a_write_is_written_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit
    with capture_logs() as logs:
        with held(audit, monkeypatch) as goes_on:
            for target in ("is under way", "waits"):
                await audit.record("login", None, origin="192.0.2.1", target=target)
        ending = asyncio.create_task(audit.end())
        await asyncio.sleep(0)
        goes_on.set()
        await ending
        assert not audit._writing, "nothing is left to a loop that ends"
    assert [one["target"] for one in await entries(api)] == ["is under way", "waits"]
    assert [log for log in logs if log["action"] == "audit-entry"] == []


async def test_at_the_end_what_is_not_written_stands_in_the_log(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit
    with capture_logs() as logs, held(audit, monkeypatch) as goes_on:
        for target in ("is under way", "waits"):
            await audit.record("login", None, origin="192.0.2.1", target=target)
        for _ in range(3):
            await audit.record("login", None, origin="192.0.2.1", target="is counted", outcome="refused")
        await audit.end()
        goes_on.set()
    told = [log["entry"] for log in logs if log["action"] == "audit-entry"]
    assert [(entry.target, entry.times) for entry in told] == [
        ("is under way", 1),
        ("waits", 1),
        ("is counted", 1),
        ("is counted", 2),
    ]


async def test_what_no_database_takes_is_written_without_it_and_takes_nothing_along(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL has no NUL, and who asked for such a path was answered with an error of ours."""
    audit: Audit = api.app.state.audit
    assert (await api.ask("nobody", "GET", "/api/v1/%00")).status_code == 401
    await audit.record("login", None, origin="192.0.2.1", target="\ud800\0")
    assert [one["target"] for one in await entries(api)] == ["/api/v1/\ufffd", "?\ufffd"]

    def broken(_: object) -> None:
        raise ValueError("no such value")

    with monkeypatch.context() as patched:
        patched.setattr(audit._store, "append_audit", broken)
        assert (await api.ask("nobody", "GET", "/api/v1/clusters")).status_code == 401
    await audit.record("login", None, origin="192.0.2.1", target="after")
    assert (await entries(api))[-1]["target"] == "after"


async def test_a_flood_of_refusals_is_counted(api: Api) -> None:
    audit: Audit = api.app.state.audit
    transport = httpx2.ASGITransport(api.app, client=("192.0.2.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url=URL, headers=NO_PAGE) as http:
        for number in range(50):
            assert (await http.get(f"/api/v1/anything/{number}")).status_code == 401
    assert len(await entries(api)) == 1, "the first is there at once"
    await audit.flush()
    found = await entries(api)
    assert [one["times"] for one in found] == [1, 49]
    for number in range(MAX_KINDS + 20):
        await audit.record("login", None, origin=f"192.0.2.{number}", outcome="refused")
    await audit.flush()
    found = (await entries(api, limit=1000))[2:]
    assert len(found) == MAX_KINDS + 1
    assert (found[-1]["address"], found[-1]["times"]) == ("others", 20)


async def test_requests_at_the_same_time_are_told_apart(api: Api) -> None:
    await asyncio.gather(*(api.submit(who) for who in ("ada", "bob", "director") for _ in range(5)))
    found = await api.app.state.audit.entries(AuditFilter())
    shown = (await api.ask("root", "GET", "/api/v1/jobs")).json()["jobs"]
    assert {(one.actor, one.target) for one in found} == {(job["owner"], f"job {job['id']}") for job in shown}
    assert len(found) == len(shown) == 15


async def test_verify_audit_with_entry_that_was_removed_names_it(api: Api, tmp_path: Path) -> None:
    for _ in range(3):
        await api.submit("ada")
    whole = (await api.ask("root", "GET", "/api/v1/audit/verify")).json()
    assert (whole["checked"], whole["is_complete"], whole["problem"]) == (3, True, "")
    rest = {"after": 2, "after_hash": "0" * 64}
    assert "entry 3 is not" in (await api.ask("root", "GET", "/api/v1/audit/verify", params=rest)).json()["problem"]
    audit: Audit = api.app.state.audit
    await audit.tidy(None)
    _without_triggers(tmp_path, "delete from audit where id = 3", "update audit_chain set head_id = 2, head_hash = ''")
    with capture_logs() as logs:
        await audit.tidy(None)
    (line,) = [line for line in logs if line["action"] == "audit-changed"]
    assert line["error"] == "entry 3 was removed since the daemon wrote it"


async def test_watch_head_logs_the_last_entry_once_while_it_stays(api: Api) -> None:
    await api.submit("ada")
    with capture_logs() as logs:
        await api.app.state.audit.tidy(None)
        await api.app.state.audit.tidy(None)
        await api.submit("ada")
        await api.app.state.audit.tidy(None)
    assert [line["entry"] for line in logs if line["action"] == "audit-head"] == [1]


def _without_triggers(folder: Path, *statements: str) -> None:
    (path,) = folder.rglob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for name in ("audit_is_kept", "audit_is_unchanged"):
            database.execute(f"drop trigger {name}")
        for statement in statements:
            database.execute(statement)
