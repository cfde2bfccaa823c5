"""The login socket of the agent: the kernel identifies accounts, and each answer is used once."""

import asyncio
import json
import os
import pwd
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent import login
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.login import MAX_CONNECTIONS_PER_ACCOUNT, BoundSocket, LoginServer
from koalapy.protocol.messages import Vouch, Vouched, Welcome
from koalapy.system.process import Peer
from tests.agent.memory_agent import loop_clock
from tests.needs import ROOT, needs

TIMEOUT_S = 30.0
ACCOUNT = pwd.getpwuid(os.geteuid()).pw_name
TOKEN = "a-token-of-the-daemon"


class FakeDaemon:
    """Records attestations of the agent and answers them."""

    def __init__(self) -> None:
        self.requests: list[Vouch] = []
        self.answer: Callable[[Vouch], None] = lambda vouch: None

    def send_soon(self, message: Vouch, *, urgent: bool) -> None:
        assert urgent
        self.requests.append(message)
        self.answer(message)


def make_settings(directory: Path, **changes: Any) -> AgentSettings:
    settings = AgentSettings(cluster="north", url="http://127.0.0.1:1", token="secret", directory=directory)
    return replace(settings, login_sockets=(directory / "login.sock",), **changes)


@asynccontextmanager
async def serve_logins(settings: AgentSettings) -> AsyncIterator[tuple[LoginServer, FakeDaemon]]:
    daemon = FakeDaemon()
    server = LoginServer(settings, daemon, loop_clock())  # type: ignore[arg-type]
    await server.listen()
    server.welcomed(Welcome(epoch=1, instance="i", users_url="https://grid:8642"), settings.url)

    def answer(vouch: Vouch) -> None:
        server.vouched(Vouched(ident=vouch.ident, token=TOKEN, user="ann", role="user", lifetime=60.0))

    daemon.answer = answer
    yield server, daemon
    server.close()


