"""The agent's socket for the users of its head node: who asks is what the kernel says, and an answer counts once."""

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
from koalapy.system.login_socket import Peer
from tests.agent.memory_agent import loop_clock
from tests.needs import ROOT, needs

DEADLINE = 30.0
OWN = pwd.getpwuid(os.geteuid()).pw_name
TOKEN = "a-token-of-the-daemon"


class StandIn:
    """The daemon at the other end of the agent's connection."""

    def __init__(self) -> None:
        self.asked: list[Vouch] = []
        self.answer: Callable[[Vouch], None] = lambda vouch: None

    def send_soon(self, message: Vouch, *, urgent: bool) -> None:
        assert urgent
        self.asked.append(message)
        self.answer(message)


def settings(directory: Path, **more: Any) -> AgentSettings:
    own = AgentSettings(cluster="north", url="http://127.0.0.1:1", token="secret", directory=directory)
    return replace(own, login_sockets=(directory / "login.sock",), **more)


@asynccontextmanager
async def serving(own: AgentSettings) -> AsyncIterator[tuple[LoginServer, StandIn]]:
    daemon = StandIn()
    server = LoginServer(own, daemon, loop_clock())  # type: ignore[arg-type]
    await server.listen()
    server.welcomed(Welcome(epoch=1, instance="i", users_url="https://grid:8642"))

    def answer(vouch: Vouch) -> None:
        server.vouched(Vouched(ident=vouch.ident, token=TOKEN, user="ann", role="user", lifetime=60.0))

    daemon.answer = answer
    yield server, daemon
    server.close()


