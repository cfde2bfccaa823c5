"""Clients that know several daemons, of which one stands by and others do not answer."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from koalapy.client import access, client, logins
from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.timeouts import ClientTimeouts
from tests.grid.standby import free_port

TOKEN = "a-token-of-the-user"
PAUSED: list[float] = []
TIMEOUTS = ClientTimeouts(start_notice_s=0.0, sleep=PAUSED.append)


@contextmanager
def serve_answers(answer: dict[str, Any], status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Serve the same answer to all requests; yield the URL and the lines of requests with their tokens."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append(f"{self.command} {self.path} {self.headers['Authorization']}")
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def standby_answer(active: str) -> dict[str, Any]:
    return {"status": 503, "code": "daemon-standby", "detail": f"{active} is active", "hint": "", "active": active}


def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_client_of_standby_follows_to_named_daemon_with_its_token() -> None:
    with serve_answers({"id": 7}) as (active, taken), serve_answers(standby_answer(active), 503) as (standby, rejected):
        client = Client(f"{standby},{dead_url()},{active}", TOKEN, timeouts=TIMEOUTS)
        assert client.submit({}, "key") == {"id": 7}
        assert client.job(7) == {"id": 7}
        assert (len(rejected), client.url) == (1, active)
        assert taken == [f"POST /api/v1/jobs Bearer {TOKEN}", f"GET /api/v1/jobs/7 Bearer {TOKEN}"]


def test_client_sends_no_token_to_address_that_user_did_not_give() -> None:
    with serve_answers({"id": 7}) as (other, taken), serve_answers(standby_answer(other), 503) as (standby, _):
        with pytest.raises(GridError, match="is active"):
            Client(standby, TOKEN, timeouts=TIMEOUTS).get("/api/v1/jobs/7")
        assert taken == []


@pytest.fixture
def save_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that saves a login for a daemon. This host has no agent for another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(logins, "find_sockets", lambda _: [])

    def save(url: str) -> None:
        logins.save_login(logins.Login(url, TOKEN, "alice", "user", "north", "", time.time(), 3600.0))

    return save


def test_client_with_login_alone_repeats_requests_at_its_daemon(
    monkeypatch: pytest.MonkeyPatch, save_login: Callable[[str], None]
) -> None:
    """Any account of a head node may listen at the default address."""
    with serve_answers({"id": 7}) as (other, taken), serve_answers(standby_answer(""), 503) as (standby, rejected):
        for module in (access, client):
            monkeypatch.setattr(module, "DEFAULT_URL", other)
        save_login(standby)
        patient = Client(None, None, timeouts=TIMEOUTS)
        for koala in (patient, patient.clone_for_thread()):
            with pytest.raises(GridError, match="is active"):
                koala.submit({}, "key")
        assert taken == []
        assert set(rejected) == {f"POST /api/v1/jobs Bearer {TOKEN}"}


@pytest.mark.parametrize("form", ["{active},{dead}", "{dead},{active}"])
def test_client_forgets_login_of_another_daemon_that_is_rejected(save_login: Callable[[str], None], form: str) -> None:
    rejection = {"status": 401, "code": "unauthenticated", "detail": "the token is not valid", "hint": ""}
    with serve_answers(rejection, 401) as (active, rejected):
        save_login(dead := dead_url())
        with pytest.raises(GridError, match="the token is not valid; run koala login"):
            Client(form.format(active=active, dead=dead), None, timeouts=TIMEOUTS).get("/api/v1/jobs")
        assert rejected == [f"GET /api/v1/jobs Bearer {TOKEN}"]
        assert logins.list_valid() == []


def test_client_with_dead_first_address_uses_second() -> None:
    with serve_answers({"id": 7}) as (active, taken):
        client = Client(f"{dead_url()}, {active}", TOKEN, timeouts=TIMEOUTS)
        assert client.post("/api/v1/jobs", {}) == {"id": 7}
        assert len(taken) == 1


def test_client_of_standby_without_active_daemon_repeats_submission_and_reports() -> None:
    dead = dead_url()
    with serve_answers(standby_answer(dead), 503) as (standby, rejected):
        client = Client(f"{dead},{standby}", TOKEN, timeouts=TIMEOUTS)
        PAUSED.clear()
        with pytest.raises(GridError, match="is active") as error:
            client.submit({}, "key")
        assert error.value.may_recover
        assert (sum(PAUSED) > 5.0, len(rejected) >= len(PAUSED)) == (True, True)


def test_client_with_dead_addresses_names_all() -> None:
    first, second = dead_url(), dead_url()
    with pytest.raises(GridError) as error:
        Client(f"{first},{second}", TOKEN, timeouts=TIMEOUTS).get("/api/v1/jobs")
    assert error.value.code is Exit.UNREACHABLE
    assert first in str(error.value)
    assert second in str(error.value)


def test_client_of_daemon_without_active_one_ends_after_some_turns() -> None:
    """Two standby daemons that name each other must not keep a client busy."""
    answer = standby_answer("")
    with serve_answers(answer, 503) as (first, _), serve_answers(answer, 503) as (second, _):
        answer["active"] = second
        with pytest.raises(GridError, match="is active"):
            Client(f"{first},{second}", TOKEN, timeouts=TIMEOUTS).get("/api/v1/jobs/1")


def test_clone_for_thread_knows_all_daemons_and_the_token() -> None:
    with serve_answers({"id": 7}) as (other, taken), serve_answers(standby_answer(""), 503) as (standby, rejected):
        client = Client(f"{standby},{other}", TOKEN, timeouts=TIMEOUTS)
        assert client.clone_for_thread().job(7) == {"id": 7}
        assert rejected == taken == [f"GET /api/v1/jobs/7 Bearer {TOKEN}"]
        assert (client.job(7), len(rejected)) == ({"id": 7}, 2), "a clone changes nothing of its client"


@pytest.mark.parametrize("urls", ["http://ada:secret1@127.0.0.1:99999", "{dead},http://ada:secret1@localhost:1"])
def test_message_about_addresses_has_no_password(urls: str) -> None:
    with pytest.raises(GridError) as error:
        Client(urls.format(dead=dead_url()), TOKEN, timeouts=TIMEOUTS).get("/api/v1/jobs")
    assert "//" in str(error.value)
    assert "secret1" not in str(error.value)
