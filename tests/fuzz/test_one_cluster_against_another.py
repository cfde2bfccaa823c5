"""Whatever one cluster's agent says, in whatever order: the daemon lives, and nobody else's is touched."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import strategies as st

from koalapy.model.job import parse_token
from koalapy.model.reports import Inventory
from koalapy.protocol import messages as wire
from tests.daemon.test_hub import Agent
from tests.fuzz.attacked import CLUSTERS, COUPLED, FILES, HOSTILE, RUNS, THEIRS, Grid, Prepared, on, prepare
from tests.fuzz.campaign import Figures, play
from tests.fuzz.clusters import when, written
from tests.fuzz.daemon import DEADLINE
from tests.fuzz.messages import Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

KINDS = get_args(get_args(wire.FromAgent)[0])
EXAMPLES = 6
LEAST_ACTS, MOST_ACTS = 15, 40
"""Of an attack; what is found is told with as little in it as can be."""
MAX_SHOWN = 400
"""Characters of a frame that somebody reads who wants to know what was found."""
TURNS = 5
"""Transactions after which a connection that is not let in waits for somebody."""
COMMANDS = [epoch * 10**9 + number for epoch in (1, 2) for number in range(1, 40)]
"""Ids of commands, as they are given."""


@dataclass(frozen=True)
class Say:
    """A frame, on the present connection."""

    frame: str

    def __repr__(self) -> str:
        return f"Say({self.frame[:MAX_SHOWN]!r}, {len(self.frame)})"


@dataclass(frozen=True)
class ConnectAnew:
    """The agent connects again, in whatever words, the one before being there or not."""

    hello: str
    hangs_up_first: bool


@dataclass(frozen=True)
class Pass:
    """Time goes by."""

    seconds: float


def vocabulary(tokens: list[str]) -> Vocabulary:
    wrong = [tokens[0].rpartition(".")[0], "1.2.0.fa", "7.1.0.77", "9" * 18 + ".1.0.fa", "nobody"]
    own = [token for token in tokens if parse_token(token).job in THEIRS]
    later = [f"{job}.2.{index}.f{nonce}" for job in THEIRS for index in (0, 1) for nonce in "abc"]
    known = [*tokens, *wrong, *own * 5, *later]
    return Vocabulary(
        {
            "token": known,
            "sender": known,
            "holding": known,
            "cluster": [*CLUSTERS, "nowhere", ""],
            "source": [*CLUSTERS, "nowhere"],
            "file": [*FILES, "nothing"],
            "id": COMMANDS,
            "ident": ["1", "2"],
            "what": ["stat", "export", "unexport", "background", "background-stop", "check"],
            "sequence": list(range(1, 60)),
            "instance": ["test", "other"],
            "protocol": [wire.PROTOCOL],
            "size": [0, 1, 8, 200_000_000],
        }
    )


def attacks(tokens: list[str]) -> st.SearchStrategy[list[Any]]:
    words = vocabulary(tokens)
    said = frames(words.message(KINDS)).map(Say)
    anew = st.builds(ConnectAnew, frames(words.message([wire.Hello])), st.booleans())
    passing = st.builds(Pass, st.sampled_from([0.001, 1.0, 31.0, 3600.0]))
    nothing = st.just(Pass(0.0))
    act = weighted((1, nothing), (8, said), (1, anew), (1, passing))
    return st.lists(act, min_size=LEAST_ACTS, max_size=MOST_ACTS)


class Attacker(Agent):
    """An agent that answers nothing that it is asked."""


class Attack:
    """The hostile cluster's side of a grid."""

    def __init__(self, grid: Grid, prepared: Prepared, figures: Figures) -> None:
        self._grid, self._prepared, self._figures = grid, prepared, figures
        self._marks = count(1)
        self._served: list[asyncio.Task[None]] = []
        self._agents: list[Attacker] = []

    async def play(self, acts: list[Any]) -> None:
        await self._begin()
        for act in acts:
            await self._act(act)
            self._grid.check()
        await self.end()

    async def _begin(self) -> None:
        """As an agent that was honest until now."""
        known = self._prepared.agent(HOSTILE)
        self._connect(wire.encode_frame(wire.from_agent, [known.hello()]))
        inventory = Inventory(tuple(known.components.values()), stages=tuple(known.stages.values()))
        await self._say(wire.encode_frame(wire.from_agent, [inventory, known.report()]))

    async def _act(self, act: Any) -> None:
        match act:
            case Say():
                if self._agents[-1].closed:
                    self._figures.counts["hung up on"] += 1
                    await self._begin()
                for earlier in self._agents[:-1]:
                    await earlier.close("")  # for which the last one may have waited
                await self._say(act.frame)
            case ConnectAnew():
                if act.hangs_up_first:
                    await self.end()
                self._connect(act.hello)
                await self._taken_in()
            case Pass():
                self._grid.daemon.clock.now += act.seconds
                await self._grid.daemon.settled()

    def _connect(self, hello: str) -> None:
        self._figures.counts["connections"] += 1
        self._agents.append(agent := Attacker())
        agent.says_frame(hello)
        self._served.append(asyncio.create_task(self._grid.daemon.hub.serve(HOSTILE, agent)))

    async def _say(self, frame: str) -> None:
        self._figures.counts["frames"] += 1
        self._figures.counts["characters"] += len(frame)
        self._agents[-1].says_frame(frame)
        await self._taken_in()

    async def _taken_in(self) -> None:
        """Return when all that was said on the last connection is taken in, or that has ended, or was not let in."""
        agent, serving = self._agents[-1], self._served[-1]
        for _ in range(TURNS):
            if serving.done() or _is_let_in(agent):
                break
            await self._grid.daemon.settled()
        if _is_let_in(agent):
            mark = f"mark {next(self._marks)}"
            agent.says(wire.Ask(ident=mark, what="nothing", payload={}))
            await when(self._grid.daemon, lambda: serving.done() or _has_heard(agent, mark))
        if serving.done():
            serving.result()
        await self._grid.daemon.settled()

    async def end(self) -> None:
        """Hang up on all connections."""
        for agent in self._agents:
            await agent.close("")
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self._served)
        self._served.clear()
        await self._grid.daemon.settled()


