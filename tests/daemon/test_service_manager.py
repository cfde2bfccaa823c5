"""Notifications of an agent to its service manager, with or without a daemon."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from koalapy.agent.core.handover import write_handover
from koalapy.config.settings import Settings
from tests.agent.test_handover import AGENT, environment
from tests.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    manager = ServiceManager(tmp_path)
    yield manager
    manager.close()


@pytest.mark.processes
def test_agent_notifies_service_manager_until_it_hangs(tmp_path: Path, manager: ServiceManager) -> None:
    handover = write_handover("north", Settings.model_validate({"clusters": {"north": {}}}), "own", 0o022)
    command = [*AGENT, "--directory", str(tmp_path / "north")]
    variables = environment() | manager.environment
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables) as agent:
        assert agent.stdin is not None
        agent.stdin.write(handover)
        agent.stdin.flush()
        manager.wait_for_message("READY=1")
        manager.wait_for_message("WATCHDOG=1")
        assert "STATUS=the daemon is not reachable" in manager.messages
        agent.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.pid, os.WSTOPPED)  # until then it may send a pending message
        manager.drop_messages()
        manager.check_no_message("WATCHDOG=1")
        agent.send_signal(signal.SIGCONT)
        manager.wait_for_message("WATCHDOG=1")
        agent.terminate()
        manager.wait_for_message("STOPPING=1")
        assert agent.wait(60) == 0
