"""Before a program starts: every node proves that it can open a connection to every other one of its gang."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice, product

from koalapy.runner.link import Loop
from koalapy.runner.networks import own_networks
from koalapy.runner.parameters import rank_ports
from koalapy.runner.plan import PLAIN, Plan
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from koalapy.runner.plan import Node

CONNECT_TIMEOUT = 3.0
REPLY_TIMEOUT = 15.0
"""Seconds for the reply of a node that was reached: one that is busy, or stands still for a while, is late with it."""
MAX_CONCURRENT_PROBES = 128
"""Connections that are tried at the same time: a process may have so many files open."""
MAX_REPLY_SIZE = 128
MAX_PEERS = 256
"""Connections of one listener: who probes leaves as soon as it has the reply, so that the oldest makes room."""


def socket_for(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


class ProbeListener:
    """A port at this node's address. Who connects is sent this listener's nonce, and the address it came from."""

    def __init__(
        self, loop: Loop, name: str, host: str, ports: tuple[int, int] | None, max_peers: int = MAX_PEERS
    ) -> None:
        """``ports`` are the first and last to choose from. Raises ``Failure``."""
        self._loop, self._max_peers = loop, max_peers
        self._listener = socket_for(host)
        self._peers: dict[int, socket.socket] = {}
        self.nonce = os.urandom(8).hex()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            try:
                self._listener.bind((host, port))
                self._listener.listen(1024)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    self._listener.close()
                    where = f"a port of {first}-{last}" if ports else "a port"
                    raise Failure(f"node {name} cannot listen on {where} of {host}: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for number in list(self._peers):
            self._disconnect(number)
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _accept(self, _events: int) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError:  # gone again
            return
        peer.setblocking(False)
        if len(self._peers) >= self._max_peers:
            self._disconnect(next(iter(self._peers)))
        self._peers[peer.fileno()] = peer
        self._loop.watch(peer.fileno(), lambda _: self._disconnect(peer.fileno()))
        try:
            peer.send(f"{self.nonce} {address[0]}\n".encode())
        except OSError:
            self._disconnect(peer.fileno())

    def _disconnect(self, number: int) -> None:
        self._loop.forget(number)
        self._peers.pop(number).close()


class ProbeRound:
    """Probes of many listeners; ``done`` gets the reasons why some could not be reached, by their number."""

    def __init__(
        self, loop: Loop, host: str, listeners: dict[int, tuple[str, int, str]], done: Callable[[dict[int, str]], None]
    ) -> None:
        """``listeners`` are (host, port, nonce) by number; all connections come from ``host``."""
        self._loop, self._host, self._listeners, self._done = loop, host, listeners, done
        self._next = list(listeners)[::-1]
        self._open: dict[int, tuple[socket.socket, bytes]] = {}
        self._failures: dict[int, str] = {}

    def start(self) -> None:
        self._probe_next()

    def close(self) -> None:
        self._next.clear()
        for number in list(self._open):
            self._disconnect(number)

    def _probe_next(self) -> None:
        while self._next and len(self._open) < MAX_CONCURRENT_PROBES:
            self._probe(self._next.pop())
        if not self._open:
            self._done(self._failures)

    def _probe(self, number: int) -> None:
        host, port, _ = self._listeners[number]
        connection = socket_for(host)
        # It ends at once, so that the port is not kept busy for a minute: ranks may want it next.
        linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        try:
            connection.bind((self._host, 0))  # as Open MPI does
            code = connection.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._failures[number] = os.strerror(code).lower()
            return
        self._open[number] = connection, b""
        self._loop.watch(connection.fileno(), lambda _: self._connected(number), selectors.EVENT_WRITE)
        self._loop.after(f"probe-{number}", CONNECT_TIMEOUT, lambda: self._finish(number, "timed out"))

    def _connected(self, number: int) -> None:
        connection, _ = self._open[number]
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._finish(number, os.strerror(code).lower())
        else:
            self._loop.after(f"probe-{number}", REPLY_TIMEOUT, lambda: self._finish(number, "no reply"))
            self._loop.watch(connection.fileno(), lambda _: self._read_reply(number))

    def _read_reply(self, number: int) -> None:
        connection, reply = self._open[number]
        try:
            data = connection.recv(MAX_REPLY_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(number, (error.strerror or "connection lost").lower())
            return
        reply += data
        self._open[number] = connection, reply
        if not data or b"\n" in reply or len(reply) >= MAX_REPLY_SIZE:
            self._finish(number, self._error_in(reply, self._listeners[number][2]))

    def _error_in(self, reply: bytes, nonce: str) -> str:
        answered, _, seen = reply.decode("ascii", "replace").rstrip("\n").partition(" ")
        if answered != nonce:
            return "something else answers there"
        return "" if seen == self._host else f"it is seen there as {seen}, and Open MPI cannot cross such a translation"

    def _finish(self, number: int, reason: str) -> None:
        if reason:
            self._failures[number] = reason
        self._disconnect(number)
        self._probe_next()

    def _disconnect(self, number: int) -> None:
        connection, _ = self._open.pop(number)
        self._loop.cancel(f"probe-{number}")
        self._loop.forget(connection.fileno())
        connection.close()


MAX_ROUTES = 6
"""That are tried when nodes do not reach each other: each takes seconds when it fails."""
RESEND_INTERVAL = 2.0
READY_TIMEOUT = 30.0
CANNOT_REACH = "cannot reach node"
"""Part of every error that says two nodes do not reach each other: by it a network is told from other faults."""
BLAME_TIMEOUT = 10.0
"""Seconds for a node to report an error of its cluster; then the head node does."""


def is_sound(payload: dict[str, Any], nodes: int) -> bool:
    """Whether what a node says of itself, or of those that it did not reach, has the shape it must have.

    It may come from another site, and is worked with outside of what deals with relays.
    """
    try:
        if payload["op"] == "ready":
            networks, addresses = [n for n, _ in payload["choices"]], [a for _, a in payload["choices"]]
            texts = [payload["word"], payload["name"], *networks, *addresses]
            plain = _are_texts(texts) and all(map(PLAIN.fullmatch, addresses))
            return plain and isinstance(payload["series"], int) and payload["port"] in range(1, 65536)
        failures = payload["failures"]
        return all(place in range(nodes) for place, _ in failures) and _are_texts([reason for _, reason in failures])
    except (KeyError, TypeError, ValueError):
        return False


def _are_texts(found: list[Any]) -> bool:
    return all(isinstance(text, str) for text in found)


class Prober:
    """A node's own part: it listens, and probes all others when the head node says where they are."""

    def __init__(
        self, runner: Node, plan: Plan, series: int, send: Callable[[dict[str, Any]], None], route: int = 0
    ) -> None:
        """``route`` counts the routes that were tried before this one."""
        self._runner, self._plan, self._send, self.route = runner, plan, send, route
        ports = rank_ports(runner.environment)
        self._listener = ProbeListener(runner.loop, runner.settings.name, plan.me["host"], ports)
        self._probes: ProbeRound | None = None
        self._result: dict[str, Any] | None = None
        self.ready: dict[str, Any] = {
            "op": "ready",
            "index": plan.index,
            "name": runner.settings.name,
            "series": series,
            "port": self._listener.port,
            "word": self._listener.nonce,
            "way": route,
            "choices": own_choices(plan, runner.environment),
            "host_name": socket.gethostname().partition(".")[0],
        }

    def send_ready(self) -> None:
        """And again until the head node answers: relays may get lost."""
        self._runner.loop.after("ready", RESEND_INTERVAL, self.send_ready)
        self._send(self.ready)

    def probe(self, listeners: list[tuple[int, str]]) -> None:
        """Probe all listeners, given as (port, nonce) in the order of the plan's nodes, and say how that went."""
        self._runner.loop.cancel("ready")
        if self._result is not None:
            self._send(self._result)
        elif self._probes is None:
            if len(listeners) != len(self._plan.nodes) or not all(
                isinstance(port, int) and 0 < port < 65536 and isinstance(nonce, str) for port, nonce in listeners
            ):
                raise ValueError("the listeners of a pre-flight are not those of the plan's nodes")
            hosts = [node["host"] for node in self._plan.nodes]
            places = {i: (hosts[i], port, nonce) for i, (port, nonce) in enumerate(listeners) if i != self._plan.index}
            self._probes = ProbeRound(self._runner.loop, hosts[self._plan.index], places, self._done)
            self._probes.start()

    def close(self) -> None:
        self._runner.loop.cancel("ready")
        self._listener.close()
        if self._probes is not None:
            self._probes.close()

    def _done(self, failures: dict[int, str]) -> None:
        report = {"op": "reached", "index": self._plan.index, "way": self.route}
        self._result = {**report, "failures": sorted(failures.items())}
        self._send(self._result)


