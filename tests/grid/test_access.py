"""Who gets at a daemon, and at what it was told: its own account, not another, and no job."""

import json
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.agent.test_other_jobs import ATTACKER
from tests.grid.embedded import Embedded, close
from tests.grid.world import until
from tests.needs import IPV6, ROOT, RSYNC, needs

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


def test_a_directory_that_others_could_read_and_the_account_that_finds_its_daemon(tmp_path: Path) -> None:
    grid = Embedded(tmp_path / "data")
    grid.directory.mkdir()
    (grid.directory / "koala.db").touch()
    (grid.directory / "koala.db").chmod(0o644)
    grid.directory.chmod(0o755)
    try:
        grid.start()
        assert mode(grid.directory) == 0o700
        made = [path for path in grid.directory.iterdir() if path.is_file()]
        assert {path.name for path in made} >= {"koala.db", "koala.db-wal", "koala.db-shm", "token"}
        assert {path.name: mode(path) for path in made} == {path.name: 0o600 for path in made}
        token = (grid.directory / "token").read_text()
        # Whatever the port and the directory, no token is given; one that is given wins.
        assert grid.run("clusters").returncode == 0
        wrong = grid.run("clusters", "--token", "not-the-one-of-the-daemon")
        assert (wrong.returncode, wrong.stdout) == (4, "")
        assert "correct KOALA_TOKEN or --token" in wrong.stderr
        assert grid.run("clusters", "--url", grid.url.replace("127.0.0.1", "localhost")).returncode == 0
        elsewhere = grid.run("clusters", "--url", grid.url.replace("127.0.0.1", "[::ffff:127.0.0.1]"))
        assert elsewhere.returncode == 4
        assert f"known are {grid.url.removeprefix('http://')}" in elsewhere.stderr
        # A token stays.
        grid.kill()
        grid.start()
        assert (grid.directory / "token").read_text() == token
        assert grid.run("clusters").returncode == 0
    finally:
        close(grid)


@needs(IPV6)
def test_an_address_of_ipv6_serves_agents_and_commands_alike(tmp_path: Path) -> None:
    grid = Embedded(tmp_path / "data")
    grid.host = "::1"
    try:
        assert grid.start().url.startswith("http://[::1]:")
        assert grid.run("clusters").returncode == 0
    finally:
        close(grid)


def test_whoever_has_the_port_afterwards_is_not_shown_the_token(make_grid: Callable[..., Embedded]) -> None:
    grid = make_grid()
    grid.kill()
    port = int(grid.url.rpartition(":")[2])
    heard: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=listen, args=(listener,), daemon=True)
        thread.start()
        grid.run("clusters")
        thread.join(60)
    assert len(heard) == 1
    assert b"authorization" not in heard[0].lower()
    assert grid.shown.encode() not in heard[0]
    grid.start()


def test_another_account_is_refused(make_grid: Callable[..., Embedded]) -> None:
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


@pytest.mark.mpi
@needs(ROOT)
def test_the_demo_needs_no_flag_and_another_account_is_refused_meanwhile(tmp_path: Path) -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith("KOALA_")}
    environment = told | {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    koala = [sys.executable, "-m", "koalapy.cli.main"]
    shown = subprocess.run([*koala, "demo", "--keep"], env=environment, capture_output=True, text=True, timeout=300)
    found = re.search(r"export KOALA_URL=(\S+)\nEnd it with: kill (\d+)", shown.stdout)
    assert found, shown.stdout + shown.stderr
    url, daemon = found[1], psutil.Process(int(found[2]))
    try:
        assert (shown.returncode, "The program's own check passed." in shown.stdout) == (0, True)
        own = subprocess.run([*koala, "clusters", "--url", url], env=environment, capture_output=True, timeout=60)
        assert own.returncode == 0
        data = next(tmp_path.glob("koala-demo-*"))
        files = [data / "data" / "token", data / "data" / "koala.db", next(tmp_path.glob("state/koala/daemons-*/*"))]
        nobody = pwd.getpwnam("nobody")
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
        asked = subprocess.run(
            [python, "-I", "-c", ASK, url, *map(str, files)],
            capture_output=True,
            text=True,
            cwd="/",
            timeout=60,
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
        )
        assert asked.stdout.split() == ["401"] * 3 + ["refused"] * 3, asked.stderr
    finally:
        daemon.terminate()
        until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE, "the daemon to end")


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """A daemon that was told secrets by its environment."""
    database = tmp_path_factory.mktemp("database") / "the-secret-of-a-path.db"
    grid = Embedded(tmp_path_factory.mktemp("grid") / "data", KOALA_DATABASE=f"sqlite:///{database}", **SECRETS)
    grid.token = "the-secret-of-users"
    yield grid.start()
    close(grid)


