"""A daemon with a hostile agent keeps running, and data of other clusters and jobs stays unchanged."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import structlog
from hypothesis import strategies as st

from koalapy.daemon.agents import budgets
from koalapy.daemon.agents.budgets import Use, count_messages
from koalapy.daemon.agents.session import Session
from koalapy.model.job import parse_token
from koalapy.model.profile import ClusterProfile
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
from tests.fuzz.messages import Send, Vocabulary, encode_json, frames, weighted

pytestmark = pytest.mark.processes

KINDS = get_args(get_args(wire.FromAgent)[0])
EXAMPLES = 6
MIN_ACTS, MAX_ACTS = 15, 40
"""Number of acts of an attack."""
MAX_TRANSACTIONS = 5
"""Transactions to wait for the welcome of a connection."""
COMMAND_IDS = [epoch * 10**9 + number for epoch in (1, 2) for number in range(1, 40)]
"""Ids of commands of the first two daemon runs."""


@dataclass(frozen=True)
class Reconnect:
    """Connect again with any hello, with or without closing the previous connection."""

    hello: str
    hangs_up_first: bool


@dataclass(frozen=True)
class AdvanceClock:
    """Advance the clock."""

    seconds: float


@dataclass(frozen=True)
class Flood:
    """Send a message many times in one frame, while a user asks for the jobs."""

    message: dict[str, Any]

    @property
    def frame(self) -> str:
        text = encode_json(self.message)
        return f"[{','.join([text] * max(1, min(FLOOD_MESSAGES, FLOOD_LENGTH // len(text))))}]"


FLOOD_MESSAGES, FLOOD_LENGTH = 1200, 1_000_000
"""Most messages and characters of a flood, which exceed the messages that a cluster may send at once."""
FUZZED_ALLOWANCES = budgets.ALLOWANCES | {
    Use.MESSAGES: (1000.0, 400.0),
    Use.PROCESSOR: (10.0, 10.0),
    Use.LOG_LINES: (2.0, 20.0),
}
"""Budgets that a short attack exceeds."""
WAL_SIZE = 16 * 1024 * 1024
"""Bytes that the database may add to its files without relation to the attack."""
STORED_SHARE = 4
"""Most bytes that are stored for each byte of a hostile message."""


class Oracle:
    """Checks of what the hostile site takes: messages that others wait for, log lines, disk, and nodes of others.

    Budgets count in virtual time, which passes only while the daemon lets the site wait.
    """

    def __init__(self, grid: AttackedGrid) -> None:
        self._grid, self._messages = grid, grid.daemon.hub._messages
        self._handled = self._largest_batch = self._log_lines = self.sent = self.connections = 0
        self._disk_before = measure_disk(grid.directory)
        self._now = 0.0
        self._may_pass = asyncio.Event()
        self._may_pass.set()

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe the daemon, with small budgets, during the block."""
        handle_messages, hub_budgets = self._messages.handle_messages, self._grid.daemon.hub._budgets

        async def observe_messages(session: Session, messages: Any) -> None:
            if session.cluster == HOSTILE:
                self._handled += (weight := count_messages(messages))
                self._largest_batch = max(self._largest_batch, weight)
            await handle_messages(session, messages)

        structlog.configure(processors=[self._observe_log])
        with (
            patch.dict(budgets.ALLOWANCES, FUZZED_ALLOWANCES),
            patch.object(budgets, "asyncio", SimpleNamespace(sleep=self._pass_time)),
            patch.object(hub_budgets, "_clock", lambda: self._now),
            patch.object(self._messages, "handle_messages", observe_messages),
        ):
            yield

    async def _pass_time(self, seconds: float) -> None:
        await self._may_pass.wait()
        self._now += seconds
        await asyncio.sleep(0)

    def _observe_log(self, _logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        self._log_lines += event.get("cluster") == HOSTILE
        raise structlog.DropEvent

    async def check_wait_of_user(self) -> None:
        """Check that a user's requests wait for no more messages of the hostile site than it may send at once."""
        self._may_pass.clear()
        handled = self._handled
        assert (await self._grid.user.get("/api/v1/jobs")).status_code == 200
        await self._grid.daemon.wait_until_settled()
        assert self._handled - handled <= FUZZED_ALLOWANCES[Use.MESSAGES][1] + self._largest_batch
        self._may_pass.set()

    def check(self) -> None:
        """Check the whole attack."""
        overshoot = self._largest_batch * self.connections
        assert self._handled <= self._allowance(Use.MESSAGES) + overshoot, "messages"
        assert self._log_lines <= self._allowance(Use.LOG_LINES) + MAX_CHANGES_LOGGED, "log lines"
        grown = measure_disk(self._grid.directory) - self._disk_before
        assert grown <= STORED_SHARE * self.sent + WAL_SIZE, f"{grown} bytes are stored of {self.sent}"
        waits = self._grid.daemon.queries.lrm_waits
        latest = self._grid.daemon.clock.now() + ClusterProfile().node_start_limit
        for token in list(waits._waits):
            assert (waits.up_by(token) or 0.0) <= latest, f"{token} holds nodes of others"

    def _allowance(self, use: Use) -> float:
        rate, at_once = FUZZED_ALLOWANCES[use]
        return at_once + rate * self._now


MAX_CHANGES_LOGGED = 200
"""Log lines about changes of the hostile site's own jobs and cluster."""


def measure_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


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
    floods = st.one_of([values.draw_valid(kind) for kind in KINDS if kind is not Inventory]).map(Flood)
    no_act = st.just(AdvanceClock(0.0))
    act = weighted((1, no_act), (8, statements), (1, reconnections), (1, pauses), (1, floods))
    return st.lists(act, min_size=MIN_ACTS, max_size=MAX_ACTS)


class Attacker(Agent):
    """An agent that answers no request."""


class Attack:
    """The hostile cluster of a grid."""

    def __init__(self, grid: AttackedGrid, prepared: PreparedGrid, figures: Figures) -> None:
        self._grid, self._prepared, self._figures = grid, prepared, figures
        self.oracle = Oracle(grid)
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
            case Send() | Flood():
                if self._agents[-1].closed:
                    self._figures.counts["closed connections"] += 1
                    await self._begin()
                for earlier in self._agents[:-1]:
                    await earlier.close("")  # the last connection may wait for its end
                await self._say(act.frame, is_flood=isinstance(act, Flood))
            case Reconnect():
                if act.hangs_up_first:
                    await self.end()
                self._connect(act.hello)
                await self._taken_in()
            case AdvanceClock():
                self._grid.daemon.clock.time += act.seconds
                await self._grid.daemon.wait_until_settled()

    def _connect(self, hello: str) -> None:
        self._figures.counts["connections"] += 1
        self.oracle.connections += 1
        self.oracle.sent += len(hello)
        self._agents.append(agent := Attacker())
        agent.says_frame(hello)
        self._served.append(asyncio.create_task(self._grid.daemon.hub.serve_connection(HOSTILE, agent)))

    async def _say(self, frame: str, *, is_flood: bool = False) -> None:
        self._figures.counts["frames"] += 1
        self._figures.counts["characters"] += len(frame)
        self.oracle.sent += len(frame)
        self._agents[-1].says_frame(frame)
        if is_flood:
            self._figures.counts["floods"] += 1
            await self.oracle.check_wait_of_user()
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
        attack = Attack(grid, prepared, figures)
        with attack.oracle.observe():
            await attack.play(acts)
        await grid.wait_until_quiet()
        attack.oracle.check()
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
