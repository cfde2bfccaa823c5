"""Describe a job's nodes and programs for one node, and define the roles of a node."""

from __future__ import annotations

import os
import re

from koalapy.runner.exec_guard import LAUNCHER
from koalapy.runner.networks import is_ipv4
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any, Optional, Protocol

    from koalapy.runner.connections import Loop
    from koalapy.runner.exec_guard import ExecGuard
    from koalapy.runner.processes import Processes
    from koalapy.runner.relay_links import Pair, RelayedLinks, RelayOffer
    from koalapy.runner.settings import Settings

    RankedBytes = tuple[Optional[int], bytes]
    """Output of one rank; None: of koalapy or mpirun itself."""

    class Node(Protocol):
        """What a role needs of its node: the runner, or a program of a script on it."""

        settings: Settings
        processes: Processes
        loop: Loop
        environment: dict[str, str]

        @property
        def relayed_before(self) -> tuple[set[Pair], int]: ...
        def spawn(
            self,
            command: list[str],
            environment: dict[str, str] | None = None,
            guard: ExecGuard | None = None,
            *,
            is_program: bool = False,
            outputs: tuple[int, int] | None = None,
        ) -> int: ...
        def make_input(self, path: str = "") -> None: ...
        def make_folder(self) -> str: ...
        def report_running(self) -> None: ...
        def relay(self, token: str, node: int, payload: dict[str, Any]) -> None: ...
        def start_relay(self, plan: Plan, on_start: Callable[[bool, str], None]) -> None: ...
        def report_relayed(self, pairs: Collection[Pair], unreached: Collection[Pair], layout: int) -> None: ...
        def show(self, output: bytes, rank: int | None = None) -> None: ...
        def say(self, line: str) -> None: ...
        def read_output(self) -> bool: ...
        def conclude_part(self) -> None: ...
        def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None: ...


PLAIN = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,254}", re.ASCII)
"""Pattern of an address: those that other nodes send are used in file names and on mpirun's command line."""


FILE_PATTERN = re.compile("%([Nr%])")
"""A placeholder for the node, the rank or a percent sign in the name of an output file."""


def has_file_per_rank(name: str) -> bool:
    return "r" in FILE_PATTERN.findall(name)


def folder_fault(node: Node) -> int | None:
    """Return the exit code if no folder below ``TMPDIR`` can be used; None if that is a fault of the infrastructure.

    A folder that the job has chosen is not a fault of its cluster.
    """
    is_of_job = node.environment.get("TMPDIR") != node.settings.program_environment.get("TMPDIR")
    return 126 if is_of_job else None


def enter_workdir(node: Node, context: dict[str, Any]) -> None:
    """Change to the program's working directory. Raise ``Failure`` if the user's own choice cannot be entered."""
    workdir = context["workdir"] or node.settings.stage or node.settings.spool
    try:
        os.chdir(workdir)
    except OSError as error:
        if context["workdir"] and not context.get("workdir_optional"):
            text = f"cannot run in {workdir} on {node.settings.name}: {error.strerror}"
            raise Failure(text, 126) from error
        # The home before the spool: files in the home stay.
        folders = (node.environment.get("HOME", ""), node.settings.spool)
        folder = next((f for f in folders if os.access(f, os.W_OK | os.X_OK)), "/")
        if node.settings.node == 0:
            node.say(f"cannot use {workdir} on {node.settings.name} ({error.strerror}): running in {folder}")
        os.chdir(folder)


def separates_streams(message: Mapping[str, Any], context: Mapping[str, Any]) -> bool:
    """Return whether the error stream of a component is kept apart from its output.

    ``message``: the order that describes the job; ``context``: the component's program in it.
    """
    return bool(message.get("interactive") or context.get("error") or context.get("label"))


