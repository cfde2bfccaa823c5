"""An agent attacked on its port for runners keeps running, and other components stay unchanged.

The attackers are strangers and the authenticated runner of one component.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from koalapy.agent.runners import runner_messages, runners
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import FakeRunner, runner_secret
from tests.fuzz.agent import SingleClusterDaemon, Site, wait_until
from tests.fuzz.campaign import AttackRunner, Figures, run_campaign
from tests.fuzz.messages import MAX_REPR_LENGTH, Send, Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

EXAMPLES = 15
MIN_ACTS, MAX_ACTS = 10, 30
OWN, OTHERS, PEER = "1.1.0.aa", "2.1.0.bb", "2.1.1.bb"
"""The attacker's component, and another job with two components."""
COMPONENTS = [f"koala-test-{token}" for token in (OWN, OTHERS, PEER)]
HELLO_MESSAGES = (runner_messages.Hello, runner_messages.Here)
RUNNER_MESSAGES = (
    runner_messages.Here,
    runner_messages.Out,
    runner_messages.Running,
    runner_messages.Ending,
    runner_messages.Relay,
    runner_messages.Exit,
)
VOCABULARY = Vocabulary(
    {
        "component": [*COMPONENTS, "koala-test-3.1.0.cc", "nobody"],
        "token": [OWN, OTHERS, PEER, "1.1.1.aa", "nobody"],
        "node": [0, 0, 0, 1, 1_000_000],
        "nonce": ["0" * 64, "f" * 64, "z" * 64, ""],
        "secret": ["", "s3cret", "0" * 32],
        "offset": [0, 0, 1, 10, 2**53],
        "start": [0, 5, 2**53],
        "phase": ["waiting", "opened", "running", "ending", "ended"],
        "life": ["one", "another"],
        "lrm_job": ["", "1", "2"],
    }
)


@dataclass(frozen=True)
class ConnectAsStranger:
    """Send bytes on a new connection without authentication, and close it or not."""

    data: bytes
    hangs_up: bool

    def __repr__(self) -> str:
        return f"Strange({self.data[:MAX_REPR_LENGTH]!r}, {len(self.data)})"


@dataclass(frozen=True)
class Impersonate:
    """Connect as a node's runner without its secret, and send a line."""

    component: str
    secret: bytes
    then: str


@dataclass(frozen=True)
class Reconnect:
    """Connect the attacker's runner again."""

    life: str


def _join_lines(text: str) -> str:
    return text.replace("\n", " ")


def draw_acts() -> st.SearchStrategy[list[Any]]:
    hellos = VOCABULARY.draw_message(HELLO_MESSAGES).map(lambda message: json.dumps(message).encode() + b"\n")
    oversize = st.sampled_from([b"x" * 9_000, b"{" * 20_000 + b"\n", b"\n" * 5000, b"\x00" * 300 + b"\n"])
    strange = st.builds(
        ConnectAsStranger,
        hellos | st.binary(max_size=100) | oversize | st.tuples(hellos, hellos).map(b"".join),
        st.booleans(),
    )
    lines = VOCABULARY.draw_message(RUNNER_MESSAGES).map(json.dumps)
    secrets = [b"", b"s3cret", runner_secret(COMPONENTS[0]), runner_secret(COMPONENTS[1], 1)]
    claim = st.builds(Impersonate, st.sampled_from(COMPONENTS[1:]), st.sampled_from(secrets), lines)
    statements = (lines | frames(VOCABULARY.draw_message(RUNNER_MESSAGES)).map(_join_lines)).map(Send)
    reconnections = st.builds(Reconnect, st.sampled_from(["one", "another"]))
    act = weighted((3, strange), (2, claim), (8, statements), (1, reconnections))
    return st.lists(act, min_size=MIN_ACTS, max_size=MAX_ACTS)


