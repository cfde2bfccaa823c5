"""Encryption of transfers between sites, and rejection of unencrypted or forged connections."""

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
SECRET = b"content that must stay encrypted; " * 10_000


def find_tunnels() -> list[psutil.Process]:
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(argument.endswith("tunnel.py") for argument in process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


class Listener(Gate):
    """A gate that records the bytes sent to both sides."""

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
    folder = north.start_stage(south.make_input(south.make_replica("set", SECRET)))
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == SECRET
    assert (SECRET[:33] in listener.heard, b"@RSYNCD" in listener.heard) == (not encrypted, not encrypted)
    listener.close()


async def test_large_file_arrives_in_one_attempt(north: FileSite, south: FileSite, wire: Wire) -> None:
    content = os.urandom(30_000_000)
    folder = north.start_stage(south.make_input(south.make_replica("set", content)))
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == content
    assert wire.questions.count("export") == 1


@pytest.mark.parametrize(("target_encrypts", "source_encrypts"), [(True, False), (False, True)])
async def test_source_can_require_encryption(
    north: FileSite, south: FileSite, wire: Wire, target_encrypts: bool, source_encrypts: bool
) -> None:
    """A source that requires encryption rejects a puller that requests an unencrypted transfer."""
    north.encrypts, south.encrypts = target_encrypts, source_encrypts
    folder = north.start_stage(south.make_input(south.make_replica("set", SECRET)))
    if source_encrypts:
        failed = await north.wait_for_state("failed")
        assert "the agent of north requests an unencrypted transfer" in failed.error
        assert "encrypt_transfers" in failed.error
        assert wire.questions.count("export") == 1
    else:
        await north.wait_for_state("done")
        assert (folder / "input").read_bytes() == SECRET


@pytest.mark.evidence("L5")
async def test_source_without_certificate_requires_unencrypted_transfers(
    north: FileSite, south: FileSite, wire: Wire
) -> None:
    south.encrypts = False
    export_replica = south.exports.export_replica

    async def export_unencrypted(payload: Any) -> dict[str, object]:
        answer = await export_replica(
            {name: value for name, value in payload.items() if name in ("path", "part", "size")}
        )
        return {name: value for name, value in answer.items() if name != "certificate"}

    south.handlers["export"] = export_unencrypted
    path = south.make_replica("set", SECRET)
    north.start_stage(south.make_input(path))
    failed = await north.wait_for_state("failed")
    assert "north allows only encrypted transfers" in failed.error
    assert wire.questions.count("export") == 1
    north.encrypts = False
    folder = north.start_stage(south.make_input(path), token="8.1.0")
    await north.wait_for_state("done", "8.1.0")
    assert (folder / "input").read_bytes() == SECRET


@pytest.mark.evidence("L5")
async def test_unencrypted_pull_is_rejected_unless_allowed(south: FileSite) -> None:
    request = {"path": str(south.make_replica("set", SECRET)), "part": None, "size": len(SECRET), "asker": "north"}
    with pytest.raises(SiteRejected, match="the agent of north requests an unencrypted transfer") as rejection:
        await south.exports.export_replica(request)
    assert rejection.value.fault == "in-clear"
    south.encrypts = False
    assert Route.model_validate(await south.exports.export_replica(request)).certificate == ""


async def test_asker_is_set_by_daemon_only(north: FileSite, south: FileSite) -> None:
    askers: list[Any] = []

    async def record_asker(payload: Any) -> dict[str, object]:
        askers.append(payload["asker"])
        return {}

    south.handlers["export"] = record_asker
    await north.questions.ask_cluster("south", "export", {"asker": "south"})
    assert askers == ["north"]


@pytest.fixture
def foreign_identity() -> Iterator[TransferIdentity]:
    identity = TransferIdentity()
    yield identity
    identity.close()


@pytest.mark.evidence("L5", "C8")
async def test_wrong_certificate_stops_transfer(
    north: FileSite, south: FileSite, wire: Wire, foreign_identity: TransferIdentity
) -> None:
    received: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1000))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"/proc/self/fd/{foreign_identity._memory}")
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    wire.change_answer = lambda payload: {**payload, "port": port} if "port" in payload else payload
    north.start_stage(south.make_input(south.make_replica("set", SECRET)))
    failed = await north.wait_for_state("failed")
    assert f"127.0.0.1:{port} shows another certificate than its agent announced" in failed.error
    assert not any(received)
    server.close()


async def test_ticket_is_valid_for_one_kind_only(south: FileSite, tmp_path: Path) -> None:
    south.encrypts = False
    path = south.make_replica("set/mine", b"mine")
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
    north.start_stage(south.make_input(south.make_replica("set", BIG)))
    await gate.reached.wait()
    arguments = [argument for process in find_tunnels() for argument in process.cmdline()]
    (ticket,) = south.exports._tickets.values()
    assert {"serve", "connect"} <= set(arguments)
    assert not any(ticket.password in argument or "PRIVATE" in argument for argument in arguments)
    assert not any(b"PRIVATE" in path.read_bytes() for path in south.directory.rglob("*") if path.is_file())
    gate.open.set()
    await north.wait_for_state("done")
    await north.wait_until(lambda: not find_tunnels())


async def test_cancelled_encrypted_transfer_leaves_nothing(north: FileSite, south: FileSite, gate: Gate) -> None:
    north.start_stage(south.make_input(south.make_replica("set", BIG)))
    await gate.reached.wait()
    assert len(find_tunnels()) == 2
    await north.stop()
    await south.stop()
    await north.wait_until(lambda: not find_tunnels())


async def test_stalled_tls_handshake_is_disconnected(south: FileSite, logins: Logins) -> None:
    path = south.make_replica("set", SECRET)
    route = Route.model_validate(
        await south.exports.export_replica({"path": str(path), "size": len(SECRET), "encrypted": True})
    )
    trusting = ssl.create_default_context(cadata=route.certificate)
    trusting.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port, ssl=trusting)
    await logins.end_behind_a_greeting(south, reader)
    writer.close()
    await south.wait_until(lambda: not find_tunnels() and not south.exports._connections)
