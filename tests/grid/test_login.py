"""Logins on head nodes: a daemon, two agents started separately, and commands of several accounts."""

import asyncio
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.asyncio.client import connect

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import ROOT, needs

pytestmark = [pytest.mark.processes, pytest.mark.grid]

ME = pwd.getpwuid(os.geteuid()).pw_name
TOKENS = {"north": "the-agent-of-north-may-come", "south": "the-agent-of-south-may-come"}
WEST = "the-agent-of-west-may-come-but-never-does"
CONFIGURATION = {
    "clusters": {
        "north": {"embedded": False, "nodes": 2, "network": "127.0.81", "token": TOKENS["north"]},
        "south": {"embedded": False, "nodes": 2, "network": "127.0.82", "token": TOKENS["south"]},
        "west": {"embedded": False, "nodes": 2, "token": WEST, "identity": "mapped"},
        "mine": {"nodes": 1, "network": "127.0.83", "identity": "own", "user": "me"},
    },
    "users": {
        "me": {"accounts": {"north": ME}, "role": "admin"},
        "alice": {"accounts": {"north": "games"}},
        "bob": {"accounts": {"south": "daemon"}},
    },
}
RUN_AS_ACCOUNT = """
import importlib, os, pkgutil, sys
import click.shell_completion, encodings.idna, getpass, grp, ssl, urllib.request
import koalapy.cli
for module in pkgutil.walk_packages(koalapy.cli.__path__, "koalapy.cli."):
    importlib.import_module(module.name)
uid = int(sys.argv.pop(1))
os.setgroups([]), os.setgid(uid), os.setuid(uid)
koalapy.cli.main.main()
"""
"""Run the command line as another account. Root imports koalapy, since other accounts may be unable to read it."""


class HeadNode:
    """A head node with its agent and its accounts."""

    def __init__(self, grid: EmbeddedGrid, folder: Path, cluster: str) -> None:
        self.grid, self.cluster, self.socket = grid, cluster, folder / "run" / f"{cluster}.sock"
        self.homes = folder
        if cluster not in TOKENS:
            return  # the daemon starts its agent
        environment = grid.environment | {"KOALA_AGENT_TOKEN": TOKENS[cluster]}
        directory = str(grid.directory.parent / f"agent-{cluster}")
        command = [*grid.koala_command, "agent", cluster, "--url", grid.url, "--directory", directory]
        log = (grid.directory.parent / "daemon.log").open("a")
        self.agent = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)

    def koala(self, account: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run koala as an account of this host that knows only the agent's socket."""
        home = self.homes / f"{account}-on-{self.cluster}"
        uid = pwd.getpwnam(account).pw_uid
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, uid, -1)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "KOALA_LOGIN_SOCKET": str(self.socket),
            **variables,
        }
        command = [*self.grid.koala_command, *arguments]
        if uid != os.geteuid():
            command = [sys.executable, "-c", RUN_AS_ACCOUNT, str(uid), *arguments]
        return subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=90, check=False
        )

    def login_of(self, account: str) -> dict[str, Any]:
        """Return the login that the account has saved."""
        (path,) = (self.homes / f"{account}-on-{self.cluster}").glob(".local/state/koala/logins-*/[!.]*")
        assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, pwd.getpwnam(account).pw_uid)
        login: dict[str, Any] = json.loads(path.read_text())
        return login


@pytest.fixture(scope="module")
def head_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HeadNode, HeadNode]]:
    folder = Path(tempfile.mkdtemp(prefix="koala-login-"))
    folder.chmod(0o755)
    (folder / "run").mkdir(mode=0o755)
    configuration: dict[str, Any] = json.loads(json.dumps(CONFIGURATION))
    for name, section in configuration["clusters"].items():
        section["login_socket"] = str(folder / "run" / f"{name}.sock")
    (folder / "koala.yaml").write_text(yaml.safe_dump(configuration))
    grid = EmbeddedGrid(tmp_path_factory.mktemp("grid") / "data", KOALA_CONFIG=str(folder / "koala.yaml"))
    grid.set_url(grid.launch_daemon())
    north, south = (HeadNode(grid, folder, name) for name in ("north", "south"))
    wait_until(lambda: grid.get_cluster("north")["state"] == "usable", "the agent of north")
    wait_until(lambda: south.socket.exists(), "the agent of south")
    yield north, south
    for site in (north, south):
        site.agent.send_signal(signal.SIGCONT)
        site.agent.terminate()
        site.agent.wait(60)
    close_grid(grid)
    shutil.rmtree(folder)