async def request_login(path: Path, request: bytes = b'{"ask": "login"}\n') -> list[dict[str, Any]]:
    """Send a login request and return all messages of the agent."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    async with asyncio.timeout(TIMEOUT_S):
        messages = [json.loads(line) async for line in reader]
    writer.close()
    return messages


@pytest.mark.evidence("A10", "C2")
async def test_login_attests_account_given_by_kernel(tmp_path: Path) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (_, daemon):
        greeting, answer = await request_login(
            settings.login_sockets[0], b'{"ask": "login", "account": "root", "uid": 0}\n'
        )
        assert greeting == {"koala": 1, "cluster": "north", "url": "https://grid:8642", "ca": ""}
        assert answer == {"token": TOKEN, "user": "ann", "role": "user", "lifetime": 60.0}
        assert [(vouch.account, vouch.uid) for vouch in daemon.requests] == [(ACCOUNT, os.geteuid())]
        assert stat.S_IMODE(settings.login_sockets[0].stat().st_mode) == 0o666
    assert not settings.login_sockets[0].exists()


@pytest.mark.parametrize(
    "request_line", [b"\n", b"{}\n", b"[]\n", b'{"ask": "token"}\n', b"\xff\n", b"[" * 10_000 + b"\n", b"x" * 1_000_000]
)
async def test_invalid_login_request_is_not_answered(tmp_path: Path, request_line: bytes) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (_, daemon):
        with suppress(ConnectionResetError):
            assert len(await request_login(settings.login_sockets[0], request_line)) <= 1
        assert daemon.requests == []
        assert len(await request_login(settings.login_sockets[0])) == 2


async def test_unknown_and_repeated_answers_are_ignored(tmp_path: Path) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (server, daemon):
        replayed: list[str] = []

        def answer(vouch: Vouch) -> None:
            for ident in ("", "made-up", *replayed, vouch.ident, vouch.ident):
                user = "ann" if ident == vouch.ident else "mallory"
                server.vouched(Vouched(ident=ident, token=TOKEN, user=user, role="user", lifetime=60.0))
            replayed.append(vouch.ident)

        daemon.answer = answer
        for _ in range(3):
            assert (await request_login(settings.login_sockets[0]))[1]["user"] == "ann"


async def test_rejected_login_returns_error_and_hint(tmp_path: Path) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (server, daemon):
        daemon.answer = lambda vouch: server.vouched(Vouched(ident=vouch.ident, error="not you", hint="ask them"))
        assert (await request_login(settings.login_sockets[0]))[1] == {"error": "not you", "hint": "ask them"}
        daemon.answer = lambda vouch: server.lost()
        assert (await request_login(settings.login_sockets[0]))[1]["error"] == "the connection to the daemon has ended"
        assert "has no connection to the daemon" in (await request_login(settings.login_sockets[0]))[1]["error"]
        server.welcomed(Welcome(epoch=1, instance="i"), settings.url)
        assert (await request_login(settings.login_sockets[0]))[0]["url"] == "http://127.0.0.1:1"


async def test_login_without_answer_of_daemon_times_out(tmp_path: Path) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (server, daemon):
        daemon.answer = lambda vouch: None
        assert "has not answered" in (await request_login(settings.login_sockets[0]))[1]["error"]
        late = daemon.requests[0].ident
        server.vouched(Vouched(ident=late, token=TOKEN, user="ann", role="user", lifetime=60.0))


@pytest.mark.evidence("A12")
async def test_connections_and_logins_of_account_are_limited(tmp_path: Path) -> None:
    async with serve_logins(settings := make_settings(tmp_path)) as (_, daemon):
        path = str(settings.login_sockets[0])
        connections = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS_PER_ACCOUNT)]
        for reader, _ in connections:
            assert await reader.readline()
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        for _, open_writer in [*connections, (reader, writer)]:
            open_writer.close()
        messages: list[dict[str, Any]] = []
        async with asyncio.timeout(TIMEOUT_S):
            while "too many" not in (messages[1].get("error", "") if len(messages) == 2 else ""):
                messages = await request_login(settings.login_sockets[0])
        assert messages[1]["hint"].startswith("try again in")
        assert len(daemon.requests) == 12


async def test_own_agent_rejects_other_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_logins(settings := make_settings(tmp_path, identity="own")) as (_, daemon):
        assert (await request_login(settings.login_sockets[0]))[1]["token"] == TOKEN
        monkeypatch.setattr(login, "get_peer", lambda _: Peer(1, 4711))
        error = (await request_login(settings.login_sockets[0]))[1]["error"]
        assert error == f"the agent of north accepts logins of {ACCOUNT} only"
        assert len(daemon.requests) == 1


async def test_unknown_account_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "get_peer", lambda _: Peer(1, 987_654))
    async with serve_logins(settings := make_settings(tmp_path)) as (_, daemon):
        assert (await request_login(settings.login_sockets[0]))[1][
            "error"
        ] == "this host has no account with the uid 987654"
        assert daemon.requests == []


def test_bound_socket_replaces_stale_socket_and_excludes_others(tmp_path: Path) -> None:
    path = tmp_path / "login.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    first = BoundSocket(path)
    with pytest.raises(ValueError, match="another agent listens there"):
        BoundSocket(path)
    assert path.is_socket()
    first.close()
    assert not path.exists()
    BoundSocket(path).close()


@pytest.mark.processes
@needs(ROOT)
def test_bound_socket_replaces_lock_of_root(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="koala-login-"))
    try:
        path = folder / "login.sock"
        BoundSocket(path).close()
        os.chown(folder, 4711, 4711)
        if (child := os.fork()) == 0:
            is_listening = False
            try:
                os.setgroups([])
                os.setgid(4711)
                os.setuid(4711)
                is_listening = BoundSocket(path).socket.fileno() >= 0 and path.is_socket()
            finally:
                os._exit(not is_listening)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        shutil.rmtree(folder)


def test_bound_socket_in_writable_folder_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="may be written by others"):
        BoundSocket(tmp_path / "login.sock")
    tmp_path.chmod(0o700)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(OSError, match="Not a directory"):
        BoundSocket(tmp_path / "link" / "login.sock")


async def test_server_without_usable_path_does_not_listen(tmp_path: Path) -> None:
    first, second = tmp_path / "nowhere" / "login.sock", tmp_path / "login.sock"
    settings = replace(make_settings(tmp_path), login_sockets=(first, second))
    async with serve_logins(settings):
        assert len(await request_login(second)) == 2
    async with serve_logins(replace(settings, login_sockets=(first,))):
        assert not second.exists()


@pytest.mark.parametrize(("identity", "runs_jobs"), [("service", True), ("own", False), ("mapped", False)])
async def test_attestation_includes_whether_jobs_run_as_account(tmp_path: Path, identity: str, runs_jobs: bool) -> None:
    async with serve_logins(settings := make_settings(tmp_path, identity=identity)) as (_, daemon):
        await request_login(settings.login_sockets[0])
        assert [vouch.runs_jobs for vouch in daemon.requests] == [runs_jobs]
