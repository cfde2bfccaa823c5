"""File transfers between agents on loopback, connected by a wire instead of a daemon."""

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from koalapy.agent.core.settings import AgentTimeouts
from koalapy.agent.runners.uplink import Handler, Questions
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.exports import RSYNC, Exports
from koalapy.agent.transfers.pull import TransferTools
from koalapy.agent.transfers.replicas import Replicas, Seals
from koalapy.agent.transfers.roots import Roots, measure_content
from koalapy.agent.transfers.stages import Stages
from koalapy.model.replica import StageFile
from koalapy.model.reports import StageStatus
from koalapy.protocol.messages import Answer, Ask, Stage, StageBundle
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from tests import needs as needed
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.deep_folders import deep_folder
from tests.signals import until

INSTANCE, T = "test", "7.1.0"
needs_rsync = needed.needs(needed.RSYNC)


class SetClock(Clock):
    """A clock set by the test."""

    def __init__(self, wall: float = 0.0) -> None:
        self.wall, self.steady = wall, 0.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady


class Wire:
    """Forwards requests and answers between sites; missing sites are out of reach."""

    def __init__(self) -> None:
        self.sites: dict[str, FileSite] = {}
        self.questions: list[str] = []
        self.change_answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda payload: payload
        """Changes the payload of a forwarded answer."""
        self.online_since = float("-inf")
        """Time at which the daemon started to forward requests, for agents that start from now on."""

    def pass_on(self, sender: str, message: Ask | Answer) -> None:
        target = self.sites.get(message.cluster)
        forwarded = message.model_copy(update={"cluster": sender})
        if isinstance(forwarded, Ask):
            self.questions.append(forwarded.what)
            if target is not None:
                target.questions.answer_question(forwarded)
            elif (back := self.sites.get(sender)) is not None:
                error = f"{message.cluster} is out of reach"
                back.questions.receive_answer(Answer(ident=message.ident, error=error, fault="unavailable"))
        elif target is not None:
            target.questions.receive_answer(
                forwarded.model_copy(update={"payload": self.change_answer(dict(message.payload))})
            )


class WireEnd:
    """The end of the wire at one site, in place of an uplink."""

    def __init__(self, site: str, wire: Wire) -> None:
        self.online = asyncio.Event()
        self.online.set()
        self.online_since = wire.online_since
        self._site, self._wire = site, wire

    def send_soon(self, message: Any, *, urgent: bool = False) -> None:
        asyncio.get_running_loop().call_soon(self._wire.pass_on, self._site, message)


class FileSite:
    """The folders of one cluster and the file part of its agent, which may be replaced."""

    def __init__(self, name: str, directory: Path, wire: Wire, daemon_files: DaemonFiles | None = None) -> None:
        self.name, self.directory, self.wire = name, directory, wire
        self.replicas = directory / "replicas"
        self.replicas.mkdir(parents=True)
        self.daemon_files = daemon_files or DaemonFiles("http://127.0.0.1:1", name, "s3cret")
        self.statuses: list[StageStatus] = []
        self.pulls = 4
        self.stages_in_use: set[str] = set()
        """Tokens of stages that components use."""
        self.timeouts = AgentTimeouts(
            transfer_retry_s=0.01, max_transfer_retry_s=0.05, transfer_login_s=Logins.TIMEOUT_S
        )
        self.clock = SYSTEM_CLOCK
        self.start()

    async def restart(
        self,
        *,
        pulls: int | None = None,
        clock: Clock | None = None,
        rsync_program: str = RSYNC,
        timeouts: Mapping[str, float] | None = None,
        **limits: int,
    ) -> None:
        """Replace the agent by one with other limits."""
        await self.stop()
        self.pulls, self.clock = pulls or self.pulls, clock or self.clock
        self.timeouts = replace(self.timeouts, **(timeouts or {}))
        self.start(rsync_program, **limits)

    def start(self, rsync_program: str = RSYNC, **limits: int) -> None:
        replicas = Replicas(
            Roots(self.name, [self.replicas]), Seals(self.directory / "seals.json", self.clock), self.clock
        )
        self.exports = Exports(replicas, self.directory / "exports", "127.0.0.1", None, self.timeouts, **limits)
        self.handlers: dict[str, Handler] = {
            "stat": replicas.stat_replica,
            "export": self.exports.export_replica,
            "unexport": self.exports.revoke_ticket,
        }
        self.questions = Questions(WireEnd(self.name, self.wire), self.handlers)  # type: ignore[arg-type]
        self.means = TransferTools(
            cluster=self.name,
            replicas=replicas,
            questions=self.questions,
            daemon_files=self.daemon_files,
            pulls=self.pulls,
            timeouts=self.timeouts,
            clock=self.clock,
            rsync_program=rsync_program,
        )
        self.stages = Stages(
            self.directory / "stages", self.means, self._tell, lambda instance, token: token in self.stages_in_use
        )
        self.wire.sites[self.name] = self

    async def stop(self) -> None:
        self.wire.sites.pop(self.name, None)
        await self.questions.stop_answering()
        await self.stages.close()
        await self.exports.close()

    def _tell(self, instance: str, status: StageStatus) -> bool:
        self.statuses.append(status)
        return True

    def make_replica(self, name: str, content: bytes = b"content\n") -> Path:
        path = self.replicas / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def make_input(self, path: Path, *, part: str | None = None, target: str = "input", **changes: Any) -> StageFile:
        """Return the input for a replica as the catalogue describes it."""
        content = measure_path(path / part if part else path)
        fields = {"size": content[0], "checksum": content[1], **changes}
        return StageFile(name="/logical", source=self.name, path=str(path), part=part, target=target, **fields)

    def start_stage(
        self, *files: StageFile, token: str = T, bundle: StageBundle | None = None, results: Sequence[str] = ()
    ) -> Path:
        """Start a stage and return its folder. ``results``: names of the results of other jobs."""
        order = Stage(id=1, epoch=1, token=token, files=list(files), bundle=bundle, result_names=list(results))
        assert self.stages.start_stage(INSTANCE, order) == ""
        return self.stages.folder_path(INSTANCE, token)

    async def wait_until(self, condition: Callable[[], object]) -> None:
        try:
            await until(condition)
        except TimeoutError:
            pytest.fail(f"condition not met; last statuses: {self.statuses[-3:]}")

    async def wait_for_state(self, state: str, token: str = T) -> StageStatus:
        await self.wait_until(lambda: self.last_status(token) is not None and self.last_status(token).state == state)  # type: ignore[union-attr]
        status = self.last_status(token)
        assert status is not None
        return status

    def last_status(self, token: str = T) -> StageStatus | None:
        return next((status for status in reversed(self.statuses) if status.token == token), None)


