"""Embedded clusters in temporary directories. Each is shut down after its test and may leave no process."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.lrm.local.cluster import LocalCluster, LocalConnection
from koalapy.agent.lrm.local.processes import LOCK_FILE, SOCKET_NAME, read_mark
from koalapy.model.errors import SiteUnavailable
from koalapy.runner.folders import short_socket_path
from tests.signals import until
from tests.virtual_time import VirtualTimeLoop

TIMEOUT_S = 60.0


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true value of a condition, outside of an event loop."""
    loop = asyncio.new_event_loop()  # not asyncio.run, which forgets the thread's other loop
    try:
        return loop.run_until_complete(until(condition, TIMEOUT_S))
    finally:
        loop.close()


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(directory: Path) -> list[int]:
    """Return the living processes of a directory's locald and of its jobs."""
    path, found = directory.resolve(), []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if read_mark(pid).endswith(f"@{path}") or f"\0--dir\0{path}\0".encode() in command:
                found.append(pid)
    return [pid for pid in found if is_alive(pid)]


def pid_of_locald(cluster: LocalCluster) -> int:
    return int((cluster.directory / LOCK_FILE).read_text())


def stop_locald(cluster: LocalCluster) -> None:
    """End the locald of a cluster with all its jobs, and wait until it is gone."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        with short_socket_path(cluster.directory / SOCKET_NAME) as path:
            client.connect(path)
        os.kill(pid_of_locald(cluster), signal.SIGTERM)
        while client.recv(1 << 16):
            pass


def numbers_in(path: Path) -> list[int]:
    """Return the numbers that a job has written so far, one a line."""
    text = path.read_text() if path.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip().isdecimal()]


def connect(cluster: LocalCluster) -> LocalConnection:
    """Start locald unless it runs, and return a connection to it."""

    def attempt() -> LocalConnection | None:
        cluster.start()
        try:
            connection = LocalConnection(cluster.directory)
        except (OSError, SiteUnavailable):
            return None
        with suppress(SiteUnavailable):  # it is ending
            connection.request("hello")
            return connection
        connection.close()
        return None

    connection: LocalConnection = eventually(attempt)
    return connection


class Site:
    """A cluster and a connection to it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.connection = connect(cluster)

    def submit(self, script: str, *, nodes: int = 1, **fields: Any) -> str:
        """Submit a shell script; its output goes to ``NAME.out``."""
        name = fields.setdefault("name", "job")
        output = str(self.cluster.directory / f"{name}.out")
        argv = fields.pop("argv", ["/bin/sh", "-c", script])
        fields = {"output": output, "cwd": str(self.cluster.directory), **fields}
        return str(self.connection.request("submit", nodes=nodes, argv=argv, **fields)["job"])

    def wait(self, job: str) -> dict[str, Any]:
        return self.connection.request("wait", job=job)

    def find(self, job: str) -> dict[str, Any]:
        return self.connection.request("find", job=job)

    def list(self) -> dict[str, Any]:
        return self.connection.request("list")

    def output(self, name: str = "job") -> Path:
        return self.cluster.directory / f"{name}.out"


@pytest.fixture
async def virtual_loop() -> VirtualTimeLoop:
    """Return the loop of a ring 1 test."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    clusters: list[LocalCluster] = []

    def make(**changes: Any) -> LocalCluster:
        cluster = replace(LocalCluster(tmp_path / "north", "north", 4, linger=20.0, kill_grace=0.3), **changes)
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        stop_locald(cluster)
    for cluster in clusters:
        try:
            eventually(lambda directory=cluster.directory: not processes_of(directory))
        finally:
            for pid in processes_of(cluster.directory):
                os.kill(pid, signal.SIGKILL)


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
