"""Relays as processes on loopback, with TLS: many streams, lost and frozen relays, and missing file descriptors."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.needs import OLDER_PYTHON, OLDER_PYTHONS, needs
from tests.relay.processes import RELAY_NODE, TIMEOUT_S, RelayProcesses, loopback_layout, running

pytestmark = pytest.mark.processes

STREAMS = 4096
FREEZE_S = 5.0


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[RelayProcesses]:
    with running(tmp_path, loopback_layout()) as made:
        yield made


@contextmanager
def echo_server(relays: RelayProcesses, node: int) -> Iterator[None]:
    """Echo bytes at the first port of a node, in a separate process."""
    layout = relays.layout
    listener = socket.create_server((layout.programs[node], layout.ports(node)[0]), backlog=4096)
    pid = os.fork()
    if pid == 0:
        try:
            _echo(listener)
        finally:
            os._exit(0)
    listener.close()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _echo(listener: socket.socket) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    poll = select.epoll()
    poll.register(listener.fileno(), select.EPOLLIN)
    peers: dict[int, socket.socket] = {}
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                peer, _ = listener.accept()
                peers[peer.fileno()] = peer
                poll.register(peer.fileno(), select.EPOLLIN)
                continue
            try:
                data = peers[number].recv(1 << 20)
            except OSError:
                data = b""
            if data:
                peers[number].sendall(data)
            else:
                poll.unregister(number)
                peers.pop(number).close()


def dial(relays: RelayProcesses, source: int, target: int) -> socket.socket:
    layout = relays.layout
    connection = socket.create_connection((layout.listeners[source], layout.ports(target)[0]), TIMEOUT_S)
    connection.settimeout(TIMEOUT_S)
    return connection


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send bytes, and return as many from the echo."""
    connection.sendall(data)
    received = bytearray()
    while len(received) < len(data):
        piece = connection.recv(len(data) - len(received))
        if not piece:
            raise ConnectionResetError
        received += piece
    return bytes(received)


def expect_reset(relays: RelayProcesses, source: int, target: int) -> None:
    """Check that a new stream is refused."""
    with pytest.raises(ConnectionResetError), dial(relays, source, target) as stream:
        exchange(stream, b"refused")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def count_files(relays: RelayProcesses, name: str) -> int:
    return len(os.listdir(f"/proc/{relays.processes[name].pid}/fd"))


