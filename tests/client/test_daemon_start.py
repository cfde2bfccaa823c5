"""Commands wait for a daemon of their account that starts at their address, and for no other daemon."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from koalapy.client.access import Access
from koalapy.client.client import Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.timeouts import ClientTimeouts
from koalapy.system.local_token import Registration, register_start

TOKEN = "a-token-for-tests"
URL = "http://127.0.0.1:9"
"""An address of this machine at which nothing listens."""
STEPS = 4


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))


def make_timeouts(*steps: Callable[[], object]) -> ClientTimeouts:
    """Return timeouts with a pause that runs the next step; a pause after the last step fails."""
    remaining = list(steps)
    return ClientTimeouts(sleep=lambda _: remaining.pop(0)(), daemon_start_s=3600.0, start_notice_s=3600.0)


def use_default_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.client.access.DEFAULT_URL", URL)


@pytest.mark.parametrize("url", [URL, URL.replace("127.0.0.1", "localhost")])
def test_access_during_start_waits_and_uses_token_of_daemon(url: str) -> None:
    lines: list[str] = []
    with ExitStack() as start, ExitStack() as daemon:
        start.enter_context(register_start(9))
        access = Access(
            url,
            None,
            timeouts=make_timeouts(
                lambda: None,
                lambda: daemon.callback(Registration(TOKEN, [("127.0.0.1", 9)]).close),
                lambda: None,  # it is registered, and not ready yet
                start.close,
            ),
            report=lines.append,
        )
        assert (access.token, lines) == (TOKEN, ["koala: waiting for the daemon, which is starting"])


def test_access_without_url_waits_for_daemon_that_registers_start_late(monkeypatch: pytest.MonkeyPatch) -> None:
    use_default_url(monkeypatch)
    with ExitStack() as start, ExitStack() as daemon:
        access = Access(
            None,
            None,
            timeouts=make_timeouts(
                lambda: None,
                lambda: start.enter_context(register_start(9)),
                lambda: daemon.callback(Registration(TOKEN, [("127.0.0.1", 9)]).close),
                start.close,
            ),
        )
        assert access.token == TOKEN


def test_access_with_user_token_waits_for_start(monkeypatch: pytest.MonkeyPatch) -> None:
    use_default_url(monkeypatch)
    with ExitStack() as start:
        steps = (lambda: start.enter_context(register_start(9)), start.close)
        assert Access(None, "a-token-of-the-user", timeouts=make_timeouts(*steps)).token == "a-token-of-the-user"


def test_access_to_daemon_that_fails_to_start_ends_wait() -> None:
    with ExitStack() as start:
        start.enter_context(register_start(9))
        assert Access(URL, None, timeouts=make_timeouts(start.close)).token == ""


@pytest.mark.parametrize("url", [URL, "http://192.0.2.1:9", "http://name.invalid:9"])
def test_access_without_start_at_address_does_not_wait(url: str) -> None:
    with register_start(10):
        assert Access(url, None, timeouts=make_timeouts()).token == ""


def test_client_of_daemon_that_starts_too_long_says_so() -> None:
    with register_start(9):
        client = Client(URL, None, timeouts=ClientTimeouts(daemon_start_s=0.0), report=lambda _: None)
        with pytest.raises(GridError, match=r"at http://127\.0\.0\.1:9 is still starting; try again") as raised:
            client.get("/healthz")
    assert raised.value.code is Exit.UNREACHABLE


def test_access_during_start_of_second_daemon_uses_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as daemon:
        port = listener.getsockname()[1]
        daemon.callback(Registration(TOKEN, [("127.0.0.1", port)]).close)
        with register_start(port):
            assert Access(f"http://127.0.0.1:{port}", None, timeouts=make_timeouts()).token == TOKEN


def test_access_without_url_prefers_started_daemon_to_error_of_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket of a killed agent is in the way."""
    use_default_url(monkeypatch)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a.sock"))
    monkeypatch.setenv("KOALA_LOGIN_SOCKET", str(tmp_path / "a.sock"))
    with ExitStack() as start, ExitStack() as daemon:
        steps = (
            lambda: start.enter_context(register_start(9)),
            lambda: daemon.callback(Registration(TOKEN, [("127.0.0.1", 9)]).close),
            start.close,
        )
        assert Access(None, None, timeouts=make_timeouts(*steps)).token == TOKEN
    failing = ClientTimeouts(start_notice_s=0.0)
    with pytest.raises(GridError, match="does not answer"):
        Access(None, None, timeouts=failing)