def find_rsyncs(argument: str | Path) -> list[psutil.Process]:
    """Return the running rsync processes with an argument that contains this text."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            has_argument = any(str(argument) in one for one in process.cmdline())
            if process.name() == "rsync" and has_argument and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


class Gate:
    """A proxy between puller and source that stops after a number of bytes until it is opened."""

    def __init__(self, wire: Wire, limit: int) -> None:
        self.limit = limit
        self.passed = 0
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        self._target = 0
        self._port = 0
        self._writers: list[asyncio.StreamWriter] = []
        wire.change_answer = self._redirect

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        self.break_connections()

    def break_connections(self) -> None:
        """Break all connections. Later ones pass, and only their bytes count."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self.limit, self.passed = sys.maxsize, 0
        self.open.set()

    def close_again(self, limit: int) -> None:
        self.limit, self.passed = limit, 0
        self.open.clear()
        self.reached.clear()

    def _redirect(self, payload: dict[str, Any]) -> dict[str, Any]:
        if "port" not in payload:
            return payload
        self._target = int(payload["port"])
        return {**payload, "port": self._port}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            source, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, back]
        upward = asyncio.create_task(self._copy(reader, back))
        try:
            while data := await source.read(65536):
                if writer not in self._writers:
                    break
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
                if self.passed >= self.limit:
                    self.reached.set()
                    await self.open.wait()
        except OSError:
            pass
        finally:
            writer.close()
            upward.cancel()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            return


@pytest.fixture
async def gate(wire: Wire, request: pytest.FixtureRequest) -> AsyncIterator[Gate]:
    """Yield a gate that stops after half of the module's ``BIG``."""
    gate = Gate(wire, len(request.module.BIG) // 2)
    await gate.listen()
    yield gate
    gate.close()


def measure_path(path: Path) -> tuple[int, str]:
    """Return size and checksum of a file or folder."""
    if path.is_file():
        data = path.read_bytes()
        return len(data), hashlib.sha256(data).hexdigest()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = measure_content(descriptor, checksum=True)
    finally:
        os.close(descriptor)
    return content.size, content.checksum


class Logins:
    """The login timeouts of pullers, which the test can expire."""

    TIMEOUT_S = 987.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._given: list[asyncio.Timeout] = []
        self._timeout = asyncio.timeout
        monkeypatch.setattr(asyncio, "timeout", self._give)

    def _give(self, seconds: float | None) -> asyncio.Timeout:
        timeout = self._timeout(seconds)
        if seconds == self.TIMEOUT_S:
            self._given.append(timeout)
        return timeout

    @property
    def rsync_runs(self) -> bool:
        """Whether the source waits for the end of rsync, after it has waited for the first byte."""
        return len(self._given) == 2

    def are_over(self) -> None:
        self._given[-1].reschedule(asyncio.get_running_loop().time())

    async def end_behind_a_greeting(self, site: FileSite, reader: asyncio.StreamReader) -> None:
        """Check that a puller without login is disconnected when its timeout expires."""
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"@RSYNCD")
            await site.wait_until(lambda: self.rsync_runs)
            self.are_over()
            with suppress(ConnectionResetError):  # the server may not have read all sent bytes
                await reader.read()


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> Logins:
    return Logins(monkeypatch)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def north(tmp_path: Path, wire: Wire, daemon_files: FakeDaemonFiles) -> AsyncIterator[FileSite]:
    """Yield the site that executes jobs."""
    site = FileSite("north", tmp_path / "north", wire, DaemonFiles(daemon_files.url, "north", "s3cret"))
    yield site
    await site.stop()


@pytest.fixture
async def south(tmp_path: Path, wire: Wire) -> AsyncIterator[FileSite]:
    """Yield the site that holds replicas."""
    site = FileSite("south", tmp_path / "south", wire)
    yield site
    await site.stop()


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """Yield the top of folders nested deeper than Python can recurse."""
    (tmp_path / "deep").mkdir()
    with deep_folder(tmp_path / "deep") as top:
        yield top