def _has_heard(agent: Agent, mark: str) -> bool:
    return any(message.get("ident") == mark for message in reversed(agent.heard))


def _is_let_in(agent: Agent) -> bool:
    return any(message["type"] == "welcome" for message in agent.heard)


async def attacked(prepared: Prepared, directory: Path, acts: list[Any], figures: Figures) -> None:
    async with prepared.taken_up(directory) as grid:
        before = await grid.foreign()
        await Attack(grid, prepared, figures).play(acts)
        await grid.quiet()
        after = await grid.foreign()
        for what, found in before.items():
            assert after[what] == found, f"changed: {what}"
        assert not grid.north.closed
        assert not grid.east.closed
        await go_on(grid)


async def go_on(grid: Grid) -> None:
    """What was under way comes to its end, and so does what comes now."""
    for job in (RUNS, COUPLED):
        for agent in (grid.north, grid.east):
            agent.finish(job)
        await grid.reaches(job, "succeeded")
    for token in (token for token in grid.north.components if token.startswith(f"{RUNS}.")):
        logs = await grid.user.get(f"/api/v1/jobs/{RUNS}/logs")
        assert written(token) in logs.content
    await grid.reaches(await grid.submit(on("north", "east")), "succeeded")
    grid.check()


class Ground:
    """Where it is all played, in one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)
        self._runner = asyncio.Runner()
        self.prepared = self._runner.run(prepare(directory / "prepared"))

    def play(self, acts: list[Any], figures: Figures) -> None:
        directory = self._directory / f"{next(self._numbers)}"
        self._runner.run(attacked(self.prepared, directory, acts, figures))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    made = Ground(tmp_path_factory.mktemp("attacked"))
    yield made
    with suppress(RuntimeError):
        made.close()


@pytest.mark.evidence("G9")
def test_one_cluster_cannot_touch_anothers(ground: Ground) -> None:
    play("agents against the daemon", EXAMPLES, attacks(ground.prepared.tokens), ground.play)
