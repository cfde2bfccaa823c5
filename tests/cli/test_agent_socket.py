"""Which sockets a command believes, and what it does with one that hangs or lies."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.client import agent_socket, logins
from koalapy.client.access import Access
from koalapy.client.errors import CliError, Exit
from koalapy.client.logins import Login
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts
from koalapy.system.login_socket import DIRECTORY, Peer
from tests.cli.conftest import FAST
from tests.needs import ROOT, needs

TOKEN = "koala_a-token-of-the-daemon"
GREETING = {"koala": 1, "cluster": "north", "url": "http://127.0.0.1:9999", "ca": ""}
ANSWER = {"token": TOKEN, "user": "ann", "role": "user", "lifetime": 600.0}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(agent_socket.VARIABLE, raising=False)


@contextmanager
def listening(path: Path, *lines: object) -> Iterator[list[bytes]]:
    """Something that says these lines to everybody, one after each that it hears; what it heard."""
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
                    if index and not (said := file.readline()):
                        break
                    if index:
                        heard.append(said)
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


def found(url: str | None, well_known: Path = DIRECTORY) -> Login:
    login = logins.find_login(url, well_known=well_known)
    assert login is not None
    return login


def refusal(path: Path, timeouts: ClientTimeouts = DEFAULT_TIMEOUTS, well_known: Path = DIRECTORY) -> CliError:
    found, wrong = agent_socket.contact_agents([path], timeouts, well_known)
    assert not found
    with pytest.raises(CliError) as refused:
        agent_socket.log_in(agent_socket.Agent(path, "north", str(GREETING["url"]), ""), timeouts, well_known)
    assert wrong == [str(refused.value)]
    return refused.value


def test_a_login_is_got_and_kept_for_the_daemon_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    with listening(path, GREETING, ANSWER) as heard:
        login = logins.find_login(None)
        assert login is not None
        assert (login.url, login.token, login.user, login.cluster) == (GREETING["url"], TOKEN, "ann", "north")
        assert logins.find_login("http://127.0.0.1:9999") == login
        assert logins.find_login("http://127.0.0.1:9998") is None
    assert [json.loads(line) for line in heard] == [{"ask": "login"}]
    assert logins.find_login(None) == login, "nobody is asked while it holds"
    assert TOKEN not in repr(login)
    (kept,) = (tmp_path / "state" / "koala").glob("logins-*/[!.]*")
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.processes
def test_commands_that_come_together_share_one_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    with listening(path, GREETING, ANSWER) as heard, ThreadPoolExecutor(16) as together:
        logins_found = list(together.map(lambda _: logins.find_login(None), range(16)))
    assert len(heard) == 1
    assert len(set(logins_found)) == 1


def test_what_others_may_read_or_is_damaged_is_no_login(tmp_path: Path) -> None:
    login = Login("http://a:1", TOKEN, "ann", "user", "north", "/s", 0.0, 1e12)
    logins.save_login(login)
    (kept,) = (tmp_path / "state" / "koala").glob("logins-*/[!.]*")
    assert logins.of_url("http://a:1") == login
    kept.chmod(0o644)
    assert logins.of_url("http://a:1") is None
    kept.chmod(0o600)
    whole = json.loads(kept.read_text())
    for damaged in (
        "",
        "[]",
        "{}",
        "x",
        json.dumps({**whole, "token": "x"}),
        json.dumps({**whole, "url": 1}),
        "[" * 9999,
    ):
        kept.write_text(damaged)
        assert logins.list_valid() == []
    kept.write_text(json.dumps({**whole, "url": "http://b:1"}))
    assert logins.of_url("http://a:1") is None, "an entry is for the daemon that it names"
    kept.parent.chmod(0o777)
    kept.write_text(json.dumps(whole))
    assert logins.list_valid() == []


def test_a_login_is_renewed_before_it_ends_and_kept_where_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "a.sock", [1000.0]
    monkeypatch.setattr(logins.time, "time", lambda: now[0])
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    with listening(path, GREETING, ANSWER) as heard:
        logins.find_login(None)
        now[0] += 500
        logins.find_login(None)
        assert len(heard) == 1
        now[0] += 60
        assert found(None).made_at == 1560.0
        assert len(heard) == 2
    now[0] += 560
    assert found(None).made_at == 1560.0, "the agent is away, and the login holds"
    now[0] += 60
    with pytest.raises(CliError, match="does not answer"):
        logins.find_login(None)
    now[0] = 1000.0  # a clock that was set back says nothing of how long it holds
    with pytest.raises(CliError, match="does not answer"):
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
def test_what_is_no_agent_is_told(tmp_path: Path, lines: tuple[object, ...]) -> None:
    path = tmp_path / "a.sock"
    with listening(path, *lines):
        error = refusal(path)
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
def test_an_answer_that_is_none_is_no_login(tmp_path: Path, answer: object) -> None:
    path = tmp_path / "a.sock"
    with listening(path, GREETING, answer), pytest.raises(CliError, match="is not an agent") as refused:
        agent_socket.log_in(agent_socket.Agent(path, "north", "http://x", ""))
    assert TOKEN not in str(refused.value)


def test_agent_that_hangs_is_given_up(tmp_path: Path) -> None:
    short = replace(FAST, agent_greeting_s=0.05, agent_login_s=0.05)
    path = tmp_path / "a.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(0)
    for _ in range(3):  # also when nobody takes any more connections
        assert "does not answer" in refusal(path, short).message
    server.close()
    assert "connection refused" in refusal(path).message


@pytest.mark.evidence("A11")
def test_who_listens_must_be_root_or_whose_folder_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    monkeypatch.setattr(agent_socket, "get_peer", lambda _: Peer(1, 4711))
    with listening(path, GREETING, ANSWER) as heard:
        error = refusal(path)
    assert (error.code, "(uid 4711)" in error.message) == (Exit.NOT_ALLOWED, True)
    assert heard == []


def writable(folder: Path) -> None:
    folder.chmod(0o777)


def group_writable(folder: Path) -> None:
    folder.chmod(0o770)


def link(folder: Path) -> None:
    folder.rename(folder.with_name("there"))
    folder.symlink_to(folder.with_name("there"))


@pytest.mark.evidence("A11")
@pytest.mark.parametrize("spoil", [writable, group_writable, link])
def test_a_folder_where_others_may_put_theirs_is_not_believed(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with listening(folder / "a.sock", GREETING, ANSWER) as heard:
        spoil(folder)
        assert refusal(folder / "a.sock").code == Exit.NOT_ALLOWED
    assert heard == []


@pytest.mark.evidence("A11")
@needs(ROOT)
def test_another_accounts_folder_is_not_believed(tmp_path: Path) -> None:
    """But for the well-known one, which only root can have given it."""
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, 4711, 4711)
    with listening(folder / "a.sock", GREETING, ANSWER) as heard:
        assert "belongs to another account (uid 4711)" in refusal(folder / "a.sock").message
        assert heard == []
        assert (
            agent_socket.contact_agents(agent_socket.find_sockets(folder), well_known=folder)[0][0].cluster == "north"
        )
        tmp_path.chmod(0o777)
        assert "belongs to another account (uid 4711)" in refusal(folder / "a.sock", well_known=folder).message


def test_agents_of_several_daemons_are_not_chosen_between(tmp_path: Path) -> None:
    other = {**GREETING, "cluster": "east", "url": "http://127.0.0.1:7777"}
    with listening(tmp_path / "a.sock", GREETING, ANSWER), listening(tmp_path / "b.sock", other, ANSWER):
        with pytest.raises(CliError, match="set KOALA_URL") as error:
            logins.find_login(None, well_known=tmp_path)
        assert "http://127.0.0.1:7777 and http://127.0.0.1:9999" in error.value.message
        assert found("http://127.0.0.1:7777", tmp_path).cluster == "east"


def test_a_refusal_is_the_answer_unless_another_agent_gives_a_login(tmp_path: Path) -> None:
    no = {"error": "the account ann of north belongs to nobody", "hint": "ask the grid's administrators"}
    with listening(tmp_path / "a.sock", GREETING, no):
        with pytest.raises(CliError, match="rejects the login: the account ann of north belongs to nobody; ask"):
            logins.find_login(None, well_known=tmp_path)
        with listening(tmp_path / "b.sock", {**GREETING, "cluster": "east"}, ANSWER):
            assert found(None, tmp_path).cluster == "east"


def test_the_socket_of_an_agent_that_was_killed_keeps_nobody_from_the_daemon_he_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    named = Access("http://127.0.0.1:1", None)
    assert (named.token, named.headers) == ("", {})
    assert f"the agent at {path} does not answer (connection refused)" in named.hint
    assert "set KOALA_TOKEN" in named.hint
    with pytest.raises(CliError, match="does not answer"):
        logins.log_in("http://127.0.0.1:1")  # who asks for nothing but a login is told why there is none
