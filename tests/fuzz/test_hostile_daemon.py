"""An agent of a hostile daemon keeps running and changes nothing outside its folders."""

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
from tests.fuzz.agent import SingleClusterDaemon, Site, wait_until
from tests.fuzz.campaign import AttackRunner, Figures, run_campaign
from tests.fuzz.messages import Send, Vocabulary, frames, weighted

pytestmark = pytest.mark.processes

KINDS = get_args(get_args(wire.FromDaemon)[0])
EXAMPLES = 25
MIN_ACTS, MAX_ACTS = 10, 25
TOKENS = ["7.1.0.aa", "7.1.1.aa", "8.1.0.bb", "9.1.0"]
# All lead to files of the test: an agent that followed one would change them.
OUTSIDE_PATHS = [
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
class Disconnect:
    """Close the connection."""


VOCABULARY = Vocabulary(
    {
        "token": [*TOKENS * 4, *OUTSIDE_PATHS],
        "sender": TOKENS,
        "stage": [*TOKENS, *OUTSIDE_PATHS, None],
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


def draw_acts() -> st.SearchStrategy[list[Any]]:
    statements = frames(VOCABULARY.draw_message(KINDS)).map(Send)
    return st.lists(weighted((12, statements), (1, st.just(Disconnect()))), min_size=MIN_ACTS, max_size=MAX_ACTS)


class HostileDaemon(SingleClusterDaemon):
    """A daemon that welcomes its agent and then sends the frames of the test."""

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
        """Send a frame, and wait until the agent has processed it or connected again."""
        connection_count, mark = self.connections, next(self._marks)
        with suppress(ConnectionClosed):
            await self._sockets["north"].send(text.encode(errors="replace").decode())
        if not await self._answers(mark, connection_count):
            # The agent has a new connection, on which nothing has been sent yet.
            await self._answers_again()

    async def _answers(self, mark: int, connection_count: int) -> bool:
        """Probe the agent. Return False if it has connected again instead of answering."""
        with suppress(ConnectionClosed):
            await self.send_messages("north", {"type": "probe", "sequence": mark, "look": False})
        await wait_until(lambda: self.connections > connection_count or self._confirmed(mark))
        return self._confirmed(mark)

    async def _answers_again(self) -> None:
        while not await self._answers(next(self._marks), self.connections):
            # The agent may know of a later run of this daemon instance and reject this one.
            self.instance = f"again-{self.connections}"

    def _confirmed(self, mark: int) -> bool:
        return any(m["type"] == "confirmed" and m["sequence"] == mark for m in reversed(self.messages))

    async def hangs_up(self) -> None:
        connection_count = self.connections
        await self._sockets["north"].close()
        await wait_until(lambda: self.connections > connection_count)
        await self._answers_again()


async def attack_agent(directory: Path, attack: list[Any], figures: Figures) -> None:
    site, daemon = Site(directory), HostileDaemon()
    untouched = site.read_outside_files()
    await daemon.listen()
    try:
        async with site.running_agent(daemon):
            await wait_until(lambda: daemon.inventories)
            places = {"home": site.home, "replicas": site.replicas, "own": site.own}
            for act in attack:
                if isinstance(act, Disconnect):
                    await daemon.hangs_up()
                    continue
                frame = act.frame
                for name, path in places.items():
                    frame = frame.replace(f"{{{name}}}", str(path))
                figures.counts["frames"] += 1
                figures.counts["characters"] += len(frame)
                await daemon.says(frame)
            check_answers(daemon, site)
            await check_agent_works(site, daemon)
    finally:
        await daemon.stop_listening()
    assert site.read_outside_files() == untouched
    site.check_submissions()
    site.remove()


def check_answers(daemon: FakeDaemon, site: Site) -> None:
    """Check that answers only describe replicas."""
    for answer in daemon.received("answer"):
        if path := answer["payload"].get("path"):
            assert str(path).startswith(f"{site.replicas}/"), answer
            assert "/out" not in str(path), answer


async def check_agent_works(site: Site, daemon: HostileDaemon) -> None:
    """Replace the daemon by an honest one, and check that it can run a component.

    As an honest one does, it sends its command again on each new connection: the agent may be about to connect again.
    """
    daemon.instance, daemon.epoch, daemon.life, daemon._ids = "honest", 1, "", 10**6
    inventory_count, old_socket = len(daemon.inventories), daemon._sockets["north"]
    await old_socket.close()
    await daemon.wait_until(
        lambda: daemon._sockets["north"] is not old_socket and len(daemon.inventories) > inventory_count
    )
    token = "1.1.0.cc"
    while not daemon.status(token):
        connections = daemon.connections
        with suppress(ConnectionClosed):
            await daemon.submit_component(token)
        await daemon.wait_until(lambda before=connections: daemon.status(token) or daemon.connections > before)
    await daemon.wait_for_state(token, "waiting")
    job = next(job.id for job in site.lrm.jobs.values() if job.name.endswith(f"honest-{token}"))
    site.lrm.end_job(job)
    site.lrm.changed.set()
    await daemon.wait_for_state(token, "ended")
    assert await daemon.wait_for_ack(await daemon.send_command("forget", token)) == ""


@pytest.mark.evidence("D4")
def test_agent_of_hostile_daemon_stays_in_its_folders(attack_runner: AttackRunner) -> None:
    run_campaign("hostile daemon", EXAMPLES, draw_acts(), attack_runner.bind(attack_agent))