def test_a_job_that_goes_for_anothers_node_gets_nothing_and_is_in_the_audit(secretive: Embedded) -> None:
    on_north = {"type": "fixed", "components": [{"cluster": "north", "size": 1}]}
    gate = secretive.gate()
    victim = secretive.submit(on_north, *gate.hold, launcher="processes")
    secretive.wait_state(victim, "running")
    cluster = next(secretive.directory.glob("**/north/**/agent.json")).parent
    attack = [sys.executable, str(ATTACKER), str(cluster), str(cluster.with_name("lrm")), f"{victim}.", ""]
    attacker = secretive.submit(on_north, *attack, launcher="processes")
    assert secretive.wait(attacker)["state"] == "succeeded", secretive.logs(attacker)
    got = json.loads(secretive.logs(attacker))
    assert (got["secrets"], got["heard"], got["orders"]) == (False, [], [["error", "kind"]] * 3)
    trail = secretive.http.get("/api/v1/audit", params={"action": "impersonate-runner"}).json()["entries"]
    assert [(entry["target"], entry["outcome"]) for entry in trail][:1] == [(f"job {victim}", "refused")]
    assert "127.0.0.1 on north" in trail[0]["address"]
    gate.open()
    ended = secretive.wait(victim)
    assert (ended["state"], ended["exit_code"]) == ("succeeded", 0)
    assert "forged" not in secretive.logs(victim)


def test_a_program_inherits_what_is_named_and_nothing_else(secretive: Embedded) -> None:
    ident = secretive.submit({"type": "fixed", "components": [{"cluster": "north", "size": 1}]}, "env")
    assert secretive.wait(ident)["state"] == "succeeded"
    found = dict(line.split("=", 1) for line in secretive.logs(ident).splitlines())
    assert "the-secret" not in secretive.logs(ident)
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


@pytest.mark.parametrize("cluster", ["north", "south"])
def test_a_program_finds_no_secret_in_any_process(secretive: Embedded, cluster: str) -> None:
    """Nor does root in what the kernel keeps of their environments: there is nothing."""
    look = "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ | sed \"s,^,$p ,\"; done 2>/dev/null; echo looked"
    ident = secretive.submit({"type": "fixed", "components": [{"cluster": cluster, "size": 1}]}, "sh", "-c", look)
    assert secretive.wait(ident)["state"] == "succeeded"
    seen = secretive.logs(ident)
    assert "looked" in seen
    assert not re.findall(r".*the-secret.*", seen)
    assert secretive.daemon is not None
    ours = [secretive.daemon.pid, *(secretive.agent(name).pid for name in secretive.nodes)]
    for pid in ours:
        assert f"/proc/{pid} KOALA" not in seen
        # Owned by root: whoever else has this account may read neither memory nor environment.
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0
        assert Path(f"/proc/{pid}/mem").stat().st_uid == 0


def test_a_local_users_program_is_not_given_the_token_of_the_command(secretive: Embedded) -> None:
    done = secretive.run("local-run", "north", "1", "env")
    assert done.returncode == 0, done.stderr
    assert "PATH=" in done.stdout
    assert "KOALA_TOKEN" not in done.stdout
    assert "the-secret-of-users" not in done.stdout


def test_agents_end_when_their_daemon_dies_while_they_start(make_grid: Callable[..., Embedded]) -> None:
    grid = make_grid()
    for _ in range(8):
        grid.kill()
        assert grid.daemon is not None
        grid.launch()
        # As soon as there is one, which has not come to its first line yet.
        until(lambda: agents(grid), "an agent")
    grid.kill()
    grid.start()
    until(lambda: sorted(agents(grid)) == ["north", "south"], f"one agent for each cluster: {agents(grid)}")


def agents(grid: Embedded) -> list[str]:
    found = [process.command for process in grid.processes("agent", "--embedded")]
    return [name for command in found for name in grid.nodes if name in command]


def test_a_cluster_whose_agent_does_not_start_says_why_until_it_does(make_grid: Callable[..., Embedded]) -> None:
    grid = make_grid()
    until(lambda: grid.cluster("south")["state"] == "usable", "an agent")
    usual = grid.cluster("south")["reason"]
    assert usual == "" or not RSYNC.is_met
    assert grid.end() == 0
    until(lambda: not grid.processes("locald.py"), "its resource managers to end")
    south = grid.directory / "clusters" / "south"
    south.rename(south.with_name("kept"))
    south.touch()
    grid.speak_to(grid.launch())
    why = until(lambda: re.search("its agent ended .*", grid.cluster("south")["reason"]), "the reason")
    assert f"cannot use {south}: File exists" in why[0]
    assert "it is started again after " in why[0]
    assert "cannot use" in grid.run("clusters").stdout
    assert "cannot use" in (grid.directory.parent / "daemon.log").read_text()
    assert grid.cluster("north")["reason"] in (usual, "its agent has not connected yet")
    south.unlink()
    south.with_name("kept").rename(south)
    until(lambda: grid.cluster("south")["state"] == "usable", "it to be mended")
    assert grid.cluster("south")["reason"] == usual
