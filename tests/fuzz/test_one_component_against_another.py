"""Whatever comes to an agent's port for runners, from strangers and from one component's own runner: the agent lives,
and no other component is touched."""

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
from tests.fuzz.agent import OnlyDaemon, Site, settled
from tests.fuzz.campaign import Figures, Ground, play
from tests.fuzz.messages import Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

EXAMPLES = 15
LEAST_ACTS, MOST_ACTS = 10, 30
MAX_SHOWN = 400
OWN, OTHERS, PEER = "1.1.0.aa", "2.1.0.bb", "2.1.1.bb"
"""The attacker's component, and a gang of two that has nothing to do with it."""
COMPONENTS = [f"koala-test-{token}" for token in (OWN, OTHERS, PEER)]
HELLOS = (runner_messages.Hello, runner_messages.Here)
SAID = (
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
class Strange:
    """Bytes from somebody who is nobody; he hangs up, or stays."""

    data: bytes
    hangs_up: bool

    def __repr__(self) -> str:
        return f"Strange({self.data[:MAX_SHOWN]!r}, {len(self.data)})"


@dataclass(frozen=True)
class Claim:
    """Somebody says that he is a node's runner, is challenged, and goes on without, or with the wrong, secret."""

    component: str
    secret: bytes
    then: str


@dataclass(frozen=True)
class Say:
    """What the attacker's own runner says, as only it can."""

    line: str

    def __repr__(self) -> str:
        return f"Say({self.line[:MAX_SHOWN]!r}, {len(self.line)})"


@dataclass(frozen=True)
class ComeAnew:
    """The attacker's own runner connects again."""

    life: str


def _flat(text: str) -> str:
    return text.replace("\n", " ")


def acts() -> st.SearchStrategy[list[Any]]:
    hellos = VOCABULARY.message(HELLOS).map(lambda one: json.dumps(one).encode() + b"\n")
    oversize = st.sampled_from([b"x" * 9_000, b"{" * 20_000 + b"\n", b"\n" * 5000, b"\x00" * 300 + b"\n"])
    strange = st.builds(
        Strange, hellos | st.binary(max_size=100) | oversize | st.tuples(hellos, hellos).map(b"".join), st.booleans()
    )
    lines = VOCABULARY.message(SAID).map(json.dumps)
    secrets = [b"", b"s3cret", runner_secret(COMPONENTS[0]), runner_secret(COMPONENTS[1], 1)]
    claim = st.builds(Claim, st.sampled_from(COMPONENTS[1:]), st.sampled_from(secrets), lines)
    said = (lines | frames(VOCABULARY.message(SAID)).map(_flat)).map(Say)
    anew = st.builds(ComeAnew, st.sampled_from(["one", "another"]))
    act = weighted((3, strange), (2, claim), (8, said), (1, anew))
    return st.lists(act, min_size=LEAST_ACTS, max_size=MOST_ACTS)


class Attack:
    """The port of an agent, and who comes to it."""

    def __init__(self, site: Site, daemon: FakeDaemon, figures: Figures) -> None:
        self._site, self._daemon, self._figures = site, daemon, figures
        self._open: list[FakeRunner] = []
        self._own: FakeRunner | None = None

    async def runner(self, token: str, **here: Any) -> FakeRunner:
        made = await self._connect()
        name = f"koala-test-{token}"
        await made.introduce(name, runner_secret(name), **here)
        assert (await made.receive("welcome", "refused"))["t"] == "welcome"
        return made

    async def _connect(self) -> FakeRunner:
        made = await FakeRunner.connect(self._site.own)
        self._open.append(made)
        return made

    async def act(self, act: Any) -> None:
        match act:
            case Strange():
                self._figures.counts["strangers"] += 1
                stranger = await self._connect()
                stranger.writer.write(act.data)
                if act.hangs_up:
                    stranger.writer.close()
            case Claim():
                self._figures.counts["impostors"] += 1
                await self._claim(act)
            case Say():
                self._figures.counts["messages"] += 1
                if self._own is not None:
                    self._own.send_line(act.line.encode(errors="replace"))
            case ComeAnew():
                await self._come_anew(act.life)

    async def _claim(self, claim: Claim) -> None:
        impostor = await self._connect()
        with suppress(ValueError, KeyError):  # what it is told is not sealed by the secret that it has
            await impostor.authenticate(claim.component, claim.secret)
        impostor.send_line(claim.then.encode())
        await impostor.wait_for_disconnect()

    async def _come_anew(self, life: str) -> None:
        self._own = await self._connect()
        try:
            await self._own.introduce(COMPONENTS[0], runner_secret(COMPONENTS[0]), life=life)
        except (ValueError, KeyError):
            self._own = None  # its component is over

    async def heard_out(self) -> None:
        """Return when the agent has read all that was written."""
        for one in self._open:
            try:
                await one.writer.drain()
            except ConnectionError:
                continue
        mark = 10**6 + len(self._daemon.messages)
        await self._daemon.send_messages("north", {"type": "probe", "sequence": mark, "look": False})
        await settled(lambda: any(m["type"] == "confirmed" and m["sequence"] == mark for m in self._daemon.messages))

    def close(self) -> None:
        for one in self._open:
            one.writer.transport.abort()


async def attacked(directory: Path, attack: list[Any], figures: Figures) -> None:
    site, daemon = Site(directory), OnlyDaemon()
    await daemon.listen()
    try:
        async with site.serving(daemon):
            await settled(lambda: daemon.inventories)
            attacker = Attack(site, daemon, figures)
            for token in (OWN, OTHERS, PEER):
                await daemon.submit_component(token)
                await daemon.wait_for_state(token, "waiting")
            await attacker.act(ComeAnew("one"))
            others = [await attacker.runner(token) for token in (OTHERS, PEER)]
            for token in (OTHERS, PEER):
                await daemon.wait_for_state(token, "claimed")
            before = [daemon.status(token) for token in (OTHERS, PEER)]
            for act in attack:
                await attacker.act(act)
            await attacker.heard_out()
            assert [daemon.status(token) for token in (OTHERS, PEER)] == before
            assert OTHERS not in daemon.output
            await go_on(daemon, others)
            attacker.close()
    finally:
        await daemon.stop_listening()
    site.remove()


async def go_on(daemon: FakeDaemon, others: list[FakeRunner]) -> None:
    """The other gang is let go, writes, is told of no stranger, and comes to its end."""
    await daemon.open_barrier(["true"], OTHERS, PEER)
    for runner, token in zip(others, (OTHERS, PEER), strict=True):
        assert (await runner.receive("open", "relay", "stop"))["t"] == "open", "somebody else was heard"
        runner.send(t="running")
        runner.send(t="out", offset=0, data="Z2VudWluZQo=")
        assert (await runner.receive("output"))["offset"] == 8
        await daemon.wait_until(lambda token=token: daemon.output.get(token) == b"genuine\n")  # type: ignore[misc]
    for runner, token in zip(others, (OTHERS, PEER), strict=True):
        runner.send(t="exit", code=3, error="", infrastructure=False, stopped=False)
        await daemon.wait_until(lambda token=token: daemon.status(token)["program_exit"] == 3)  # type: ignore[misc]


@pytest.mark.evidence("J11")
def test_one_component_cannot_touch_another(ground: Ground) -> None:
    assert runners.MAX_UNAUTHENTICATED > MOST_ACTS, "strangers would push each other out"
    play("runners against their agent", EXAMPLES, acts(), ground.of(attacked))