@contextmanager
def more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.nightly
def test_many_streams_at_once_pass_their_bytes_and_leave_nothing(relays: RelayProcesses) -> None:
    names = list(relays.processes)
    before = {name: count_files(relays, name) for name in names}
    with more_files(), ExitStack() as stack:
        for node in (2, 3):
            stack.enter_context(echo_server(relays, node))
        streams = [stack.enter_context(dial(relays, number % 2, 2 + number // 2 % 2)) for number in range(STREAMS)]
        for number, stream in enumerate(streams):
            stream.sendall(b"%8d" % number)
        for number, stream in enumerate(streams):
            assert stream.recv(8, socket.MSG_WAITALL) == b"%8d" % number
        assert relays.controls["hub"].metric("koala_relay_streams") == STREAMS
        expect_reset(relays, 0, 2)
        assert exchange(streams[0], b"still") == b"still"
        relays.remove_attempt()
        with pytest.raises(ConnectionResetError):
            exchange(streams[-1], b"ended")
    removed = relays.controls["hub"].wait_for(lambda event: event["t"] == "removed")
    assert removed["streams"] == STREAMS
    relays_with_streams = [name for name in names if not name.startswith("node")]
    for name in relays_with_streams:
        # Two heads or two nodes are no longer connected.
        wait_until(lambda name=name: count_files(relays, name) <= before[name] + 2)
    for index in range(4):
        assert relays.processes[f"node-{index}"].wait(TIMEOUT_S) == 0


def _exchange_in_pieces(stream: socket.socket, data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1 << 18):
        yield exchange(stream, data[start : start + (1 << 18)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hub", "head-south", "node-2"])
def test_relay_frozen_for_seconds_resumes_and_ends_no_stream(relays: RelayProcesses, name: str) -> None:
    frozen = relays.processes[name]
    with echo_server(relays, 2), dial(relays, 0, 2) as stream:
        assert exchange(stream, b"before") == b"before"
        frozen.send_signal(signal.SIGSTOP)
        stream.sendall(b"during")
        time.sleep(FREEZE_S)
        frozen.send_signal(signal.SIGCONT)
        assert stream.recv(6, socket.MSG_WAITALL) == b"during"
    for control in relays.controls.values():
        control.request("metrics")  # the answer comes after all events
        assert not [event for event in control.events if event["t"] == "lost"]


def test_restarted_hub_takes_the_list_and_serves_new_streams(relays: RelayProcesses) -> None:
    for control in relays.controls.values():
        control.events.clear()
    relays.stop("hub")
    relays.start_hub()
    for cluster in ("north", "south"):
        relays.controls[f"head-{cluster}"].wait_for(lambda event: event == {"t": "hub", "connected": True})
    with echo_server(relays, 2), dial(relays, 0, 2) as stream:
        assert exchange(stream, b"again") == b"again"


def test_relay_without_file_descriptors_refuses_new_streams_and_keeps_old_ones(relays: RelayProcesses) -> None:
    hub = relays.processes["hub"].pid
    with echo_server(relays, 2), dial(relays, 0, 2) as stream:
        assert exchange(stream, b"before") == b"before"
        _, hard = resource.prlimit(hub, resource.RLIMIT_NOFILE)
        resource.prlimit(hub, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{hub}/fd")), hard))
        expect_reset(relays, 1, 2)
        assert exchange(stream, b"still") == b"still"
        assert "Too many open files" in (relays.folder / "hub.log").read_text()
        resource.prlimit(hub, resource.RLIMIT_NOFILE, (hard, hard))
        with dial(relays, 1, 2) as accepted:
            assert exchange(accepted, b"accepted") == b"accepted"


def test_heads_tell_their_agents_the_certificate_that_others_pin(relays: RelayProcesses) -> None:
    entry = relays.entry("north")
    assert entry["peers"]["south"]["certificate"].strip() == relays.certificates["south"].strip() != ""


def test_ended_runner_ends_the_relay_of_its_node(relays: RelayProcesses) -> None:
    node = relays.processes["node-0"]
    assert node.stdin is not None
    node.stdin.close()
    assert node.wait(TIMEOUT_S) == 0
    control = relays.controls["head-north"]
    wait_until(lambda: control.metric("koala_relay_children") == 1)
    assert not [event for event in control.events if event["t"] == "lost"]


@pytest.mark.nightly
@needs(OLDER_PYTHON)
@pytest.mark.parametrize("python", ["python3.9", "python3.10"])
def test_node_relay_with_older_python_passes_bytes(tmp_path: Path, python: str) -> None:
    layout = loopback_layout(node_python=OLDER_PYTHONS[python])
    with running(tmp_path, layout) as relays, echo_server(relays, 2), dial(relays, 0, 2) as stream:
        data = os.urandom(300_000)
        assert b"".join(_exchange_in_pieces(stream, data)) == data


def test_node_with_a_low_limit_of_open_files_says_what_it_needs() -> None:
    settings = {
        "attempt": "7.1.x",
        "node": 0,
        "key": "00" * 32,
        "head": ["127.0.0.1", 1],
        "listeners": [["127.0.0.2", 20000, 20199, 1]],
        "targets": [],
    }
    process = subprocess.run(
        ["bash", "-c", f"ulimit -n 100; exec {sys.executable} {RELAY_NODE}"],
        input=json.dumps(settings) + "\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert json.loads(process.stdout) == {
        "t": "lost",
        "why": "its relay needs 264 open files and may have 100: raise the hard limit (ulimit -Hn) of jobs",
    }
    assert (process.returncode, process.stderr) == (1, "")
