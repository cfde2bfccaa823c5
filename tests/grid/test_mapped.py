"""A daemon that is root, with clusters on which jobs are their owners': from a token to a program and back.

The accounts are in a copy of ``/etc/passwd`` that only the daemon and what it starts see.
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

from tests.agent.mapped.conftest import python_for_all
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import NAMESPACES, ROOT, needs

pytestmark = [pytest.mark.processes, needs(ROOT)]
UIDS = {"alice": 64_101, "bob": 64_102}


class MappedGrid(EmbeddedGrid):
    """``folder`` is open to all accounts."""

    def __init__(self, directory: Path, folder: Path) -> None:
        self._folder = folder
        for name, own in (("passwd", "{0}:x:{1}:{1}::{2}/{0}:/bin/sh\n"), ("group", "{0}:x:{1}:\n")):
            more = "".join(own.format(account, uid, folder) for account, uid in UIDS.items())
            (folder / name).write_text(Path("/etc", name).read_text() + more)
        clusters: dict[str, Any] = {
            name: {
                "kind": "local",
                "nodes": 4,
                "identity": "mapped",
                "python": python_for_all(),
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


class Person:
    def __init__(self, grid: MappedGrid, name: str) -> None:
        made = grid.run_koala("token", "create", "--user", name, "--role", "user", "-q")
        assert made.returncode == 0, made.stderr
        headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
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
    if not python_for_all():
        pytest.skip("only root can be others, with a Python and koalapy that all may read")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip(NAMESPACES.reason)
    folder = Path(tempfile.mkdtemp(prefix="koala-mapped-"))
    folder.chmod(0o755)
    try:
        made = MappedGrid(tmp_path_factory.mktemp("grid") / "data", folder)
        made.start()
        yield made
        made.wait_until_idle()
        close_grid(made)
    finally:
        shutil.rmtree(folder)


@pytest.mark.evidence("K1")
def test_one_job_runs_as_its_owner_on_two_clusters(grid: MappedGrid) -> None:
    job, said = Person(grid, "ann").finish("id -u; pwd", north=2, south=1)
    assert (job["state"], job["exit_code"]) == ("succeeded", 0), job
    assert said.split().count(str(UIDS["alice"])) == 3


@pytest.mark.evidence("K2")
def test_each_is_somebody_else_to_the_machine_and_nobodys_files_are_open(grid: MappedGrid) -> None:
    gate = grid.make_gate()
    folder = Path(gate.path).parent
    ann, ben = Person(grid, "ann"), Person(grid, "ben")
    held = ann.submit("trap '' TERM; echo $$; sleep 300", north=1).json()["id"]
    grid.wait_for_state(held, "running")
    wait_until(lambda: grid.read_output(held).strip().isdecimal(), "its number")
    pid = grid.read_output(held).strip()
    look = (
        f"cat /proc/{pid}/environ {folder}/* {grid.directory}/token; kill -9 {pid} && echo killed; ls {folder.parent}"
    )
    job, said = ben.finish(f"({look}) 2>/dev/null; id -u", north=1)
    assert (job["state"], said) == ("succeeded", f"{UIDS['bob']}\n")
    assert ann.http.post(f"/api/v1/jobs/{held}/cancel", json={}).status_code == 200
    assert grid.wait_for_end(held)["state"] == "cancelled"


def test_who_has_no_account_there_is_refused(grid: MappedGrid) -> None:
    refused = Person(grid, "ben").submit("true", south=1)
    assert refused.status_code == 422
    assert "ben has no account on south" in refused.text


def test_an_account_that_the_machine_does_not_know_runs_nothing(grid: MappedGrid) -> None:
    job, _ = Person(grid, "ghost").finish("true", north=1)
    assert job["state"] == "failed"
    assert "there is no account nobody-there on north" in job["reason"]
