"""The lock by which only one agent uses a directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from koalapy.agent.main import lock_directory
from koalapy.model.errors import ConflictError


def test_lock_of_used_directory_names_its_holder(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        content = (tmp_path / "agent.lock").read_text()
        with pytest.raises(ConflictError) as rejection, lock_directory(tmp_path):
            pytest.fail("the lock was not held")
        assert f"process {os.getpid()} on {socket.gethostname()}, since 2" in rejection.value.message
        assert str(tmp_path) in rejection.value.message
        assert (tmp_path / "agent.lock").read_text() == content
        assert os.listdir(tmp_path) == ["agent.lock"]
    with lock_directory(tmp_path):
        assert json.loads((tmp_path / "agent.lock").read_text())["pid"] == os.getpid()


@pytest.mark.processes
def test_lock_of_killed_process_is_released(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from koalapy.agent.main import lock_directory\n"
        f"with lock_directory(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with lock_directory(tmp_path):
        pass


@pytest.mark.processes
def test_lock_with_timeout_waits_for_ending_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from koalapy.agent.main import lock_directory\n"
        f"with lock_directory(Path({str(tmp_path)!r})): print(flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdin is not None
    first.stdout.readline()
    with pytest.raises(ConflictError), lock_directory(tmp_path):
        pass
    first.stdin.close()
    with lock_directory(tmp_path, 30.0):
        assert first.wait(30) == 0
    first.stdout.close()


def test_lock_file_with_torn_content_is_used(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        (tmp_path / "agent.lock").write_text('{"pid": 1')
        with pytest.raises(ConflictError, match="an agent that is starting"), lock_directory(tmp_path):
            pass


def test_lock_on_full_disk_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed agent must be able to restart while the disk is full."""

    def raise_no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", raise_no_space)
    with (
        lock_directory(tmp_path),
        pytest.raises(ConflictError, match="an agent that is starting"),
        lock_directory(tmp_path),
    ):
        pass
