"""One input on its way from another site: pulled by rsync, gone on with after every cut, verified at the end."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from koalapy.agent.accounts import drop_capabilities
from koalapy.agent.core.questions import Questions
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.core.spool import DiskSync
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.digest import Content, GrowingDigest, measure_content
from koalapy.agent.transfers.exports import RSYNC, RequiresEncryption, Route, always_required, tunnel_environment
from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.sharing import Fault, SharedTasks, StageError, Turns, site_error
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.protocol.messages import StageFile
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

IO_TIMEOUT = 30
"""Seconds without a byte after which a transfer counts as cut."""
TICK = 0.25
"""Seconds between two looks at how far it is."""
FIRST_TICK = 0.02
"""The same until the first bytes have come: how long that took is no sign of how fast the link is."""
MAX_ERROR_LENGTH = 4000
"""Bytes that are kept of what it says, the last ones: there is a line for each of very many files, maybe."""
OURS = re.compile(r"\[(receiver|generator)\]|\[(receiver|generator)=", re.IGNORECASE)
NO_SPACE = ("No space left on device", "Disk quota exceeded", "File too large")
READ_ONLY = ("Read-only file system", "Permission denied")


class RsyncMissing(Exception):
    """There is none on this host."""


@dataclass(frozen=True, slots=True)
class RsyncOutcome:
    code: int
    errors: str

    @property
    def reason(self) -> str:
        """The line that says why, for people."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        reasons = [line for line in lines if not line.startswith("rsync error:")]
        if self.code < 0:
            return f"rsync was killed by signal {-self.code}"
        return next(iter(reasons or lines), f"rsync ended with {self.code}").removeprefix("rsync: ")

    @property
    def local_error(self) -> str:
        """Why nothing can be written here; empty when that is not what went wrong."""
        for line in self.errors.splitlines():
            if any(text in line for text in NO_SPACE) or (
                OURS.search(line) and any(text in line for text in READ_ONLY)
            ):
                return line.strip().removeprefix("rsync: ")
        return ""


def rsync_command(route: Route, folder: Path, program: str = RSYNC) -> list[str]:
    """Pull what a ticket is for into a folder, and go on with what is there of it already.

    Names of single files are given by standard input, where none of their characters has a meaning.
    """
    options = ["--append", "--times", "--perms", "--chmod=u=rwX,go=", "--no-motd"]
    options += [f"--timeout={IO_TIMEOUT}", "--contimeout=10"]
    options += ["--recursive"] if route.kind == "folder" else ["--from0", "--files-from=-"]
    host = f"[{route.host}]" if ":" in route.host else route.host
    return [program, *options, f"rsync://{route.user}@{host}:{route.port}/{route.module}/", f"{folder}/"]


