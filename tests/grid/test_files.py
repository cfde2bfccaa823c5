"""Replicas and transfers of files on a live grid, with damaged files, cancelled jobs and killed daemons."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import wait_until
from tests.needs import RSYNC, needs

pytestmark = [pytest.mark.processes, needs(RSYNC)]

Json = dict[str, Any]
CLUSTERS = json.dumps(
    {name: {"nodes": 2, "network": f"127.0.{i}"} for i, name in enumerate(("east", "north", "south"), 1)}
)
MB = 10**6
SlowTransfers = Callable[[], AbstractContextManager[None]]
SLOW_RSYNC = """#!/bin/sh
[ "$1" != --daemon ] && [ -e "$0.slow" ] && set -- --bwlimit=2000 "$@"
exec {rsync} "$@"
"""
"""An rsync that needs minutes for 300 MB while the file ``rsync.slow`` is in its directory."""


@pytest.fixture(scope="module")
def rsync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("bin") / "rsync"
    program.write_text(SLOW_RSYNC.format(rsync=shutil.which("rsync")))
    program.chmod(0o755)
    return program


@pytest.fixture
def slow_transfers(rsync: Path) -> SlowTransfers:
    """Return a context manager in which new transfers are slow."""

    @contextmanager
    def slow_down() -> Iterator[None]:
        mark = rsync.with_name("rsync.slow")
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    return slow_down


def path_with_rsync(rsync: Path) -> str:
    return f"{rsync.parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, rsync: Path) -> Iterator[EmbeddedGrid]:
    """Yield a grid of three clusters for all tests of the module."""
    directory = tmp_path_factory.mktemp("grid") / "data"
    embedded = EmbeddedGrid(directory, KOALA_CLUSTERS=CLUSTERS, PATH=path_with_rsync(rsync)).start()
    yield embedded
    embedded.wait_until_idle()
    close_grid(embedded)


def replica_folder(grid: EmbeddedGrid, cluster: str) -> Path:
    return grid.directory / "clusters" / cluster / "replicas"


def add_replica(grid: EmbeddedGrid, name: str, *clusters: str, content: bytes | Path, place: str = "") -> str:
    """Write a file or a copy of a folder to clusters, register it in the catalogue, and return its SHA-256."""
    for cluster in clusters:
        path = replica_folder(grid, cluster) / (place or name.replace("/", "-"))
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copytree(content, path)
        order = {"name": name, "cluster": cluster, "path": str(path)}
        answer = grid.http.post("/api/v1/replicas", json=order)
        assert answer.status_code == 201, answer.text
    return str(answer.json()["checksum"])


def fixed(*clusters: str) -> Json:
    return {"type": "fixed", "components": [{"size": 1, "cluster": cluster} for cluster in clusters]}


def nonfixed(*sizes: int) -> Json:
    return {"type": "nonfixed", "components": [{"size": size} for size in sizes]}


def list_events(job: Json, *names: str) -> list[str]:
    return [entry["event"] for entry in job["timeline"] if entry["event"] in names]


def read_replica_state(grid: EmbeddedGrid, name: str, cluster: str) -> str:
    replicas = grid.http.get("/api/v1/replicas", params={"name": name}).json()["replicas"]
    return next(str(replica["state"]) for replica in replicas if replica["cluster"] == cluster)


def list_stages(grid: EmbeddedGrid) -> list[Path]:
    """Return all stage folders of components."""
    return [
        path
        for cluster in (c["name"] for c in grid.list_clusters())
        for path in (grid.directory / "clusters" / cluster).glob("stages/*")
    ]


def list_transfers(grid: EmbeddedGrid) -> list[psutil.Process]:
    """Return the rsync processes that receive files."""
    processes = []
    for candidate in grid.list_processes("rsync"):
        if "--daemon" not in candidate.command and "rsync" in candidate.command[0]:
            with suppress(psutil.NoSuchProcess):  # it has ended
                processes.append(psutil.Process(candidate.pid))
    return processes


def test_job_runs_at_replica_or_after_transfer(grid: EmbeddedGrid) -> None:
    content = os.urandom(20 * MB)
    add_replica(grid, "climate/mesh", "south", content=content)
    inputs = [{"file": "climate/mesh"}]
    close_by = grid.wait_for_end(
        grid.submit(nonfixed(2), "sh", "-c", "test -L mesh", inputs=inputs, policy="close-to-files")
    )
    assert close_by["state"] == "succeeded", close_by["timeline"]
    (component,) = close_by["components"]
    assert (component["cluster"], component["sources"], component["stage_size"]) == ("south", ["south"], 0)
    assert list_events(close_by, "transfer", "staged") == []
    local_job = grid.submit(fixed("north"), "sha256sum", "mine", inputs=[{"file": "climate/mesh", "as": "mine"}])
    elsewhere = grid.wait_for_end(local_job)
    assert elsewhere["state"] == "succeeded", elsewhere["timeline"]
    assert grid.read_output(local_job).split() == [hashlib.sha256(content).hexdigest(), "mine"]
    assert list_events(elsewhere, "placed", "transfer", "staged", "started") == [
        "placed",
        "transfer",
        "staged",
        "started",
    ]
    (component,) = elsewhere["components"]
    assert (component["sources"], component["staged"], component["stage_size"]) == (["south"], 20 * MB, 20 * MB)
    assert component["staged_at"] <= elsewhere["started_at"]
    assert "20 MB from south in" in grid.run_koala("show", str(local_job)).stdout


def test_missing_replica_is_not_used_again(grid: EmbeddedGrid) -> None:
    add_replica(grid, "twice", "north", "south", content=b"twice")
    (replica_folder(grid, "north") / "twice").unlink()
    job = grid.wait_for_end(grid.submit(fixed("east"), "cat", "twice", inputs=[{"file": "twice"}]))
    assert job["state"] == "succeeded", job["timeline"]
    assert (job["restarts"], job["components"][0]["sources"]) == (1, ["south"])
    wait_until(lambda: read_replica_state(grid, "twice", "north") == "missing", "it to be known as missing")
    assert read_replica_state(grid, "twice", "south") == "good"
    again = grid.wait_for_end(grid.submit(fixed("east"), "cat", "twice", inputs=[{"file": "twice"}]))
    assert (again["state"], again["restarts"]) == ("succeeded", 0)


@pytest.mark.parametrize("damage", ["missing", "changed", "truncated"])
def test_job_waits_until_its_only_replica_is_restored(grid: EmbeddedGrid, damage: str) -> None:
    name, content = f"only-{damage}", b"only one"
    add_replica(grid, name, "north", content=content)
    path = replica_folder(grid, "north") / name
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"another." if damage == "changed" else b"only")
    ident = grid.submit(fixed("south"), "cat", name, inputs=[{"file": name}])
    wait_until(
        lambda: read_replica_state(grid, name, "north") == ("missing" if damage == "missing" else "changed"),
        "it to be noticed",
    )
    waiting = grid.wait_for_state(ident, "queued")
    assert name in waiting["reason"], waiting["reason"]
    refused = {"request": fixed("south"), "command": ["true"], "inputs": [{"file": name}]}
    assert "no replica is good" in grid.http.post("/api/v1/jobs", json=refused).json()["detail"]
    path.write_bytes(content)
    verified = grid.run_koala("replicas", "verify", name)
    assert verified.returncode == 0, verified.stdout
    assert grid.wait_for_end(ident)["state"] == "succeeded"
    assert grid.read_output(ident) == "only one"


@pytest.fixture
def add_large_file(grid: EmbeddedGrid) -> str:
    """Add a file of 300 MB on south, and return its name."""
    path = replica_folder(grid, "south") / "large"
    if not path.exists():
        path.touch()
        os.truncate(path, 300 * MB)
        answer = grid.http.post("/api/v1/replicas", json={"name": "large", "cluster": "south", "path": str(path)})
        assert answer.status_code == 201, answer.text
    return "large"


def stall_transfer(grid: EmbeddedGrid, ident: int) -> list[psutil.Process]:
    """Suspend the processes of a job's slow transfer once it has begun."""
    wait_until(lambda: grid.get_job(ident)["components"][0]["staged"], "some of it to come")
    running = list_transfers(grid)
    for process in running:
        process.suspend()
    return running


