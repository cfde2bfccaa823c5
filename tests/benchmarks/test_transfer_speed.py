"""Compare transfers between two sites and from the submitter with bare rsync."""

import asyncio
import os
import random
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from koalapy.agent.transfers.daemon_files import DaemonFiles
from tests.agent.transfers.conftest import INSTANCE, FileSite, Wire
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.needs import RSYNC, needs

pytestmark = [needs(RSYNC), pytest.mark.nightly]
ROUNDS = 9
LARGE_FILE_BYTES = 200_000_000
FILE_COUNT, SMALL_FILE_BYTES = 1000, 2000
CONFIG = """\
use chroot = no
uid = {uid}
gid = {gid}
reverse lookup = no
log file = /dev/null
[all]
path = {path}
"""


@pytest.fixture
def rsync_url(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a plain rsync daemon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "rsyncd.conf"
    config.write_text(CONFIG.format(uid=os.getuid(), gid=os.getgid(), path=tmp_path / "south" / "replicas"))
    command = ["rsync", "--daemon", "--no-detach", f"--config={config}", "--address=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen(command)
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    yield f"rsync://127.0.0.1:{port}/all/"
    process.terminate()
    process.wait()


class SitePair:
    """Two sites, with the same transfers by koalapy and by rsync."""

    def __init__(self, directory: Path, bare: str) -> None:
        self.wire, self.daemon_files, self.directory, self._bare = Wire(), FakeDaemonFiles(), directory, bare
        self.north = FileSite(
            "north", directory / "north", self.wire, DaemonFiles(self.daemon_files.url, "north", "s3cret")
        )
        self.south = FileSite("south", directory / "south", self.wire)
        self._number = 0

    async def close(self) -> None:
        await self.north.stop()
        await self.south.stop()
        self.daemon_files.close()

    async def rsync(self, name: str) -> float:
        target = self.directory / "copy"
        target.mkdir()
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec("rsync", "-rt", f"{self._bare}{name}", f"{target}/")
        assert await process.wait() == 0
        took = time.perf_counter() - began
        shutil.rmtree(target)
        return took

    async def ours(self, order: Callable[[str], object]) -> float:
        """Return the seconds from an order until the report that all files have arrived."""
        self._number += 1
        token = f"{self._number}.1.0"
        began = time.perf_counter()
        order(token)
        await self.north.wait_until(lambda: any(s.token == token and s.state == "done" for s in self.north.statuses))
        took = time.perf_counter() - began
        self.north.stages.discard_stage(INSTANCE, token)
        await self.north.wait_until(lambda: not list(self.north.directory.glob("stages/*")))
        return took

    async def compare(self, bare: Callable[[], Awaitable[float]], ours: Callable[[], Awaitable[float]]) -> list[float]:
        """Return the medians of both transfers, which alternate."""
        times = [(await bare(), await ours()) for _ in range(ROUNDS)]
        return [statistics.median(column) for column in zip(*times, strict=True)]


def test_transfer_time_of_large_file(tmp_path: Path, rsync_url: str, benchmark: object) -> None:
    async def measured() -> list[float]:
        pair = SitePair(tmp_path, rsync_url)
        path = pair.south.make_replica("big", random.Random(3).randbytes(LARGE_FILE_BYTES))
        input_file = pair.south.make_input(path)
        try:
            return await pair.compare(
                lambda: pair.rsync("big"),
                lambda: pair.ours(lambda token: pair.north.start_stage(input_file, token=token)),
            )
        finally:
            await pair.close()

    check_ratio(benchmark, "200 MB, encrypted", asyncio.run(measured()), at_most=4)


def test_transfer_time_of_small_files(tmp_path: Path, rsync_url: str, benchmark: object) -> None:
    async def measured() -> list[float]:
        pair = SitePair(tmp_path, rsync_url)
        for name, content in create_small_files().items():
            pair.south.make_replica(f"many/{name}", content)
        input_folder = pair.south.make_input(pair.south.replicas / "many")
        try:
            return await pair.compare(
                lambda: pair.rsync("many"),
                lambda: pair.ours(lambda token: pair.north.start_stage(input_folder, token=token)),
            )
        finally:
            await pair.close()

    check_ratio(benchmark, "1000 files of a replica", asyncio.run(measured()), at_most=2)


def create_small_files() -> dict[str, bytes]:
    draws = random.Random(4)
    return {f"{number % 10}/{number}": draws.randbytes(SMALL_FILE_BYTES) for number in range(FILE_COUNT)}


def check_ratio(benchmark: object, title: str, medians: list[float], *, at_most: float) -> None:
    bare, transfer = medians
    print(
        f"\n{title}: bare rsync {bare:.3f} s, koalapy {transfer:.3f} s,"
        f" ratio {transfer / bare:.2f} (at most {at_most:.2f})"
    )
    benchmark.extra_info.update(bare=bare, ours=transfer, ratio=transfer / bare)  # type: ignore[attr-defined]
    benchmark.pedantic(lambda: None)  # type: ignore[attr-defined]
    assert transfer < at_most * bare
