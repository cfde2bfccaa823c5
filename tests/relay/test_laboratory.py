"""Relays over two sites behind firewalls, in network namespaces; ``tests/runner/test_relayed.py`` runs programs."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.grid.namespaces import LABORATORY, laboratory
from tests.needs import needs
from tests.relay.processes import RelayProcesses, running

pytestmark = [pytest.mark.processes, needs(LABORATORY)]

ECHO_SERVER = """import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
peer, _ = listener.accept()
while data := peer.recv(1 << 20):
    peer.sendall(data)
"""
ECHO_CLIENT = """import hashlib, json, os, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30)
sent, received = hashlib.sha256(), hashlib.sha256()
for _ in range(32):
    data = os.urandom(1 << 18)
    sent.update(data)
    connection.sendall(data)
    left = len(data)
    while left:
        piece = connection.recv(left)
        received.update(piece)
        left -= len(piece)
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b""
print(json.dumps([sent.hexdigest(), received.hexdigest()]))
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
PYTHON = "/usr/bin/python3"


def run_on(relays: RelayProcesses, host: str, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*relays.layout.command(host), PYTHON, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"same_addresses": True}, {"heads_meet": True}], ids=str)
def test_stream_between_firewalled_sites_arrives_unchanged(tmp_path: Path, options: dict[str, bool]) -> None:
    with laboratory(tmp_path, **options) as lab, running(tmp_path, lab.layout()) as relays:
        port = relays.layout.ports(2)[0]
        far_head = relays.layout.head_addresses["south"]
        if not lab.same_addresses:
            assert run_on(relays, "node-0", REACH, lab.node_address(2), port).returncode != 0
            assert run_on(relays, "node-0", REACH, far_head, 7001).returncode != 0
        command = [*relays.layout.command("node-2"), PYTHON, "-c", ECHO_SERVER, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            echoed = run_on(relays, "node-0", ECHO_CLIENT, port)
            assert echoed.returncode == 0, echoed.stderr
            assert server.wait(60) == 0
        sent, received = json.loads(echoed.stdout)
        assert sent == received != hashlib.sha256().hexdigest()
        used_hub = relays.controls["hub"].metric("koala_relay_streams_total")
        assert used_hub == (0 if options.get("heads_meet") else 1)


def test_node_from_outside_the_node_may_not_use_its_listener(tmp_path: Path) -> None:
    with laboratory(tmp_path) as lab, running(tmp_path, lab.layout()) as relays:
        # Node 2 listens at its own address for the control port of mpirun on node 0.
        first = relays.layout.extra_listeners[2][0][1]
        read = "c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 9); print(c.recv(1))"
        reached = run_on(relays, "node-3", f"import socket, sys; {read}", lab.node_address(2), first)
        assert "ConnectionResetError" in reached.stderr
        event = relays.read_event(2)
        assert event["why"] == f"another machine may not use port {first} of the relay"