def test_cancelled_job_leaves_no_partial_transfer(
    grid: EmbeddedGrid, add_large_file: str, slow_transfers: SlowTransfers
) -> None:
    with slow_transfers():
        ident = grid.submit(fixed("north"), "true", inputs=[{"file": add_large_file}])
        running = stall_transfer(grid, ident)
    assert 0 < grid.get_job(ident)["components"][0]["staged"] < 300 * MB
    grid.cancel(ident)
    assert grid.wait_for_end(ident)["state"] == "cancelled"
    for process in running:
        if process.is_running():
            process.resume()
    wait_until(lambda: not list_transfers(grid), "no rsync to be left")
    wait_until(lambda: not list_stages(grid), f"no folder to be left: {list_stages(grid)}")


def test_transfer_survives_killed_daemon(
    make_grid: Callable[..., EmbeddedGrid], slow_transfers: SlowTransfers, rsync: Path
) -> None:
    grid = make_grid(PATH=path_with_rsync(rsync))
    path = replica_folder(grid, "south") / "large"
    path.touch()
    os.truncate(path, 300 * MB)
    grid.http.post("/api/v1/replicas", json={"name": "large", "cluster": "south", "path": str(path)})
    command = "import os; print(os.stat('large').st_size, os.stat('large').st_ino)"
    with slow_transfers():
        ident = grid.submit(fixed("north"), sys.executable, "-c", command, inputs=[{"file": "large"}])
        running = stall_transfer(grid, ident)
    (arriving,) = (grid.directory / "clusters" / "north").rglob("large")
    size, inode = arriving.stat().st_size, arriving.stat().st_ino
    grid.kill_daemon()
    grid.start()
    for process in running:
        if process.is_running():
            process.resume()
    sizes: list[int] = []

    def is_over() -> bool:
        job = grid.get_job(ident)
        sizes.append(job["components"][0]["staged"])
        return job["state"] in ("succeeded", "failed")

    wait_until(is_over, "the job to be over")
    job = grid.get_job(ident)
    assert job["state"] == "succeeded", job["timeline"]
    assert (job["generation"], list_events(job, "transfer", "staged")) == (1, ["transfer", "staged"]), job["timeline"]
    assert grid.read_output(ident) == f"{300 * MB} {inode}\n", "the file that had begun to arrive is the one that came"
    # A restarted agent reports no replicas until it has checked them.
    assert min(staged for staged in sizes if staged) >= size, f"it began again: {sizes}"
