"""A laboratory of network namespaces: two sites of two nodes behind firewalls, and a hub that their heads can reach.

Only root can make it. Programs run in it as an ordinary account without capabilities. No host forwards packets, and the
firewall of each head drops new connections from outside.
"""

import ctypes
import json
import os
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.needs import Need
from tests.relay.processes import Layout

ACCOUNT = 4711
"""The number of an account that owns nothing else."""
HUB_ADDRESS = "198.51.100.1"
NODE_NAMES = ("ka1", "ka2", "kb1", "kb2")
CLUSTERS = ("north", "north", "south", "south")
CONTROL_PORTS = (20_000, 20_003)
"""Ports at which mpirun listens for its daemons."""
DAEMON_PORTS = "20010-20019"
FIREWALL = """table inet site {
  chain input { type filter hook input priority 0; policy accept;
    iifname "wan" ct state new drop
  }
}
"""
HEADS_NETWORK = "192.0.2"
LAUNCH_AGENT = """import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(json.dumps({"host": sys.argv[2], "command": " ".join(sys.argv[3:])}).encode() + b"\\n")
sys.exit(int(connection.makefile().readline() or 1))
"""


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nft", "unshare", "setpriv"))):
        return False
    name = f"koala-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


LABORATORY = Need(
    "laboratory of network namespaces",
    _can_make_namespaces(),
    "apt-get install iproute2 nftables, and root with the capability SYS_ADMIN",
    "relayed links are not tested behind firewalls",
)