async def run_rsync(
    route: Route, name: str, folder: Path, tick: Callable[[], bool], program: str = RSYNC
) -> RsyncOutcome:
    """Run rsync to its end, ``tick`` being called all the while, which says whether anything has come;
    ``RsyncMissing``. Killed when cancelled."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "RSYNC_PASSWORD": route.password}
    if route.certificate:
        environment |= tunnel_environment(route.host, route.port, route.certificate)
    try:
        process = await asyncio.create_subprocess_exec(
            *drop_capabilities(*rsync_command(route, folder, program)),
            env=environment,
            cwd="/",
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise RsyncMissing(error.strerror) from error
    talking = asyncio.create_task(_talk(process, f"./{name}\0".encode()))
    try:
        pause = FIRST_TICK
        while True:
            finished, _ = await asyncio.wait((talking,), timeout=pause)
            pause = TICK if tick() else min(TICK, 1.1 * pause)
            if finished:
                break
        errors = talking.result()
        return RsyncOutcome(process.returncode or 0, errors.decode(errors="replace"))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(talking, return_exceptions=True)


async def _talk(process: asyncio.subprocess.Process, names: bytes) -> bytes:
    """Tell it what to pull, and hear whole lines of what it complains of at last, until it has ended."""
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(names)
    process.stdin.close()
    errors = b""
    while data := await process.stderr.read(MAX_ERROR_LENGTH):
        errors += data
        if len(errors) > MAX_ERROR_LENGTH:
            errors = errors[-MAX_ERROR_LENGTH:].partition(b"\n")[2]
    await process.wait()
    return errors


def kill_orphans(folder: Path) -> list[int]:
    """Kill what an agent that is gone has left pulling into a folder, and return what was told to end.

    Two writers at once would spoil the file.
    """
    target, killed = os.fsencode(f"{folder}/"), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")
            if os.path.basename(arguments[0]) == RSYNC.encode() and any(
                argument.startswith(target) for argument in arguments[1:]
            ):
                os.kill(int(entry), signal.SIGKILL)
                killed.append(int(entry))
        except (OSError, ProcessLookupError):
            continue
    return killed


def is_process_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


MAX_TRIES = 6
"""How often nothing more may come before we give up; after that many pauses about 30 s have passed."""
FILE_FAULTS = (SiteFault.MISSING, SiteFault.CHANGED, SiteFault.UNREADABLE, SiteFault.IRREGULAR, SiteFault.OUTSIDE)
"""By these words a source says that its replica is not what the catalogue has."""
FINAL_FAULTS = (
    SiteFault.UNCONFIGURED,
    SiteFault.NO_RSYNC,
    SiteFault.ADDRESS,
    SiteFault.UNKNOWN,
    SiteFault.INVALID,
    SiteFault.IN_CLEAR,
)
SHARE = 10
"""A folder is measured no more often than that part of the time allows."""

MAX_DIGESTS = 16
"""Checksums computed at once while files come, besides one for each pull that has its turn."""
MAX_BUNDLES = 16
MAX_REPLICAS = 16
"""Replicas on this site that are looked at for programs at once; each may have to be read."""

NO_CONTENT = Content(0, "")


class TransferCut(Exception):
    """The transfer was cut, and may be gone on with."""


class TooManyBytes(Exception):
    """More has come than there should be: it is not what was wanted."""


@dataclass(kw_only=True)
class TransferTools:
    """What every stage of a cluster uses; ``pulls`` is how many may run at once."""

    cluster: str
    replicas: Replicas
    questions: Questions
    daemon_files: DaemonFiles
    pulls: int
    disk_sync: DiskSync | None = None
    encrypts: RequiresEncryption = always_required
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS
    clock: Clock = SYSTEM_CLOCK
    rsync_program: str = RSYNC
    shared_tasks: SharedTasks = field(default_factory=SharedTasks)

    def __post_init__(self) -> None:
        self.turns = Turns(self.pulls)
        # A daemon that hangs, or a replica that has to be read again, must not keep all threads of the agent waiting.
        self.digest_threads = ThreadPoolExecutor(MAX_DIGESTS + self.pulls, "digest")
        self.bundle_threads = ThreadPoolExecutor(MAX_BUNDLES, "bundle")
        self.replica_threads = ThreadPoolExecutor(MAX_REPLICAS, "replica")

    def close(self) -> None:
        for pool in (self.digest_threads, self.bundle_threads, self.replica_threads):
            pool.shutdown(wait=False, cancel_futures=True)


class Pull:
    """Brings one file or folder into ``folder``, which is its own and is kept over restarts of the agent."""

    def __init__(
        self, file: StageFile, folder: Path, place: int, progress: Callable[[], object], means: TransferTools
    ) -> None:
        """``place`` in the order of pulls; ``progress`` is called all the while."""
        self._file, self._folder, self._place, self._progress = file, folder, place, progress
        self._questions, self._timeouts, self._clock = means.questions, means.timeouts, means.clock
        self._means, self._cluster = means, means.cluster
        self._encrypted = means.encrypts(file.source)
        self._name = file.part if file.part is not None else Path(file.path).name
        self._kind = ""
        self._digest: GrowingDigest | None = None
        self._digesting: asyncio.Future[Content] | None = None
        self._looking: asyncio.Future[None] | None = None
        self._next_look = 0.0
        self.arrived_bytes = 0
        """Bytes that have arrived."""
        self.moved_bytes = 0
        """Bytes that this agent has seen arrive."""
        self.seconds = 0.0
        """In which they did; no wait for a turn is among them."""
        self.flowed, self.flowing = 0, 0.0
        """The same without what it took until the first of them was here, and until it was noticed that none came."""
        self._first: tuple[float, int] | None = None
        """When bytes were first seen to have come in this try, and how many were there."""
        self._last = 0.0, 0
        """The same of the last ones, or of the beginning."""
        self._arrived_at_start = 0
        """Bytes that were there before it."""

    async def fetch_input(self) -> Path:
        """The path of what came, whole and verified; ``StageError``."""
        try:
            await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            for _ in range(2):
                await self._pull_with_retries()
                if await self._is_right():
                    return self._folder / self._name if self._kind == "file" else self._folder
                log.warning("a wrong checksum", action="checksum-wrong", file=self._file.name, source=self._file.source)
                await asyncio.to_thread(_empty, self._folder)
                self.arrived_bytes = 0
        except OSError as error:
            raise site_error(self._cluster, error) from error
        finally:
            self._stop_digest()
        raise await self._diagnose_mismatch()

    async def _pull_with_retries(self) -> None:
        """Pull until all is there; what has come is kept over all tries."""
        failures, pause = 0, self._timeouts.transfer_retry_s
        while True:
            arrived_before = self.arrived_bytes
            try:
                # Who waits for a turn has no ticket: those that a source gives out are few.
                async with self._means.turns.wait_turn(self._place):
                    await self._pull_once()
                return
            except TooManyBytes:
                return
            except SiteRejected as error:
                if error.fault in FILE_FAULTS:
                    raise self._error(error.message, "file") from error
                if error.fault in FINAL_FAULTS:
                    raise self._error(error.message, "source") from error
                problem = error.message
            except ValidationError as error:
                raise self._error(f"{self._file.source} answers what we do not understand", "source") from error
            except (SiteError, TransferCut) as error:
                problem = str(error)
                if isinstance(error, SiteUnavailable) and self._questions.is_recently_connected:
                    failures = 0  # the source's agent may have to come back, too
            if self.arrived_bytes > arrived_before:
                failures, pause = 0, self._timeouts.transfer_retry_s
            failures += 1
            log.info(
                "transfer cut", action="transfer-cut", file=self._file.name, source=self._file.source, reason=problem
            )
            if failures > MAX_TRIES:
                raise self._error(f"gave up after {failures} tries: {problem}", "source")
            await asyncio.sleep(pause)
            pause = min(self._timeouts.max_transfer_retry_s, 2 * pause)

    async def _pull_once(self) -> None:
        file = self._file
        request = {"path": file.path, "part": file.part, "size": file.size, "encrypted": self._encrypted}
        route = Route.model_validate(await self._questions.ask_cluster(file.source, "export", request))
        if self._encrypted and not route.certificate:
            self._return_ticket(file.source, route)
            reason = f"nothing comes to {self._cluster} in clear, and the agent there encrypts nothing: update that one"
            raise self._error(reason, "source")
        self._kind = route.kind
        await self._measure_now()
        if self.arrived_bytes > file.size:
            self._stop_digest()
            await asyncio.to_thread(_empty, self._folder)
            self.arrived_bytes = 0
        if self._kind == "file" and self._digest is None:
            self._digest = GrowingDigest(self._folder / self._name)
            follow = self._digest.compute_content
            self._digesting = asyncio.get_running_loop().run_in_executor(self._means.digest_threads, follow)
        began = self._clock.monotonic()
        self._expect_first(began)
        try:
            outcome = await run_rsync(route, self._name, self._folder, self._tick, self._means.rsync_program)
        except RsyncMissing as error:
            words = "there is no rsync on its head node: install it there"
            raise StageError(f"{self._cluster} cannot pull files: {words}", "site") from error
        finally:
            ended = self._clock.monotonic()
            self.seconds += ended - began
            first = self._first  # not what the last look sees
            await self._measure_now()
            self.moved_bytes += max(0, self.arrived_bytes - self._arrived_at_start)
            if first is not None:
                # A cut is noticed long after the last bytes; what only the last look sees came before the end.
                self.flowing += max(0.0, min(ended, self._last[0]) - first[0])
                self.flowed += max(0, self.arrived_bytes - first[1])
            self._return_ticket(file.source, route)
        if outcome.local_error:
            raise StageError(f"there is no room left on {self._cluster}: {outcome.local_error}", "site")
        if outcome.code:
            raise TransferCut(outcome.reason)

    def _return_ticket(self, source: str, route: Route) -> None:
        """Nobody waits for it: a ticket that stays ends by itself."""
        task = asyncio.ensure_future(self._questions.ask_cluster(source, "unexport", {"module": route.module}))
        task.add_done_callback(_forget)

    # How far it is

    def _expect_first(self, now: float) -> None:
        self._arrived_at_start, self._first, self._next_look = self.arrived_bytes, None, now
        self._last = now, self.arrived_bytes

    def _tick(self) -> bool:
        """Whether anything has come yet; ``TooMuch``."""
        if self._clock.monotonic() >= self._next_look and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().run_in_executor(None, self._measure_folder)
        self._progress()
        if self.arrived_bytes > self._file.size:
            raise TooManyBytes
        return self._first is not None

    async def _measure_now(self) -> None:
        """After a look that is still under way, lest it has the last word."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        await asyncio.to_thread(self._measure_folder)

    def _measure_folder(self) -> None:
        began = self._clock.monotonic()
        with contextlib.suppress(OSError):
            self.arrived_bytes = _size_of(self._folder)
        now = self._clock.monotonic()
        if self.arrived_bytes > self._last[1]:
            self._last = now, self.arrived_bytes
            self._first = self._first or self._last
        self._next_look = now + SHARE * (now - began)

    # Whether it is right

    def _stop_digest(self) -> None:
        if self._digest is not None and self._digesting is not None:
            self._digest.cancel()
            self._digesting.add_done_callback(_forget)
        self._digest = self._digesting = None

    async def _is_right(self) -> bool:
        if self._digest is not None and self._digesting is not None:
            self._digest.mark_complete()
            try:
                content = await asyncio.shield(self._digesting)
            except FileNotFoundError:
                content = NO_CONTENT
            self._digest = self._digesting = None
        else:
            threads = self._means.digest_threads
            content = await asyncio.get_running_loop().run_in_executor(threads, _measure, self._folder)
        return (content.size, content.checksum) == (self._file.size, self._file.checksum)

    async def _diagnose_mismatch(self) -> StageError:
        """Twice the wrong bytes came: is the replica another now?"""
        file = self._file
        path = file.path if file.part is None else f"{file.path}/{file.part}"
        try:
            content = await self._questions.ask_cluster(file.source, "stat", {"path": path, "checksum": True}, 600.0)
        except SiteError as error:
            return self._error(f"its checksum is wrong, and {file.source} cannot tell why: {error}", "source")
        if content.get("checksum") != file.checksum:
            return self._error("its checksum is another than the catalogue's: it was changed", "file")
        return self._error(f"it arrives on {self._cluster} with a wrong checksum, though its own is right", "site")

    def _error(self, reason: str, fault: Fault) -> StageError:
        message = f"{self._file.name} from {self._file.source}: {reason}"
        return StageError(message, fault, source=self._file.source, file=self._file.name)


def _forget(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def _measure(folder: Path) -> Content:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return measure_content(descriptor, checksum=True)
    except SiteRejected:
        return NO_CONTENT  # What a replica cannot hold is not what was wanted.
    finally:
        os.close(descriptor)


def _size_of(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            total += _size_of(Path(entry)) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total