class Attack:
    """The connections of an attack to an agent's port."""

    def __init__(self, site: Site, daemon: FakeDaemon, figures: Figures) -> None:
        self._site, self._daemon, self._figures = site, daemon, figures
        self._open: list[FakeRunner] = []
        self._own: FakeRunner | None = None

    async def runner(self, token: str, **here: Any) -> FakeRunner:
        runner = await self._connect()
        name = f"koala-test-{token}"
        await runner.introduce(name, runner_secret(name), **here)
        assert (await runner.receive("welcome", "refused"))["t"] == "welcome"
        return runner

    async def _connect(self) -> FakeRunner:
        runner = await FakeRunner.connect(self._site.own)
        self._open.append(runner)
        return runner

    async def act(self, act: Any) -> None:
        match act:
            case ConnectAsStranger():
                self._figures.counts["strangers"] += 1
                stranger = await self._connect()
                stranger.writer.write(act.data)
                if act.hangs_up:
                    stranger.writer.close()
            case Impersonate():
                self._figures.counts["impostors"] += 1
                await self._claim(act)
            case Send():
                self._figures.counts["messages"] += 1
                if self._own is not None:
                    self._own.send_line(act.frame.encode(errors="replace"))
            case Reconnect():
                await self._come_anew(act.life)

    async def _claim(self, claim: Impersonate) -> None:
        impostor = await self._connect()
        with suppress(ValueError, KeyError):  # the answer is not sealed with this secret
            await impostor.authenticate(claim.component, claim.secret)
        impostor.send_line(claim.then.encode())
        await impostor.wait_for_disconnect()

    async def _come_anew(self, life: str) -> None:
        self._own = await self._connect()
        try:
            await self._own.introduce(COMPONENTS[0], runner_secret(COMPONENTS[0]), life=life)
        except (ValueError, KeyError):
            self._own = None  # the component has ended

    async def heard_out(self) -> None:
        """Wait until the agent has read all sent lines."""
        for connection in self._open:
            try:
                await connection.writer.drain()
            except ConnectionError:
                continue
        mark = 10**6 + len(self._daemon.messages)
        await self._daemon.send_messages("north", {"type": "probe", "sequence": mark, "look": False})
        await wait_until(lambda: any(m["type"] == "confirmed" and m["sequence"] == mark for m in self._daemon.messages))

    def close(self) -> None:
        for connection in self._open:
            connection.writer.transport.abort()


async def attack_agent(directory: Path, attack: list[Any], figures: Figures) -> None:
    site, daemon = Site(directory), SingleClusterDaemon()
    await daemon.listen()
    try:
        async with site.running_agent(daemon):
            await wait_until(lambda: daemon.inventories)
            attacker = Attack(site, daemon, figures)
            for token in (OWN, OTHERS, PEER):
                await daemon.submit_component(token)
                await daemon.wait_for_state(token, "waiting")
            await attacker.act(Reconnect("one"))
            other_runners = [await attacker.runner(token) for token in (OTHERS, PEER)]
            for token in (OTHERS, PEER):
                await daemon.wait_for_state(token, "claimed")
            states_before = [daemon.status(token) for token in (OTHERS, PEER)]
            for act in attack:
                await attacker.act(act)
            await attacker.heard_out()
            assert [daemon.status(token) for token in (OTHERS, PEER)] == states_before
            assert OTHERS not in daemon.output
            await check_components_finish(daemon, other_runners)
            attacker.close()
    finally:
        await daemon.stop_listening()
    site.remove()


async def check_components_finish(daemon: FakeDaemon, other_runners: list[FakeRunner]) -> None:
    """Check that the other components run, write output and end."""
    await daemon.open_barrier(["true"], OTHERS, PEER)
    for runner, token in zip(other_runners, (OTHERS, PEER), strict=True):
        assert (await runner.receive("open", "relay", "stop"))["t"] == "open", (
            "the message of another connection was relayed"
        )
        runner.send(t="running")
        runner.send(t="out", offset=0, data="Z2VudWluZQo=")
        assert (await runner.receive("output"))["offset"] == 8
        await daemon.wait_until(lambda token=token: daemon.output.get(token) == b"genuine\n")  # type: ignore[misc]
    for runner, token in zip(other_runners, (OTHERS, PEER), strict=True):
        runner.send(t="exit", code=3, error="", infrastructure=False, stopped=False)
        await daemon.wait_until(lambda token=token: daemon.status(token)["program_exit"] == 3)  # type: ignore[misc]


@pytest.mark.evidence("J11")
def test_hostile_runner_affects_only_its_own_component(attack_runner: AttackRunner) -> None:
    assert runners.MAX_UNAUTHENTICATED > MAX_ACTS, "strangers would displace each other"
    run_campaign("hostile runner", EXAMPLES, draw_acts(), attack_runner.bind(attack_agent))
