"""Tokens over the API: made, shown once, listed, revoked, and what is open by them ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.serving import Open
from tests.signals import until

Json = dict[str, Any]
BODY = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"]}


def shows(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.evidence("T1")
async def test_a_token_is_shown_once_and_lets_in_until_it_is_revoked(open_api: Open) -> None:
    api = await open_api()
    made = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": "8h"})).json()
    alice = shows(made["token"])
    assert (made["user"], made["role"], made["created_by"], made["made_by"]) == ("alice", "user", "ada", None)
    listed = await api.get("/api/v1/tokens")
    assert made["token"] not in listed.text
    assert {**made, "last_used_at": None} == {**listed.json()["tokens"][0], "token": made["token"]}
    assert (await api.get("/api/v1/tokens", headers=alice)).json()["tokens"][0]["last_used_at"]
    assert (await api.post("/api/v1/tokens/1/revoke", headers=alice)).json()["tokens"][0]["revoked_at"]
    assert (await api.get("/api/v1/tokens", headers=alice)).status_code == 401
    assert (await api.get("/api/v1/tokens")).json()["tokens"] == []
    assert len((await api.get("/api/v1/tokens?all=true")).json()["tokens"]) == 1


async def test_without_a_word_it_is_one_s_own(open_api: Open) -> None:
    api = await open_api()
    made = (await api.post("/api/v1/tokens")).json()
    assert (made["user"], made["role"]) == ("ada", "admin")
    assert made["expires_at"] is not None


async def test_users_have_their_own_only(open_api: Open) -> None:
    api = await open_api()
    made = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": 3600})).json()
    alice = shows(made["token"])
    assert (await api.post("/api/v1/tokens", json={"user": "bob"})).json()["role"] == "user", "the least"
    for wanted in ({"user": "bob"}, {"role": "operator"}, {"role": "admin"}):
        refused = await api.post("/api/v1/tokens", json=wanted, headers=alice)
        assert (refused.status_code, refused.json()["field"]) == (403, next(iter(wanted)))
    mine = (await api.post("/api/v1/tokens", json={"expires": None}, headers=alice)).json()
    assert (mine["user"], mine["role"], mine["made_by"]) == ("alice", "user", 1)
    assert mine["expires_at"] == made["expires_at"]
    assert [one["id"] for one in (await api.get("/api/v1/tokens", headers=alice)).json()["tokens"]] == [1, 3]
    assert (await api.post("/api/v1/tokens/2/revoke", headers=alice)).status_code == 404
    assert (await api.post("/api/v1/tokens/revoke", json={"all": True}, headers=alice)).status_code == 403
    revoked = (await api.post("/api/v1/tokens/revoke", json={"all": True})).json()["tokens"]
    assert [one["id"] for one in revoked] == [1, 2, 3]
    assert (await api.get("/api/v1/tokens")).status_code == 200


@pytest.mark.parametrize(
    "wanted",
    [{"user": ""}, {"user": "a b"}, {"user": "a\nb"}, {"expires": 0}, {"expires": -1}, {"role": "root"}, {"x": 1}],
)
async def test_what_is_no_order_is_refused(open_api: Open, wanted: Json) -> None:
    refused = await (await open_api()).post("/api/v1/tokens", json=wanted)
    assert (refused.status_code, refused.json()["field"]) == (422, next(iter(wanted)))


# What is open


class Request:
    """One that goes on for as long as its answer does."""

    def __init__(self, app: Callable[..., Any], path: str, token: str, method: str = "GET", body: bytes = b"") -> None:
        self.messages: list[Any] = []
        self.began, self._body = asyncio.Event(), body
        path, _, query = path.partition("?")
        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "http_version": "1.1",
            "headers": headers,
        }
        self.answer = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if (body := self._body) is not None:
            self._body = None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": bool(body)}
        self.began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        self.began.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def is_whole(self) -> bool:
        last = self.messages[-1]
        return last["type"] == "http.response.body" and not last.get("more_body", False)


async def tokens_of_alice(api: httpx2.AsyncClient, number: int = 1, expires: str | float = "8h") -> list[str]:
    """Return tokens of a user who has one job."""
    order = {"user": "alice", "role": "user", "expires": expires}
    made = [(await api.post("/api/v1/tokens", json=order)).json()["token"] for _ in range(number)]
    assert (await api.post("/api/v1/jobs", json=BODY, headers=shows(made[0]))).status_code == 201
    return made


@pytest.mark.evidence("U15", "C4", "T5")
@pytest.mark.parametrize("path", ["/api/v1/jobs/1/logs?follow=true", "/api/v1/jobs/1/events"])
async def test_what_is_followed_breaks_off_when_the_token_is_revoked(open_api: Open, path: str) -> None:
    api = await open_api()
    shown, other = await tokens_of_alice(api, 2)
    app = api._transport.app
    following, going_on = Request(app, path, shown), Request(app, path, other)
    for request in (following, going_on):
        await asyncio.wait_for(request.began.wait(), 30)
    await api.post("/api/v1/tokens/1/revoke")
    await asyncio.wait_for(following.answer, 30)
    assert following.status == 200
    assert not following.is_whole, "nobody takes it for all there is"
    assert not going_on.answer.done()
    going_on.answer.cancel()


@pytest.mark.evidence("T5")
async def test_who_waits_for_a_job_is_told_that_the_token_holds_no_longer(open_api: Open) -> None:
    api = await open_api()
    (shown,) = await tokens_of_alice(api)
    engine = api._transport.app.state.engine
    waiting = Request(api._transport.app, "/api/v1/jobs/1?wait=60", shown)
    await until(lambda: engine._watchers)
    await api.post("/api/v1/tokens/1/revoke")
    await asyncio.wait_for(waiting.answer, 30)
    assert (waiting.status, waiting.is_whole) == (401, True)


@pytest.mark.evidence("T5")
async def test_who_waits_is_told_as_well_when_the_token_expires(open_api: Open) -> None:
    api = await open_api()
    (shown,) = await tokens_of_alice(api, expires=0.5)
    waiting = Request(api._transport.app, "/api/v1/jobs/1?wait=60", shown)
    await asyncio.wait_for(waiting.answer, 30)
    assert waiting.status == 401


async def test_a_client_that_goes_away_is_no_token_that_ends(open_api: Open) -> None:
    api = await open_api()
    (shown,) = await tokens_of_alice(api)
    waiting = Request(api._transport.app, "/api/v1/jobs/1?wait=60", shown)
    await until(lambda: api._transport.app.state.engine._watchers)
    waiting.answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.answer
    assert waiting.messages == []


async def test_what_is_being_changed_is_not_left_half_done(open_api: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that has begun when its token is revoked goes on to its end."""
    api = await open_api()
    (shown,) = await tokens_of_alice(api)
    jobs, began, go_on = api._transport.app.state.jobs, asyncio.Event(), asyncio.Event()
    submit = jobs.submit

    async def slow(*arguments: Any) -> Any:
        began.set()
        await go_on.wait()
        return await submit(*arguments)

    monkeypatch.setattr(jobs, "submit", slow)
    submitting = asyncio.create_task(api.post("/api/v1/jobs", json=BODY, headers=shows(shown)))
    await asyncio.wait_for(began.wait(), 30)
    await api.post("/api/v1/tokens/1/revoke")
    go_on.set()
    assert (await submitting).status_code == 201
    assert (await api.get("/api/v1/jobs", headers=shows(shown))).status_code == 401


async def test_what_is_wrong_with_a_users_name_is_told(open_api: Open) -> None:
    api = await open_api()
    told = [
        (await api.post("/api/v1/tokens", json={"user": user, "role": "user"})).json()["detail"]
        for user in ("älice", "alice\n", "a\0")
    ]
    assert [text.rpartition(", ")[2] for text in told] == [
        "with characters that are not allowed",
        "with characters that are not allowed",
        "with a NUL character",
    ]
