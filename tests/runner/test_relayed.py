"""Runners over two sites behind firewalls, joined by relayed links, in network namespaces."""

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from koalapy.runner.processes import command_of, descendants
from koalapy.runner.relay_links import RELAY_CONTROL_PORTS, SPARE_PORTS
from koalapy.runner.relay_protocol import derive_node_key
from tests.grid.namespaces import ACCOUNT, LABORATORY, NODE_NAMES, Laboratory, laboratory
from tests.needs import LIBMPI_5, MPI, MPIRUN_5, OPEN_MPI_4, needs
from tests.relay.processes import Layout, RelayProcesses
from tests.runner.conftest import FakeAgent, FakeNode, make_plan

pytestmark = [pytest.mark.processes, pytest.mark.nightly, needs(LABORATORY)]

PYTHON = "/usr/bin/python3"
EXCHANGE = Path(__file__).parents[1] / "relay" / "exchange.py"
BIN_5 = str(Path(MPIRUN_5).parent)
VERSIONS = [
    pytest.param("/usr/bin", "libmpi.so.40", 4, marks=needs(OPEN_MPI_4), id="4"),
    pytest.param(BIN_5, str(LIBMPI_5), 5, marks=needs(MPI), id="5"),
]
BASES = (21_000, 22_000)
SLOTS = 1


def listen_in(lab: Laboratory, host: str, address: str, port: int = 0) -> socket.socket:
    """Return a listening socket of a host of the laboratory."""

    def enter() -> socket.socket:
        with open(f"/run/netns/{lab._name(host)}", encoding="ascii") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server((address, port))

    with ThreadPoolExecutor() as executor:  # only its thread changes its namespace
        return executor.submit(enter).result()


class SiteRelays(RelayProcesses):
    """Relays of heads and the hub, with runners as nodes."""

    secrets: tuple[bytes, ...] = ()

    def start_sites(self) -> None:
        self.start_hub()
        for cluster in self.head_ports:
            self.start_head(cluster)
        for cluster in self.head_ports:
            self.controls[f"head-{cluster}"].wait_for(lambda event: event["t"] == "hub" and event["connected"])

    def node_key(self, node: int) -> bytes:
        return derive_node_key(self.secrets[node], self.attempt)


