"""Check before the program starts that every node of a job can open a connection to every other node."""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Callable
from itertools import islice, product

from koalapy.runner.connections import LineConnection, LineTooLong, Loop, connect_side, describe_error, open_listener
from koalapy.runner.containers import VERSION_TIMEOUT_S
from koalapy.runner.networks import is_ipv4, own_networks
from koalapy.runner.parameters import rank_ports
from koalapy.runner.plan import PLAIN, Plan
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from koalapy.runner.plan import Node
    from koalapy.runner.relay_links import Pair, RelayedLinks

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = 3.0
RETRY_INTERVAL, RETRY_TIME = 0.3, 10.0
"""Seconds between two probes through relays, and in which head and hub must know the job."""
REPLY_TIMEOUT = 15.0
"""Seconds to wait for the reply of a node that was reached, which may be busy or stopped for a while."""
MAX_ROUTES = 6
"""Routes to try if nodes do not reach each other; each takes seconds to fail."""
MAX_COMBINATIONS = 10_000
"""Combinations of the clusters' networks that are considered. Nodes of many clusters, with many networks, have more."""
MAX_CONCURRENT_PROBES = 128
"""Connections to try at the same time; each needs an open file."""
MAX_REPLY_SIZE = 128
OTHER_PROGRAM = "another program answers there"
MAX_PEERS = 256
"""Connections of one listener. A node that probes closes its own after the reply, so the oldest is closed first."""


