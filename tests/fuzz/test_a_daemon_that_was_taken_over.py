"""Whatever a daemon says, in whatever order: its agent lives, and does nothing outside its own folders."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from koalapy.protocol import messages as wire
from tests.agent.conftest import FakeDaemon
from tests.fuzz.agent import OnlyDaemon, Site, settled
from tests.fuzz.campaign import Figures, Ground, play
from tests.fuzz.messages import Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

KINDS = get_args(get_args(wire.FromDaemon)[0])
EXAMPLES = 25
LEAST_ACTS, MOST_ACTS = 10, 25
MAX_SHOWN = 400
TOKENS = ["7.1.0.aa", "7.1.1.aa", "8.1.0.bb", "9.1.0"]
# All of them lead to what the test has made: an agent that followed one would remove what is there.
WAYS_OUT = [
    "../home",
    "..",
    "{home}/thesis",
    "{home}",
    "../../home/thesis",
    "7.1.0.aa/../../../home",
    "out",
    "replicas/out/thesis",
]
PATHS = [
    "mesh",
    "{replicas}/mesh",
    "{replicas}/folder",
    "{replicas}/out/thesis",
    "{replicas}/../home/thesis",
    "{home}/thesis",
    "/proc/self/environ",
    "{own}/agent.json",
    "../home/thesis",
    "",
]


@dataclass(frozen=True)
class Say:
    """A frame on the present connection; words in braces stand for folders."""

    frame: str

    def __repr__(self) -> str:
        return f"Say({self.frame[:MAX_SHOWN]!r}, {len(self.frame)})"


@dataclass(frozen=True)
class HangUp:
    """The connection ends."""


VOCABULARY = Vocabulary(
    {
        "token": [*TOKENS * 4, *WAYS_OUT],
        "sender": TOKENS,
        "stage": [*TOKENS, *WAYS_OUT, None],
        "head": TOKENS,
        "cluster": ["north", "south", ""],
        "source": ["north", "north", "south"],
        "instance": ["test", "test", "test", "other", "../home", "{home}", ".."],
        "epoch": [1, 1, 1, 2, 0],
        "id": list(range(1, 30)),
        "size": [1, 2, 0, 4],
        "path": PATHS,
        "part": [None, "part", "../../home/thesis", ".."],
        "target": ["mesh", "input", "../out", "{home}/thesis", ".."],
        "checksum": ["", "0" * 64],
        "name": ["mesh", "../../home/x"],
        "collect": ["**", "../**", "{home}/**", "/**", "*"],
        "what": ["stat", "export", "unexport", "background", "background-stop", "check"],
        "payload": [
            {},
            *({"path": path} for path in PATHS),
            *({"path": path, "size": 4, "part": part} for path in PATHS for part in (None, "../../home/thesis")),
            {"nodes": 1, "seconds": 1.0},
            {"module": "../x"},
        ],
        "protocol": [wire.PROTOCOL],
        "lease": [60.0, 0.0],
        "output_limit": [0, 1000],
    }
)


def acts() -> st.SearchStrategy[list[Any]]:
    said = frames(VOCABULARY.message(KINDS)).map(Say)
    return st.lists(weighted((12, said), (1, st.just(HangUp()))), min_size=LEAST_ACTS, max_size=MOST_ACTS)


class TakenOver(OnlyDaemon):
    """Says what the test says, once it has welcomed its agent."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = 0
        self._marks = count(10**6)

    async def _serve(self, socket: ServerConnection) -> None:
        self.connections += 1
        try:
            await super()._serve(socket)
        except ConnectionClosed:
            return

    async def _take(self, cluster: str, message: dict[str, Any]) -> None:
        if message["type"] != "output":
            await super()._take(cluster, message)

    async def says(self, text: str) -> None:
        """Have an agent take in a frame, whatever it does about it."""
        before, mark = self.connections, next(self._marks)
        with suppress(ConnectionClosed):
            await self._sockets["north"].send(text.encode(errors="replace").decode())
        if not await self._answers(mark, before):
            # On the new connection it is welcomed, and told nothing yet.
            await self._answers_again()

    async def _answers(self, mark: int, before: int) -> bool:
        """Whether the agent says so, on a connection; False when there was another in place of it."""
        with suppress(ConnectionClosed):
            await self.send_messages("north", {"type": "probe", "sequence": mark, "look": False})
        await settled(lambda: self.connections > before or self._confirmed(mark))
        return self._confirmed(mark)

    async def _answers_again(self) -> None:
        while not await self._answers(next(self._marks), self.connections):
            # It may have been told of a later daemon of the same name, and obeys no other any more.
            self.instance = f"again-{self.connections}"

    def _confirmed(self, mark: int) -> bool:
        return any(m["type"] == "confirmed" and m["sequence"] == mark for m in reversed(self.messages))

    async def hangs_up(self) -> None:
        before = self.connections
        await self._sockets["north"].close()
        await settled(lambda: self.connections > before)
        await self._answers_again()


async def attacked(directory: Path, attack: list[Any], figures: Figures) -> None:
    site, daemon = Site(directory), TakenOver()
    before = site.outside()
    await daemon.listen()
    try:
        async with site.serving(daemon):
            await settled(lambda: daemon.inventories)
            places = {"home": site.home, "replicas": site.replicas, "own": site.own}
            for act in attack:
                if isinstance(act, HangUp):
                    await daemon.hangs_up()
                    continue
                frame = act.frame
                for name, path in places.items():
                    frame = frame.replace(f"{{{name}}}", str(path))
                figures.counts["frames"] += 1
                figures.counts["characters"] += len(frame)
                await daemon.says(frame)
            check_answers(daemon, site)
            await go_on(site, daemon)
    finally:
        await daemon.stop_listening()
    assert site.outside() == before
    site.check_submissions()
    site.remove()


def check_answers(daemon: FakeDaemon, site: Site) -> None:
    """Nothing is told of what is no replica."""
    for answer in daemon.received("answer"):
        if path := answer["payload"].get("path"):
            assert str(path).startswith(f"{site.replicas}/"), answer
            assert "/out" not in str(path), answer


async def go_on(site: Site, daemon: FakeDaemon) -> None:
    """Another daemon takes over, and what it has to be done is done."""
    daemon.instance, daemon.epoch, daemon.life, daemon._ids = "honest", 1, "", 10**6
    known, before = len(daemon.inventories), daemon._sockets["north"]
    await before.close()
    await daemon.wait_until(lambda: daemon._sockets["north"] is not before and len(daemon.inventories) > known)
    token = "1.1.0.cc"
    await daemon.submit_component(token)
    await daemon.wait_for_state(token, "waiting")
    job = next(job.id for job in site.lrm.jobs.values() if job.name.endswith(f"honest-{token}"))
    site.lrm.end_job(job)
    site.lrm.changed.set()
    await daemon.wait_for_state(token, "ended")
    assert await daemon.wait_for_ack(await daemon.send_command("forget", token)) == ""


@pytest.mark.evidence("D4")
def test_a_daemon_leads_its_agent_nowhere(ground: Ground) -> None:
    play("a daemon against its agent", EXAMPLES, acts(), ground.of(attacked))