class Laboratory:
    """The namespaces of one test."""

    def __init__(self, folder: Path, *, same_addresses: bool = False, heads_meet: bool = False, routed: bool = False):
        """``same_addresses``: both sites use one private network. ``heads_meet``: heads reach each other.

        ``routed``: the kernel forwards packets between all nodes, for comparison.
        """
        self._folder, self._prefix = folder, f"koala{os.getpid()}"
        self._heads_meet, self.is_routed = heads_meet, routed
        self.networks = ("10.1.0", "10.1.0" if same_addresses else "10.2.0")
        self.same_addresses = same_addresses
        self.hosts = ("hub", "head-north", "head-south", *(f"node-{i}" for i in range(4)))

    def node_address(self, node: int) -> str:
        return f"{self.networks[node // 2]}.{11 + node % 2}"

    def head_address(self, cluster: str) -> str:
        return f"{self.networks[('north', 'south').index(cluster)]}.1"

    def make(self) -> None:
        for host in self.hosts:
            self._ip("netns", "add", self._name(host))
            self._ip("-n", self._name(host), "link", "set", "lo", "up")
        self._ip("-n", self._name("hub"), "addr", "add", f"{HUB_ADDRESS}/32", "dev", "lo")
        for number, cluster in enumerate(("north", "south")):
            self._make_site(number, cluster)
        if self._heads_meet:
            north, south = self._name("head-north"), self._name("head-south")
            self._ip("link", "add", "meet", "netns", north, "type", "veth", "peer", "name", "meet", "netns", south)
            for number, name in enumerate((north, south)):
                self._ip("-n", name, "addr", "add", f"{HEADS_NETWORK}.{number + 1}/30", "dev", "meet")
                self._ip("-n", name, "link", "set", "meet", "up")

    def remove(self) -> None:
        for host in self.hosts:
            for pid in self.list_processes(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "del", self._name(host)], capture_output=True)

    def command(self, host: str, account: int = ACCOUNT) -> list[str]:
        """Return the prefix of a command that runs on a host: of nodes as an account without capabilities."""
        enter = ["ip", "netns", "exec", self._name(host)]
        if not host.startswith("node-"):
            return enter
        rights = f"--reuid {account} --regid {account} --clear-groups --inh-caps=-all --bounding-set -all"
        prefix = ["setpriv", *rights.split(), "--no-new-privs", "env", f"HOME={self._folder}"]
        name = NODE_NAMES[int(host.removeprefix("node-"))]
        return [*enter, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name, *prefix]

    def list_processes(self, host: str) -> list[int]:
        """Return the process ids on a host."""
        listing = subprocess.run(["ip", "netns", "pids", self._name(host)], capture_output=True, text=True)
        return [int(pid) for pid in listing.stdout.split()]

    @contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """Put this thread, and the processes that it starts, on a host until the end of the block."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._name(host)}") as inside:
            self._set_namespace(inside.fileno())
            try:
                yield
            finally:
                self._set_namespace(before.fileno())

    def layout(self) -> Layout:
        """Return the layout of relays, with all ranks on loopback and mpirun on the first node."""
        far = range(2, 4)
        return Layout(
            CLUSTERS,
            hub=HUB_ADDRESS,
            hub_listen="0.0.0.0",
            head_addresses={cluster: self.head_address(cluster) for cluster in ("north", "south")},
            peer_addresses={"north": f"{HEADS_NETWORK}.1", "south": f"{HEADS_NETWORK}.2"} if self._heads_meet else {},
            programs=["127.0.0.1"] * 4,
            listeners=["127.0.0.1"] * 4,
            fixed_ports=(7000, 7001, 7002),
            extra_targets={0: [[*CONTROL_PORTS, self.node_address(0), ""]]},
            extra_listeners={i: [[self.node_address(i), *CONTROL_PORTS, 0]] for i in far},
            command=self.command,
            node_python="/usr/bin/python3",
        )

    def _make_site(self, number: int, cluster: str) -> None:
        head, network = self._name(f"head-{cluster}"), self.networks[number]
        outer, inner = (f"203.0.113.{4 * number + i}" for i in (1, 2))
        self._ip("-n", head, "link", "add", "br0", "type", "bridge")
        self._ip("-n", head, "addr", "add", f"{network}.1/24", "dev", "br0")
        self._ip("-n", head, "link", "set", "br0", "up")
        for index in (2 * number, 2 * number + 1):
            node, port = self._name(f"node-{index}"), f"p{index}"
            self._ip("link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", port, "netns", head)
            self._ip("-n", head, "link", "set", port, "master", "br0", "up")
            self._ip("-n", node, "addr", "add", f"{self.node_address(index)}/24", "dev", "eth0")
            self._ip("-n", node, "link", "set", "eth0", "up")
            if self.is_routed:
                self._ip("-n", node, "route", "add", "default", "via", f"{network}.1")
        hub, port = self._name("hub"), f"w{number}"
        self._ip("link", "add", "wan", "netns", head, "type", "veth", "peer", "name", port, "netns", hub)
        self._ip("-n", head, "addr", "add", f"{inner}/30", "dev", "wan")
        self._ip("-n", head, "link", "set", "wan", "up")
        self._ip("-n", hub, "addr", "add", f"{outer}/30", "dev", port)
        self._ip("-n", hub, "link", "set", port, "up")
        self._ip("-n", head, "route", "add", "default" if self.is_routed else HUB_ADDRESS, "via", outer)
        forward = int(self.is_routed)
        for name in (head, hub):
            self._run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.ip_forward={forward}")
        if self.is_routed:
            self._ip("-n", hub, "route", "add", f"{network}.0/24", "via", inner)
        else:
            self._run("ip", "netns", "exec", head, "nft", "-f", "-", text=FIREWALL)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    @staticmethod
    def _set_namespace(file: int) -> None:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")

    @staticmethod
    def _run(*command: str, text: str = "") -> None:
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)


@contextmanager
def laboratory(folder: Path, **options: bool) -> Iterator[Laboratory]:
    """Make the laboratory, and remove it with all processes in it."""
    made = Laboratory(folder, **options)
    made.remove()
    try:
        made.make()
        yield made
    finally:
        made.remove()


class Launcher:
    """Starts MPI daemons on nodes at mpirun's request, as koalapy's runners and agents do.

    It replaces mpirun's address by the node's own, at which the node's relay listens.
    """

    def __init__(self, lab: Laboratory, folder: Path) -> None:
        self._lab, self._socket = lab, socket.socket(socket.AF_UNIX)
        self._path = folder / "launch.sock"
        self._script = folder / "launch.py"
        self._script.write_text(LAUNCH_AGENT)
        self._script.chmod(0o755)
        self._log = folder
        self._socket.bind(str(self._path))
        self._path.chmod(0o666)
        self._socket.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def agent(self) -> str:
        return f"/usr/bin/python3 {self._script} {self._path}"

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._launch, args=(connection,), daemon=True).start()

    def _launch(self, connection: socket.socket) -> None:
        request = json.loads(connection.makefile().readline())
        node = NODE_NAMES.index(request["host"])
        command = request["command"].replace(f"{CONTROL_PORTS[0]}-{CONTROL_PORTS[1]}", DAEMON_PORTS)
        if node >= 2 and not self._lab.is_routed:
            command = command.replace(f"tcp://{self._lab.node_address(0)}:", f"tcp://{self._lab.node_address(node)}:")
        with (self._log / f"daemon-{node}.log").open("wb") as log:
            started = subprocess.run(
                [*self._lab.command(f"node-{node}"), "sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        with suppress(OSError):
            connection.sendall(f"{started.returncode}\n".encode())
            connection.close()


SERIES_4 = {
    "plm": "rsh",
    "plm_rsh_agent": "AGENT",
    "plm_rsh_no_tree_spawn": "1",
    "ras": "^slurm,gridengine",
    "orte_do_not_resolve": "1",
    "orte_leave_session_attached": "1",
    "oob_tcp_if_include": "eth0",
    "oob_tcp_dynamic_ipv4_ports": f"{CONTROL_PORTS[0]}-{CONTROL_PORTS[1]}",
    "oob_tcp_disable_ipv6_family": "1",
    "hwloc_base_binding_policy": "none",
}
SERIES_5 = {
    "plm": "ssh",
    "plm_ssh_agent": "AGENT",
    "plm_ssh_no_tree_spawn": "1",
    "ras": "^slurm,gridengine",
    "prte_do_not_resolve": "1",
    "prte_if_include": "eth0",
    "oob_tcp_dynamic_ipv4_ports": f"{CONTROL_PORTS[0]}-{CONTROL_PORTS[1]}",
    "oob_tcp_disable_ipv6_family": "1",
    "odls_base_max_threads": "0",
}


def rank_variables(lab: Laboratory, layout: Layout, series: int, node: int) -> dict[str, object]:
    """Return the parameters of a node's ranks.

    Series 4 passes all traffic through loopback and the relays. Series 5 passes it natively within a site, unless both
    sites have the same addresses. With routes both pass it through the interfaces.
    """
    first, last = layout.ports(node)
    values: dict[str, object] = {
        "pml": "ob1",
        "btl": "self,tcp" if series == 4 else "self,sm,tcp",
        "btl_tcp_disable_family": 6,
        "btl_tcp_port_min_v4": first,
        "btl_tcp_port_range_v4": last - first + 1,
        "mpi_yield_when_idle": 1,
    }
    if lab.is_routed:
        return {**values, "btl_tcp_if_include": "eth0"}
    if series == 4 or lab.same_addresses:
        return {**values, "btl_tcp_if_include": "lo"}
    return {
        **values,
        "btl_tcp_if_include": "eth0,lo",
        "reachable": "weighted",
        "opal_net_private_ipv4": f"{lab.networks[node // 2]}.0/24",
        "btl_tcp_bandwidth_lo": 1,
        "btl_tcp_latency_lo": 1000,
    }


def run_open_mpi(
    lab: Laboratory,
    folder: Path,
    layout: Layout,
    mpirun: str,
    series: int,
    program: Sequence[str],
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program of one rank per node. ``folder``: one that every account may read."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    os.chown(temporary, ACCOUNT, ACCOUNT)
    for index, name in enumerate(NODE_NAMES):
        values = rank_variables(lab, layout, series, index)
        lines = [f"export OMPI_MCA_{key}={shlex.quote(str(value))}\n" for key, value in values.items()]
        (folder / f"env.{name}").write_text("".join(lines))
    launcher = Launcher(lab, folder)
    flag, parameters = ("--mca", SERIES_4) if series == 4 else ("--prtemca", SERIES_5)
    words = [
        word for key, value in parameters.items() for word in (flag, key, launcher.agent if value == "AGENT" else value)
    ]
    command = [
        *lab.command("node-0"),
        *("env", f"TMPDIR={temporary}", "PATH=/usr/bin:/bin", mpirun, *words),
        *(("--leave-session-attached", "--bind-to", "none") if series == 5 else ()),
        *("--host", ",".join(f"{name}:1" for name in NODE_NAMES), "-np", "4"),
        *("/bin/sh", "-c", f'. {folder}/env.$(hostname); exec "$@"', "sh", *program),
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    finally:
        launcher.close()