class Preflight:
    """The head node's part: it sends all listeners to all nodes, and learns who cannot reach whom.

    Where they do not reach each other by the addresses they are known by, other networks that they have are tried.
    """

    def __init__(
        self, runner: Node, plan: Plan, series: int, over: Callable[[], None], moving: Callable[[], None]
    ) -> None:
        """``over`` is called once all have reached all; ``moving`` before that, when the nodes' addresses change."""
        self._runner, self._plan, self._over, self._moving = runner, plan, over, moving
        self._series, self._route = series, 0
        self._routes: list[tuple[list[str], list[str]]] = []
        """Networks and addresses of the routes that have not been tried."""
        self._error = ""
        """Why the first route was none, and whose node tells that."""
        self._reporter = 0
        self._ready: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, list[tuple[int, str]]] = {}
        self.namesakes: dict[int, str] = {}
        """Of each node that shares its host name with another, why that must not be; known when all are ready."""
        self._prober = Prober(runner, plan, series, self.receive)
        self._deadline = self._runner.loop.time() + READY_TIMEOUT

    def start(self) -> None:
        self._wait()
        self.receive(self._prober.ready)

    def receive(self, payload: dict[str, Any]) -> None:
        """A node listens, or has probed all others."""
        index = payload["index"]
        if payload["way"] != self._route or not is_sound(payload, len(self._plan.nodes)):
            return
        if payload["op"] == "reached":
            self._failures[index] = payload["failures"]
            if len(self._failures) == len(self._plan.nodes):
                self._settle()
        elif index not in self._ready:
            self._ready[index] = payload
            if len(self._ready) == len(self._plan.nodes):
                self._compare()
                self._send_probes()

    def close(self) -> None:
        self._runner.loop.cancel("preflight")
        self._prober.close()

    def _wait(self) -> None:
        """Until everybody has answered; those that have not are asked again."""
        if self._runner.loop.time() > self._deadline:
            missing = next(i for i in range(len(self._plan.nodes)) if i not in self._failures)
            self._runner.conclude(
                None, f"node {self._name(missing)} did not get ready within {READY_TIMEOUT:g} s", infrastructure=True
            )
            return
        self._runner.loop.after("preflight", RESEND_INTERVAL, self._resend)

    def _resend(self) -> None:
        if len(self._ready) == len(self._plan.nodes):
            self._send_probes()
        elif self._route:
            self._send_moves()
        self._wait()

    def _send_probes(self) -> None:
        listeners = [(self._ready[i]["port"], self._ready[i]["word"]) for i in range(len(self._plan.nodes))]
        for index, node in enumerate(self._plan.nodes):
            if index in self._failures:
                continue
            if index == self._plan.index:
                self._prober.probe(listeners)
            else:
                self._runner.relay(node["token"], node["node"], {"op": "probe", "way": self._route, "doors": listeners})

    def _compare(self) -> None:
        """One job needs one series on all its nodes."""
        own = self._ready[self._plan.index]
        for index, other in self._ready.items():
            if other["series"] != own["series"]:
                clusters = " and ".join(f"clusters.{self._cluster(i)}.mpi" for i in (self._plan.index, index))
                raise Failure(
                    f"node {own['name']} has Open MPI {own['series']}, node {other['name']} has {other['series']}: "
                    f"one job needs the same series everywhere, see {clusters}"
                )
        called: dict[str, list[int]] = {}
        for index, other in self._ready.items():
            called.setdefault(other["host_name"], []).append(index)
        for name, indices in called.items():
            one, *others = (f"{self._name(i)} of {self._cluster(i)}" for i in indices)
            if others:
                self.namesakes |= dict.fromkeys(indices, f"nodes {one} and {others[0]} have the same host name, {name}")

    def _settle(self) -> None:
        failed = [(i, int(j), why) for i, found in sorted(self._failures.items()) for j, why in found]
        if not failed:
            self.close()
            self._over()
            return
        if not self._error:
            self._explain(failed)
            self._routes = other_routes(self._plan, {i: ready["choices"] for i, ready in self._ready.items()})[::-1]
        if self._routes:
            self._move(*self._routes.pop())
        else:
            self._deadline = self._runner.loop.time() + BLAME_TIMEOUT
            self._blame(self._reporter, self._error)

    def _explain(self, failed: list[tuple[int, int, str]]) -> None:
        """Keep the error of the first route: it is by the addresses that people know."""
        culprit = self._culprit([(i, j) for i, j, _ in failed])
        at = {i for i, n in enumerate(self._plan.nodes) if n["cluster"] == culprit}
        source, target, why = min(failed, key=lambda f: (f[1] not in at, f[0] not in at))
        node, port = self._plan.nodes[target], self._ready[target]["port"]
        self._error = (
            f"node {self._name(source)} {CANNOT_REACH} {self._name(target)} at {node['host']}:{port} ({why}): "
            f"name a network that both have in clusters.{node['cluster']}.mpi.interface, "
            f"and ports that are open between them in clusters.{node['cluster']}.mpi.ports"
        )
        self._reporter = target if target in at else source

    def _move(self, networks: list[str], hosts: list[str]) -> None:
        if not self._route:
            self._moving()
        self._prober.close()
        self._route += 1
        self._error += f"; tried too: {', '.join(networks)}"
        self._plan.move(hosts)
        self._ready, self._failures = {}, {}
        self._deadline = self._runner.loop.time() + READY_TIMEOUT
        self._prober = Prober(self._runner, self._plan, self._series, self.receive, self._route)
        self._send_moves()
        self.receive(self._prober.ready)

    def _send_moves(self) -> None:
        hosts = [node["host"] for node in self._plan.nodes]
        for index, node in enumerate(self._plan.nodes):
            if index not in self._ready and index != self._plan.index:
                self._runner.relay(node["token"], node["node"], {"op": "move", "way": self._route, "hosts": hosts})

    def _culprit(self, pairs: list[tuple[int, int]]) -> str:
        """The cluster with most of the failing pairs; if in doubt not the head node's, which has most of the nodes."""
        counts: Counter[str] = Counter()
        for pair in pairs:
            counts.update(self._cluster(i) for i in pair)
        return max(counts, key=lambda c: (counts[c], c != self._plan.head["cluster"]))

    def _blame(self, index: int, error: str) -> None:
        """Have a node of the cluster at fault report it, since the cluster that reports an error is charged with it."""
        node = self._plan.nodes[index]
        if self._runner.loop.time() > self._deadline or node["cluster"] == self._plan.me["cluster"]:
            self._runner.conclude(None, error, infrastructure=True)
            return
        self._runner.relay(node["token"], node["node"], {"op": "unreached", "error": error})
        self._runner.loop.after("preflight", RESEND_INTERVAL, lambda: self._blame(index, error))

    def _name(self, index: int) -> str:
        return str(self._ready[index]["name"] if index in self._ready else self._plan.nodes[index]["host"])

    def _cluster(self, index: int) -> str:
        return str(self._plan.nodes[index]["cluster"])


