"""Logins by sockets of agents: which are trusted, and errors."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.client import logins
from koalapy.client.access import Access
from koalapy.client.errors import Exit, GridError
from koalapy.client.logins import Login
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.files import DIRECTORY
from koalapy.system.process import Peer
from tests.cli.conftest import FAST
from tests.needs import ROOT, needs

TOKEN = "koala_a-token-of-the-daemon"
GREETING = {"koala": 1, "cluster": "north", "url": "http://127.0.0.1:9999", "ca": ""}
ANSWER = {"token": TOKEN, "user": "ann", "role": "user", "lifetime": 600.0}


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(logins.VARIABLE, raising=False)


@contextmanager
def serve_agent(path: Path, *lines: object) -> Iterator[list[bytes]]:
    """Serve a socket that answers each request with the next line; yield the requests."""
    heard: list[bytes] = []
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with suppress(OSError), connection, connection.makefile("rwb") as file:
                for index, line in enumerate(lines):
                    if index and not (request := file.readline()):
                        break
                    if index:
                        heard.append(request)
                    file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
                    file.flush()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(30)


def find_login(url: str | None, well_known: Path = DIRECTORY) -> Login:
    login = logins.find_login(url, well_known=well_known)
    assert login is not None
    return login


def request_rejected_login(
    path: Path, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY
) -> GridError:
    agents, wrong = logins.contact_agents([path], timeouts, well_known)
    assert not agents
    with pytest.raises(GridError) as refused:
        logins.request_login(logins.Agent(path, "north", str(GREETING["url"]), ""), timeouts, well_known)
    assert wrong == [str(refused.value)]
    return refused.value


def test_login_is_saved_for_its_daemon_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setenv(logins.VARIABLE, str(path))
    with serve_agent(path, GREETING, ANSWER) as heard:
        login = logins.find_login(None)
        assert login is not None
        assert (login.url, login.token, login.user, login.cluster) == (GREETING["url"], TOKEN, "ann", "north")
        assert logins.find_login("http://127.0.0.1:9999") == login
        assert logins.find_login("http://127.0.0.1:9998") is None
    assert [json.loads(line) for line in heard] == [{"ask": "login"}]
    assert logins.find_login(None) == login, "a valid login needs no agent"
    assert TOKEN not in repr(login)
    (file,) = (tmp_path / "state" / "koala").glob("logins-*/[!.]*")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.processes
def test_concurrent_commands_share_one_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setenv(logins.VARIABLE, str(path))
    with serve_agent(path, GREETING, ANSWER) as heard, ThreadPoolExecutor(16) as together:
        logins_found = list(together.map(lambda _: logins.find_login(None), range(16)))
    assert len(heard) == 1
    assert len(set(logins_found)) == 1


def test_saved_login_readable_by_others_or_damaged_is_ignored(tmp_path: Path) -> None:
    login = Login("http://a:1", TOKEN, "ann", "user", "north", "/s", 0.0, 1e12)
    logins.save_login(login)
    (file,) = (tmp_path / "state" / "koala").glob("logins-*/[!.]*")
    assert logins.of_url("http://a:1") == login
    file.chmod(0o644)
    assert logins.of_url("http://a:1") is None
    file.chmod(0o600)
    fields = json.loads(file.read_text())
    for damaged in (
        "",
        "[]",
        "{}",
        "x",
        json.dumps({**fields, "token": "x"}),
        json.dumps({**fields, "url": 1}),
        "[" * 9999,
    ):
        file.write_text(damaged)
        assert logins.list_valid() == []
    file.write_text(json.dumps({**fields, "url": "http://b:1"}))
    assert logins.of_url("http://a:1") is None, "an entry is for the daemon that it names"
    file.parent.chmod(0o777)
    file.write_text(json.dumps(fields))
    assert logins.list_valid() == []


def test_login_is_renewed_before_expiry_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "a.sock", [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setenv(logins.VARIABLE, str(path))
    with serve_agent(path, GREETING, ANSWER) as heard:
        logins.find_login(None)
        now[0] += 500
        logins.find_login(None)
        assert len(heard) == 1
        now[0] += 60
        assert find_login(None).made_at == 1560.0
        assert len(heard) == 2
        now[0] += 560
        assert find_login("http://127.0.0.1:9999").made_at == 2120.0
    path.unlink()
    with serve_agent(path, GREETING | {"url": "http://127.0.0.1:9998"}, ANSWER):
        now[0] += 560
        assert find_login("http://127.0.0.1:9999").made_at == 2120.0, "a valid login is kept without its daemon's agent"
    path.unlink()
    assert find_login(None).made_at == 2120.0, "a valid login is kept without an agent"
    now[0] += 60
    with pytest.raises(GridError, match="does not answer"):
        logins.find_login(None)
    now[0] = 1000.0  # setting the clock back expires a login
    with pytest.raises(GridError, match="does not answer"):
        logins.find_login(None)


@pytest.mark.parametrize(
    "lines",
    [
        (b"HTTP/1.1 400 Bad Request",),
        (b"{}",),
        (b"[" * 5000,),
        ({**GREETING, "url": "javascript:1"},),
        ({**GREETING, "url": "http://"},),
        ({**GREETING, "url": 1},),
        (b"x" * 1_000_000,),
        (),
    ],
)
def test_socket_of_another_program_is_reported(tmp_path: Path, lines: tuple[object, ...]) -> None:
    path = tmp_path / "a.sock"
    with serve_agent(path, *lines):
        error = request_rejected_login(path)
    assert (error.code, "is not an agent" in error.message or "does not answer" in error.message) == (
        Exit.UNREACHABLE,
        True,
    ), error


@pytest.mark.parametrize(
    "answer",
    [
        {**ANSWER, "token": "short"},
        {**ANSWER, "token": "with\nnewline and more"},
        {**ANSWER, "lifetime": "x"},
        {name: value for name, value in ANSWER.items() if name != "user"},
    ],
)
def test_login_with_invalid_answer_is_rejected(tmp_path: Path, answer: object) -> None:
    path = tmp_path / "a.sock"
    with serve_agent(path, GREETING, answer), pytest.raises(GridError, match="is not an agent") as refused:
        logins.request_login(logins.Agent(path, "north", "http://x", ""))
    assert TOKEN not in str(refused.value)


def test_agent_that_hangs_times_out(tmp_path: Path) -> None:
    short = replace(FAST, agent_greeting_s=0.05, agent_login_s=0.05)
    path = tmp_path / "a.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(0)
    for _ in range(3):  # also when the queue of connections is full
        assert "does not answer" in request_rejected_login(path, short).message
    server.close()
    assert "connection refused" in request_rejected_login(path).message


@pytest.mark.evidence("A11")
def test_login_socket_owner_must_be_root_or_folder_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setattr(logins, "get_peer", lambda _: Peer(1, 4711))
    with serve_agent(path, GREETING, ANSWER) as heard:
        error = request_rejected_login(path)
    assert (error.code, "(uid 4711)" in error.message) == (Exit.NOT_ALLOWED, True)
    assert heard == []


def make_writable(folder: Path) -> None:
    folder.chmod(0o777)


def make_group_writable(folder: Path) -> None:
    folder.chmod(0o770)


def replace_by_link(folder: Path) -> None:
    folder.rename(folder.with_name("there"))
    folder.symlink_to(folder.with_name("there"))


@pytest.mark.evidence("A11")
@pytest.mark.parametrize("spoil", [make_writable, make_group_writable, replace_by_link])
def test_login_socket_in_folder_writable_by_others_is_rejected(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with serve_agent(folder / "a.sock", GREETING, ANSWER) as heard:
        spoil(folder)
        assert request_rejected_login(folder / "a.sock").code == Exit.NOT_ALLOWED
    assert heard == []


@pytest.mark.evidence("A11")
@needs(ROOT)
def test_login_socket_in_folder_of_another_account_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, 4711, 4711)
    with serve_agent(folder / "a.sock", GREETING, ANSWER) as heard:
        assert "belongs to another account (uid 4711)" in request_rejected_login(folder / "a.sock").message
        assert heard == []
        assert logins.contact_agents(logins.find_sockets(folder), well_known=folder)[0][0].cluster == "north"
        tmp_path.chmod(0o777)
        assert (
            "belongs to another account (uid 4711)"
            in request_rejected_login(folder / "a.sock", well_known=folder).message
        )


def test_login_with_agents_of_several_daemons_needs_url(tmp_path: Path) -> None:
    second_greeting = {**GREETING, "cluster": "east", "url": "http://127.0.0.1:7777"}
    with serve_agent(tmp_path / "a.sock", GREETING, ANSWER), serve_agent(tmp_path / "b.sock", second_greeting, ANSWER):
        with pytest.raises(GridError, match="set KOALA_URL") as error:
            logins.find_login(None, well_known=tmp_path)
        assert "http://127.0.0.1:7777 and http://127.0.0.1:9999" in error.value.message
        assert find_login("http://127.0.0.1:7777", tmp_path).cluster == "east"


def test_rejected_login_is_requested_from_next_agent(tmp_path: Path) -> None:
    no = {"error": "the account ann of north belongs to nobody", "hint": "ask the grid's administrators"}
    with serve_agent(tmp_path / "a.sock", GREETING, no):
        with pytest.raises(GridError, match="rejects the login: the account ann of north belongs to nobody; ask"):
            logins.find_login(None, well_known=tmp_path)
        with serve_agent(tmp_path / "b.sock", {**GREETING, "cluster": "east"}, ANSWER):
            assert find_login(None, tmp_path).cluster == "east"


def test_access_with_socket_of_killed_agent_names_it_in_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    monkeypatch.setenv(logins.VARIABLE, str(path))
    access = Access("http://127.0.0.1:1", None)
    assert (access.token, access.headers) == ("", {})
    assert f"the agent at {path} does not answer (connection refused)" in access.hint
    assert "set KOALA_TOKEN" in access.hint
    with pytest.raises(GridError, match="does not answer"):
        logins.log_in("http://127.0.0.1:1")
