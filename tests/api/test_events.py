"""Event streams of a job and of the grid."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from itertools import count
from typing import Any

import httpx2
import pytest

from koalapy.api.jobs import changes_router
from koalapy.daemon.jobs.changes import TOPICS, Changes, Topic
from koalapy.daemon.jobs.job_records import JobChange
from koalapy.model.errors import NotFoundError, StoreUnavailable
from koalapy.model.job import JobId
from tests.identities import administrators
from tests.serving import TOKEN, URL, Open, app_of, bare_application

Event = tuple[str | None, str, dict[str, Any]]


def parse_events(text: str) -> list[Event]:
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return events


async def test_job_events_stream_timeline_until_end(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    stream = asyncio.create_task(api.get("/api/v1/jobs/1/events"))
    await api.post("/api/v1/jobs/1/hold", json={"reason": "not yet"})
    await api.post("/api/v1/jobs/1/cancel", json={"reason": "never"})
    answer = await stream
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.text)
    lines = [(ident, data["event"]) for ident, kind, data in events if kind == "timeline"]
    assert [ident for ident, _ in lines] == [str(number) for number in range(1, len(lines) + 1)]
    timeline = (await api.get("/api/v1/jobs/1/timeline")).json()["timeline"]
    assert [data for _, kind, data in events if kind == "timeline"] == timeline, "each line once, in order"
    assert [name for _, name in lines][-2:] == ["held", "cancelled"]
    assert events[-1][1] == "job"
    assert (events[-1][2]["state"], events[-1][2]["reason"]) == ("cancelled", "never")


async def test_job_events_resume_after_last_event_id(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/1/cancel")
    events = parse_events((await api.get("/api/v1/jobs/1/events", headers={"Last-Event-ID": "1"})).text)
    assert [(ident, data["event"]) for ident, kind, data in events if kind == "timeline"] == [("2", "cancelled")]
    after_end = parse_events((await api.get("/api/v1/jobs/1/events", headers={"Last-Event-ID": "2"})).text)
    assert [kind for _, kind, _ in after_end] == ["job"]


async def test_job_events_of_unknown_job_are_rejected(open_api: Open) -> None:
    api = await open_api()

    wrong_id = await api.get("/api/v1/jobs/9/events", headers={"Last-Event-ID": "x"})
    assert wrong_id.status_code == 422
    assert "Last-Event-ID" in wrong_id.text


class TwoChanges(Changes):
    """Reports one change to a new stream, none after its version, and all topics after an unknown version."""

    async def follow_changes(self, since: str = "") -> AsyncIterator[frozenset[Topic]]:
        if since not in ("", self.version):
            yield frozenset(TOPICS)
        elif not since:
            yield frozenset(["jobs"])
        yield frozenset()


async def test_grid_events_resume_after_known_version() -> None:
    changes = TwoChanges()
    app = bare_application(administrators(TOKEN), [changes_router(changes)])

    async def read_events(last_id: str | None) -> list[Event]:
        answer = await client.get("/api/v1/events", headers={"Last-Event-ID": last_id} if last_id else {})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.text)

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL) as client:
        assert (await client.get("/api/v1/events")).status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        everything, nothing = {"topics": ["clusters", "jobs"]}, {"topics": []}
        assert [data for _, _, data in await read_events(None)] == [everything, {"topics": ["jobs"]}, nothing]
        assert await read_events(changes.version) == [(changes.version, "changed", nothing)]
        assert [data for _, _, data in await read_events("of.another")] == [everything, nothing]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("the database does not answer"), NotFoundError("there is no job 1")]
)
async def test_job_events_end_on_database_failure_or_deleted_job(
    open_api: Open, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    jobs = app_of(api).state.jobs

    async def failing(job: JobId, last: int) -> AsyncIterator[JobChange]:
        yield JobChange(await jobs.get(job), ())
        raise error

    monkeypatch.setattr(jobs, "follow_job", failing)
    answer = await api.get("/api/v1/jobs/1/events")
    assert [kind for _, kind, _ in parse_events(answer.text)] == ["job"]


@pytest.mark.parametrize("path", ["/api/v1/events", "/api/v1/jobs/1/events"])
async def test_client_that_leaves_with_events_pending_ends_stream_without_error(
    open_api: Open, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    api, changes, has_pending_events = await open_api(), Changes(), asyncio.Event()
    await api.post("/api/v1/jobs", json=body)
    app = app_of(api)
    app.include_router(changes_router(changes))
    change = JobChange(await app.state.jobs.get(1), ())

    async def follow(*_: object) -> AsyncIterator[Any]:
        for number in count():
            if number == 4:  # one is being sent, three wait
                has_pending_events.set()
            yield change if "jobs" in path else frozenset()

    async def disconnect() -> dict[str, Any]:
        await has_pending_events.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    monkeypatch.setattr(changes, "follow_changes", follow)
    monkeypatch.setattr(app.state.jobs, "follow_job", follow)
    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"host", b"127.0.0.1"), (b"last-event-id", b"1")]
    request = {"type": "http", "method": "GET", "scheme": "http", "headers": headers, "query_string": b""}
    async with asyncio.timeout(60):
        await app({**request, "path": path, "raw_path": path.encode()}, disconnect, send)
