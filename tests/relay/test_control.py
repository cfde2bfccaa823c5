"""The control socket of a relay: state, changes, metrics and events."""

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.relay.control import ControlServer
from tests.relay.links import ATTEMPT, CLUSTERS, Links, head_key


class Control:
    """The control socket of a hub, and one connection to it."""

    def __init__(self, links: Links, folder: Path) -> None:
        self.links, self.path = links, folder / "hub.sock"
        self.server = ControlServer(links.loop, self.path, links.hub)
        self.connection = self.connect()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        connection.setblocking(False)
        return connection

    def send(self, data: bytes, connection: socket.socket | None = None) -> dict[str, Any]:
        """Send a line, and return the next line of the relay."""
        used = connection or self.connection
        used.send(data + b"\n")
        return self.receive(used)

    def receive(self, connection: socket.socket) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            line += self.links.read(connection, 1)
        return dict(json.loads(line))

    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self.send(json.dumps({"t": kind, "id": 1, **fields}).encode())

    def state(self, **changes: Any) -> dict[str, Any]:
        heads = {cluster: head_key(cluster).hex() for cluster in CLUSTERS}
        return self.request("state", **{"heads": heads, "attempts": [self.links.entry()], **changes})


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    links = Links(tmp_path)
    made = Control(links, tmp_path)
    yield made
    made.connection.close()
    made.server.close()
    links.close()


def test_control_socket_is_private_and_removed_at_the_end(control: Control) -> None:
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
    control.server.close()
    assert not control.path.exists()


def test_change_before_state_is_refused(control: Control) -> None:
    answer = control.request("remove", attempt=ATTEMPT)
    assert (answer["t"], answer["id"]) == ("error", 1)
    assert "before the state" in answer["why"]
    assert ATTEMPT in control.links.hub.attempts


def test_state_with_other_attempts_replaces_the_list(control: Control) -> None:
    removed = control.state(attempts=[control.links.entry(token="9.1.new")])
    assert (removed["t"], removed["attempt"]) == ("removed", ATTEMPT)
    assert control.receive(control.connection) == {"t": "done", "lost": {}, "id": 1}
    assert list(control.links.hub.attempts) == ["9.1.new"]


def test_removed_attempt_is_reported_with_its_totals(control: Control) -> None:
    control.state()
    links = control.links
    with links.program(2) as listener, links.dial(0, 2) as client:
        client.send(b"ping")
        with links.accept(listener) as server:
            links.read(server, 4)
            event = control.request("remove", attempt=ATTEMPT)
    assert (event["t"], event["attempt"], event["streams"]) == ("removed", ATTEMPT, 1)
    moved = {(source, target): count for source, target, count in event["bytes"]}
    assert moved["north", "south"] > 4
    assert control.receive(control.connection) == {"t": "done", "id": 1}


def test_lost_attempt_is_repeated_in_the_answer_to_a_later_state(control: Control) -> None:
    control.links.hub.lost[ATTEMPT] = {"why": "it is lost", "via": ("head", "south")}
    assert control.state()["lost"] == {ATTEMPT: {"why": "it is lost", "via": ["head", "south"]}}


def test_withdrawn_key_ends_the_head(control: Control) -> None:
    control.state(heads={"north": head_key("north").hex()})
    control.links.turn_until(lambda: ("head", "south") not in control.links.hub.children)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not of this protocol"),
        (b'{"t":"shutdown"}', "before the state"),
        (b'{"t":"state"}', "list of objects"),
        (b'{"t":"state","attempts":[{}],"heads":{}}', "incomplete"),
        (b'{"t":"state","attempts":[]}', "keys of the heads"),
        (b'{"t":"state","attempts":[],"heads":{"north":"xyz"}}', "non-hexadecimal"),
    ],
    ids=repr,
)
def test_invalid_request_is_answered_with_an_error(control: Control, line: bytes, reason: str) -> None:
    answer = control.send(line)
    assert answer["t"] == "error"
    assert reason in answer["why"]
    assert ATTEMPT in control.links.hub.attempts


def test_describe_needs_no_state_and_changes_nothing(control: Control) -> None:
    answer = control.request("describe")
    assert (answer["t"], answer["lost"]) == ("done", {})
    assert answer["files"]["needed"] > 2 * control.links.hub.limits.streams
    assert answer["files"]["allowed"] > 0
    assert ATTEMPT in control.links.hub.attempts
    assert "before the state" in control.request("remove", attempt=ATTEMPT)["why"]


def test_metrics_name_streams_bytes_and_refusals(control: Control) -> None:
    links = control.links
    with links.program(2) as listener, links.dial(0, 2) as client:
        client.send(b"ping")
        with links.accept(listener) as server:
            links.read(server, 4)
            links.hub.refusals["port"] = 3
            text = control.request("metrics")["text"]
    lines = text.splitlines()
    assert "koala_relay_streams 1.0" in lines
    assert 'koala_relay_refused_total{reason="port"} 3.0' in lines
    assert f'koala_relay_attempt_streams{{attempt="{ATTEMPT}"}} 1.0' in lines
    assert any(
        line.startswith("koala_relay_attempt_bytes_total") and 'from="north",to="south"' in line for line in lines
    )
    assert text.count("# TYPE") == text.count("# HELP") == 10


def test_socket_of_an_ended_process_is_replaced(control: Control, tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    ControlServer(control.links.loop, path, control.links.hub).close()


def test_file_at_the_path_is_not_replaced(control: Control, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(OSError, match="in use"):
        ControlServer(control.links.loop, path, control.links.hub)
    assert path.read_text() == "kept"