async def ask(path: Path, question: bytes = b'{"ask": "login"}\n') -> list[dict[str, Any]]:
    """All that is said."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(question)
    async with asyncio.timeout(DEADLINE):
        said = [json.loads(line) async for line in reader]
    writer.close()
    return said


@pytest.mark.evidence("A10", "C2")
async def test_the_agent_vouches_for_who_the_kernel_says_asks(tmp_path: Path) -> None:
    async with serving(own := settings(tmp_path)) as (_, daemon):
        greeting, answer = await ask(own.login_sockets[0], b'{"ask": "login", "account": "root", "uid": 0}\n')
        assert greeting == {"koala": 1, "cluster": "north", "url": "https://grid:8642", "ca": ""}
        assert answer == {"token": TOKEN, "user": "ann", "role": "user", "lifetime": 60.0}
        assert [(vouch.account, vouch.uid) for vouch in daemon.asked] == [(OWN, os.geteuid())]
        assert stat.S_IMODE(own.login_sockets[0].stat().st_mode) == 0o666
    assert not own.login_sockets[0].exists()


@pytest.mark.parametrize(
    "question", [b"\n", b"{}\n", b"[]\n", b'{"ask": "token"}\n', b"\xff\n", b"[" * 10_000 + b"\n", b"x" * 1_000_000]
)
async def test_who_asks_for_something_else_gets_no_answer(tmp_path: Path, question: bytes) -> None:
    async with serving(own := settings(tmp_path)) as (_, daemon):
        with suppress(ConnectionResetError):
            assert len(await ask(own.login_sockets[0], question)) <= 1
        assert daemon.asked == []
        assert len(await ask(own.login_sockets[0])) == 2


async def test_answers_to_nothing_and_those_that_come_again_go_to_nobody(tmp_path: Path) -> None:
    async with serving(own := settings(tmp_path)) as (server, daemon):
        replayed: list[str] = []

        def answer(vouch: Vouch) -> None:
            for ident in ("", "made-up", *replayed, vouch.ident, vouch.ident):
                user = "ann" if ident == vouch.ident else "mallory"
                server.vouched(Vouched(ident=ident, token=TOKEN, user=user, role="user", lifetime=60.0))
            replayed.append(vouch.ident)

        daemon.answer = answer
        for _ in range(3):
            assert (await ask(own.login_sockets[0]))[1]["user"] == "ann"


async def test_a_refusal_is_told_with_its_way_out(tmp_path: Path) -> None:
    async with serving(own := settings(tmp_path)) as (server, daemon):
        daemon.answer = lambda vouch: server.vouched(Vouched(ident=vouch.ident, error="not you", hint="ask them"))
        assert (await ask(own.login_sockets[0]))[1] == {"error": "not you", "hint": "ask them"}
        daemon.answer = lambda vouch: server.lost()
        assert (await ask(own.login_sockets[0]))[1]["error"] == "the daemon hung up"
        assert "does not reach the daemon" in (await ask(own.login_sockets[0]))[1]["error"]
        server.welcomed(Welcome(epoch=1, instance="i"))
        assert (await ask(own.login_sockets[0]))[0]["url"] == "http://127.0.0.1:1"


async def test_a_daemon_that_hangs_is_told(tmp_path: Path) -> None:
    async with serving(own := settings(tmp_path)) as (server, daemon):
        daemon.answer = lambda vouch: None
        assert "has not answered" in (await ask(own.login_sockets[0]))[1]["error"]
        late = daemon.asked[0].ident
        server.vouched(Vouched(ident=late, token=TOKEN, user="ann", role="user", lifetime=60.0))


@pytest.mark.evidence("A12")
async def test_nobody_has_more_than_a_few_connections_or_asks_all_the_time(tmp_path: Path) -> None:
    async with serving(own := settings(tmp_path)) as (_, daemon):
        path = str(own.login_sockets[0])
        open_ones = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS_PER_ACCOUNT)]
        for reader, _ in open_ones:
            assert await reader.readline()
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        for _, each in [*open_ones, (reader, writer)]:
            each.close()
        said: list[dict[str, Any]] = []
        async with asyncio.timeout(DEADLINE):
            while "too many" not in (said[1].get("error", "") if len(said) == 2 else ""):
                said = await ask(own.login_sockets[0])
        assert said[1]["hint"].startswith("try again in")
        assert len(daemon.asked) == 12


async def test_agent_of_one_user_vouches_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(own := settings(tmp_path, identity="own")) as (_, daemon):
        assert (await ask(own.login_sockets[0]))[1]["token"] == TOKEN
        monkeypatch.setattr(login, "get_peer", lambda _: Peer(1, 4711))
        refused = (await ask(own.login_sockets[0]))[1]["error"]
        assert refused == f"the agent of north is {OWN}'s own: it vouches for nobody else"
        assert len(daemon.asked) == 1


async def test_unknown_account_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "get_peer", lambda _: Peer(1, 987_654))
    async with serving(own := settings(tmp_path)) as (_, daemon):
        assert (await ask(own.login_sockets[0]))[1]["error"] == "this host knows no account with the uid 987654"
        assert daemon.asked == []


def test_one_agent_listens_at_a_place_and_what_it_left_is_in_nobodys_way(tmp_path: Path) -> None:
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
def test_what_an_agent_left_that_was_root_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="koala-login-"))
    try:
        path = folder / "login.sock"
        BoundSocket(path).close()
        os.chown(folder, 4711, 4711)
        if (child := os.fork()) == 0:
            listens = False
            try:
                os.setgroups([])
                os.setgid(4711)
                os.setuid(4711)
                listens = BoundSocket(path).socket.fileno() >= 0 and path.is_socket()
            finally:
                os._exit(not listens)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        shutil.rmtree(folder)


def test_no_socket_is_made_where_others_may_put_theirs(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="may be written by others"):
        BoundSocket(tmp_path / "login.sock")
    tmp_path.chmod(0o700)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match="Not a directory"):
        BoundSocket(tmp_path / "link" / "login.sock")


async def test_a_long_path_is_none_the_worse(tmp_path: Path) -> None:
    """The kernel takes 107 bytes."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    bound = BoundSocket(folder / "login.sock")
    assert (folder / "login.sock").is_socket()
    bound.close()


async def test_where_it_may_not_listen_it_says_so_and_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "nowhere" / "login.sock", tmp_path / "login.sock"
    own = replace(settings(tmp_path), login_sockets=(first, second))
    async with serving(own):
        assert len(await ask(second)) == 2
    async with serving(replace(own, login_sockets=(first,))):
        assert not second.exists()


@pytest.mark.parametrize(("identity", "runs_jobs"), [("service", True), ("own", False), ("mapped", False)])
async def test_vouch_says_whether_jobs_run_as_the_account(tmp_path: Path, identity: str, runs_jobs: bool) -> None:
    async with serving(own := settings(tmp_path, identity=identity)) as (_, daemon):
        await ask(own.login_sockets[0])
        assert [vouch.runs_jobs for vouch in daemon.asked] == [runs_jobs]
