"""A job's events as they happen."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from koalapy.api.jobs import changes_router
from koalapy.daemon.jobs.changes import TOPICS, Changes, Topic
from koalapy.daemon.jobs.jobs import JobChange
from koalapy.model.errors import NotFoundError, StoreUnavailable
from koalapy.model.job import JobId
from tests.identities import administrators
from tests.serving import TOKEN, URL, Open, bare_application

Event = tuple[str | None, str, dict[str, Any]]


def parsed(text: str) -> list[Event]:
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


async def test_a_stream_tells_the_timeline_and_the_job_until_it_is_over(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    following = asyncio.create_task(api.get("/api/v1/jobs/1/events"))
    await api.post("/api/v1/jobs/1/hold", json={"reason": "not yet"})
    await api.post("/api/v1/jobs/1/cancel", json={"reason": "never"})
    answer = await following
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parsed(answer.text)
    lines = [(ident, data["event"]) for ident, kind, data in events if kind == "timeline"]
    assert [ident for ident, _ in lines] == [str(number) for number in range(1, len(lines) + 1)]
    timeline = (await api.get("/api/v1/jobs/1/timeline")).json()["timeline"]
    assert [data for _, kind, data in events if kind == "timeline"] == timeline, "each line once, in order"
    assert [name for _, name in lines][-2:] == ["held", "cancelled"]
    assert events[-1][1] == "job"
    assert (events[-1][2]["state"], events[-1][2]["reason"]) == ("cancelled", "never")


async def test_after_a_break_it_goes_on_where_it_was(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    await api.post("/api/v1/jobs/1/cancel")
    events = parsed((await api.get("/api/v1/jobs/1/events", headers={"Last-Event-ID": "1"})).text)
    assert [(ident, data["event"]) for ident, kind, data in events if kind == "timeline"] == [("2", "cancelled")]
    seen_all = parsed((await api.get("/api/v1/jobs/1/events", headers={"Last-Event-ID": "2"})).text)
    assert [kind for _, kind, _ in seen_all] == ["job"]


async def test_what_cannot_be_followed(open_api: Open) -> None:
    api = await open_api()
    assert (await api.get("/api/v1/jobs/9/events")).status_code == 404
    refused = await api.get("/api/v1/jobs/9/events", headers={"Last-Event-ID": "x"})
    assert refused.status_code == 422
    assert "Last-Event-ID" in refused.text


class Told(Changes):
    """Two changes after a version of its own, none after the last, and everything after one it does not know."""

    async def follow(self, since: str = "") -> AsyncIterator[frozenset[Topic]]:
        if since not in ("", self.version):
            yield frozenset(TOPICS)
        elif not since:
            yield frozenset(["jobs"])
        yield frozenset()


async def test_who_follows_the_grid_is_told_that_something_has_changed_and_goes_on_after_a_break() -> None:
    changes = Told()
    app = bare_application(administrators(TOKEN), [changes_router(changes)])

    async def told(last: str | None) -> list[Event]:
        answer = await client.get("/api/v1/events", headers={"Last-Event-ID": last} if last else {})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parsed(answer.text)

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL) as client:
        assert (await client.get("/api/v1/events")).status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        everything, nothing = {"topics": ["clusters", "jobs"]}, {"topics": []}
        assert [data for _, _, data in await told(None)] == [everything, {"topics": ["jobs"]}, nothing]
        assert await told(changes.version) == [(changes.version, "changed", nothing)]
        assert [data for _, _, data in await told("of.another")] == [everything, nothing]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("the database does not answer"), NotFoundError("there is no job 1")]
)
async def test_a_stream_ends_when_the_database_does_not_answer_or_the_job_is_not_kept(
    open_api: Open, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    jobs = api._transport.app.state.jobs

    async def failing(job: JobId, last: int) -> AsyncIterator[JobChange]:
        yield JobChange(await jobs.get(job), ())
        raise error

    monkeypatch.setattr(jobs, "follow", failing)
    answer = await api.get("/api/v1/jobs/1/events")
    assert [kind for _, kind, _ in parsed(answer.text)] == ["job"]
