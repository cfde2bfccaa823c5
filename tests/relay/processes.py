"""A hub, heads and nodes as processes, controlled as the daemon, the agents and the runners do."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from koalapy.relay.attempts import AttemptPlan, add_node_keys
from tests.certificates import CertificateAuthority
from tests.relay.links import ATTEMPT_KEY, head_key, node_key

pytestmark = pytest.mark.processes  # for tests of ring 2 only

RELAY_NODE = Path(__file__).parents[2] / "koalapy" / "runner" / "relay_node.py"
TIMEOUT_S = 60.0


class ControlClient:
    """A connection to a relay's control socket."""

    def __init__(self, path: Path, deadline: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._socket.settimeout(TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a request, and return its answer. Keep the events that come before it."""
        self._count += 1
        self._socket.sendall(json.dumps({"t": kind, "id": self._count, **fields}).encode() + b"\n")
        while True:
            message = json.loads(self._file.readline())
            if message.get("id") == self._count:
                return dict(message)
            self.events.append(message)

    def wait_for(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first event that matches."""
        while True:
            for event in self.events:
                if matches(event):
                    return event
            self.events.append(json.loads(self._file.readline()))

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        text = self.request("metrics")["text"]
        return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@dataclass
class Layout:
    """Where the relays run: addresses, ports, and how to start a process of a host."""

    clusters: Sequence[str]
    """The cluster of each node."""
    hub: str = "127.0.0.1"
    hub_listen: str = ""
    head_addresses: dict[str, str] = field(default_factory=dict)
    peer_addresses: dict[str, str] = field(default_factory=dict)
    """Addresses at which heads reach each other; empty: only by the hub."""
    programs: Sequence[str] = ()
    """Address of each node's programs for its relay."""
    listeners: Sequence[str] = ()
    """Address of each node's relay for its programs."""
    base: int = 21_000
    ports_per_node: int = 8
    relayed: Callable[[int, int], bool] = lambda source, target: source != target
    """Whether a node reaches another by the relay."""
    extra_targets: dict[int, list[list[Any]]] = field(default_factory=dict)
    """Further targets of a node, as (first, last, address, source)."""
    extra_listeners: dict[int, list[list[Any]]] = field(default_factory=dict)
    """Further listeners of a node, as (address, first, last, node)."""
    fixed_ports: tuple[int, int, int] | None = None
    """Ports of the hub, of heads for nodes, and of heads for each other; None: free ones of loopback."""
    node_python: str = sys.executable
    command: Callable[[str], list[str]] = lambda host: []
    """Prefix of the command of a process on the host ``hub``, ``head-CLUSTER`` or ``node-INDEX``."""

    def ports(self, node: int) -> tuple[int, int]:
        first = self.base + node * self.ports_per_node
        return first, first + self.ports_per_node - 1


class RelayProcesses:
    """The relays of one attempt."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        tls: bool = True,
        attempt: str = "7.1.k3",
        hub_options: dict[str, Any] | None = None,
        head_options: dict[str, Any] | None = None,
    ) -> None:
        self.layout, self.attempt, self._tls = layout, attempt, tls
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.controls: dict[str, ControlClient] = {}
        self.certificates: dict[str, str] = {}
        """Certificate of each head, as it tells its agent."""
        hosts = sorted({layout.hub, *layout.head_addresses.values(), *layout.peer_addresses.values()})
        self._authority = CertificateAuthority(folder / "ca")
        self._files = self._authority.issue(hosts)
        self._tls_files = {"certificate": str(self._files.certificate), "key": str(self._files.key)}
        self._hub_options, self._head_options = hub_options or {}, head_options or {}
        self.hub_port = self._choose_port(0)
        self.head_ports = {cluster: self._choose_port(1) for cluster in dict.fromkeys(layout.clusters)}
        self.peer_ports = {cluster: self._choose_port(2) for cluster in layout.peer_addresses}

    def _choose_port(self, number: int) -> int:
        if self.layout.fixed_ports is not None:
            return self.layout.fixed_ports[number]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return int(probe.getsockname()[1])

    def start(self) -> None:
        """Start all relays, install the attempt, and wait until all nodes are ready."""
        self.start_hub()
        for cluster in self.head_ports:
            self.start_head(cluster)
        for cluster in self.head_ports:
            self.controls[f"head-{cluster}"].wait_for(lambda event: event["t"] == "hub" and event["connected"])
        for index in range(len(self.layout.clusters)):
            self.start_node(index)
        for index in range(len(self.layout.clusters)):
            event = self.read_event(index)
            assert event["t"] == "ready", event

    def start_hub(self) -> None:
        listen = f"{self.layout.hub_listen or self.layout.hub}:{self.hub_port}"
        tls = {"tls": self._tls_files} if self._tls else {"without_tls": True}
        self._start_relay("hub", {"listen": listen, **tls, **self._hub_options})
        heads = {cluster: head_key(cluster).hex() for cluster in self.head_ports}
        answer = self.controls["hub"].request("state", heads=heads, attempts=[self.entry()])
        assert answer["t"] == "done", answer

    def start_head(self, cluster: str) -> None:
        values: dict[str, Any] = {
            "cluster": cluster,
            "listen": f"{self.layout.head_addresses[cluster]}:{self.head_ports[cluster]}",
            "hub": f"{self.layout.hub}:{self.hub_port}",
            **({"ca_file": str(self._authority.file), "tls": self._tls_files} if self._tls else {"without_tls": True}),
            **self._head_options,
        }
        if cluster in self.peer_ports:
            values["listen_for_heads"] = f"{self.layout.peer_addresses[cluster]}:{self.peer_ports[cluster]}"
        self._start_relay(f"head-{cluster}", values)
        control = self.controls[f"head-{cluster}"]
        answer = control.request("state", key=head_key(cluster).hex(), attempts=[self.entry(cluster)])
        assert answer["t"] == "done", answer
        self.certificates[cluster] = answer["certificate"]

    def start_node(self, index: int) -> None:
        layout = self.layout
        cluster = layout.clusters[index]
        settings = {
            "attempt": self.attempt,
            "node": index,
            "key": self.node_key(index).hex(),
            "head": [layout.head_addresses[cluster], self.head_ports[cluster]],
            "listeners": [
                *(
                    [layout.listeners[index], *layout.ports(other), other]
                    for other in range(len(layout.clusters))
                    if other != index and layout.relayed(index, other)
                ),
                *layout.extra_listeners.get(index, []),
            ],
            "targets": [
                [*layout.ports(index), layout.programs[index], "127.0.0.1"],
                *layout.extra_targets.get(index, []),
            ],
        }
        process = self._start(f"node-{index}", ["-I", "-S", str(RELAY_NODE)], stdin=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()

    def read_event(self, index: int) -> dict[str, Any]:
        """Return the next event of a node."""
        stdout = self.processes[f"node-{index}"].stdout
        assert stdout is not None
        return dict(json.loads(stdout.readline() or b'{"t": "ended"}'))

    def entry(self, cluster: str = "") -> dict[str, Any]:
        """Return the attempt's entry for the hub, or for a cluster's head."""
        layout = self.layout
        nodes = [
            (name, [layout.ports(i), *((f, t) for f, t, _, _ in layout.extra_targets.get(i, []))])
            for i, name in enumerate(layout.clusters)
        ]
        certificate = {"certificate": self._files.certificate.read_text()} if self._tls else {}
        heads: dict[str, dict[str, Any]] = dict.fromkeys(layout.clusters, certificate)
        for name, port in self.peer_ports.items():
            heads[name] = {**certificate, "host": layout.peer_addresses[name], "port": port}
        plan = AttemptPlan(self.attempt, ATTEMPT_KEY, nodes, heads)
        if not cluster:
            return plan.hub_entry()
        keys = {i: self.node_key(i) for i, name in enumerate(layout.clusters) if name == cluster}
        return add_node_keys(plan.head_entry(cluster), keys)

    def node_key(self, node: int) -> bytes:
        return node_key(node)

    def _start_relay(self, name: str, values: dict[str, Any]) -> None:
        control = self.folder / f"{name}.sock"
        control.unlink(missing_ok=True)
        config = self.folder / f"{name}.yaml"
        config.write_text(json.dumps({"control": str(control), **values}))
        kind = name.partition("-")[0]
        self._start(name, ["-m", "koalapy.cli.main", "relay", kind, "--config", str(config)])
        self.controls[name] = ControlClient(control, time.monotonic() + TIMEOUT_S)

    def _start(self, name: str, arguments: list[str], *, stdin: bool = False) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [*self.layout.command(name), self.layout.node_python if stdin else sys.executable, *arguments],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE if stdin else log,
                stderr=log,
                cwd=RELAY_NODE.parents[2],
            )
        return self.processes[name]

    def remove_attempt(self) -> None:
        for control in self.controls.values():
            control.request("remove", attempt=self.attempt)

    def stop(self, name: str) -> None:
        """End a process and wait for it."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait(TIMEOUT_S)
        for file in (process.stdin, process.stdout):
            if file is not None:
                file.close()
        if control := self.controls.pop(name, None):
            control.close()

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)


def loopback_layout(clusters: Sequence[str] = ("north", "north", "south", "south"), **fields: Any) -> Layout:
    """Return a layout on loopback, where each node has its own addresses."""
    values: dict[str, Any] = {
        "head_addresses": dict.fromkeys(clusters, "127.0.0.1"),
        "programs": [f"127.0.2.{i + 1}" for i in range(len(clusters))],
        "listeners": [f"127.0.1.{i + 1}" for i in range(len(clusters))],
        "base": 20_000 + os.getpid() % 250 * 40,
        **fields,
    }
    return Layout(clusters, **values)


@contextlib.contextmanager
def running(folder: Path, layout: Layout, **options: Any) -> Iterator[RelayProcesses]:
    """Run relays until the end of the block."""
    relays = RelayProcesses(folder, layout, **options)
    try:
        relays.start()
        yield relays
    finally:
        relays.close()
