"""REST routes of tokens, whoami and logout, and the end of open requests with their token."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.serving import Open, app_of
from tests.signals import until

Json = dict[str, Any]
BODY = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"]}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.evidence("T1")
async def test_token_is_shown_once_and_valid_until_revoked(open_api: Open) -> None:
    api = await open_api()
    token = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": "8h"})).json()
    alice = bearer(token["token"])
    assert (token["user"], token["role"], token["created_by"], token["made_by"]) == ("alice", "user", "ada", None)
    listed = await api.get("/api/v1/tokens")
    assert token["token"] not in listed.text
    assert {**token, "last_used_at": None} == {**listed.json()["tokens"][0], "token": token["token"]}
    assert (await api.get("/api/v1/tokens", headers=alice)).json()["tokens"][0]["last_used_at"]
    assert (await api.post("/api/v1/tokens/1/revoke", headers=alice)).json()["tokens"][0]["revoked_at"]
    assert (await api.get("/api/v1/tokens", headers=alice)).status_code == 401
    assert (await api.get("/api/v1/tokens")).json()["tokens"] == []
    assert len((await api.get("/api/v1/tokens?all=true")).json()["tokens"]) == 1


async def test_token_without_fields_is_for_caller(open_api: Open) -> None:
    api = await open_api()
    token = (await api.post("/api/v1/tokens")).json()
    assert (token["user"], token["role"]) == ("ada", "admin")
    assert token["expires_at"] is not None


@pytest.mark.evidence("T6")
async def test_users_manage_only_their_own_tokens(open_api: Open) -> None:
    api = await open_api()
    token = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": 3600})).json()
    alice = bearer(token["token"])
    assert (await api.post("/api/v1/tokens", json={"user": "bob"})).json()["role"] == "user", "the lowest role"
    for order in ({"user": "bob"}, {"role": "operator"}, {"role": "admin"}):
        answer = await api.post("/api/v1/tokens", json=order, headers=alice)
        assert (answer.status_code, answer.json()["field"]) == (403, next(iter(order)))
    mine = (await api.post("/api/v1/tokens", json={"expires": None}, headers=alice)).json()
    assert (mine["user"], mine["role"], mine["made_by"]) == ("alice", "user", 1)
    assert mine["expires_at"] == token["expires_at"]
    assert [token_entry["id"] for token_entry in (await api.get("/api/v1/tokens", headers=alice)).json()["tokens"]] == [
        1,
        3,
    ]
    for headers, ids in (({}, [2]), (alice, [])):
        of_bob = (await api.get("/api/v1/tokens?user=bob", headers=headers)).json()["tokens"]
        assert [token_entry["id"] for token_entry in of_bob] == ids
    for number in (2, 99):
        assert (await api.post(f"/api/v1/tokens/{number}/revoke", headers=alice)).status_code == 404
    several = await api.post("/api/v1/tokens/revoke", json={"tokens": [1, 2]}, headers=alice)
    assert several.status_code == 404
    assert (await api.post("/api/v1/tokens/revoke", json={"all": True}, headers=alice)).status_code == 403
    revoked = (await api.post("/api/v1/tokens/revoke", json={"all": True})).json()["tokens"]
    assert [token_entry["id"] for token_entry in revoked] == [1, 2, 3]
    assert (await api.get("/api/v1/tokens")).status_code == 200


# Open requests


class OpenRequest:
    """A request that stays connected until its answer is complete."""

    def __init__(self, app: Callable[..., Any], path: str, token: str, method: str = "GET", body: bytes = b"") -> None:
        self.messages: list[Any] = []
        self.started, self._body = asyncio.Event(), body
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
        self.started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        self.started.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def is_complete(self) -> bool:
        last = self.messages[-1]
        return last["type"] == "http.response.body" and not last.get("more_body", False)


async def create_tokens_of_alice(api: httpx2.AsyncClient, number: int = 1, expires: str | float = "8h") -> list[str]:
    """Create tokens for the user alice, submit a job as her, and return the tokens."""
    order = {"user": "alice", "role": "user", "expires": expires}
    tokens = [(await api.post("/api/v1/tokens", json=order)).json()["token"] for _ in range(number)]
    assert (await api.post("/api/v1/jobs", json=BODY, headers=bearer(tokens[0]))).status_code == 201
    return tokens


@pytest.mark.evidence("U15", "C4", "T5")
@pytest.mark.parametrize("path", ["/api/v1/jobs/1/logs?follow=true", "/api/v1/jobs/1/events"])
async def test_stream_is_aborted_when_token_is_revoked(open_api: Open, path: str) -> None:
    api = await open_api()
    revoked, valid = await create_tokens_of_alice(api, 2)
    app = app_of(api)
    following, going_on = OpenRequest(app, path, revoked), OpenRequest(app, path, valid)
    for request in (following, going_on):
        await asyncio.wait_for(request.started.wait(), 30)
    await api.post("/api/v1/tokens/1/revoke")
    await asyncio.wait_for(following.answer, 30)
    assert following.status == 200
    assert not following.is_complete, "the client notices that the answer is incomplete"
    assert not going_on.answer.done()
    going_on.answer.cancel()


async def test_followed_text_of_ending_daemon_stays_without_its_end(open_api: Open) -> None:
    api = await open_api()
    (token,) = await create_tokens_of_alice(api)
    app = app_of(api)
    following = OpenRequest(app, "/api/v1/jobs/1/logs?follow=true", token)
    await asyncio.wait_for(following.started.wait(), 30)
    await until(lambda: app.state.engine._watchers)
    app.state.engine.drain()
    await asyncio.wait_for(following.answer, 30)
    assert not following.is_complete, "the client notices that the output goes on"


@pytest.mark.evidence("T5")
async def test_waiting_request_returns_401_when_token_is_revoked(open_api: Open) -> None:
    api = await open_api()
    (token,) = await create_tokens_of_alice(api)
    engine = app_of(api).state.engine
    waiting = OpenRequest(app_of(api), "/api/v1/jobs/1?wait=60", token)
    await until(lambda: engine._watchers)
    await api.post("/api/v1/tokens/1/revoke")
    await asyncio.wait_for(waiting.answer, 30)
    assert (waiting.status, waiting.is_complete) == (401, True)


@pytest.mark.evidence("T5")
async def test_waiting_request_returns_401_when_token_expires(open_api: Open) -> None:
    api = await open_api()
    (token,) = await create_tokens_of_alice(api, expires=0.5)
    waiting = OpenRequest(app_of(api), "/api/v1/jobs/1?wait=60", token)
    await asyncio.wait_for(waiting.answer, 30)
    assert waiting.status == 401


async def test_disconnected_request_sends_no_answer(open_api: Open) -> None:
    api = await open_api()
    (token,) = await create_tokens_of_alice(api)
    waiting = OpenRequest(app_of(api), "/api/v1/jobs/1?wait=60", token)
    await until(lambda: app_of(api).state.engine._watchers)
    waiting.answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.answer
    assert waiting.messages == []


async def test_change_in_progress_completes_after_token_is_revoked(
    open_api: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that has started completes even when its token is revoked."""
    api = await open_api()
    (token,) = await create_tokens_of_alice(api)
    jobs, began, go_on = app_of(api).state.jobs, asyncio.Event(), asyncio.Event()
    submit = jobs.submit

    async def submit_slowly(*arguments: Any) -> Any:
        began.set()
        await go_on.wait()
        return await submit(*arguments)

    monkeypatch.setattr(jobs, "submit", submit_slowly)
    submitting = asyncio.create_task(api.post("/api/v1/jobs", json=BODY, headers=bearer(token)))
    await asyncio.wait_for(began.wait(), 30)
    await api.post("/api/v1/tokens/1/revoke")
    go_on.set()
    assert (await submitting).status_code == 201
    assert (await api.get("/api/v1/jobs", headers=bearer(token))).status_code == 401


