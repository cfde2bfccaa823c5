"""Encryption of transfers between sites, and rejection of unencrypted or forged connections."""

import asyncio
import os
import ssl
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from koalapy.agent.transfers.exports import Route, TransferIdentity
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
async def test_encrypted_transfer_shows_no_content(north: FileSite, south: FileSite, wire: Wire) -> None:
    listener = Listener(wire)
    await listener.listen()
    folder = north.start_stage(south.make_input(south.make_replica("set", SECRET)))
    await north.wait_for_state("done")
    assert (folder / "input").read_bytes() == SECRET
    assert listener.heard
    assert SECRET[:33] not in listener.heard
    assert b"@RSYNCD" not in listener.heard
    listener.close()


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


async def test_stalled_tls_handshake_is_disconnected(south: FileSite, logins: Logins) -> None:
    path = south.make_replica("set", SECRET)
    route = Route.model_validate(await south.exports.export_replica({"path": str(path), "size": len(SECRET)}))
    trusting = ssl.create_default_context(cadata=route.certificate)
    trusting.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port, ssl=trusting)
    await logins.end_behind_a_greeting(south, reader)
    writer.close()
    await south.wait_until(lambda: not find_tunnels() and not south.exports._connections)
