"""The handover of the daemon to an agent that it starts, and the end of the agent with its daemon."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from koalapy.agent.core.handover import write_handover
from koalapy.config.settings import Settings
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

SECRETS = {
    "database": "postgresql://koala:database-password@db/koala",
    "tokens": [{"token": "the-secret-of-users", "user": "ada"}],
    "clusters": {
        "east": {"token": "the-secret-of-east"},
        "north": {"token": "the-secret-of-north", "environment": {"MODEL": "coarse"}, "start_failures": 0.5},
    },
}

AGENT = [sys.executable, "-m", "koalapy.cli.main", "agent", "north", "--embedded", "--url", "http://127.0.0.1:1"]


def test_handover_contains_own_section_and_secret_only() -> None:
    settings = Settings.model_validate(SECRETS)
    text = write_handover("north", settings, "the-own-token", 0o022)
    content = json.loads(text)
    assert (content["token"], content["umask"]) == ("the-own-token", 0o022)
    again = Settings.model_validate({"clusters": content["clusters"]})
    assert list(again.clusters) == ["east", "north"]
    assert again.clusters["north"] == replace(settings.clusters["north"], token=None, network="127.0.2")
    assert text.count(b"\n") == 1
    assert not [secret for secret in (b"password", b"the-secret-of") if secret in text]


@pytest.fixture
def handover() -> bytes:
    return write_handover("north", Settings.model_validate({"clusters": {"north": {}}}), "the-own-token", 0o022)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")}


def start_agent(tmp_path: Path, stdin: "IO[bytes] | int") -> "subprocess.Popen[bytes]":
    command = [*AGENT, "--directory", str(tmp_path / "north")]
    return subprocess.Popen(command, stdin=stdin, stderr=subprocess.DEVNULL, env=environment(), start_new_session=True)


@pytest.mark.parametrize("length", [0, 1, -1, None])
def test_agent_ends_if_its_daemon_is_gone_at_start(tmp_path: Path, handover: bytes, length: int | None) -> None:
    """The handover is empty, partial, complete but for its last byte, or complete."""
    reading, writing = os.pipe()
    os.write(writing, handover[:length])
    os.close(writing)
    with start_agent(tmp_path, reading) as agent:
        os.close(reading)
        assert agent.wait(60) in (0, -15)


def test_agent_ends_with_its_daemon(tmp_path: Path, handover: bytes) -> None:
    with start_agent(tmp_path, subprocess.PIPE) as agent:
        assert agent.stdin is not None
        agent.stdin.write(handover)
        agent.stdin.flush()
        address_file = tmp_path / "north" / "spool" / "agent.json"
        wait_until(lambda: address_file.exists() or agent.poll() is not None, "the agent to serve")
        assert agent.poll() is None
        agent.stdin.close()
        assert agent.wait(60) == 0


def test_handover_names_network_chosen_among_all_clusters() -> None:
    settings = Settings.model_validate({"clusters": {"a": {"network": "127.0.2"}, "b": {}}})
    content = json.loads(write_handover("b", settings, "the-own-token", 0o022))
    again = Settings.model_validate({"clusters": content["clusters"]})
    assert again.local_networks()["b"] == settings.local_networks()["b"] == "127.0.1"
