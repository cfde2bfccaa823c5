"""Who is not the runner of a node gets nothing by saying that he is, and who is not the agent gets nothing from it."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from koalapy.agent.core.settings import RUNNER
from koalapy.runner.session import TAG_LENGTH, Line, Session
from tests.agent.conftest import FakeDaemon
from tests.agent.played_runner import HERE, secret_of
from tests.agent.test_unauthenticated import Port, serving

TOKEN = "1.1.0.aa"
NAME = f"koala-test-{TOKEN}"
EXIT = {"t": "exit", "code": 0, "error": "", "infrastructure": False, "stopped": False}


@pytest.fixture
async def port(daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[Port]:
    async with serving(daemon, tmp_path / "agent") as port:
        yield port


@pytest.mark.evidence("R1")
@pytest.mark.parametrize("secret", [b"", b"s3cret", secret_of(NAME, 1), secret_of("koala-test-1.2.0.aa")])
async def test_runner_without_node_secret_is_rejected(port: Port, secret: bytes) -> None:
    """Nor one who knows that of its neighbour, or of the attempt before."""
    true = await port.runner(TOKEN)
    liar = await port.connect()
    with pytest.raises(ValueError, match="not have the tag of the other side"):
        await liar.greet(NAME, secret)
    liar.send(t="here", life="x", **HERE)
    liar.send(**EXIT)
    assert await liar.read() == {}
    true.send(t="out", offset=0, data="aGk=")
    assert (await true.receive("output"))["offset"] == 2
    assert port.daemon.status(TOKEN)["program_exit"] is None
    told = await port.impostor()
    assert (told["token"], told["node"], told["how"], told["address"]) == (TOKEN, 0, "forged", "127.0.0.1")


@pytest.mark.evidence("R2")
async def test_replayed_session_is_rejected(port: Port) -> None:
    true = await port.runner(TOKEN)
    true.send(t="out", offset=0, data="aGk=")
    await true.receive("output")
    listener = await port.connect()
    recorded: list[bytes] = []
    write = listener.writer.write
    listener.writer.write = lambda line: (recorded.append(line), write(line))[1]  # type: ignore[method-assign]
    await listener.greet(NAME, secret_of(NAME), life="1")
    assert (await listener.read())["t"] == "refused", "there is one already"
    again = await port.connect()
    for line in recorded:
        again.writer.write(line)
    challenge = (await again.reader.readline())[TAG_LENGTH:]
    assert json.loads(challenge)["t"] == "challenge"
    assert await again.reader.read() == b""


@pytest.mark.evidence("R3")
@pytest.mark.parametrize("forge", ["twice", "swapped", "changed", "plain", "reflected", "skipped"])
async def test_line_out_of_sequence_ends_connection(port: Port, forge: str) -> None:
    """As somebody between it and its agent might slip in, repeat, turn back or hold back."""
    runner = await port.runner(TOKEN)
    assert runner.session is not None
    first, second = (Line(b'{"t":"out","offset":%d,"data":"aGk="}' % (2 * n)) for n in range(2))
    sealed = [runner.session.seal(first), runner.session.seal(second)]
    other = Session(secret_of(NAME), NAME, 0, ("0" * 64, "n"), is_agent=True)
    said = {
        "twice": sealed[0] * 2,
        "swapped": sealed[1] + sealed[0],
        "changed": sealed[0].replace(b"aGk", b"aGl"),
        "plain": first.ended,
        "reflected": other.seal(first),
        "skipped": sealed[1],
    }[forge]
    runner.writer.write(said)
    await runner.is_cut_off()
    kept = b"hi" if forge == "twice" else b""
    await port.daemon.wait_until(lambda: port.daemon.output.get(TOKEN, b"") == kept)


@pytest.mark.evidence("R4")
async def test_second_runner_with_secret_is_rejected(port: Port) -> None:
    true = await port.runner(TOKEN)
    thief = await port.connect()
    await thief.greet(NAME, secret_of(NAME), lrm_job="4711")
    assert await thief.read() == {"t": "refused"}
    assert await thief.read() == {}
    told = await port.impostor()
    assert (told["how"], told["lrm_job"]) == ("second", "4711")
    true.send(t="out", offset=0, data="aGk=")
    assert (await true.receive("output"))["offset"] == 2


async def test_disconnected_runner_reconnects(port: Port) -> None:
    await port.daemon.submit(TOKEN)
    await port.daemon.reaches(TOKEN, "waiting")
    for _ in range(2):
        runner = await port.connect()
        await runner.greet(NAME, secret_of(NAME), life="mine")
        await runner.receive("welcome")


@pytest.mark.evidence("R4")
async def test_first_runner_of_node_keeps_its_place_after_agent_restart(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(daemon, tmp_path) as port:
        await daemon.submit(TOKEN)
        await daemon.reaches(TOKEN, "waiting")
        runner = await port.connect()
        await runner.greet(NAME, secret_of(NAME), life="mine")
        await daemon.reaches(TOKEN, "claimed")
        await daemon.open(["true"], TOKEN)
        await runner.receive("open")
    await daemon.leave()
    daemon.inventories.clear()
    await daemon.listen()
    async with serving(daemon, tmp_path) as port:
        thief = await port.connect()
        await thief.greet(NAME, secret_of(NAME), life="other")
        assert await thief.read() == {"t": "refused"}
        runner = await port.connect()
        await runner.greet(NAME, secret_of(NAME), life="mine")
        await runner.receive("welcome")


@pytest.mark.evidence("R8")
async def test_repeated_rejections_are_reported_together(port: Port) -> None:
    await port.runner(TOKEN)
    for _ in range(20):
        liar = await port.connect()
        with pytest.raises(ValueError, match="not have the tag of the other side"):
            await liar.meet(NAME, b"guess")
        liar.send(t="here", life="x", **HERE)
        assert await liar.read() == {}
    said = port.daemon.received
    await port.daemon.wait_until(lambda: sum(told["times"] for told in said("impostor")) == 20)
    assert len(said("impostor")) < 20


# An agent that is none


@pytest.mark.evidence("R5")
@pytest.mark.processes
async def test_stranger_at_agents_port_learns_and_orders_nothing(daemon: FakeDaemon, tmp_path: Path) -> None:
    """A real runner meets a stranger first, who sends it all that an agent might, and its agent then."""
    heard: list[bytes] = []
    came_again = asyncio.Event()

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if heard:
            came_again.set()
        heard.append(await reader.readline())
        guess = Session(b"guess", NAME, 0, (json.loads(heard[-1])["nonce"], "n"), is_agent=True)
        for said in ({"t": "challenge", "nonce": "n"}, {"t": "stop"}, {"t": "welcome", "lease": 1, "output": 0}):
            writer.write(guess.seal(Line(json.dumps(said).encode())))
        with contextlib.suppress(ConnectionError):
            heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    address = {"host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
    (tmp_path / "other.json").write_text(json.dumps(address))
    async with serving(daemon, tmp_path / "agent") as port:
        await daemon.submit(TOKEN)
        await daemon.reaches(TOKEN, "waiting")
        (tmp_path / "secret.0").write_text(secret_of(NAME).hex())
        environment = {
            "KOALA_AGENT_FILE": str(tmp_path / "other.json"),
            "KOALA_COMPONENT_TOKEN": TOKEN,
            "KOALA_COMPONENT_NAME": NAME,
            "KOALA_SPOOL": str(tmp_path),
        }
        runner = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", str(RUNNER), "node", env=environment)
        await asyncio.wait_for(came_again.wait(), 30)
        assert not (tmp_path / "secret.0").exists()
        (tmp_path / "other.json").write_text((tmp_path / "agent" / "agent.json").read_text())
        await daemon.reaches(TOKEN, "claimed")
        await daemon.open(["sh", "-c", "exit 7"], TOKEN)
        await daemon.wait_until(lambda: daemon.status(TOKEN).get("program_exit") == 7)
        await runner.wait()
        port.close()
    server.close()
    assert secret_of(NAME).hex().encode() not in b"".join(heard)
    assert all(set(json.loads(said)) == {"t", "component", "node", "nonce"} for said in heard if said)