class ProbeListener:
    """A port of this node that answers each connection with its nonce, a random text, and the address of the client."""

    def __init__(
        self, loop: Loop, name: str, host: str, ports: tuple[int, int] | None, max_peers: int = MAX_PEERS
    ) -> None:
        """Listen on the first free port; ``ports``: the first and last to try. Raise ``Failure``."""
        self._loop, self._max_peers = loop, max_peers
        self._peers: dict[int, socket.socket] = {}
        self.nonce = os.urandom(8).hex()
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            try:
                self._listener = open_listener((host, port), 1024)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    choice = f"a port of {first}-{last}" if ports else "a port"
                    raise Failure(f"node {name} cannot listen on {choice} of {host}: {error.strerror}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        loop.watch(self._listener.fileno(), self._accept_peer)

    def close(self) -> None:
        for number in list(self._peers):
            self._disconnect_peer(number)
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _accept_peer(self, _events: int) -> None:
        """Accept a connection and answer it. Close the oldest connection if there are too many."""
        try:
            peer, address = self._listener.accept()
        except OSError:
            self._loop.pause(self._listener.fileno())
            return
        peer.setblocking(False)
        if len(self._peers) >= self._max_peers:
            self._disconnect_peer(next(iter(self._peers)))
        self._peers[peer.fileno()] = peer
        self._loop.watch(peer.fileno(), lambda _: self._disconnect_peer(peer.fileno()))
        try:
            peer.send(f"{self.nonce} {address[0]}\n".encode())
        except OSError:
            self._disconnect_peer(peer.fileno())

    def _disconnect_peer(self, number: int) -> None:
        self._loop.forget(number)
        self._peers.pop(number).close()


class ProbeRound:
    """Probes of all other nodes, after which ``on_end`` is called with the reason for each failure, by number."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        listeners: dict[int, tuple[str, int, str]],
        on_end: Callable[[dict[int, str]], None],
        retry_time: float = 0.0,
    ) -> None:
        """``listeners``: (host, port, nonce) by number. Connections are bound to ``host``, as those of Open MPI are.

        Those to loopback go through relays, which may learn of the job later: repeat them for ``retry_time`` seconds.
        """
        self._loop, self._host, self._listeners, self._on_end = loop, host, listeners, on_end
        self._retry_until, self._retrying = loop.time() + retry_time, set[int]()
        self._next = list(listeners)[::-1]
        self._open: dict[int, LineConnection] = {}
        self._buffer = memoryview(bytearray(MAX_REPLY_SIZE))
        self._failures: dict[int, str] = {}

    def start(self) -> None:
        self._probe_next()

    def close(self) -> None:
        self._next.clear()
        for number in self._retrying:
            self._loop.cancel_alarm(f"retry-{number}")
        for number in list(self._open):
            self._disconnect_peer(number)

    def _probe_next(self) -> None:
        while self._next and len(self._open) < MAX_CONCURRENT_PROBES:
            self._start_probe(self._next.pop())
        if not self._open and not self._retrying:
            self._on_end(self._failures)

    def _source_of(self, number: int) -> str:
        """Return the address from which a node's listener is probed: relays accept local connections only."""
        return LOOPBACK if self._listeners[number][0] == LOOPBACK != self._host else self._host

    def _retry_probe(self, number: int) -> None:
        self._retrying.discard(number)
        self._next.append(number)
        self._probe_next()

    def _start_probe(self, number: int) -> None:
        """Begin to connect to a node's listener as Open MPI does, or record why that fails at once."""
        host, port, _ = self._listeners[number]
        try:
            side = connect_side(host, port, self._source_of(number))
        except OSError as error:
            self._failures[number] = describe_error(error).lower()
            return
        self._open[number] = LineConnection(
            self._loop,
            side,
            self._buffer,
            lambda _, reply: self._check_reply(number, reply),
            lambda _, error: self._handle_end(number, error),
            MAX_REPLY_SIZE - 1,
        )
        self._loop.set_alarm(f"probe-{number}", CONNECT_TIMEOUT, lambda: self._check_connected(number))

    def _check_connected(self, number: int) -> None:
        if self._open[number].side.events():
            self._finish_probe(number, "timed out")
        else:
            timeout = REPLY_TIMEOUT - CONNECT_TIMEOUT
            self._loop.set_alarm(f"probe-{number}", timeout, lambda: self._finish_probe(number, "no reply"))

    def _check_reply(self, number: int, reply: bytes) -> None:
        """Check the nonce in a listener's reply, and the address that it saw."""
        nonce, _, source = reply.decode("ascii", "replace").partition(" ")
        if nonce != self._listeners[number][2]:
            self._finish_probe(number, OTHER_PROGRAM)
        elif source != self._source_of(number):
            self._finish_probe(number, f"its address is translated to {source}, which Open MPI does not support")
        else:
            self._finish_probe(number, "")

    def _handle_end(self, number: int, error: OSError | None) -> None:
        if error is None or isinstance(error, LineTooLong):
            self._finish_probe(number, OTHER_PROGRAM)
        else:
            self._finish_probe(number, describe_error(error).lower())

    def _finish_probe(self, number: int, reason: str) -> None:
        self._disconnect_peer(number)
        if reason and self._listeners[number][0] == LOOPBACK and self._loop.time() < self._retry_until:
            self._retrying.add(number)
            self._loop.set_alarm(f"retry-{number}", RETRY_INTERVAL, lambda: self._retry_probe(number))
        elif reason:
            self._failures[number] = reason
        self._probe_next()

    def _disconnect_peer(self, number: int) -> None:
        self._loop.cancel_alarm(f"probe-{number}")
        self._open.pop(number).close(reset=True)  # else the port stays in TIME_WAIT, and ranks may need it next


ANY_ADDRESS = "0.0.0.0"
RESEND_INTERVAL = 2.0
READY_TIMEOUT = 30.0
CANNOT_REACH = "cannot reach node"
"""Part of every error of two nodes that do not reach each other, by which the daemon recognizes it."""
BLAME_TIMEOUT = 10.0
"""Seconds for a node to report an error of its cluster, before the head node reports it."""


def is_well_formed(payload: dict[str, Any], nodes: int) -> bool:
    """Return whether a ``ready`` or ``reached`` message is well-formed, since it may come from another site."""
    try:
        if payload["op"] == "taken":
            return _are_texts([payload["why"]])
        if payload["op"] == "ready":
            for network, address in payload.get("networks", []):
                if not (is_ipv4(address) and is_ipv4(network.partition("/")[0])):
                    return False
            networks, addresses = [n for n, _ in payload["choices"]], [a for _, a in payload["choices"]]
            texts = [payload["word"], payload["name"], *networks, *addresses]
            plain = _are_texts(texts) and all(map(PLAIN.fullmatch, addresses))
            return plain and isinstance(payload["series"], int) and payload["port"] in range(1, 65536)
        failures = payload["failures"]
        return all(index in range(nodes) for index, _ in failures) and _are_texts([reason for _, reason in failures])
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


class Prober:
    """One node's part: it listens, and probes all other nodes when the head node sends their ports."""

    def __init__(
        self, runner: Node, plan: Plan, series: int, send: Callable[[dict[str, Any]], None], route: int = 0
    ) -> None:
        """``route`` counts the routes that were tried before this one."""
        self._runner, self._plan, self._send, self.route = runner, plan, send, route
        self._series, self._is_closed = series, False
        self._listener: ProbeListener | None = None
        self._probes: ProbeRound | None = None
        self._result: dict[str, Any] | None = None

    def start(self) -> None:
        """Listen, after this node's relay has started if the program has relayed links. Raise ``Failure``."""
        if self._plan.relayed is not None and self._plan.relayed.has_relay(self._plan.me["cluster"]):
            self._runner.start_relay(self._plan, self._handle_relay)
        else:
            self._listen()

    def _handle_relay(self, is_ready: bool, reason: str) -> None:
        """Listen now that this node's relay is ready, or report that its ports are taken."""
        if self._is_closed:
            return
        if is_ready:
            self._listen()
        else:
            self._send_ready({"op": "taken", "index": self._plan.index, "way": self.route, "why": reason})

    def _listen(self) -> None:
        plan, runner = self._plan, self._runner
        # A relay connects to loopback, other nodes to the host.
        host = plan.me["host"] if plan.relayed is None else ANY_ADDRESS
        ports = plan.rank_ports or rank_ports(runner.environment)
        self._listener = ProbeListener(runner.loop, runner.settings.name, host, ports)
        self._send_ready(
            {
                "op": "ready",
                "index": plan.index,
                "name": runner.settings.name,
                "series": self._series,
                "port": self._listener.port,
                "word": self._listener.nonce,
                "way": self.route,
                "choices": own_choices(plan, runner.environment),
                "host_name": socket.gethostname().partition(".")[0],
                **({} if plan.offer is None else {"networks": own_networks()}),
            }
        )

    def _send_ready(self, message: dict[str, Any]) -> None:
        """Report this node's port to the head node until it answers: messages between nodes may get lost."""
        self._runner.loop.set_alarm("ready", RESEND_INTERVAL, lambda: self._send_ready(message))
        self._send(message)

    def probe(self, listeners: list[tuple[int, str]], skipped: Collection[Sequence[str]] = ()) -> None:
        """Probe all listeners, given as (port, nonce) in the order of the plan's nodes, and report the result.

        ``skipped``: pairs of clusters between which there is nothing to probe.
        """
        self._runner.loop.cancel_alarm("ready")
        if self._result is not None:
            self._send(self._result)
        elif self._probes is None:
            if len(listeners) != len(self._plan.nodes) or not all(
                isinstance(port, int) and 0 < port < 65536 and isinstance(nonce, str) for port, nonce in listeners
            ):
                raise ValueError("the listeners of a pre-flight are not those of the plan's nodes")
            me, links = self._plan.me, self._plan.relayed
            targets: dict[int, tuple[str, int, str]] = {}
            for i, (node, (port, nonce)) in enumerate(zip(self._plan.nodes, listeners)):
                is_relayed = links is not None and links.joins(me["cluster"], node["cluster"])
                if i != self._plan.index and sorted((me["cluster"], node["cluster"])) not in map(sorted, skipped):
                    targets[i] = LOOPBACK if is_relayed else node["host"], port, nonce
            retry_time = 0.0 if links is None else RETRY_TIME
            self._probes = ProbeRound(self._runner.loop, me["host"], targets, self._report_result, retry_time)
            self._probes.start()

    def close(self) -> None:
        self._is_closed = True
        self._runner.loop.cancel_alarm("ready")
        if self._listener is not None:
            self._listener.close()
        if self._probes is not None:
            self._probes.close()

    def _report_result(self, failures: dict[int, str]) -> None:
        report = {"op": "reached", "index": self._plan.index, "way": self.route}
        self._result = {**report, "failures": sorted(failures.items())}
        self._send(self._result)


def own_choices(plan: Plan, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (network, address) of all addresses that this node may use for the job.

    There is no choice if the cluster configures an interface, in a job of one cluster, and on loopback.
    """
    host = plan.me["host"]
    if environment.get("KOALA_MPI_INTERFACE") or host.startswith("127.") or not plan.spans_clusters:
        return []
    return own_networks()


def other_routes(plan: Plan, choices: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[list[str], list[str]]]:
    """Return routes other than the plan's, as (networks, addresses of all nodes), at most ``MAX_ROUTES``.

    All nodes of a cluster use one network. ``choices``: (network, address) pairs of each node. Routes by a network that
    all clusters have come first.
    """
    clusters: dict[str, list[int]] = {}
    for index, node in enumerate(plan.nodes):
        clusters.setdefault(node["cluster"], []).append(index)
    by_node = {index: {pair[0]: pair[1] for pair in pairs} for index, pairs in choices.items()}
    common = {
        cluster: [n for n in by_node[nodes[0]] if all(n in by_node[index] for index in nodes)] or [""]
        for cluster, nodes in clusters.items()
    }
    shared = [n for n in next(iter(common.values())) if n and all(n in networks for networks in common.values())]
    combined = sorted(islice(product(*common.values()), MAX_COMBINATIONS), key=lambda networks: len({*networks}))
    routes = dict.fromkeys([*((network,) * len(common) for network in shared), *combined])
    candidates = (_route(plan, dict(zip(clusters, networks)), by_node) for networks in routes)
    current = [node["host"] for node in plan.nodes]
    return list(islice((route for route in candidates if route[1] != current), MAX_ROUTES))


def _route(
    plan: Plan, networks: Mapping[str, str], by_node: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the networks of a route and its hosts: nodes of clusters without a choice keep their addresses."""
    hosts = [by_node[index].get(networks[node["cluster"]], node["host"]) for index, node in enumerate(plan.nodes)]
    return sorted({*networks.values()} - {""}), hosts


class Preflight:
    """The head node's part: it sends all ports to all nodes, and collects which nodes cannot reach each other.

    If some cannot, it tries other networks that the nodes have.
    """

    def __init__(
        self,
        runner: Node,
        plan: Plan,
        series: int,
        on_success: Callable[[], None],
        on_move: Callable[[], None],
        timeout: float = READY_TIMEOUT,
    ) -> None:
        """``on_success``: all nodes reach each other. ``on_move``: the nodes' addresses are about to change.

        ``timeout``: seconds in which all nodes must have reported, besides those for the check of container images.
        """
        has_images = any(context.get("container") for context in plan.contexts)
        self._timeout = timeout + (VERSION_TIMEOUT_S if has_images else 0.0)
        self._runner, self._plan, self._on_success, self._on_move = runner, plan, on_success, on_move
        self._series, self._route = series, 0
        self._routes: list[tuple[list[str], list[str]]] = []
        """Networks and addresses of the routes still to try."""
        self._error = ""
        """The error of the first route, and the index of the node that reports it."""
        self._reporter = 0
        self._ready: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, list[tuple[int, str]]] = {}
        self.namesakes: dict[int, str] = {}
        """Of each node that shares its host name with another, a description; known once all are ready."""
        self._prober = Prober(runner, plan, series, self.receive)
        self._deadline = self._runner.loop.time() + self._timeout
        self._skipped: set[Pair] = set()
        """Pairs of clusters that are relayed without a try of direct connections."""
        self._unreached: set[Pair] = set()
        """Pairs of clusters for which the program uses relays. Others may be relayed with them."""
        self._layout = 0
        if plan.offer is not None:
            needed, self._layout = runner.relayed_before
            self._skipped = plan.pairs & (plan.offer.required | needed)
        self._networks: dict[int, list[Sequence[str]]] = {}
        """All (network, address) pairs of each node, if the job may use relayed links."""
        self._relayable: list[tuple[set[Pair], list[str]]] = []
        """The pairs of clusters that would be relayed, and the addresses, of each route that relays would complete."""

    @property
    def must_relay(self) -> bool:
        """Return whether some clusters of the program are joined by relays in any case."""
        return bool(self._skipped)

    def start(self) -> None:
        self._wait_for_nodes()
        self._prober.start()

    def receive(self, payload: dict[str, Any]) -> None:
        """Handle the ``ready`` or ``reached`` message of a node."""
        index = payload["index"]
        if payload["way"] != self._route or not is_well_formed(payload, len(self._plan.nodes)):
            return
        if payload["op"] == "taken":
            if self._plan.relayed is not None:
                self._use_next_layout(str(payload["why"]))
        elif payload["op"] == "reached":
            self._failures[index] = payload["failures"]
            if len(self._failures) == len(self._plan.nodes):
                self._evaluate_failures()
        elif index not in self._ready:
            self._ready[index] = payload
            self._networks[index] = payload.get("networks", [])
            if len(self._ready) == len(self._plan.nodes):
                self._compare_nodes()
                self._send_probes()

    def close(self) -> None:
        self._runner.loop.cancel_alarm("preflight")
        self._prober.close()

    def _wait_for_nodes(self) -> None:
        """End the program with an error after the deadline; until then repeat the messages of this step."""
        if self._runner.loop.time() > self._deadline:
            reported = self._failures if len(self._ready) == len(self._plan.nodes) else self._ready
            missing = next(i for i in range(len(self._plan.nodes)) if i not in reported)
            self._runner.conclude(
                None, f"node {self._name_of(missing)} was not ready within {self._timeout:g} s", infrastructure=True
            )
            return
        self._runner.loop.set_alarm("preflight", RESEND_INTERVAL, self._resend_messages)

    def _resend_messages(self) -> None:
        if len(self._ready) == len(self._plan.nodes):
            self._send_probes()
        elif self._route:
            self._send_moves()
        self._wait_for_nodes()

    def _send_probes(self) -> None:
        """Let each node that has not reported its result probe the ports of all nodes."""
        listeners = [(self._ready[i]["port"], self._ready[i]["word"]) for i in range(len(self._plan.nodes))]
        for index, node in enumerate(self._plan.nodes):
            if index in self._failures:
                continue
            skipped = [] if self._plan.relayed else sorted(self._skipped)
            if index == self._plan.index:
                self._prober.probe(listeners, skipped)
            else:
                probe = {"op": "probe", "way": self._route, "doors": listeners}
                self._runner.relay(node["token"], node["node"], {**probe, "skip": skipped} if skipped else probe)

    def _compare_nodes(self) -> None:
        """Raise ``Failure`` if the nodes have different major versions of Open MPI, and find equal host names."""
        head = self._ready[self._plan.index]
        for index, node in self._ready.items():
            if node["series"] != head["series"]:
                clusters = " and ".join(f"clusters.{self._cluster_of(i)}.mpi" for i in (self._plan.index, index))
                raise Failure(
                    f"node {head['name']} has Open MPI {head['series']}, node {node['name']} has {node['series']}: "
                    f"one job needs the same series everywhere, see {clusters}"
                )
        by_name: dict[str, list[int]] = {}
        for index, node in self._ready.items():
            by_name.setdefault(node["host_name"], []).append(index)
        for name, indices in by_name.items():
            first, *duplicates = (f"{self._name_of(i)} of {self._cluster_of(i)}" for i in indices)
            if duplicates:
                self.namesakes |= dict.fromkeys(
                    indices, f"nodes {first} and {duplicates[0]} have the same host name, {name}"
                )

    def _evaluate_failures(self) -> None:
        """Act on the results of all nodes: go on if there is no failure, else try another route or report the error."""
        failed = [(i, int(j), reason) for i, pairs in sorted(self._failures.items()) for j, reason in pairs]
        if not failed and (self._plan.relayed or not self._skipped):
            self.close()
            if self._plan.relayed is not None:
                self._runner.report_relayed(self._plan.relayed.pairs, self._unreached, self._layout)
            self._on_success()
            return
        if not failed:
            self._try_relays(self._skipped)
            return
        pairs = {
            (min(names), max(names)) for names in ((self._cluster_of(i), self._cluster_of(j)) for i, j, _ in failed)
        }
        if self._plan.relayed is not None:
            self._extend_relays(self._plan.relayed, pairs, failed)
            return
        if self._plan.offer is not None and self._plan.offer.layouts and pairs <= self._plan.offer.pairs.keys():
            self._relayable.append((pairs | self._skipped, [node["host"] for node in self._plan.nodes]))
        if not self._error:
            self._record_first_failure(failed)
            self._routes = other_routes(self._plan, {i: ready["choices"] for i, ready in self._ready.items()})[::-1]
        if self._routes:
            networks, hosts = self._routes.pop()
            self._error += f"; tried too: {', '.join(networks)}"
            self._try_route(hosts)
        elif self._relayable:
            chosen, hosts = min(self._relayable, key=lambda route: len(route[0]))
            self._try_relays(chosen, hosts)
        else:
            self._deadline = self._runner.loop.time() + BLAME_TIMEOUT
            self._report_error(self._reporter, self._error)

    def _try_relays(self, pairs: Collection[Pair], hosts: list[str] | None = None) -> None:
        """Repeat the check of connections with relays between pairs of clusters. Raise ``Failure``."""
        from koalapy.runner.relay_links import decide_links

        if self._plan.offer is None:
            return
        self._unreached |= set(pairs)
        hosts = hosts or [node["host"] for node in self._plan.nodes]
        by_cluster: dict[str, list[tuple[str, list[Sequence[str]]]]] = {}
        for index, host in enumerate(hosts):
            by_cluster.setdefault(self._cluster_of(index), []).append((host, self._networks[index]))
        self._plan.relayed = decide_links(self._plan.offer, pairs, self._layout, self._series, by_cluster)
        self._try_route(hosts)

    def _extend_relays(self, links: RelayedLinks, pairs: set[Pair], failed: list[tuple[int, int, str]]) -> None:
        """Relay pairs of clusters, too, that reach each other no longer with the ports of relayed jobs."""
        offer = self._plan.offer
        if offer is not None and not links.on_loopback and pairs <= offer.pairs.keys() - links.pairs:
            self._try_relays(links.pairs | pairs)
            return
        self._error = ""
        self._record_first_failure(failed)
        self._deadline = self._runner.loop.time() + BLAME_TIMEOUT
        self._report_error(self._reporter, self._error)

    def _use_next_layout(self, reason: str) -> None:
        """Repeat the check of connections with other ports, since a node's relay cannot use its. Raise ``Failure``."""
        offer, links = self._plan.offer, self._plan.relayed
        if offer is None or links is None:
            return
        self._layout += 1
        if self._layout >= len(offer.layouts):
            raise Failure(f"no ports are free for relayed links: {reason[:MAX_REPLY_SIZE]}: submit the job again")
        self._try_relays(self._unreached)

    def _record_first_failure(self, failed: list[tuple[int, int, str]]) -> None:
        """Set the error message and the node that reports it, from the first route, since users know its addresses."""
        # That with most failed pairs; in a tie not the head node's, which has most nodes.
        counts = Counter(self._cluster_of(index) for source, target, _ in failed for index in (source, target))
        faulty_cluster = max(counts, key=lambda c: (counts[c], c != self._plan.head["cluster"]))
        faulty = {i for i, n in enumerate(self._plan.nodes) if n["cluster"] == faulty_cluster}
        source, target, reason = min(failed, key=lambda f: (f[1] not in faulty, f[0] not in faulty))
        node, port, links = self._plan.nodes[target], self._ready[target]["port"], self._plan.relayed
        self._error = (
            f"node {self._name_of(source)} {CANNOT_REACH} {self._name_of(target)} at {node['host']}:{port} ({reason}): "
            f"name a network that both have in clusters.{node['cluster']}.mpi.interface, "
            f"and ports that are open between them in clusters.{node['cluster']}.mpi.ports"
        )
        if links is not None and links.joins(self._cluster_of(source), self._cluster_of(target)):
            self._error = (
                f"node {self._name_of(source)} {CANNOT_REACH} {self._name_of(target)} by the relays ({reason}): "
                "see the logs of koala relay hub and koala relay head"
            )
        elif self._plan.offer is not None and not self._plan.offer.layouts:
            self._error += "; relayed links cannot be used, since the job needs more ports than there are"
        self._reporter = target if target in faulty else source

    def _try_route(self, hosts: list[str]) -> None:
        """Repeat the check of connections with the addresses ``hosts`` of all nodes, in the plan's order."""
        if not self._route:
            self._on_move()
        self._prober.close()
        self._route += 1
        self._plan.move(hosts)
        self._ready, self._failures = {}, {}
        self._deadline = self._runner.loop.time() + self._timeout
        self._prober = Prober(self._runner, self._plan, self._series, self.receive, self._route)
        self._send_moves()
        self._prober.start()

    def _send_moves(self) -> None:
        move: dict[str, Any] = {"op": "move", "way": self._route, "hosts": [node["host"] for node in self._plan.nodes]}
        if self._plan.relayed is not None:
            move["relayed"] = self._plan.relayed.to_message()
        for index, node in enumerate(self._plan.nodes):
            if index not in self._ready and index != self._plan.index:
                self._runner.relay(node["token"], node["node"], move)

    def _report_error(self, index: int, error: str) -> None:
        """Let a node of the faulty cluster report the error, since errors count against the reporting cluster."""
        node = self._plan.nodes[index]
        if self._runner.loop.time() > self._deadline or node["cluster"] == self._plan.me["cluster"]:
            self._runner.conclude(None, error, infrastructure=True)
            return
        self._runner.relay(node["token"], node["node"], {"op": "unreached", "error": error})
        self._runner.loop.set_alarm("preflight", RESEND_INTERVAL, lambda: self._report_error(index, error))

    def _name_of(self, index: int) -> str:
        return str(self._ready[index]["name"] if index in self._ready else self._plan.nodes[index]["host"])

    def _cluster_of(self, index: int) -> str:
        return str(self._plan.nodes[index]["cluster"])
