"""Audit log: every change and every rejection is recorded, without secrets."""

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
from tests.api.test_access import BODY, BUNDLE, SECRET, Api, open_access_api
from tests.serving import AGENT_TOKENS, CSRF_HEADER, URL
from tests.signals import hanging_threads

Json = dict[str, Any]


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_access_api(tmp_path) as access_api:
        yield access_api


async def list_entries(api: Api, **query: Any) -> list[Json]:
    answer = await api.send_as("root", "GET", "/api/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    entries: list[Json] = answer.json()["entries"]
    return entries


def summarize(entries: list[Json]) -> list[tuple[str, ...]]:
    return [(entry["actor"], entry["role"], entry["action"], entry["target"], entry["outcome"]) for entry in entries]


@pytest.mark.evidence("C9")
async def test_audit_entry_of_change_names_actor_target_and_outcome(api: Api) -> None:
    await api.submit_as("ada")
    await api.send_as("ada", "POST", "/api/v1/jobs/1/hold")
    await api.send_as("director", "POST", "/api/v1/jobs/1/cancel", json={"reason": "enough"})
    await api.send_as("director", "POST", "/api/v1/clusters/north/drain", json={"reason": "new disks"})
    await api.send_as("director", "POST", "/api/v1/replicas", json={"name": "m", "cluster": "north", "path": "/m"})
    await api.send_as("ada", "POST", "/api/v1/bundles", content=BUNDLE)
    token = await api.send_as("ada", "POST", "/api/v1/tokens", json={})
    assert token.status_code == 201
    log = await list_entries(api)
    assert [entry[:3] + entry[4:] for entry in summarize(log)] == [
        ("ada", "user", "submit_job", "done"),
        ("ada", "user", "hold_job", "done"),
        ("director", "operator", "cancel_job", "done"),
        ("director", "operator", "drain_cluster", "done"),
        ("director", "operator", "add_replica", "done"),
        ("ada", "user", "upload_bundle", "done"),
        ("ada", "user", "create_token", "done"),
    ]
    assert [entry["detail"] for entry in log[2:4]] == ["enough", "new disks"]
    targets = [entry["target"] for entry in log]
    assert targets[:5] == ["job 1", "job 1", "job 1", "cluster north", "m on north"]
    assert targets[5].startswith("bundle ")
    assert targets[6].startswith("token ")
    assert {entry["how"] for entry in log} == {"test token"}
    assert all(entry["address"].startswith("192.0.2.") for entry in log)
    assert token.json()["token"] not in json.dumps(log)


async def test_audit_omits_reads_and_records_rejections(api: Api) -> None:
    await api.submit_as("ada")
    for user, method, path in (
        ("ada", "GET", "/api/v1/jobs"),
        ("ada", "POST", "/api/v1/explain"),
        ("bob", "GET", "/api/v1/jobs/1"),
        ("bob", "GET", "/api/v1/jobs/1/logs"),
        ("bob", "POST", "/api/v1/jobs/1/cancel"),
        ("bob", "GET", "/api/v1/audit"),
        ("anonymous", "GET", "/api/v1/jobs"),
        ("agent", "POST", "/api/v1/jobs"),
    ):
        await api.send_as(user, method, path, json=BODY if method == "POST" and "cancel" not in path else None)
    log = (await list_entries(api))[1:]
    assert summarize(log) == [
        ("bob", "user", "read_logs", "job 1", "refused"),
        ("bob", "user", "cancel_job", "job 1", "refused"),
        ("bob", "user", "list_audit", "", "refused"),
        ("", "", "GET", "/api/v1/jobs", "refused"),
        ("", "", "POST", "/api/v1/jobs", "refused"),
    ]
    assert [entry["detail"][:4] for entry in log] == ["403 ", "403 ", "403 ", "401 ", "401 "]
    assert "not yours" in log[0]["detail"]


async def test_audit_of_rejected_agent_omits_its_token(api: Api) -> None:
    path = "/api/v1/agents/south/results/1.1.0.nonce"
    sent_by_north = await api.send_as("agent", "PUT", path, content=b"")
    assert sent_by_north.request.headers["Authorization"] == f"Bearer {AGENT_TOKENS['north']}"
    assert [answer.status_code for answer in (sent_by_north, await api.send_as("bob", "PUT", path))] == [401, 401]
    entries = await list_entries(api)
    assert [(entry["action"], entry["target"], entry["outcome"]) for entry in entries] == [
        ("put", "cluster south", "refused")
    ] * 2
    assert not any(token in json.dumps(entries) for token in (AGENT_TOKENS["north"], "the-token-of-bob"))


async def test_audit_of_cancel_jobs_names_jobs_of_other_users(api: Api) -> None:
    await api.submit_as("ada")
    await api.submit_as("bob")
    await api.send_as("bob", "POST", "/api/v1/jobs/cancel", json={"jobs": [1, 2]})
    entry = (await list_entries(api))[-1]
    assert (entry["action"], entry["target"], entry["detail"]) == ("cancel_jobs", "job 2", "not bob's: 1")


async def test_audit_of_bulk_action_has_an_entry_for_each_changed_job(api: Api) -> None:
    for _ in range(3):
        await api.submit_as("ada")
    await api.send_as("ada", "POST", "/api/v1/jobs/3/hold")
    for _ in range(2):
        order = {"jobs": [1, 2, 3], "reason": "full"}
        assert (await api.send_as("director", "POST", "/api/v1/jobs/hold", json=order)).status_code == 200
    log = [(entry["action"], entry["target"], entry["detail"]) for entry in (await list_entries(api))[4:]]
    assert log == [
        ("hold_jobs", "job 1", "full"),
        ("hold_jobs", "job 2", "full"),
        ("hold_jobs", "jobs 1, 2, 3", "full"),  # the repetition, which changed nothing
    ]
    assert (await api.send_as("root", "GET", "/api/v1/audit/verify")).json()["problem"] == ""


async def test_audit_filters_by_user_action_and_page(api: Api) -> None:
    for user in ("ada", "bob", "ada"):
        await api.submit_as(user)
    await api.send_as("ada", "POST", "/api/v1/jobs/1/hold")
    assert [entry["target"] for entry in await list_entries(api, user="ada")] == ["job 1", "job 3", "job 1"]
    assert [entry["target"] for entry in await list_entries(api, action="submit_job", user="bob")] == ["job 2"]
    first = (await api.send_as("root", "GET", "/api/v1/audit", params={"limit": 2})).json()
    second = (await api.send_as("root", "GET", "/api/v1/audit", params={"after": first["next"]})).json()
    assert [entry["target"] for entry in second["entries"]] == ["job 3", "job 1"]
    third = (await api.send_as("root", "GET", "/api/v1/audit", params={"after": second["next"]})).json()
    assert third == {"entries": [], "next": second["next"]}
    assert len(await list_entries(api, since="1h")) == 4


async def test_change_and_audit_entry_are_one_transaction(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit

    def refuse(_: object) -> None:
        raise AssertionError("written by itself")

    monkeypatch.setattr(audit._store, "append_audit", refuse)
    await api.submit_as("ada")
    for path in ("jobs/1/hold", "jobs/1/release", "jobs/1/cancel"):
        assert (await api.send_as("ada", "POST", f"/api/v1/{path}")).status_code == 200
    for path in ("drain", "resume", "clear"):
        body = {"reason": "test"} if path == "drain" else None
        assert (await api.send_as("director", "POST", f"/api/v1/clusters/north/{path}", json=body)).status_code == 200
    assert len(await list_entries(api)) == 7


async def test_audit_entry_is_written_after_database_returns(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit

    def fail(_: object) -> None:
        raise StoreUnavailable("it is away")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(audit._store, "append_audit", fail)
        assert (await api.send_as("ada", "POST", "/api/v1/bundles", content=BUNDLE)).status_code == 201
        assert (await api.send_as("anonymous", "GET", "/api/v1/jobs")).status_code == 401
        await audit.flush_entries()
    unwritten = [log["entry"].action for log in logs if log["action"] == "audit-not-written"]
    assert unwritten == ["upload_bundle", "GET"], "each is logged once, in case the daemon is killed"
    assert await list_entries(api) == []
    await audit.flush_entries()
    assert [entry["action"] for entry in await list_entries(api)] == ["upload_bundle", "GET"]


async def test_audit_does_not_block_requests_while_database_hangs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rejected requests nor other work in threads may wait for the database."""
    audit: Audit = api.app.state.audit
    append, proceed = audit._store.append_audit, threading.Event()

    def hanging(written: Sequence[AuditEntry]) -> None:
        proceed.wait()
        append(written)

    monkeypatch.setattr(audit._store, "append_audit", hanging)
    try:
        with hanging_threads():
            await asyncio.gather(
                *(api.send_as("anonymous", "GET", path) for path in 20 * ["/api/v1/jobs", "/api/v1/clusters"]),
                *(audit.record("login", None, origin=f"192.0.2.{number}") for number in range(20)),
            )
            await audit.flush_entries()
        assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
    finally:
        proceed.set()
    await audit.flush_entries()
    await audit.flush_entries()
    log = await list_entries(api, limit=1000)
    assert sum(entry["times"] for entry in log if entry["action"] == "GET") == 40
    assert sum(entry["action"] == "login" for entry in log) == 20


@contextmanager
def block_writes(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block database writes until the event is set. Within this context, hanging threads time out."""
    append, proceed = audit._store.append_audit, threading.Event()
    with monkeypatch.context() as patched, hanging_threads():
        patched.setattr(audit._store, "append_audit", lambda written: (proceed.wait(), append(written)))
        try:
            yield proceed
        except BaseException:
            proceed.set()
            raise


async def test_audit_end_writes_entries_behind_pending_write(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit
    with capture_logs() as logs:
        with block_writes(audit, monkeypatch) as proceed:
            for target in ("is under way", "waits"):
                await audit.record("login", None, origin="192.0.2.1", target=target)
        ending = asyncio.create_task(audit.end_writing())
        await asyncio.sleep(0)
        proceed.set()
        await ending
        assert not audit._writing, "no write is left to the ending event loop"
    assert [entry["target"] for entry in await list_entries(api)] == ["is under way", "waits"]
    assert [log for log in logs if log["action"] == "audit-entry"] == []


async def test_audit_end_logs_entries_not_written(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    audit: Audit = api.app.state.audit
    with capture_logs() as logs, block_writes(audit, monkeypatch) as proceed:
        for target in ("is under way", "waits"):
            await audit.record("login", None, origin="192.0.2.1", target=target)
        for _ in range(3):
            await audit.record("login", None, origin="192.0.2.1", target="is counted", outcome="refused")
        await audit.end_writing()
        proceed.set()
    unwritten = [log["entry"] for log in logs if log["action"] == "audit-entry"]
    assert [(entry.target, entry.times) for entry in unwritten] == [
        ("is under way", 1),
        ("waits", 1),
        ("is counted", 1),
        ("is counted", 2),
    ]


async def test_audit_replaces_characters_the_database_rejects(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL rejects NUL; a request for such a path must not fail with a server error."""
    audit: Audit = api.app.state.audit
    assert (await api.send_as("anonymous", "GET", "/api/v1/%00")).status_code == 401
    await audit.record("login", None, origin="192.0.2.1", target="\ud800\0")
    assert [entry["target"] for entry in await list_entries(api)] == ["/api/v1/\ufffd", "?\ufffd"]

    def fail(_: object) -> None:
        raise ValueError("no such value")

    with monkeypatch.context() as patched:
        patched.setattr(audit._store, "append_audit", fail)
        assert (await api.send_as("anonymous", "GET", "/api/v1/clusters")).status_code == 401
    await audit.record("login", None, origin="192.0.2.1", target="after")
    assert (await list_entries(api))[-1]["target"] == "after"


async def test_audit_counts_repeated_rejections(api: Api) -> None:
    audit: Audit = api.app.state.audit
    transport = httpx2.ASGITransport(api.app, client=("192.0.2.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url=URL, headers=CSRF_HEADER) as http:
        for number in range(50):
            assert (await http.get(f"/api/v1/anything/{number}")).status_code == 401
    assert len(await list_entries(api)) == 1, "the first is written at once"
    await audit.flush_entries()
    log = await list_entries(api)
    assert [entry["times"] for entry in log] == [1, 49]
    for number in range(MAX_KINDS + 20):
        await audit.record("login", None, origin=f"192.0.2.{number}", outcome="refused")
    await audit.flush_entries()
    log = (await list_entries(api, limit=1000))[2:]
    assert len(log) == MAX_KINDS + 1
    assert (log[-1]["address"], log[-1]["times"]) == ("others", 20)


async def test_audit_attributes_concurrent_requests_to_their_users(api: Api) -> None:
    await asyncio.gather(*(api.submit_as(user) for user in ("ada", "bob", "director") for _ in range(5)))
    log = await api.app.state.audit.read_entries(AuditFilter())
    jobs = (await api.send_as("root", "GET", "/api/v1/jobs")).json()["jobs"]
    assert {(entry.actor, entry.target) for entry in log} == {(job["owner"], f"job {job['id']}") for job in jobs}
    assert len(log) == len(jobs) == 15


async def test_verify_audit_after_removal_names_missing_entry(api: Api, tmp_path: Path) -> None:
    for _ in range(3):
        await api.submit_as("ada")
    verification = (await api.send_as("root", "GET", "/api/v1/audit/verify")).json()
    assert (verification["checked"], verification["is_complete"], verification["problem"]) == (3, True, "")
    parameters = {"after": 2, "after_hash": "0" * 64}
    assert (
        "entry 3 is not"
        in (await api.send_as("root", "GET", "/api/v1/audit/verify", params=parameters)).json()["problem"]
    )
    audit: Audit = api.app.state.audit
    await audit.write_and_prune(None)
    change_audit_table(tmp_path, "delete from audit where id = 3", "update audit_chain set head_id = 2, head_hash = ''")
    with capture_logs() as logs:
        await audit.write_and_prune(None)
    (line,) = [line for line in logs if line["action"] == "audit-changed"]
    assert line["error"] == "entry 3 was removed since the daemon wrote it"


async def test_audit_head_is_logged_once_per_change(api: Api) -> None:
    await api.submit_as("ada")
    with capture_logs() as logs:
        await api.app.state.audit.write_and_prune(None)
        await api.app.state.audit.write_and_prune(None)
        await api.submit_as("ada")
        await api.app.state.audit.write_and_prune(None)
    assert [line["entry"] for line in logs if line["action"] == "audit-head"] == [1]


def change_audit_table(folder: Path, *statements: str) -> None:
    (path,) = folder.rglob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for name in ("audit_is_kept", "audit_is_unchanged"):
            database.execute(f"drop trigger {name}")
        for statement in statements:
            database.execute(statement)