def own_choices(plan: Plan, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(network, address) of all this node may be known by; empty when there is nothing to choose.

    That is so where the profile says it, within one cluster, and on loopback.
    """
    host = plan.me["host"]
    several = len({node["cluster"] for node in plan.nodes}) > 1
    if environment.get("KOALA_MPI_INTERFACE") or host.startswith("127.") or not several:
        return []
    return own_networks()


def other_routes(plan: Plan, choices: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[list[str], list[str]]]:
    """Other routes, as (networks, addresses of the plan's nodes): all nodes of a cluster by one network.

    ``choices`` are those of each node. Routes by one network that all have come first.
    """
    clusters: dict[str, list[int]] = {}
    for index, node in enumerate(plan.nodes):
        clusters.setdefault(node["cluster"], []).append(index)
    by_node = {index: {known[0]: known[1] for known in found} for index, found in choices.items()}
    common = {
        cluster: [n for n in by_node[nodes[0]] if all(n in by_node[index] for index in nodes)] or [""]
        for cluster, nodes in clusters.items()
    }
    routes = sorted(product(*common.values()), key=lambda networks: len({*networks}))
    found = (_hosts(plan, dict(zip(clusters, networks)), by_node) for networks in routes)
    current = [node["host"] for node in plan.nodes]
    return list(islice((route for route in found if route[1] != current), MAX_ROUTES))


def _hosts(
    plan: Plan, networks: Mapping[str, str], by_node: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Where a cluster has no choice its nodes keep their addresses."""
    hosts = [by_node[index].get(networks[node["cluster"]], node["host"]) for index, node in enumerate(plan.nodes)]
    return sorted({*networks.values()} - {""}), hosts
