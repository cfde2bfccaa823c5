"""A daemon with a hostile agent keeps running, and data of other clusters and jobs stays unchanged."""

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
from koalapy.protocol.frames import encode_frame
from tests.daemon.test_hub import Agent
from tests.fuzz.attacked_grid import (
    CLUSTERS,
    COUPLED,
    FILES,
    HOSTILE,
    HOSTILE_JOBS,
    RUNNING,
    AttackedGrid,
    PreparedGrid,
    job_on,
    prepare_grid,
)
from tests.fuzz.campaign import Figures, run_campaign
from tests.fuzz.clusters import expected_output, wait_until
from tests.fuzz.daemon import MAX_WAIT_S
from tests.fuzz.messages import Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

KINDS = get_args(get_args(wire.FromAgent)[0])
EXAMPLES = 6
MIN_ACTS, MAX_ACTS = 15, 40
"""Number of acts of an attack."""
MAX_REPR_LENGTH = 400
"""Characters of a frame that are printed."""
MAX_TRANSACTIONS = 5
"""Transactions to wait for the welcome of a connection."""
COMMAND_IDS = [epoch * 10**9 + number for epoch in (1, 2) for number in range(1, 40)]
"""Ids of commands of the first two daemon runs."""


@dataclass(frozen=True)
class Send:
    """Send a frame on the current connection."""

    frame: str

    def __repr__(self) -> str:
        return f"Say({self.frame[:MAX_REPR_LENGTH]!r}, {len(self.frame)})"


@dataclass(frozen=True)
class Reconnect:
    """Connect again with any hello, with or without closing the previous connection."""

    hello: str
    hangs_up_first: bool


@dataclass(frozen=True)
class AdvanceClock:
    """Advance the clock."""

    seconds: float


def make_vocabulary(tokens: list[str]) -> Vocabulary:
    invalid_tokens = [tokens[0].rpartition(".")[0], "1.2.0.fa", "7.1.0.77", "9" * 18 + ".1.0.fa", "nobody"]
    hostile_tokens = [token for token in tokens if parse_token(token).job in HOSTILE_JOBS]
    later_tokens = [f"{job}.2.{index}.f{nonce}" for job in HOSTILE_JOBS for index in (0, 1) for nonce in "abc"]
    all_tokens = [*tokens, *invalid_tokens, *hostile_tokens * 5, *later_tokens]
    return Vocabulary(
        {
            "token": all_tokens,
            "sender": all_tokens,
            "holding": all_tokens,
            "cluster": [*CLUSTERS, "nowhere", ""],
            "source": [*CLUSTERS, "nowhere"],
            "file": [*FILES, "nothing"],
            "id": COMMAND_IDS,
            "ident": ["1", "2"],
            "what": ["stat", "export", "unexport", "background", "background-stop", "check"],
            "sequence": list(range(1, 60)),
            "instance": ["test", "other"],
            "protocol": [wire.PROTOCOL],
            "size": [0, 1, 8, 200_000_000],
        }
    )


def draw_attacks(tokens: list[str]) -> st.SearchStrategy[list[Any]]:
    values = make_vocabulary(tokens)
    statements = frames(values.draw_message(KINDS)).map(Send)
    reconnections = st.builds(Reconnect, frames(values.draw_message([wire.Hello])), st.booleans())
    pauses = st.builds(AdvanceClock, st.sampled_from([0.001, 1.0, 31.0, 3600.0]))
    no_act = st.just(AdvanceClock(0.0))
    act = weighted((1, no_act), (8, statements), (1, reconnections), (1, pauses))
    return st.lists(act, min_size=MIN_ACTS, max_size=MAX_ACTS)


class Attacker(Agent):
    """An agent that answers no request."""


