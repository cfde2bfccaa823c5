"""Decide which clusters of a job are joined by relayed links, tell all nodes, and start the relay of this node.

See docs/adr/0034-relayed-links.md. A job that may use relayed links has an offer of the daemon in its plan. Daemon and
runners compute the same layout of ports: every node's relay listens on loopback at the ports of the other nodes, so a
port belongs to one node of the job.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from itertools import combinations

from koalapy.runner.connections import encode
from koalapy.runner.networks import is_inside
from koalapy.runner.plan import Plan
from koalapy.runner.relay_protocol import derive_node_key
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from koalapy.runner.link import Loop
    from koalapy.runner.processes import Processes
    from koalapy.runner.settings import Settings

    Pair = tuple[str, str]

    Waiter = Callable[[bool, str], None]

FIRST_PORT, LAST_PORT = 15_000, 32_767
"""The ports of all layouts, below those that Linux gives to connections."""
RELAY_CONTROL_PORTS = 8
"""Ports of each node at which mpirun listens for its daemons, if it runs there: two for each program at a time."""
SPARE_PORTS = 4
"""Ports of each node beside one for each rank: for the probe, and for ports that other programs use."""


def count_ports(slots: Sequence[int]) -> int:
    """Return how many ports a job needs; ``slots``: the ranks of each node."""
    return sum(slots) + len(slots) * (RELAY_CONTROL_PORTS + SPARE_PORTS)


def node_ports(base: int, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last port of each node, from the port ``base`` on. ``slots``: the ranks of each node."""
    ranges = []
    for count in slots:
        width = count + RELAY_CONTROL_PORTS + SPARE_PORTS
        ranges.append((base, base + width - 1))
        base += width
    return ranges


def split_ports(ports: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two parts of a node's range: the ports of mpirun, and those of ranks and the probe."""
    first, last = ports
    return (first, first + RELAY_CONTROL_PORTS - 1), (first + RELAY_CONTROL_PORTS, last)


NETWORK = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}/(?:[12]?\d|3[01])", re.ASCII)
"""Pattern of a network that Open MPI recognizes: never one of a single address."""
MAX_NETWORKS = 4096
LOOPBACK_SERIES = 4
"""The series of Open MPI that cannot use loopback between sites and another interface within them."""