# whoami and logout


async def test_whoami_returns_user_and_role(open_api: Open) -> None:
    api = await open_api()
    expected = {"user": "ada", "role": "admin", "how": "a token of the test", "groups": [], "expires_at": None}
    assert (await api.get("/api/v1/whoami")).json() == expected
    token = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": 3600})).json()
    identity = (await api.get("/api/v1/whoami", headers=bearer(token["token"]))).json()
    assert identity == {
        "user": "alice",
        "role": "user",
        "how": "token 1",
        "groups": [],
        "expires_at": token["expires_at"],
    }
    assert (await api.get("/api/v1/whoami", headers=bearer("koala_of-nobody-at-all"))).status_code == 401


async def test_logout_revokes_only_its_own_token(open_api: Open) -> None:
    api = await open_api()
    first, second = [(await api.post("/api/v1/tokens", json={"user": "alice", "role": "user"})).json() for _ in "ab"]
    assert (await api.post("/api/v1/logout", headers=bearer(first["token"]))).json() == {"user": "alice"}
    assert (await api.post("/api/v1/logout", headers=bearer(first["token"]))).status_code == 401
    assert (await api.get("/api/v1/whoami", headers=bearer(second["token"]))).status_code == 200
    answer = await api.post("/api/v1/logout")
    assert (answer.status_code, answer.json()["detail"]) == (409, "a token of the test cannot log out")