class Attack:
    """The hostile cluster of a grid."""

    def __init__(self, grid: AttackedGrid, prepared: PreparedGrid, figures: Figures) -> None:
        self._grid, self._prepared, self._figures = grid, prepared, figures
        self._marks = count(1)
        self._served: list[asyncio.Task[None]] = []
        self._agents: list[Attacker] = []

    async def play(self, acts: list[Any]) -> None:
        await self._begin()
        for act in acts:
            await self._act(act)
            self._grid.check_consistency()
        await self.end()

    async def _begin(self) -> None:
        """Connect as the agent that was honest until now."""
        honest_agent = self._prepared.copy_agent(HOSTILE)
        self._connect(encode_frame(wire.from_agent, [honest_agent.make_hello()]))
        inventory = Inventory(tuple(honest_agent.components.values()), stages=tuple(honest_agent.stages.values()))
        await self._say(encode_frame(wire.from_agent, [inventory, honest_agent.make_report()]))

    async def _act(self, act: Any) -> None:
        match act:
            case Send():
                if self._agents[-1].closed:
                    self._figures.counts["closed connections"] += 1
                    await self._begin()
                for earlier in self._agents[:-1]:
                    await earlier.close("")  # the last connection may wait for its end
                await self._say(act.frame)
            case Reconnect():
                if act.hangs_up_first:
                    await self.end()
                self._connect(act.hello)
                await self._taken_in()
            case AdvanceClock():
                self._grid.daemon.clock.now += act.seconds
                await self._grid.daemon.wait_until_settled()

    def _connect(self, hello: str) -> None:
        self._figures.counts["connections"] += 1
        self._agents.append(agent := Attacker())
        agent.says_frame(hello)
        self._served.append(asyncio.create_task(self._grid.daemon.hub.serve_connection(HOSTILE, agent)))

    async def _say(self, frame: str) -> None:
        self._figures.counts["frames"] += 1
        self._figures.counts["characters"] += len(frame)
        self._agents[-1].says_frame(frame)
        await self._taken_in()

    async def _taken_in(self) -> None:
        """Wait until the daemon has processed the last connection's frames, closed it, or not welcomed it."""
        agent, serving = self._agents[-1], self._served[-1]
        for _ in range(MAX_TRANSACTIONS):
            if serving.done() or _is_welcomed(agent):
                break
            await self._grid.daemon.wait_until_settled()
        if _is_welcomed(agent):
            mark = f"mark {next(self._marks)}"
            agent.say_to_daemon(wire.Ask(ident=mark, what="nothing", payload={}))
            await wait_until(self._grid.daemon, lambda: serving.done() or _has_received(agent, mark))
        if serving.done():
            serving.result()
        await self._grid.daemon.wait_until_settled()

    async def end(self) -> None:
        """Hang up on all connections."""
        for agent in self._agents:
            await agent.close("")
        async with asyncio.timeout(MAX_WAIT_S):
            await asyncio.gather(*self._served)
        self._served.clear()
        await self._grid.daemon.wait_until_settled()


def _has_received(agent: Agent, mark: str) -> bool:
    return any(message.get("ident") == mark for message in reversed(agent.heard))


def _is_welcomed(agent: Agent) -> bool:
    return any(message["type"] == "welcome" for message in agent.heard)


async def attack_grid(prepared: PreparedGrid, directory: Path, acts: list[Any], figures: Figures) -> None:
    async with prepared.resumed_grid(directory) as grid:
        unrelated_before = await grid.read_unrelated_data()
        await Attack(grid, prepared, figures).play(acts)
        await grid.wait_until_quiet()
        unrelated_after = await grid.read_unrelated_data()
        for name, value in unrelated_before.items():
            assert unrelated_after[name] == value, f"changed: {name}"
        assert not grid.north.closed
        assert not grid.east.closed
        await check_jobs_finish(grid)


async def check_jobs_finish(grid: AttackedGrid) -> None:
    """Check that running jobs and a new one succeed."""
    for job in (RUNNING, COUPLED):
        for agent in (grid.north, grid.east):
            agent.finish_job(job)
        await grid.wait_for_state(job, "succeeded")
    for token in (token for token in grid.north.components if token.startswith(f"{RUNNING}.")):
        logs = await grid.user.get(f"/api/v1/jobs/{RUNNING}/logs")
        assert expected_output(token) in logs.content
    await grid.wait_for_state(await grid.submit_job(job_on("north", "east")), "succeeded")
    grid.check_consistency()


class GridAttackRunner:
    """Runs attacks in one event loop, each on a copy of a prepared grid."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)
        self._runner = asyncio.Runner()
        self.prepared = self._runner.run(prepare_grid(directory / "prepared"))

    def play(self, acts: list[Any], figures: Figures) -> None:
        directory = self._directory / f"{next(self._numbers)}"
        self._runner.run(attack_grid(self.prepared, directory, acts, figures))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def grid_attack_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridAttackRunner]:
    runner = GridAttackRunner(tmp_path_factory.mktemp("attacked"))
    yield runner
    with suppress(RuntimeError):
        runner.close()


@pytest.mark.evidence("G9")
def test_hostile_agent_affects_only_its_own_cluster(grid_attack_runner: GridAttackRunner) -> None:
    run_campaign("hostile agent", EXAMPLES, draw_attacks(grid_attack_runner.prepared.tokens), grid_attack_runner.play)
