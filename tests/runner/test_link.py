"""The runner's connection to its agent."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from koalapy.runner.link import Link, Loop
from koalapy.runner.settings import Settings


def test_link_reconnected_while_a_retry_is_due_connects_once(tmp_path: Path) -> None:
    """A second connection would begin with the session of the first, and the agent hang up on it."""
    loop, file = Loop(), tmp_path / "agent.json"
    settings = SimpleNamespace(agent_file=str(file), component_name="koala-test-7.1.0", node=0)
    link = Link(loop, cast(Settings, settings), dict[str, Any], lambda message: None)
    link.connect()  # there is no file: it is tried again soon
    with socket.create_server(("127.0.0.1", 0)) as agent:
        host, port = agent.getsockname()
        file.write_text(json.dumps({"host": host, "port": port}))
        link.reconnect()
        has_passed: list[bool] = []
        loop.after("later", 0.2, lambda: has_passed.append(True))  # the retry is due before that
        while not has_passed:
            loop.turn()
        agent.setblocking(False)
        connections = []
        try:
            while True:
                connections.append(agent.accept()[0])
        except BlockingIOError:
            pass
        for connection in connections:
            connection.close()
    link.close()
    assert len(connections) == 1
