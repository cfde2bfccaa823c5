"""Backup of a running daemon and its restore."""

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid

pytestmark = pytest.mark.processes

ONE = {"type": "flexible", "total_size": 1}


def check_output(process: "subprocess.CompletedProcess[str]") -> str:
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_backup_of_running_daemon_restores_jobs_files_and_tokens(
    make_grid: Callable[..., EmbeddedGrid], tmp_path: Path
) -> None:
    grid = make_grid()
    backup, data = tmp_path / "backup", str(grid.directory)
    ended = grid.submit(ONE, "sh", "-c", "echo kept; echo result >out", collect=["out"])
    assert grid.wait_for_end(ended)["state"] == "succeeded"
    token = check_output(grid.run_koala("token", "create", "--user", "ada", "-q")).strip()
    gate = grid.make_gate()
    running = grid.submit(ONE, *gate.hold)
    grid.wait_for_state(running, "running")
    assert "database of" in check_output(grid.run_koala("backup", str(backup), "--data-dir", data))
    for path in (backup, *backup.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    rejected = grid.run_koala("restore", str(backup), "--data-dir", data, "--replace")
    assert (rejected.returncode, "systemctl stop" in rejected.stderr) == (4, True), rejected.stderr
    later = grid.submit(ONE, "true")
    grid.wait_for_end(later)
    gate.open()
    grid.wait_for_end(running)
    grid.stop_daemon()
    rejected = grid.run_koala("restore", str(backup), "--data-dir", data)
    assert (rejected.returncode, "--replace" in rejected.stderr) == (4, True), rejected.stderr
    restored = check_output(grid.run_koala("restore", str(backup), "--data-dir", data, "--replace"))
    assert "before-restore-" in restored
    grid.start()
    assert grid.get_job(ended)["state"] == "succeeded"
    assert grid.read_output(ended) == "kept\n"
    check_output(grid.run_koala("fetch", str(ended), "--to", str(tmp_path / "results")))
    assert [path.read_text() for path in (tmp_path / "results").rglob("out")] == ["result\n"]
    assert grid.http.get("/api/v1/whoami", headers={"Authorization": f"Bearer {token}"}).json()["user"] == "ada"
    assert grid.submit(ONE, "true") > later, "no job number is used twice"
    assert grid.wait_for_end(running)["state"] in ("succeeded", "failed"), "its agent reports the result"
    grid.wait_until_idle()
