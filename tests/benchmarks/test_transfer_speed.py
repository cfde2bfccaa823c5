"""Files between two sites and from the submitter, against bare rsync side by side."""

import asyncio
import hashlib
import io
import os
import random
import shutil
import socket
import statistics
import subprocess
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.protocol.messages import StageBundle
from tests.agent.transfers.conftest import INSTANCE, FileSite, Wire
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.needs import RSYNC, needs

pytestmark = [needs(RSYNC), pytest.mark.nightly]
ROUNDS = 9
SIZE = 200_000_000
FILES, FILE_SIZE = 1000, 2000
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
def bare(tmp_path: Path) -> Iterator[str]:
    """An rsync daemon with nothing of ours around it; its URL."""
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


class Pair:
    """Two sites, and the same transfers with and without us."""

    def __init__(self, directory: Path, bare: str, *, encrypts: bool = False) -> None:
        self.wire, self.daemon_files, self.directory, self._bare = Wire(), FakeDaemonFiles(), directory, bare
        self.north = FileSite(
            "north", directory / "north", self.wire, DaemonFiles(self.daemon_files.url, "north", "s3cret")
        )
        self.south = FileSite("south", directory / "south", self.wire)
        self.north.encrypts = self.south.encrypts = encrypts
        self._number = 0

    async def close(self) -> None:
        await self.north.stop()
        await self.south.stop()
        self.daemon_files.close()

    async def rsync(self, what: str) -> float:
        target = self.directory / "copy"
        target.mkdir()
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec("rsync", "-rt", f"{self._bare}{what}", f"{target}/")
        assert await process.wait() == 0
        took = time.perf_counter() - began
        shutil.rmtree(target)
        return took

    async def ours(self, order: Callable[[str], object]) -> float:
        """Seconds from an order until it is told that all is there."""
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
        """Medians of both, which take turns."""
        found = [(await bare(), await ours()) for _ in range(ROUNDS)]
        return [statistics.median(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize(("encrypts", "at_most"), [(False, 1 / 0.9), (True, 4)])
def test_a_large_file_from_another_site(
    tmp_path: Path, bare: str, benchmark: object, encrypts: bool, at_most: float
) -> None:
    async def measured() -> list[float]:
        pair = Pair(tmp_path, bare, encrypts=encrypts)
        path = pair.south.make("big", random.Random(3).randbytes(SIZE))
        wanted = pair.south.input(path)
        try:
            return await pair.compare(
                lambda: pair.rsync("big"), lambda: pair.ours(lambda token: pair.north.stage(wanted, token=token))
            )
        finally:
            await pair.close()

    report(benchmark, "200 MB, encrypted" if encrypts else "200 MB", asyncio.run(measured()), at_most=at_most)


def test_many_small_files_from_another_site(tmp_path: Path, bare: str, benchmark: object) -> None:
    async def measured() -> list[float]:
        pair = Pair(tmp_path, bare)
        for name, content in small_files().items():
            pair.south.make(f"many/{name}", content)
        wanted = pair.south.input(pair.south.replicas / "many")
        try:
            return await pair.compare(
                lambda: pair.rsync("many"), lambda: pair.ours(lambda token: pair.north.stage(wanted, token=token))
            )
        finally:
            await pair.close()

    report(benchmark, "1000 files of a replica", asyncio.run(measured()), at_most=2)


def test_many_small_files_from_the_submitter(tmp_path: Path, bare: str, benchmark: object) -> None:
    async def measured() -> list[float]:
        pair = Pair(tmp_path, bare)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as opened:
            for name, content in small_files().items():
                pair.south.make(f"many/{name}", content)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))
        ident = hashlib.sha256(archive.getvalue()).hexdigest()
        pair.daemon_files.bundles[ident] = archive.getvalue()
        bundle = StageBundle(id=ident, size=len(archive.getvalue()))
        try:
            return await pair.compare(
                lambda: pair.rsync("many"),
                lambda: pair.ours(lambda token: pair.north.stage(token=token, bundle=bundle)),
            )
        finally:
            await pair.close()

    report(benchmark, "1000 files of a submitter", asyncio.run(measured()), at_most=2)


def small_files() -> dict[str, bytes]:
    made = random.Random(4)
    return {f"{number % 10}/{number}": made.randbytes(FILE_SIZE) for number in range(FILES)}


def report(benchmark: object, what: str, found: list[float], *, at_most: float) -> None:
    bare, ours = found
    print(f"\n{what}: bare rsync {bare:.3f} s, ours {ours:.3f} s, ratio {ours / bare:.2f} (at most {at_most:.2f})")
    benchmark.extra_info.update(bare=bare, ours=ours, ratio=ours / bare)  # type: ignore[attr-defined]
    benchmark.pedantic(lambda: None)  # type: ignore[attr-defined]
    assert ours < at_most * bare