@pytest.mark.evidence("A10")
@needs(ROOT)
def test_login_on_two_head_nodes_identifies_each_account(head_nodes: tuple[HeadNode, HeadNode]) -> None:
    north, south = head_nodes
    assert north.koala("games", "whoami").stdout.startswith("alice, user, known by games on north")
    assert south.koala("daemon", "whoami").stdout.startswith("bob, user, known by daemon on south")
    run = north.koala(
        "games", "submit", "--fixed", "north:1", "--launcher", "processes", "--wait", "--", "echo", "done"
    )
    assert (run.returncode, "done" in run.stdout) == (0, True), run.stderr
    job = str(json.loads(north.koala("games", "queue", "--state", "succeeded", "--json").stdout)["jobs"][0]["id"])
    assert "alice" not in south.koala("daemon", "show", job).stdout
    assert south.koala("daemon", "logs", job).returncode != 0
    assert south.koala("daemon", "cancel", job).returncode != 0
    rejections = {
        ("games", south): "games of south has uid 5, a system account",
        ("daemon", north): "daemon of north has uid 1, a system account",
        ("nobody", north): "nobody of north has uid 65534, a system account",
        (ME, south): f"{ME} of south has uid 0, a system account",
    }
    for (account, site), reason in rejections.items():
        answer = site.koala(account, "whoami")
        assert (answer.returncode, answer.stdout) == (4, "")
        assert reason in answer.stderr
        assert "ask the grid's administrators for users.NAME.accounts" in answer.stderr
    # Another account can neither read the saved login nor use it.
    login_file = next((north.homes / "games-on-north").glob(".local/state/koala/logins-*"))
    stolen = north.koala("daemon", "whoami", XDG_STATE_HOME=str(login_file.parents[1]))
    assert (stolen.returncode, stolen.stdout) == (4, "")


def test_login_on_own_cluster_is_limited_to_its_user(head_nodes: tuple[HeadNode, HeadNode]) -> None:
    north, _ = head_nodes
    mine = HeadNode(north.grid, north.homes, "mine")
    wait_until(lambda: mine.grid.get_cluster("mine")["state"] == "usable", "the agent that the daemon has started")
    assert mine.koala(ME, "whoami").stdout.startswith(f"me, user, known by {ME} on mine, until")
    submit = ("submit", "--launcher", "processes", "--fixed", "mine:1", "--wait", "--")
    run = mine.koala(ME, *submit, "id", "-un")
    assert (run.returncode, run.stdout.split()[-1]) == (0, ME), run.stderr
    error = north.grid.http.post("/api/v1/jobs", json={**TO_MINE, "owner": "alice"}).json()
    assert error["detail"] == "request.components[0].cluster is mine, but mine is me's own"
    answer = asyncio.run(request_attestation(mine))
    assert answer["user"] == "me"


async def request_attestation(site: HeadNode) -> dict[str, Any]:
    """Request an attestation for another account by hand; the kernel reports the real one to the agent."""
    reader, writer = await asyncio.open_unix_connection(str(site.socket))
    writer.write(b'{"ask": "login", "account": "games", "user": "alice", "uid": 5}\n')
    async with asyncio.timeout(60):
        messages: list[dict[str, Any]] = [json.loads(line) async for line in reader]
    writer.close()
    return messages[1]


TO_MINE = {
    "request": {"type": "fixed", "components": [{"cluster": "mine", "size": 1}]},
    "command": ["true"],
    "launcher": "processes",
}


def test_agent_with_other_identity_mode_is_rejected(head_nodes: tuple[HeadNode, HeadNode]) -> None:
    """The daemon runs jobs as their owners, the agent as its own account."""
    grid = head_nodes[0].grid

    async def reason() -> str:
        url = f"{grid.url.replace('http', 'ws', 1)}/api/v1/agents/west/connect"
        async with connect(url, additional_headers={"Authorization": f"Bearer {WEST}"}) as socket:
            hello = {"type": "hello", "cluster": "x", "protocol": 3, "version": "1", "lrm": "l", "host": "h", "pid": 1}
            await socket.send(json.dumps([hello]))
            async with asyncio.timeout(60):
                await socket.wait_closed()
            return socket.close_reason or ""

    assert "clusters.west.identity is mapped for the daemon and service for its agent" in asyncio.run(reason())
