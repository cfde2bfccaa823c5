"""Files go encrypted from site to site, to whoever was told the way and to nobody who stands on it."""

import asyncio
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from koalapy.agent.transfers.exports import Route, TransferIdentity, tunnel_environment
from koalapy.model.errors import SiteRejected
from tests.agent.transfers.conftest import FileSite, Gate, Logins, Wire, needs_rsync

pytestmark = [needs_rsync, pytest.mark.processes]
BIG = os.urandom(3_000_000)
SECRET = b"nobody on the way may read this; " * 10_000


def tunnels() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(word.endswith("tunnel.py") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Listener(Gate):
    """Hears what passes."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, 10**12)
        self.heard = bytearray()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write = writer.write

        def writing(data: bytes) -> None:
            self.heard += data
            write(data)

        writer.write = writing  # type: ignore[method-assign]
        await super()._serve(reader, writer)


@pytest.mark.evidence("L5", "C8")
@pytest.mark.parametrize("encrypted", [True, False])
async def test_encrypted_transfer_shows_no_content(
    north: FileSite, south: FileSite, wire: Wire, encrypted: bool
) -> None:
    north.encrypts = south.encrypts = encrypted
    listener = Listener(wire)
    await listener.listen()
    folder = north.stage(south.input(south.make("set", SECRET)))
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == SECRET
    assert (SECRET[:33] in listener.heard, b"@RSYNCD" in listener.heard) == (not encrypted, not encrypted)
    listener.close()


async def test_large_file_arrives_in_one_attempt(north: FileSite, south: FileSite, wire: Wire) -> None:
    content = os.urandom(30_000_000)
    folder = north.stage(south.input(south.make("set", content)))
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == content
    assert wire.questions.count("export") == 1


@pytest.mark.parametrize(("to", "of"), [(True, False), (False, True)])
async def test_one_side_can_require_encryption(
    north: FileSite, south: FileSite, wire: Wire, to: bool, of: bool
) -> None:
    """Where the source alone wants it, a puller that does not is refused, for it would not understand."""
    north.encrypts, south.encrypts = to, of
    folder = north.stage(south.input(south.make("set", SECRET)))
    if of:
        failed = await north.wait_for_state("failed")
        assert "the agent of north requests an unencrypted transfer" in failed.error
        assert "encrypt_transfers" in failed.error
        assert wire.questions.count("export") == 1
    else:
        await north.wait_for_state("done")
        assert (folder / "input").read_bytes() == SECRET


@pytest.mark.evidence("L5")
async def test_source_without_certificate_needs_clear_allowed(north: FileSite, south: FileSite, wire: Wire) -> None:
    south.encrypts = False
    real = south.exports.export_replica

    async def in_clear(payload: Any) -> dict[str, object]:
        answer = await real({name: value for name, value in payload.items() if name in ("path", "part", "size")})
        return {name: value for name, value in answer.items() if name != "certificate"}

    south.handlers["export"] = in_clear
    path = south.make("set", SECRET)
    north.stage(south.input(path))
    failed = await north.wait_for_state("failed")
    assert "north allows only encrypted transfers" in failed.error
    assert wire.questions.count("export") == 1
    north.encrypts = False
    folder = north.stage(south.input(path), token="8.1.0")
    await north.wait_for_state("done", "8.1.0")
    assert (folder / "input").read_bytes() == SECRET


@pytest.mark.evidence("L5")
async def test_pull_in_clear_is_refused_unless_allowed(south: FileSite) -> None:
    asked = {"path": str(south.make("set", SECRET)), "part": None, "size": len(SECRET), "asker": "north"}
    with pytest.raises(SiteRejected, match="the agent of north requests an unencrypted transfer") as refused:
        await south.exports.export_replica(asked)
    assert refused.value.fault == "in-clear"
    south.encrypts = False
    assert Route.model_validate(await south.exports.export_replica(asked)).certificate == ""


async def test_asker_is_set_by_daemon_only(north: FileSite, south: FileSite) -> None:
    heard: list[Any] = []

    async def hear(payload: Any) -> dict[str, object]:
        heard.append(payload["asker"])
        return {}

    south.handlers["export"] = hear
    await north.questions.ask_cluster("south", "export", {"asker": "south"})
    assert heard == ["north"]


@pytest.fixture
def other() -> Iterator[TransferIdentity]:
    identity = TransferIdentity()
    yield identity
    identity.close()


@pytest.mark.evidence("L5", "C8")
async def test_wrong_certificate_stops_transfer(
    north: FileSite, south: FileSite, wire: Wire, other: TransferIdentity
) -> None:
    said: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.read(1000))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"/proc/self/fd/{other._memory}")
    impostor = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = impostor.sockets[0].getsockname()[1]
    wire.change_answer = lambda payload: {**payload, "port": port} if "port" in payload else payload
    north.stage(south.input(south.make("set", SECRET)))
    failed = await north.wait_for_state("failed")
    assert f"127.0.0.1:{port} shows another certificate than its agent announced" in failed.error
    assert not any(said)
    impostor.close()


async def test_ticket_is_valid_for_one_kind_only(south: FileSite, tmp_path: Path) -> None:
    south.encrypts = False
    path = south.make("set/mine", b"mine")
    routes = [
        Route.model_validate(await south.exports.export_replica({"path": str(path), "size": 4, "encrypted": encrypted}))
        for encrypted in (True, False)
    ]

    async def pull(route: Route, certificate: str) -> int:
        environment = {"PATH": os.environ["PATH"], "RSYNC_PASSWORD": route.password}
        if certificate:
            environment |= tunnel_environment(route.host, route.port, certificate)
        url = f"rsync://{route.user}@{route.host}:{route.port}/{route.module}/"
        process = await asyncio.create_subprocess_exec(
            "rsync", "-r", url, f"{tmp_path}/came/", env=environment, cwd="/"
        )
        return await process.wait()

    certificate = routes[0].certificate
    assert [await pull(routes[0], ""), await pull(routes[1], certificate)] == [5, 5]
    assert not (tmp_path / "came" / "mine").exists()
    assert [await pull(routes[0], certificate), await pull(routes[1], "")] == [0, 0]


@pytest.mark.evidence("C11")
async def test_transfer_key_is_neither_on_disk_nor_command_line(north: FileSite, south: FileSite, gate: Gate) -> None:
    north.stage(south.input(south.make("set", BIG)))
    await gate.reached.wait()
    seen = [word for process in tunnels() for word in process.cmdline()]
    (ticket,) = south.exports._tickets.values()
    assert {"serve", "connect"} <= set(seen)
    assert not any(ticket.password in word or "PRIVATE" in word for word in seen)
    assert not any(b"PRIVATE" in path.read_bytes() for path in south.directory.rglob("*") if path.is_file())
    gate.open.set()
    await north.wait_for_state("done")
    await north.wait_until(lambda: not tunnels())


async def test_cancelled_encrypted_transfer_leaves_nothing(north: FileSite, south: FileSite, gate: Gate) -> None:
    north.stage(south.input(south.make("set", BIG)))
    await gate.reached.wait()
    assert len(tunnels()) == 2
    await north.stop()
    await south.stop()
    await north.wait_until(lambda: not tunnels())


async def test_stalled_tls_handshake_is_disconnected(south: FileSite, logins: Logins) -> None:
    path = south.make("set", SECRET)
    route = Route.model_validate(
        await south.exports.export_replica({"path": str(path), "size": len(SECRET), "encrypted": True})
    )
    trusting = ssl.create_default_context(cadata=route.certificate)
    trusting.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port, ssl=trusting)
    await logins.end_behind_a_greeting(south, reader)
    writer.close()
    await south.wait_until(lambda: not tunnels() and not south.exports._connections)
