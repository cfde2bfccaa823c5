"""Embedded clusters in temporary directories; each is shut down after its test, and nothing may be left of it."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.local.cluster import LocalCluster, LocalConnection
from koalapy.agent.lrm.local.processes import is_of, kill_marked
from tests.signals import until
from tests.virtual_time import VirtualTimeLoop

WITHIN = 60.0
"""Seconds after which something that should happen has failed to."""


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true value of a condition, outside of an event loop."""
    loop = asyncio.new_event_loop()  # not asyncio.run, which forgets the thread's other loop
    try:
        return loop.run_until_complete(until(condition, WITHIN))
    finally:
        loop.close()


def is_alive(pid: int) -> bool:
    """It runs; what has ended and only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(directory: Path) -> list[int]:
    """Everything alive that was started by the locald of that directory, and itself."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if is_of(pid, str(directory.resolve())) and is_alive(pid)]


def pid_of_locald(cluster: LocalCluster) -> int:
    return int(json.loads((cluster.directory / "locald.json").read_text())["pid"])


def numbers_in(path: Path) -> list[int]:
    """Whole lines of numbers that a job has written so far."""
    text = path.read_text() if path.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip().isdecimal()]


class Site:
    """A cluster and a connection to it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.connection: LocalConnection = cluster.connect()

    def submit(self, script: str, *, nodes: int = 1, **fields: Any) -> str:
        """Submit a shell script; its output goes to ``NAME.out``."""
        name = fields.setdefault("name", "job")
        output = str(self.cluster.directory / f"{name}.out")
        argv = fields.pop("argv", ["/bin/sh", "-c", script])
        fields = {"output": output, "cwd": str(self.cluster.directory), **fields}
        return str(self.connection.request("submit", nodes=nodes, argv=argv, **fields)["job"])

    def wait(self, job: str) -> dict[str, Any]:
        return self.connection.request("wait", job=job)

    def look(self, job: str) -> dict[str, Any]:
        return self.connection.request("find", job=job)

    def list(self) -> dict[str, Any]:
        return self.connection.request("list")

    def output(self, name: str = "job") -> Path:
        return self.cluster.directory / f"{name}.out"


@pytest.fixture
async def virtual_loop() -> VirtualTimeLoop:
    """Return the loop of a test of ring 1."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    made: list[LocalCluster] = []

    def make(**changes: Any) -> LocalCluster:
        plain = LocalCluster(tmp_path / "north", "north", 4, linger=20.0, kill_grace=0.3)
        made.append(replace(plain, **changes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
    for cluster in made:
        try:
            eventually(lambda directory=cluster.directory: not processes_of(directory))
        finally:
            kill_marked(str(cluster.directory.resolve()), within=5)


@pytest.fixture
def make_site(make_cluster: Callable[..., LocalCluster]) -> Iterator[Callable[..., Site]]:
    with ExitStack() as connections:

        def make(**changes: Any) -> Site:
            site = Site(make_cluster(**changes))
            connections.enter_context(site.connection)
            return site

        yield make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()
