"""Who gets at a daemon, and at what it was told: its own account, not another, and no job."""

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
ASK = """
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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs(IPV6)
def test_an_address_of_ipv6_serves_agents_and_commands_alike(tmp_path: Path) -> None:
    grid = EmbeddedGrid(tmp_path / "data")
    grid.host = "::1"
    try:
        assert grid.start().url.startswith("http://[::1]:")
        assert grid.run_koala("clusters").returncode == 0
    finally:
        close_grid(grid)


@pytest.mark.evidence("A1", "C6")
def test_another_account_is_refused(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
    entry = next(grid.state.glob("koala/daemons-*/*"))
    paths = [str(path) for path in (grid.directory / "token", grid.directory / "koala.db", entry)]
    for path in paths:
        assert mode(Path(path)) == 0o600
        assert Path(path).stat().st_uid == os.geteuid()
    # Any account may try; only root can try as another, to whom the files are shut as well.
    root = os.geteuid() == 0
    nobody = pwd.getpwnam("nobody")
    account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if root else {}
    command = [python, "-I", "-c", ASK, grid.url, *(paths if root else [])]
    asked = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, **account)  # type: ignore[call-overload]
    assert asked.stdout.split() == ["401", "401", "401", *["refused"] * (3 if root else 0)], asked.stderr
    with httpx2.Client(base_url=grid.url, timeout=60.0) as stranger:
        assert stranger.post("/api/v1/jobs/1/cancel").status_code == 401


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    """A daemon that was told secrets by its environment."""
    database = tmp_path_factory.mktemp("database") / "the-secret-of-a-path.db"
    grid = EmbeddedGrid(tmp_path_factory.mktemp("grid") / "data", KOALA_DATABASE=f"sqlite:///{database}", **SECRETS)
    grid.token = "the-secret-of-users"
    yield grid.start()
    close_grid(grid)


@pytest.mark.evidence("J1")
def test_a_program_inherits_what_is_named_and_nothing_else(secretive: EmbeddedGrid) -> None:
    ident = secretive.submit({"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, "env")
    assert secretive.wait_for_end(ident)["state"] == "succeeded"
    found = dict(line.split("=", 1) for line in secretive.read_output(ident).splitlines())
    assert "the-secret" not in secretive.read_output(ident)
    assert found.keys() & SECRETS.keys() == {"TMPDIR", "LC_NUMERIC"}
    assert found["MODEL"] == "coarse"
    assert {"HOME", "PATH", "KOALA_JOB", "KOALA_CLUSTER"} <= found.keys()
    told = {
        "KOALA_JOB",
        "KOALA_GENERATION",
        "KOALA_COMPONENT",
        "KOALA_CLUSTER",
        "KOALA_NODE",
        "KOALA_HOST",
        "KOALA_NODE_INDEX",
        "KOALA_NODES",
        "KOALA_COMPONENT_NODES",
        "KOALA_HOSTS",
        "KOALA_COMPONENT_TOKEN",
        "KOALA_MPI_SERIES",
        "KOALA_STAGE",
    }
    assert {name for name in found if name.startswith("KOALA_")} <= told


def test_a_local_users_program_is_not_given_the_token_of_the_command(secretive: EmbeddedGrid) -> None:
    done = secretive.run_koala("local-run", "north", "1", "env")
    assert done.returncode == 0, done.stderr
    assert "PATH=" in done.stdout
    assert "KOALA_TOKEN" not in done.stdout
    assert "the-secret-of-users" not in done.stdout


def test_agents_end_when_their_daemon_dies_while_they_start(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    for _ in range(8):
        grid.kill_daemon()
        assert grid.daemon is not None
        grid.launch_daemon()
        # As soon as there is one, which has not come to its first line yet.
        wait_until(lambda: agents(grid), "an agent")
    grid.kill_daemon()
    grid.start()
    wait_until(lambda: sorted(agents(grid)) == ["north", "south"], f"one agent for each cluster: {agents(grid)}")


def agents(grid: EmbeddedGrid) -> list[str]:
    found = [process.command for process in grid.list_processes("agent", "--embedded")]
    return [name for command in found for name in grid.nodes if name in command]
