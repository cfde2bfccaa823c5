"""Access of other accounts and of jobs to a daemon, its files and its secrets."""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from koalapy.config.errors import OF_JOBS
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import IPV6, needs

pytestmark = [pytest.mark.processes, pytest.mark.grid]

SECRETS = {
    "KOALA_TOKENS": '[{"token": "the-secret-of-users", "user": "ada", "role": "admin"}]',
    "KOALA_CLUSTERS": json.dumps(
        {
            "north": {"nodes": 2, "token": "the-secret-of-north", "environment": {"MODEL": "coarse"}},
            "south": {"nodes": 2},
        }
    ),
    "PGPASSWORD": "the-secret-of-the-database",
    "TMPDIR": "/tmp",
    "LC_NUMERIC": "C",
}
REQUESTS_AND_READS = """
import sys, urllib.error, urllib.request
for path, data in [("/api/v1/clusters", None), ("/api/v1/jobs", b"{}"), ("/api/v1/jobs/1/cancel", b"")]:
    try:
        print(urllib.request.urlopen(sys.argv[1] + path, data, 30).status)
    except urllib.error.HTTPError as error:
        print(error.code)
for path in sys.argv[2:]:
    try:
        open(path).read()
        print("read", path)
    except PermissionError:
        print("refused")
"""


def read_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs(IPV6)
def test_daemon_on_ipv6_address_serves_agents_and_commands(tmp_path: Path) -> None:
    grid = EmbeddedGrid(tmp_path / "data")
    grid.host = "::1"
    try:
        assert grid.start().url.startswith("http://[::1]:")
        assert grid.run_koala("clusters").returncode == 0
    finally:
        close_grid(grid)


@pytest.mark.evidence("A1", "C6")
def test_request_of_another_account_is_rejected(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
    entry = next(grid.state.glob("koala/daemons-*/*"))
    paths = [str(path) for path in (grid.directory / "token", grid.directory / "koala.db", entry)]
    for path in paths:
        assert read_mode(Path(path)) == 0o600
        assert Path(path).stat().st_uid == os.geteuid()
    # Only root can run the requests as another account, which must not read the files either.
    root = os.geteuid() == 0
    nobody = pwd.getpwnam("nobody")
    account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if root else {}
    command = [python, "-I", "-c", REQUESTS_AND_READS, grid.url, *(paths if root else [])]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, **account)  # type: ignore[call-overload]
    assert result.stdout.split() == ["401", "401", "401", *["refused"] * (3 if root else 0)], result.stderr
    with httpx2.Client(base_url=grid.url, timeout=60.0) as stranger:
        assert stranger.post("/api/v1/jobs/1/cancel").status_code == 401


@pytest.fixture(scope="module")
def grid_with_secrets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    """Yield a grid with secrets in the environment of its daemon."""
    database = tmp_path_factory.mktemp("database") / "the-secret-of-a-path.db"
    grid = EmbeddedGrid(tmp_path_factory.mktemp("grid") / "data", KOALA_DATABASE=f"sqlite:///{database}", **SECRETS)
    grid.token = "the-secret-of-users"
    yield grid.start()
    close_grid(grid)


@pytest.mark.evidence("J1")
def test_program_environment_has_named_variables_only(grid_with_secrets: EmbeddedGrid) -> None:
    ident = grid_with_secrets.submit({"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, "env")
    assert grid_with_secrets.wait_for_end(ident)["state"] == "succeeded"
    environment = dict(line.split("=", 1) for line in grid_with_secrets.read_output(ident).splitlines())
    assert "the-secret" not in grid_with_secrets.read_output(ident)
    assert environment.keys() & SECRETS.keys() == {"TMPDIR", "LC_NUMERIC"}
    assert environment["MODEL"] == "coarse"
    assert {"HOME", "PATH", "KOALA_JOB", "KOALA_CLUSTER"} <= environment.keys()
    names = {name.removeprefix("KOALA_") for name in environment if name.startswith("KOALA_")}
    assert names <= set(OF_JOBS)


def test_local_program_environment_lacks_command_token(grid_with_secrets: EmbeddedGrid) -> None:
    result = grid_with_secrets.run_koala("local-run", "north", "1", "env")
    assert result.returncode == 0, result.stderr
    assert "PATH=" in result.stdout
    assert "KOALA_TOKEN" not in result.stdout
    assert "the-secret-of-users" not in result.stdout


def test_starting_agents_end_with_killed_daemon(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    for _ in range(4):
        grid.kill_daemon()
        assert grid.daemon is not None
        grid.launch_daemon()
        # Kill the daemon again before an agent has run its first line.
        wait_until(lambda: list_agent_clusters(grid), "an agent")
    grid.kill_daemon()
    grid.start()
    wait_until(
        lambda: sorted(list_agent_clusters(grid)) == ["north", "south"],
        f"one agent for each cluster: {list_agent_clusters(grid)}",
    )


def list_agent_clusters(grid: EmbeddedGrid) -> list[str]:
    commands = [process.command for process in grid.list_processes("agent", "--embedded")]
    return [name for command in commands for name in grid.nodes if name in command]
