"""Authentication between runners and agent: forged runners and false agents are rejected."""

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
from tests.agent.fake_runner import HERE, runner_secret
from tests.agent.test_runner_port import Port, open_port

TOKEN = "1.1.0.aa"
NAME = f"koala-test-{TOKEN}"
EXIT = {"t": "exit", "code": 0, "error": "", "infrastructure": False, "stopped": False}


@pytest.fixture
async def port(daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(daemon, tmp_path / "agent") as port:
        yield port


@pytest.mark.evidence("R1")
@pytest.mark.parametrize("secret", [b"", b"s3cret", runner_secret(NAME, 1), runner_secret("koala-test-1.2.0.aa")])
async def test_runner_without_node_secret_is_rejected(port: Port, secret: bytes) -> None:
    """The secrets of a neighbouring node and of the attempt before are rejected too."""
    runner = await port.connect_runner(TOKEN)
    forger = await port.connect()
    with pytest.raises(ValueError, match="not sent by the other side: its tag is wrong"):
        await forger.introduce(NAME, secret)
    forger.send(t="here", life="x", **HERE)
    forger.send(**EXIT)
    assert await forger.read() == {}
    runner.send(t="out", offset=0, data="aGk=")
    assert (await runner.receive("output"))["offset"] == 2
    assert port.daemon.status(TOKEN)["program_exit"] is None
    rejection = await port.last_rejection()
    assert (rejection["token"], rejection["node"], rejection["how"], rejection["address"]) == (
        TOKEN,
        0,
        "forged",
        "127.0.0.1",
    )


@pytest.mark.evidence("R2")
async def test_replayed_session_is_rejected(port: Port) -> None:
    runner = await port.connect_runner(TOKEN)
    runner.send(t="out", offset=0, data="aGk=")
    await runner.receive("output")
    recorder = await port.connect()
    recorded: list[bytes] = []
    write = recorder.writer.write
    recorder.writer.write = lambda line: (recorded.append(line), write(line))[1]  # type: ignore[method-assign]
    await recorder.introduce(NAME, runner_secret(NAME), life="1")
    assert (await recorder.read())["t"] == "refused", "this node already has a runner"
    replay = await port.connect()
    for line in recorded:
        replay.writer.write(line)
    challenge = (await replay.reader.readline())[TAG_LENGTH:]
    assert json.loads(challenge)["t"] == "challenge"
    assert await replay.reader.read() == b""


@pytest.mark.evidence("R3")
@pytest.mark.parametrize("forge", ["twice", "swapped", "changed", "plain", "reflected", "skipped"])
async def test_line_out_of_sequence_ends_connection(port: Port, forge: str) -> None:
    """An attacker on the path could inject, repeat, reflect or drop lines."""
    runner = await port.connect_runner(TOKEN)
    assert runner.session is not None
    first, second = (Line(b'{"t":"out","offset":%d,"data":"aGk="}' % (2 * n)) for n in range(2))
    sealed = [runner.session.seal(first), runner.session.seal(second)]
    agent_session = Session(runner_secret(NAME), NAME, 0, ("0" * 64, "n"), is_agent=True)
    sent = {
        "twice": sealed[0] * 2,
        "swapped": sealed[1] + sealed[0],
        "changed": sealed[0].replace(b"aGk", b"aGl"),
        "plain": first.ended,
        "reflected": agent_session.seal(first),
        "skipped": sealed[1],
    }[forge]
    runner.writer.write(sent)
    await runner.wait_for_disconnect()
    expected = b"hi" if forge == "twice" else b""
    await port.daemon.wait_until(lambda: port.daemon.output.get(TOKEN, b"") == expected)


@pytest.mark.evidence("R4")
async def test_second_runner_with_secret_is_rejected(port: Port) -> None:
    runner = await port.connect_runner(TOKEN)
    thief = await port.connect()
    await thief.introduce(NAME, runner_secret(NAME), lrm_job="4711")
    assert await thief.read() == {"t": "refused"}
    assert await thief.read() == {}
    rejection = await port.last_rejection()
    assert (rejection["how"], rejection["lrm_job"]) == ("second", "4711")
    runner.send(t="out", offset=0, data="aGk=")
    assert (await runner.receive("output"))["offset"] == 2


async def test_disconnected_runner_reconnects(port: Port) -> None:
    await port.daemon.submit_component(TOKEN)
    await port.daemon.wait_for_state(TOKEN, "waiting")
    for _ in range(2):
        runner = await port.connect()
        await runner.introduce(NAME, runner_secret(NAME), life="mine")
        await runner.receive("welcome")


@pytest.mark.evidence("R4")
async def test_first_runner_is_kept_after_agent_restart(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with open_port(daemon, tmp_path) as port:
        await daemon.submit_component(TOKEN)
        await daemon.wait_for_state(TOKEN, "waiting")
        runner = await port.connect()
        await runner.introduce(NAME, runner_secret(NAME), life="mine")
        await daemon.wait_for_state(TOKEN, "claimed")
        await daemon.open_barrier(["true"], TOKEN)
        await runner.receive("open")
    await daemon.stop_listening()
    daemon.inventories.clear()
    await daemon.listen()
    async with open_port(daemon, tmp_path) as port:
        thief = await port.connect()
        await thief.introduce(NAME, runner_secret(NAME), life="other")
        assert await thief.read() == {"t": "refused"}
        runner = await port.connect()
        await runner.introduce(NAME, runner_secret(NAME), life="mine")
        await runner.receive("welcome")


@pytest.mark.evidence("R8")
async def test_repeated_rejections_are_reported_together(port: Port) -> None:
    await port.connect_runner(TOKEN)
    for _ in range(20):
        forger = await port.connect()
        with pytest.raises(ValueError, match="not sent by the other side: its tag is wrong"):
            await forger.authenticate(NAME, b"guess")
        forger.send(t="here", life="x", **HERE)
        assert await forger.read() == {}
    received = port.daemon.received
    await port.daemon.wait_until(lambda: sum(rejection["times"] for rejection in received("impostor")) == 20)
    assert len(received("impostor")) < 20


# False agents


@pytest.mark.evidence("R5")
@pytest.mark.processes
async def test_runner_reveals_nothing_to_false_agent(daemon: FakeDaemon, tmp_path: Path) -> None:
    """A real runner connects first to a false agent, which sends all messages of an agent, then to its own."""
    received: list[bytes] = []
    reconnected = asyncio.Event()

    async def answer_falsely(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if received:
            reconnected.set()
        received.append(await reader.readline())
        guess = Session(b"guess", NAME, 0, (json.loads(received[-1])["nonce"], "n"), is_agent=True)
        for message in ({"t": "challenge", "nonce": "n"}, {"t": "stop"}, {"t": "welcome", "lease": 1, "output": 0}):
            writer.write(guess.seal(Line(json.dumps(message).encode())))
        with contextlib.suppress(ConnectionError):
            received.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(answer_falsely, "127.0.0.1", 0)
    address = {"host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
    (tmp_path / "other.json").write_text(json.dumps(address))
    async with open_port(daemon, tmp_path / "agent") as port:
        await daemon.submit_component(TOKEN)
        await daemon.wait_for_state(TOKEN, "waiting")
        (tmp_path / "secret.0").write_text(runner_secret(NAME).hex())
        environment = {
            "KOALA_AGENT_FILE": str(tmp_path / "other.json"),
            "KOALA_COMPONENT_TOKEN": TOKEN,
            "KOALA_COMPONENT_NAME": NAME,
            "KOALA_SPOOL": str(tmp_path),
        }
        runner = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", str(RUNNER), "node", env=environment)
        await asyncio.wait_for(reconnected.wait(), 30)
        assert not (tmp_path / "secret.0").exists()
        (tmp_path / "other.json").write_text((tmp_path / "agent" / "agent.json").read_text())
        await daemon.wait_for_state(TOKEN, "claimed")
        await daemon.open_barrier(["sh", "-c", "exit 7"], TOKEN)
        await daemon.wait_until(lambda: daemon.status(TOKEN).get("program_exit") == 7)
        await runner.wait()
        port.close()
    server.close()
    assert runner_secret(NAME).hex().encode() not in b"".join(received)
    assert all(set(json.loads(message)) == {"t", "component", "node", "nonce"} for message in received if message)