class Sites:
    """A laboratory with an agent that both sites reach, and a runner on each node."""

    def __init__(self, lab: Laboratory, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.agent = FakeAgent(folder, python=PYTHON)
        width = SLOTS + RELAY_CONTROL_PORTS + SPARE_PORTS
        base = lab.layout()
        others = {i: [[b + i * width, b + (i + 1) * width - 1, "", ""] for b in BASES[1:]] for i in range(4)}
        layout = Layout(
            base.clusters,
            hub=base.hub,
            hub_listen=base.hub_listen,
            head_addresses=base.head_addresses,
            peer_addresses=base.peer_addresses,
            base=BASES[0],
            ports_per_node=width,
            extra_targets=others,
            fixed_ports=base.fixed_ports,
            command=lab.command,
        )
        self.relays = SiteRelays(folder, layout)
        self.nodes: list[FakeNode] = []

    async def listen(self) -> None:
        for number, cluster in enumerate(("north", "south")):
            listener = listen_in(self.lab, f"head-{cluster}", self.lab.head_address(cluster))
            server = await asyncio.start_server(self.agent._serve, sock=listener, limit=2**24)
            self.agent.server = server
            host, port = listener.getsockname()
            (self.folder / f"agent{number}.json").write_text(json.dumps({"host": host, "port": port}))

    async def start(self, bin_folder: str) -> None:
        for index in range(4):
            token, node = f"7.1.{index // 2}", index % 2
            spool = self.folder / token
            spool.mkdir(exist_ok=True)
            os.chown(spool, ACCOUNT, ACCOUNT)
            temporary = self.folder / f"tmp{index}"
            temporary.mkdir()
            os.chown(temporary, ACCOUNT, ACCOUNT)
            environment = {
                "KOALA_AGENT_FILE": str(self.folder / f"agent{index // 2}.json"),
                "SLURM_NODEID": str(node),
                "SLURMD_NODENAME": NODE_NAMES[index],
                "TMPDIR": str(temporary),
                "PATH": f"{bin_folder}:/usr/bin:/bin",
            }
            prefix = self.lab.command(f"node-{index}")
            address = self.lab.node_address(index)
            self.nodes.append(await self.agent.start(token, node, address, prefix, **environment))
        self.relays.secrets = tuple(node.secret for node in self.nodes)

    def plan(self, program: list[str], how: str = "any", **context: Any) -> dict[str, Any]:
        plan = make_plan(self.nodes, program, launcher="openmpi", **context)
        relay = {"attempt": self.relays.attempt, "pairs": [["north", "south", how]], "bases": list(BASES)}
        return {**plan, "relay": relay}

    def open(self, plan: dict[str, Any], **for_first: Any) -> None:
        for index, node in enumerate(self.nodes):
            cluster = ("north", "south")[index // 2]
            head = [self.lab.head_address(cluster), self.relays.head_ports[cluster]]
            node.send(**plan, relay_head=head, **({} if index else for_first))

    def relay_pid(self, index: int) -> int:
        """Return the process id of a node's relay."""
        process = self.nodes[index].process
        assert process is not None
        return next(pid for pid in descendants(process.pid) if any("relay_node.py" in w for w in command_of(pid)))

    async def close(self) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.returncode is None:
                node.process.kill()
                await node.ended()
        self.relays.close()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Return a folder that every account may read: those of pytest are private."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@asynccontextmanager
async def running_sites(folder: Path, bin_folder: str, **options: bool) -> AsyncIterator[Sites]:
    """Start the laboratory with all runners waiting for their plan."""
    with laboratory(folder, **options) as lab:
        sites = Sites(lab, folder)
        try:
            await sites.listen()
            await sites.start(bin_folder)
            yield sites
        finally:
            await sites.close()


@pytest.mark.parametrize("how", ["any", "relayed"])
@pytest.mark.parametrize("options", [{}, {"same_addresses": True}], ids=str)
@pytest.mark.parametrize(("bin_folder", "library", "series"), VERSIONS)
async def test_program_over_firewalled_sites_passes_messages(
    public_folder: Path, bin_folder: str, library: str, series: int, options: dict[str, bool], how: str
) -> None:
    async with running_sites(public_folder, bin_folder, **options) as sites:
        sites.relays.start_sites()
        sites.open(sites.plan([PYTHON, str(EXCHANGE), library], how))
        end = await sites.nodes[0].expect("exit")
        assert (end["code"], end["error"]) == (0, ""), sites.nodes[0].output
        assert sites.nodes[0].output == b"ring equal\nend\n"
        assert sites.nodes[0].said("relay_used")[-1]["pairs"] == [["north", "south"]]
        for node in sites.nodes:
            assert await node.ended() == 0
            assert node.said("exit")[-1]["error"] == ""
        for cluster in ("north", "south"):
            text = sites.relays.controls[f"head-{cluster}"].request("metrics")["text"]
            is_native = series == 5 and not options
            assert (f'from="{cluster}",to="{cluster}"' not in text) == is_native


@pytest.mark.parametrize(("bin_folder", "library", "series"), VERSIONS)
async def test_script_over_firewalled_sites_starts_programs_at_once_and_in_turn(
    public_folder: Path, bin_folder: str, library: str, series: int
) -> None:
    program = f"{PYTHON} {EXCHANGE} {library}"
    text = (
        f"mpirun {program} || exit 3; mpirun {program} & koala mpirun {program} || exit 5; wait %1 || exit 4; echo over"
    )
    async with running_sites(public_folder, bin_folder) as sites:
        sites.relays.start_sites()
        plan = sites.plan(["job.sh"])
        sites.open({**plan, "is_script": True}, script=f"#!/bin/bash\n{text}")
        end = await sites.nodes[0].expect("exit")
        assert (end["code"], end["error"]) == (0, ""), sites.nodes[0].output
        lines = sites.nodes[0].output.replace(b"\0", b"").decode().splitlines()
        assert sorted(lines) == ["end"] * 3 + ["over"] + ["ring equal"] * 3
        for node in sites.nodes[1:]:
            node.send(t="stop")
            assert await node.ended() == 0


async def start_endless(sites: Sites, library: str) -> None:
    """Start a program that does not end, and wait until it sends data between the sites."""
    sites.relays.start_sites()
    sites.open(sites.plan([PYTHON, str(EXCHANGE), library, "--endless"], "relayed"))
    control = sites.relays.controls["hub"]
    await sites.agent.until(lambda: control.metric("koala_relay_streams") >= 3, "streams between the sites")


@pytest.mark.parametrize("killed", ["node", "head-south", "hub"])
@pytest.mark.parametrize(("bin_folder", "library", "series"), VERSIONS)
async def test_lost_relay_is_a_failure_of_the_infrastructure(
    public_folder: Path, bin_folder: str, library: str, series: int, killed: str
) -> None:
    async with running_sites(public_folder, bin_folder) as sites:
        await start_endless(sites, library)
        if killed == "node":
            os.kill(sites.relay_pid(2), signal.SIGKILL)
            losers = sites.nodes[2:3]
        else:
            sites.relays.processes[killed].kill()
            losers = sites.nodes[2:] if killed == "head-south" else []
        if killed == "hub":
            # The agents hear it from their heads.
            control = sites.relays.controls["head-north"]
            reason = control.wait_for(lambda event: event["t"] == "lost")["why"]
            losers = sites.nodes
            for node in losers:
                node.send(t="relay_lost", why=reason)
        for node in losers:
            end = await node.expect("exit")
            assert end["infrastructure"]
            assert end["error"].startswith("a relayed link is lost: ")
            assert await node.ended() == 0


@needs(MPI)
async def test_taken_port_selects_the_next_layout(public_folder: Path) -> None:
    async with running_sites(public_folder, BIN_5) as sites:
        ports = sites.relays.layout.ports(0)
        with listen_in(sites.lab, "node-3", "127.0.0.1", ports[1]):
            sites.relays.start_sites()
            sites.open(sites.plan([PYTHON, str(EXCHANGE), str(LIBMPI_5)], "relayed"))
            end = await sites.nodes[0].expect("exit")
            assert (end["code"], end["error"]) == (0, ""), sites.nodes[0].output
        assert sites.nodes[0].output == b"ring equal\nend\n"


@needs(MPI)
async def test_relays_that_learn_of_the_job_later_are_awaited(public_folder: Path) -> None:
    async with running_sites(public_folder, BIN_5) as sites:
        sites.open(sites.plan([PYTHON, str(EXCHANGE), str(LIBMPI_5)], "relayed"))
        moves: list[str] = []
        sites.agent.meddle = lambda _, payload: (moves.append(payload["op"]), payload)[1]
        await sites.agent.until(lambda: "move" in moves, "the decision")
        await asyncio.to_thread(sites.relays.start_sites)
        end = await sites.nodes[0].expect("exit")
        assert (end["code"], end["error"]) == (0, ""), sites.nodes[0].output


@needs(MPI)
async def test_job_without_relayed_links_starts_no_relay(public_folder: Path) -> None:
    async with running_sites(public_folder, BIN_5, routed=True) as sites:
        kinds: list[str] = []
        sites.agent.meddle = lambda _, payload: (kinds.append(payload["op"]), payload)[1]
        sites.open(sites.plan([PYTHON, str(EXCHANGE), str(LIBMPI_5)]))
        end = await sites.nodes[0].expect("exit")
        assert (end["code"], end["error"]) == (0, ""), sites.nodes[0].output
        assert not sites.nodes[0].said("relay_used")
        assert "move" not in kinds


@pytest.mark.parametrize(("bin_folder", "library", "series"), VERSIONS)
async def test_exit_code_of_a_rank_counts_unless_a_relay_is_lost(
    public_folder: Path, bin_folder: str, library: str, series: int
) -> None:
    async with running_sites(public_folder, bin_folder) as sites:
        sites.relays.start_sites()
        sites.open(sites.plan(["sh", "-c", "exit 3"], "relayed"))
        end = await sites.nodes[0].expect("exit")
        assert (end["code"], end["error"], end["infrastructure"]) == (3, "", False)
        for node in sites.nodes:
            assert await node.ended() == 0
