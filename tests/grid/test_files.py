"""Files on a real daemon with real agents: what is staged, transferred and collected, and what befalls that."""

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
Slow = Callable[[], AbstractContextManager[None]]
SLOW_RSYNC = """#!/bin/sh
[ "$1" != --daemon ] && [ -e "$0.slow" ] && set -- --bwlimit=2000 "$@"
exec {rsync} "$@"
"""
"""rsync that takes minutes for 300 MB, as long as a file is beside it."""


@pytest.fixture(scope="module")
def rsync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("bin") / "rsync"
    program.write_text(SLOW_RSYNC.format(rsync=shutil.which("rsync")))
    program.chmod(0o755)
    return program


@pytest.fixture
def slow(rsync: Path) -> Slow:
    """Transfers that begin meanwhile are slow ones."""

    @contextmanager
    def held() -> Iterator[None]:
        mark = rsync.with_name("rsync.slow")
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    return held


def path_with(rsync: Path) -> str:
    return f"{rsync.parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, rsync: Path) -> Iterator[EmbeddedGrid]:
    """Three clusters, for all tests that leave them as they found them."""
    directory = tmp_path_factory.mktemp("grid") / "data"
    embedded = EmbeddedGrid(directory, KOALA_CLUSTERS=CLUSTERS, PATH=path_with(rsync)).start()
    yield embedded
    embedded.wait_until_idle()
    close_grid(embedded)


def folder(grid: EmbeddedGrid, cluster: str) -> Path:
    """The replica directory of a cluster."""
    return grid.directory / "clusters" / cluster / "replicas"


def add(grid: EmbeddedGrid, name: str, *clusters: str, content: bytes | Path, place: str = "") -> str:
    """Put a file, or a copy of a folder, on clusters, and enter it in the catalogue; its SHA-256."""
    for cluster in clusters:
        path = folder(grid, cluster) / (place or name.replace("/", "-"))
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


def events(job: Json, *names: str) -> list[str]:
    return [entry["event"] for entry in job["timeline"] if entry["event"] in names]


def state_of(grid: EmbeddedGrid, name: str, cluster: str) -> str:
    found = grid.http.get("/api/v1/replicas", params={"name": name}).json()["replicas"]
    return next(str(replica["state"]) for replica in found if replica["cluster"] == cluster)


def stages(grid: EmbeddedGrid) -> list[Path]:
    """Whatever components' folders there are."""
    return [
        path
        for cluster in (c["name"] for c in grid.list_clusters())
        for path in (grid.directory / "clusters" / cluster).glob("stages/*")
    ]


def transfers(grid: EmbeddedGrid) -> list[psutil.Process]:
    """rsync where files arrive."""
    found = []
    for seen in grid.list_processes("rsync"):
        if "--daemon" not in seen.command and "rsync" in seen.command[0]:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found.append(psutil.Process(seen.pid))
    return found


def test_a_job_runs_where_its_file_is_or_after_the_file_has_come(grid: EmbeddedGrid) -> None:
    content = os.urandom(20 * MB)
    add(grid, "climate/mesh", "south", content=content)
    inputs = [{"file": "climate/mesh"}]
    close_by = grid.wait_for_end(
        grid.submit(nonfixed(2), "sh", "-c", "test -L mesh", inputs=inputs, policy="close-to-files")
    )
    assert close_by["state"] == "succeeded", close_by["timeline"]
    (component,) = close_by["components"]
    assert (component["cluster"], component["sources"], component["stage_size"]) == ("south", ["south"], 0)
    assert events(close_by, "transfer", "staged") == []
    there = grid.submit(fixed("north"), "sha256sum", "mine", inputs=[{"file": "climate/mesh", "as": "mine"}])
    elsewhere = grid.wait_for_end(there)
    assert elsewhere["state"] == "succeeded", elsewhere["timeline"]
    assert grid.read_output(there).split() == [hashlib.sha256(content).hexdigest(), "mine"]
    assert events(elsewhere, "placed", "transfer", "staged", "started") == ["placed", "transfer", "staged", "started"]
    (component,) = elsewhere["components"]
    assert (component["sources"], component["staged"], component["stage_size"]) == (["south"], 20 * MB, 20 * MB)
    assert component["staged_at"] <= elsewhere["started_at"]
    assert "20 MB from south in" in grid.run_koala("show", str(there)).stdout


