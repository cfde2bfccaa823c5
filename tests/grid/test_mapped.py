"""A daemon that runs as root, with clusters that run jobs as their owners, from a token to a program and back.

The accounts are in a copy of ``/etc/passwd`` that only the daemon and its children see.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.agent.mapped.conftest import find_shared_python
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import NAMESPACES, ROOT, needs

pytestmark = [pytest.mark.processes, needs(ROOT)]
UIDS = {"alice": 64_101, "bob": 64_102}


class MappedGrid(EmbeddedGrid):
    """A grid that runs jobs as their owners; ``folder`` is accessible to all accounts."""

    def __init__(self, directory: Path, folder: Path) -> None:
        self._folder = folder
        for name, line in (("passwd", "{0}:x:{1}:{1}::{2}/{0}:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
            lines = "".join(line.format(account, uid, folder) for account, uid in UIDS.items())
            (folder / name).write_text(Path("/etc", name).read_text() + lines)
        clusters: dict[str, Any] = {
            name: {
                "kind": "local",
                "nodes": 4,
                "identity": "mapped",
                "python": find_shared_python(),
                "stage_directory": str(folder / name),
                "environment": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            }
            for name in ("north", "south")
        }
        users = {
            "ann": {"accounts": {"north": "alice", "south": "alice"}},
            "ben": {"accounts": {"north": "bob"}},
            "ghost": {"accounts": {"north": "nobody-there"}},
        }
        configuration = folder / "koala.yaml"
        configuration.write_text(yaml.safe_dump({"users": users, "clusters": clusters}))
        super().__init__(directory, KOALA_CONFIG=str(configuration))

    @property
    def koala_command(self) -> list[str]:
        mounts = "; ".join(f"mount --bind {self._folder}/{name} /etc/{name}" for name in ("passwd", "group"))
        return ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh", *super().koala_command]


class User:
    def __init__(self, grid: MappedGrid, name: str) -> None:
        token = grid.run_koala("token", "create", "--user", name, "--role", "user", "-q")
        assert token.returncode == 0, token.stderr
        self.token = token.stdout.strip()
        headers = {"Authorization": f"Bearer {self.token}"}
        self._grid = grid
        self.http = httpx2.Client(base_url=grid.url, headers=headers, timeout=90.0)

    def submit(self, script: str, **sizes: int) -> httpx2.Response:
        request = {"type": "fixed", "components": [{"size": n, "cluster": c} for c, n in sizes.items()]}
        body = {"request": request, "command": ["sh", "-c", script], "launcher": "processes"}
        return self.http.post("/api/v1/jobs", json=body)

    def finish(self, script: str, **sizes: int) -> tuple[dict[str, Any], str]:
        answer = self.submit(script, **sizes)
        assert answer.status_code == 201, answer.text
        ident = int(answer.json()["id"])
        return self._grid.wait_for_end(ident), self._grid.read_output(ident)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MappedGrid]:
    if not find_shared_python():
        pytest.skip("only root can be others, with a Python and koalapy that all may read")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip(NAMESPACES.reason)
    folder = Path(tempfile.mkdtemp(prefix="koala-mapped-"))
    folder.chmod(0o755)
    try:
        mapped_grid = MappedGrid(tmp_path_factory.mktemp("grid") / "data", folder)
        mapped_grid.start()
        yield mapped_grid
        mapped_grid.wait_until_idle()
        close_grid(mapped_grid)
    finally:
        shutil.rmtree(folder)


@pytest.mark.evidence("K1")
def test_mapped_job_runs_as_owner_on_two_clusters(grid: MappedGrid) -> None:
    job, output = User(grid, "ann").finish("id -u; pwd", north=2, south=1)
    assert (job["state"], job["exit_code"]) == ("succeeded", 0), job
    assert output.split().count(str(UIDS["alice"])) == 3


@pytest.mark.evidence("K2")
def test_mapped_job_cannot_read_or_signal_other_users(grid: MappedGrid) -> None:
    gate = grid.make_gate()
    folder = Path(gate.path).parent
    ann, ben = User(grid, "ann"), User(grid, "ben")
    victim = ann.submit("trap '' TERM; echo $$; sleep 300", north=1).json()["id"]
    grid.wait_for_state(victim, "running")
    wait_until(lambda: grid.read_output(victim).strip().isdecimal(), "its number")
    pid = grid.read_output(victim).strip()
    look = (
        f"cat /proc/{pid}/environ {folder}/* {grid.directory}/token; kill -9 {pid} && echo killed; ls {folder.parent}"
    )
    job, output = ben.finish(f"({look}) 2>/dev/null; id -u", north=1)
    assert (job["state"], output) == ("succeeded", f"{UIDS['bob']}\n")
    assert ann.http.post(f"/api/v1/jobs/{victim}/cancel", json={}).status_code == 200
    assert grid.wait_for_end(victim)["state"] == "cancelled"


@pytest.mark.evidence("K1", "U18")
def test_shell_on_mapped_cluster_runs_as_the_owner_of_the_job(grid: MappedGrid) -> None:
    ann, ben = User(grid, "ann"), User(grid, "ben")
    ident = ann.submit("sleep 300", north=1).json()["id"]
    grid.wait_for_state(ident, "running")
    script = "id -u; stat -c owner=%u $(tty)"
    shell = grid.run_koala("shell", str(ident), "--token", ann.token, "--", "sh", "-c", script)
    assert shell.stdout.split() == [str(UIDS["alice"]), f"owner={UIDS['alice']}"], shell.stderr
    for token, reason in ((ben.token, "is not yours"), (grid.admin_token, "to the owners of jobs only")):
        shell = grid.run_koala("shell", str(ident), "--token", token, "--", "id")
        assert (shell.returncode, shell.stdout) == (4, "")
        assert reason in shell.stderr
    assert ann.http.post(f"/api/v1/jobs/{ident}/cancel", json={}).status_code == 200
    grid.wait_for_end(ident)


def test_submit_without_account_at_cluster_is_rejected(grid: MappedGrid) -> None:
    refused = User(grid, "ben").submit("true", south=1)
    assert refused.status_code == 422
    assert "ben has no account on south" in refused.text


def test_job_with_unknown_account_runs_nothing(grid: MappedGrid) -> None:
    job, _ = User(grid, "ghost").finish("true", north=1)
    assert job["state"] == "failed"
    assert "there is no account nobody-there on north" in job["reason"]