def sort_pair(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


class RelayOffer:
    """The pairs of clusters that may use relayed links, and the ports for them, as the daemon says."""

    def __init__(self, relay: Mapping[str, Any], slots: Sequence[int]) -> None:
        """``slots``: the ranks of each node of the job."""
        self.attempt = str(relay["attempt"])
        self.pairs = {sort_pair(one, other): str(how) for one, other, how in relay["pairs"]}
        """By pair: ``any`` to try direct connections first, or ``relayed``."""
        self.layouts = [node_ports(base, slots) for base in relay["bases"]]
        """The ports of each node of the job, in alternative layouts; none if relayed links cannot be used."""

    @property
    def required(self) -> set[Pair]:
        """Return the pairs whose direct connections are not even tried."""
        return {pair for pair, how in self.pairs.items() if how == "relayed"}


class RelayedLinks:
    """The decision of a job's head node: which pairs of clusters are relayed, and how."""

    def __init__(
        self, pairs: Collection[Pair], layout: int, networks: Mapping[str, Sequence[str]], *, on_loopback: bool
    ) -> None:
        """``layout``: the index of the offer's layout of ports. ``networks``: those of each cluster's nodes.

        ``on_loopback``: all streams of ranks are relayed, also within a cluster.
        """
        self.pairs, self.layout, self.networks, self.on_loopback = frozenset(pairs), layout, networks, on_loopback

    def joins(self, one: str, other: str) -> bool:
        """Return whether nodes of two clusters reach each other only by relays."""
        return self.on_loopback or sort_pair(one, other) in self.pairs

    def has_relay(self, cluster: str) -> bool:
        """Return whether nodes of a cluster have a relay."""
        return self.on_loopback or any(cluster in pair for pair in self.pairs)

    def reachable_networks(self, cluster: str) -> list[str]:
        """Return the networks that nodes of a cluster reach without relays, with their own."""
        visible = [nets for other, nets in self.networks.items() if sort_pair(cluster, other) not in self.pairs]
        return sorted({network for networks in visible for network in networks})

    def to_message(self) -> dict[str, Any]:
        return {
            "pairs": sorted(self.pairs),
            "layout": self.layout,
            "networks": self.networks,
            "on_loopback": self.on_loopback,
        }


def read_links(message: Mapping[str, Any], offer: RelayOffer | None) -> RelayedLinks:
    """Return the head node's decision. Raise ``ValueError`` if the daemon does not allow it, or it is malformed."""
    pairs = {sort_pair(str(one), str(other)) for one, other in message["pairs"]}
    networks = {str(cluster): list(values) for cluster, values in message["networks"].items()}
    if offer is None or not pairs <= offer.pairs.keys() or message["layout"] not in range(len(offer.layouts)):
        raise ValueError("the head node decides on relayed links that the job may not use")
    texts = [network for values in networks.values() for network in values]
    if len(texts) > MAX_NETWORKS or not all(isinstance(text, str) and NETWORK.fullmatch(text) for text in texts):
        raise ValueError("the head node names networks of nodes that cannot be")
    links = RelayedLinks(pairs, message["layout"], networks, on_loopback=bool(message["on_loopback"]))
    is_complete = all(cluster in networks for pair in pairs for cluster in pair)
    if not links.on_loopback and (not is_complete or any(_collide(links, *pair) for pair in pairs)):
        raise ValueError("the head node names no or the same networks for clusters that do not reach each other")
    return links


def check_networks(links: RelayedLinks, cluster: str, clusters: Collection[str], own: str) -> None:
    """Raise ``ValueError`` if the head node of another site describes this node's cluster wrongly.

    Else ranks of clusters whose links are to be relayed could connect directly. ``clusters``: those of the job.
    ``own``: the network of this node.
    """
    if links.on_loopback:
        return
    if links.networks.keys() != {*clusters} or own not in links.networks[cluster]:
        raise ValueError(f"the head node names networks of {cluster} without {own or 'any'}, that of this node")


def decide_links(
    offer: RelayOffer,
    pairs: Collection[Pair],
    layout: int,
    series: int,
    hosts: Mapping[str, Sequence[tuple[str, Sequence[Sequence[str]]]]],
) -> RelayedLinks:
    """Return which pairs of clusters are relayed: ``pairs`` or all. Raise ``Failure`` if the daemon forbids it.

    ``series``: Open MPI's major version. ``hosts``: by cluster, the address of each node and its (network, address)
    pairs. Ranks can use loopback between sites and another interface within a site only under Open MPI 5, if networks
    do not overlap and the network of each node is known. Otherwise they use loopback alone, so that all is relayed.
    """
    if not offer.layouts:
        one, other = min(pairs)
        raise Failure(
            f"relayed links cannot be used between clusters {one} and {other}, which the job needs: its nodes need too "
            "many ports, or the relay of the daemon or of a site is away; see koala network"
        )
    found = {
        cluster: sorted({next((n for n, address in networks if address == host), "") for host, networks in nodes})
        for cluster, nodes in hosts.items()
    }
    networks = {cluster: [n for n in values if NETWORK.fullmatch(n)] for cluster, values in found.items()}
    if sum(map(len, networks.values())) > MAX_NETWORKS:
        raise Failure(f"relayed links allow nodes of at most {MAX_NETWORKS} networks: use fewer nodes")
    links = RelayedLinks(pairs, layout, networks, on_loopback=False)
    unknown = next((cluster for cluster, values in found.items() if values != networks[cluster]), "")
    if series <= LOOPBACK_SERIES:
        cause = f"Open MPI {series}"
    elif any(_collide(links, *pair) for pair in links.pairs):
        cause = "networks with the same addresses"
    elif unknown:
        cause = f"nodes of {unknown} without a known network"
    else:
        return links
    every = {sort_pair(*pair) for pair in combinations(hosts, 2)}
    if forbidden := sorted(every - offer.pairs.keys()):
        raise Failure(
            f"a job with {cause} sends all data by relays if it needs one, but the clusters {forbidden[0][0]} and "
            f"{forbidden[0][1]} may not use relayed links: name fewer clusters, or allow it in the section links"
        )
    return RelayedLinks(every, layout, networks, on_loopback=True)


def _collide(links: RelayedLinks, one: str, other: str) -> bool:
    """Return whether addresses of one cluster mean other nodes to a cluster that reaches it only by relays."""
    return any(
        overlap(near, far)
        for cluster, remote in ((one, other), (other, one))
        for near in links.reachable_networks(cluster)
        for far in links.networks[remote]
    )


def overlap(one: str, other: str) -> bool:
    """Return whether two networks have an address in common."""
    return is_inside(one.partition("/")[0], other) or is_inside(other.partition("/")[0], one)


PROGRAM = f"{os.path.dirname(os.path.abspath(__file__))}/relay_node.py"
START_TIMEOUT = 10.0
"""Seconds in which the head's relay must accept this node, which it may learn of later than the runner."""
RETRY_INTERVAL = 0.3
LOOPBACK = "127.0.0.1"


def child_settings(plan: Plan, secret: bytes) -> dict[str, Any]:
    """Return the settings of this node's relay: it serves the ports of all other nodes of the job. Raise ``Failure``.

    Which of these are used is decided by the parameters of Open MPI. So the programs of a script can share a relay.
    """
    head = plan.message.get("relay_head")
    if plan.offer is None or plan.relayed is None:
        raise Failure("the job needs relayed links, but the relays of its clusters were not ready when it started")
    if not head:
        raise Failure(
            f"the job needs relayed links, but the agent of {plan.me['cluster']} was not connected with its relay: "
            "koala check on its head node says why"
        )
    layout, me = plan.offer.layouts[plan.relayed.layout], plan.me["number"]
    first = next(i for i, node in enumerate(plan.job.nodes) if node is plan.job.head)
    listeners: list[Any] = [[LOOPBACK, *split_ports(layout[i])[1], i] for i in range(len(layout)) if i != me]
    targets: list[Any] = [[*split_ports(layout[me])[1], LOOPBACK, LOOPBACK]]
    if me == first:
        targets.append([*split_ports(layout[me])[0], plan.me["host"], ""])
    elif plan.relayed.joins(plan.me["cluster"], plan.head["cluster"]) and plan.me["cluster"] != plan.head["cluster"]:
        listeners.append([plan.me["host"], *split_ports(layout[first])[0], first])
    return {
        "attempt": plan.offer.attempt,
        "node": me,
        "key": derive_node_key(secret, plan.offer.attempt).hex(),
        "head": head,
        "listeners": listeners,
        "targets": targets,
    }


class RelayChild:
    """The relay of this node. It is started again while the head's relay does not know the node yet."""

    def __init__(
        self, loop: Loop, processes: Processes, settings: Settings, plan: Plan, on_lost: Callable[[str], None]
    ) -> None:
        """``on_lost`` is called with the reason if the relay cannot be used, or no longer."""
        self._loop, self._processes, self._on_lost = loop, processes, on_lost
        self._settings = child_settings(plan, settings.secret)
        self._name = settings.name
        self._waiting: list[Waiter] = []
        self._deadline = loop.time() + START_TIMEOUT
        self.pid = 0
        self._input = self._output = -1
        self._partial_line = b""
        self._taken = ""
        self._reason = ""
        """Why the head's relay does not accept this node yet."""
        self.is_ready = self._has_ended = False

    def serves(self, plan: Plan) -> bool:
        """Return whether it has the ports that a plan needs."""
        mine = self._settings["listeners"], self._settings["targets"]
        other = child_settings(plan, b"")
        return mine == (other["listeners"], other["targets"])

    def wait(self, waiter: Waiter) -> None:
        """Call ``waiter`` once the relay is ready, with True, or with False and the reason if its ports are taken."""
        if self.is_ready or self._taken:
            waiter(self.is_ready, self._taken)
            return
        self._waiting.append(waiter)
        if not self.pid:
            self._start()

    def finish(self) -> None:
        """Let the relay end."""
        self._has_ended = True
        self._waiting.clear()
        self._loop.cancel_alarm("relay-child")
        self._close_files()

    def child_ended(self, pid: int, code: int) -> bool:
        """Return whether it was the relay that ended. Start it again while the head's relay does not know it."""
        if pid != self.pid:
            return False
        if self._output >= 0:
            self._read_events(0)
        self.pid = 0
        self._close_files()
        if self._has_ended or self._taken:
            return True
        if self.is_ready or self._loop.time() > self._deadline:
            self._lose(self._reason or f"the relay of node {self._name} ended with {code}")
        else:
            self._loop.set_alarm("relay-child", RETRY_INTERVAL, self._start)
        return True

    def _start(self) -> None:
        input_end, self._input = os.pipe2(os.O_CLOEXEC)
        self._output, output_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        command = [sys.executable, "-I", "-S", PROGRAM]
        try:
            self.pid = self._processes.start(command, dict(os.environ), output_end, input_end, 2)
        finally:
            os.close(input_end)
            os.close(output_end)
        self._partial_line = b""
        self._loop.watch(self._output, self._read_events)
        data = encode(self._settings).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._input, data) :]
        except BrokenPipeError:
            return  # its end is handled later

    def _read_events(self, _events: int) -> None:
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(self._output)
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if not self._has_ended:
                self._handle_event(json.loads(line))

    def _handle_event(self, event: dict[str, Any]) -> None:
        if event["t"] == "ready":
            self.is_ready, self._reason = True, ""
            self._notify()
        elif event["t"] == "taken":
            self._taken = f"{event['why']} on node {self._name}"
            self._notify()
        elif event["t"] == "lost" and self.is_ready:
            self._lose(f"node {self._name}: {event['why']}")
        elif event["t"] == "lost":
            self._reason = f"node {self._name}: {event['why']}"

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter(self.is_ready, self._taken)

    def _lose(self, reason: str) -> None:
        self.finish()
        self._on_lost(reason)

    def _close_files(self) -> None:
        for file in (self._input, self._output):
            if file >= 0:
                self._loop.forget(file)
                os.close(file)
        self._input = self._output = -1