class Plan:
    """The nodes and programs of a job, and which of these nodes this one is."""

    def __init__(self, message: dict[str, Any], token: str, node: int) -> None:
        self.message = message
        self.nodes: list[dict[str, Any]] = message["nodes"]
        self.contexts: list[dict[str, Any]] = message["contexts"]
        self._offer: RelayOffer | None = None
        if message.get("relay"):
            for number, place in enumerate(self.nodes):
                place.setdefault("number", number)  # a program of a script has fewer nodes than its job
        self._places = {(n["token"], n["node"]): i for i, n in enumerate(self.nodes)}
        self.index = self._places[token, node]
        self.me = self.nodes[self.index]
        self.context = next(c for c in self.contexts if c["token"] == token)
        self.head = next(n for n in self.nodes if n["token"] == message["head"] and n["node"] == 0)
        self.job = self
        """The plan of the whole job, if this is one of a script's programs."""
        self.relayed: RelayedLinks | None = None
        """The relayed links of this program; None without any."""
        self.lane: int | None = None
        """Which of the programs that a script runs at once it is, from 0; None without a script."""
        self._names: list[str] = []
        """Cached ``names``; empty: not computed yet."""
        self.rank_folder = ""
        """Folder in which ranks start on this node; empty: the runner's."""
        self.input_file = ""
        """File of this node that rank 0 reads, of a program of a script on the head node; empty: none."""

    @property
    def offer(self) -> RelayOffer | None:
        """Return the relayed links that the job may use; None if it may use none."""
        if self.job is not self:
            return self.job.offer
        if self._offer is None and self.message.get("relay"):
            from koalapy.runner.relay_links import RelayOffer  # few jobs need it

            self._offer = RelayOffer(self.message["relay"], [node["slots"] for node in self.nodes])
        return self._offer

    def require_relays(self) -> None:
        """Raise ``Failure`` if a pair with this cluster must be relayed, but the head node, maybe another site's, has
        not decided so."""
        relayed = () if self.relayed is None else self.relayed.pairs
        for pair in sorted(self.pairs & self.offer.required if self.offer else ()):
            if self.me["cluster"] in pair and pair not in relayed:
                raise Failure(
                    f"clusters {pair[0]} and {pair[1]} must use relayed links, but the job's head node does not"
                )

    @property
    def names(self) -> list[str]:
        """Return a unique name of each node for mpirun: its address, unless clusters have the same addresses."""
        if not self._names:
            hosts = [node["host"] for node in self.nodes]
            self._names = hosts if len({*hosts}) == len(hosts) else [f"koala-node-{i}" for i in range(len(hosts))]
        return self._names

    @property
    def rank_ports(self) -> tuple[int, int] | None:
        """Return the first and last port of this node's ranks; None without relayed links."""
        if self.relayed is None or self.offer is None:
            return None
        from koalapy.runner.relay_links import split_ports

        return split_ports(self.offer.layouts[self.relayed.layout][self.me["number"]])[1]

    @property
    def reads_input(self) -> bool:
        """Return whether a client may send standard input to this node's program: the job is interactive, and this
        node has rank 0."""
        return bool(self.message.get("interactive")) and self.index == 0

    @property
    def separates_streams(self) -> bool:
        """Return whether the error stream of this node's program is kept apart from its output."""
        return separates_streams(self.message, self.context)

    def index_of(self, sender: tuple[str, int]) -> int | None:
        """Return the index of a runner's node, given its token and node; None if it is not in the plan."""
        return self._places.get(sender)

    def move(self, hosts: list[str]) -> None:
        """Replace the hosts of all nodes.

        Raise ``ValueError`` if one is neither an address nor the present host: the head node may be another site's.
        """
        if len(hosts) != len(self.nodes):
            raise ValueError(f"the plan has {len(self.nodes)} nodes, but {len(hosts)} addresses were given")
        for host, node in zip(hosts, self.nodes):
            is_address = is_ipv4(host) or (":" in host and PLAIN.fullmatch(host))
            if host != node["host"] and not is_address:
                raise ValueError(f"{host!r} is not an address of a node")
        for node, host in zip(self.nodes, hosts):
            node["host"] = host
        self._names = []

    @property
    def first_rank(self) -> int:
        """Return the first rank on this node. Ranks are numbered in order of the nodes."""
        return sum(node["slots"] for node in self.nodes[: self.index])

    @property
    def needs_ranks(self) -> bool:
        """Return whether it must be known which rank has written what: for labels, or files of ranks."""
        names = filter(None, (self.context["output"], self.context.get("error")))
        return bool(self.context.get("label")) or any(has_file_per_rank(name) for name in names)

    @property
    def pairs(self) -> set[Pair]:
        """Return all pairs of different clusters with nodes of this program, with sorted names."""
        clusters = sorted({node["cluster"] for node in self.nodes})
        return {(one, other) for i, one in enumerate(clusters) for other in clusters[i + 1 :]}

    @property
    def spans_clusters(self) -> bool:
        return len({node["cluster"] for node in self.nodes}) > 1

    def environment(self, settings: Settings) -> dict[str, str]:
        """Return the program's environment on this node."""
        variables = {
            "KOALA_JOB": self.message["job"],
            "KOALA_GENERATION": self.message["generation"],
            "KOALA_COMPONENT": self.contexts.index(self.context),
            "KOALA_CLUSTER": self.me["cluster"],
            "KOALA_NODE": settings.name,
            "KOALA_HOST": self.me["host"],
            "KOALA_NODE_INDEX": self.index,
            "KOALA_NODES": len(self.nodes),
            "KOALA_COMPONENT_NODES": len(self.context["nodes"]),
            "KOALA_HOSTS": ",".join(n["host"] for n in self.nodes),
        }
        cpus_per_rank = self.message.get("cpus_per_rank")
        threads = {} if cpus_per_rank is None else {"OMP_NUM_THREADS": str(cpus_per_rank)}
        return {
            **settings.program_environment,
            **threads,
            **{k: str(v) for k, v in variables.items()},
            **self.context["environment"],
        }

    def mpirun_contexts(self) -> list[str]:
        """Return the words of mpirun's command line that say which program runs where, in order of the plan's nodes."""
        commands = [(context["command"], context["nodes"]) for context in self.contexts]
        if all(command == commands[0][0] for command, _ in commands):
            commands = [(commands[0][0], list(range(len(self.nodes))))]
        arguments: list[str] = []
        names = self.names
        for _, indices in commands:
            slots = {i: self.nodes[i]["slots"] for i in indices if self.nodes[i]["slots"]}
            hosts = ",".join(f"{names[i]}:{count}" for i, count in slots.items())
            arguments += [":"] if arguments else []
            arguments += ["--host", hosts, "-np", str(sum(slots.values())), *LAUNCHER]
        return arguments


class Role:
    """A node's part in the program from the time at which all nodes have reported and the barrier is open."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner, self._plan = runner, plan

    @property
    def first_rank(self) -> int | None:
        """Return the first rank on this node; None if it receives no output of the program."""
        return self._plan.first_rank

    def start(self) -> None:
        """Start this node's part of the program. Raise ``Failure``."""
        raise NotImplementedError

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Handle a message of another node of the job."""

    def child_ended(self, pid: int, code: int) -> None:
        """Handle the end of a child process; ``code``: its exit code, or minus the signal that killed it."""
        raise NotImplementedError

    def is_starter(self, pid: int) -> bool:
        """Return whether a process starts the program and is not a part of it."""
        return False

    def rank_output(self, output: bytes, *, is_error: bool) -> list[RankedBytes]:
        """Return the part of new output to show now, by rank. ``is_error``: it is of the error stream only."""
        return [(None, output)]

    def rest_of_output(self, *, stopped: bool) -> list[tuple[bool, int | None, bytes]]:
        """Return the output held back, at the end: whether it is of the error stream, its rank, and the bytes.

        ``stopped``: the agent ended the program.
        """
        return []

    def close(self) -> None:
        """Cancel alarms and close files."""