def test_a_replica_that_is_gone_is_not_used_again(grid: EmbeddedGrid) -> None:
    add(grid, "twice", "north", "south", content=b"twice")
    (folder(grid, "north") / "twice").unlink()
    job = grid.wait_for_end(grid.submit(fixed("east"), "cat", "twice", inputs=[{"file": "twice"}]))
    assert job["state"] == "succeeded", job["timeline"]
    assert (job["restarts"], job["components"][0]["sources"]) == (1, ["south"])
    wait_until(lambda: state_of(grid, "twice", "north") == "missing", "it to be known as missing")
    assert state_of(grid, "twice", "south") == "good"
    again = grid.wait_for_end(grid.submit(fixed("east"), "cat", "twice", inputs=[{"file": "twice"}]))
    assert (again["state"], again["restarts"]) == ("succeeded", 0)


@pytest.mark.parametrize("what", ["missing", "changed", "truncated"])
def test_a_job_waits_until_its_only_replica_is_good_again(grid: EmbeddedGrid, what: str) -> None:
    name, content = f"only-{what}", b"only one"
    add(grid, name, "north", content=content)
    path = folder(grid, "north") / name
    path.unlink()
    if what != "missing":
        path.write_bytes(b"another." if what == "changed" else b"only")
    ident = grid.submit(fixed("south"), "cat", name, inputs=[{"file": name}])
    wait_until(
        lambda: state_of(grid, name, "north") == ("missing" if what == "missing" else "changed"), "it to be noticed"
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
def large(grid: EmbeddedGrid) -> str:
    """A file of 300 MB in south."""
    path = folder(grid, "south") / "large"
    if not path.exists():
        path.touch()
        os.truncate(path, 300 * MB)
        answer = grid.http.post("/api/v1/replicas", json={"name": "large", "cluster": "south", "path": str(path)})
        assert answer.status_code == 201, answer.text
    return "large"


def stalled(grid: EmbeddedGrid, ident: int) -> list[psutil.Process]:
    """Stop a job's transfer, which is a slow one, in its middle."""
    wait_until(lambda: grid.get_job(ident)["components"][0]["staged"], "some of it to come")
    running = transfers(grid)
    for process in running:
        process.suspend()
    return running


def test_a_job_that_is_cancelled_leaves_nothing_of_its_transfer(grid: EmbeddedGrid, large: str, slow: Slow) -> None:
    with slow():
        ident = grid.submit(fixed("north"), "true", inputs=[{"file": large}])
        running = stalled(grid, ident)
    assert 0 < grid.get_job(ident)["components"][0]["staged"] < 300 * MB
    grid.cancel(ident)
    assert grid.wait_for_end(ident)["state"] == "cancelled"
    for process in running:
        if process.is_running():
            process.resume()
    wait_until(lambda: not transfers(grid), "no rsync to be left")
    wait_until(lambda: not stages(grid), f"no folder to be left: {stages(grid)}")


def test_a_transfer_goes_on_when_the_daemon_is_killed_meanwhile(
    make_grid: Callable[..., EmbeddedGrid], slow: Slow, rsync: Path
) -> None:
    grid = make_grid(PATH=path_with(rsync))
    path = folder(grid, "south") / "large"
    path.touch()
    os.truncate(path, 300 * MB)
    grid.http.post("/api/v1/replicas", json={"name": "large", "cluster": "south", "path": str(path)})
    command = "import os; print(os.stat('large').st_size, os.stat('large').st_ino)"
    with slow():
        ident = grid.submit(fixed("north"), sys.executable, "-c", command, inputs=[{"file": "large"}])
        running = stalled(grid, ident)
    (arriving,) = (grid.directory / "clusters" / "north").rglob("large")
    there, inode = arriving.stat().st_size, arriving.stat().st_ino
    grid.kill_daemon()
    grid.start()
    for process in running:
        if process.is_running():
            process.resume()
    seen: list[int] = []

    def is_over() -> bool:
        job = grid.get_job(ident)
        seen.append(job["components"][0]["staged"])
        return job["state"] in ("succeeded", "failed")

    wait_until(is_over, "the job to be over")
    job = grid.get_job(ident)
    assert job["state"] == "succeeded", job["timeline"]
    assert (job["generation"], events(job, "transfer", "staged")) == (1, ["transfer", "staged"]), job["timeline"]
    assert grid.read_output(ident) == f"{300 * MB} {inode}\n", "the file that had begun to arrive is the one that came"
    # As long as an agent that was started again has not looked, it tells nothing of what is there.
    assert min(staged for staged in seen if staged) >= there, f"it began again: {seen}"
