"""Pull one input from another site by rsync, resume after every cut, and verify the result.

Stages share the pulls of a site: few run at once, and stages with the same input wait for one pull.
"""

import asyncio
import contextlib
import errno
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from koalapy.agent.accounts import drop_capabilities
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.core.spool import DiskSync
from koalapy.agent.runners.uplink import Questions
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.exports import RSYNC, Route, tunnel_environment
from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.roots import MAX_DEPTH, Content, GrowingDigest, measure_content, remove_tree
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.replica import StageFile
from koalapy.model.reports import StageFault
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ContentKey = tuple[str, str, str | None, str, int]
"""Identifies a replica, or an entry of one, in the catalogue. A checksum is not enough: empty files and empty folders
share one."""


class StageError(Exception):
    """A stage has failed; ``fault`` names the responsible side, ``source`` and ``file`` where and which file."""

    def __init__(self, message: str, fault: StageFault, *, source: str = "", file: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fault: StageFault = fault
        self.source = source
        self.file = file


def site_error(cluster: str, error: OSError) -> StageError:
    """Return the error for a local file that could not be created or written."""
    problem = "the disk is full" if error.errno in FULL else "a file cannot be written"
    return StageError(f"{problem} on {cluster}: {error.strerror or error}", "site")


def content_key(file: StageFile) -> ContentKey:
    """Return the key by which stages recognize that they need the same input."""
    return file.source, file.path, file.part, file.checksum, file.size


class SharedTask:
    """A pull of one input that several stages need: one stage at a time does it, and the others wait."""

    def __init__(self) -> None:
        self.users = 0
        """Number of stages that run it or wait for it."""
        self.free = asyncio.Lock()
        self.failure: StageError | None = None


class SharedTasks:
    """The shared tasks that are running or awaited."""

    def __init__(self) -> None:
        self._tasks: dict[ContentKey, SharedTask] = {}

    @asynccontextmanager
    async def run_exclusively(self, file: StageFile) -> AsyncIterator[None]:
        """Wait until no other stage pulls this file. Raise ``StageError`` if its source has failed."""
        task = self._tasks.setdefault(content_key(file), SharedTask())
        task.users += 1
        try:
            async with task.free:
                if task.failure is not None:
                    raise task.failure
                yield
        except StageError as failure:
            # An error without a source affects this stage only.
            task.failure = failure if failure.source and failure.fault != "site" else None
            raise
        finally:
            task.users -= 1
            if not task.users:
                del self._tasks[content_key(file)]


IO_TIMEOUT = 30
"""Seconds without a byte after which a transfer counts as cut."""
TICK = 0.25
"""Seconds between two progress checks."""
FIRST_TICK = 0.02
"""The same until the first bytes have arrived: the start-up time says nothing about the link."""
MAX_ERROR_LENGTH = 4000
"""Bytes kept of rsync's errors, the last ones: there may be a line for each of many files."""
OURS = re.compile(r"\[(receiver|generator)\]|\[(receiver|generator)=", re.IGNORECASE)
NO_SPACE = ("No space left on device", "Disk quota exceeded", "File too large")
READ_ONLY = ("Read-only file system", "Permission denied")
MAX_TRIES = 6
"""Attempts without progress before a pull fails, after pauses of about 30 s in all."""
FILE_FAULTS = (SiteFault.MISSING, SiteFault.CHANGED, SiteFault.UNREADABLE, SiteFault.IRREGULAR, SiteFault.OUTSIDE)
"""Faults with which a source reports that its replica differs from the catalogue."""
FINAL_FAULTS = (SiteFault.UNCONFIGURED, SiteFault.NO_RSYNC, SiteFault.ADDRESS, SiteFault.UNKNOWN, SiteFault.INVALID)
SHARE = 10
"""A folder is measured for at most one part in so many of the time."""
MAX_DIGESTS = 16
"""Checksums computed at once during transfers, besides one for each running pull."""
MAX_ENTRIES = 20_000_000
"""Files and folders in a pulled folder: its size in bytes does not limit those that are empty."""
MAX_BUNDLES = 16
MAX_REPLICAS = 16
"""Replicas of this site that are checked at once; each may have to be read."""
NO_CONTENT = Content(0, "")


class RsyncMissing(Exception):
    """rsync is not installed on this host."""


@dataclass(frozen=True, slots=True)
class RsyncOutcome:
    """Exit code and errors of an rsync run."""

    code: int
    errors: str

    @property
    def reason(self) -> str:
        """Why rsync failed: its first error line, its signal, or its exit code."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        reasons = [line for line in lines if not line.startswith("rsync error:")]
        if self.code < 0:
            return f"rsync was killed by signal {-self.code}"
        return next(iter(reasons or lines), f"rsync ended with {self.code}").removeprefix("rsync: ")

    @property
    def local_error(self) -> str:
        """Why nothing can be written here; empty for any other error."""
        for line in self.errors.splitlines():
            if any(text in line for text in NO_SPACE) or (
                OURS.search(line) and any(text in line for text in READ_ONLY)
            ):
                return line.strip().removeprefix("rsync: ")
        return ""


def rsync_command(route: Route, folder: Path, program: str = RSYNC) -> list[str]:
    """Return the command that pulls the files of a ticket into a folder and resumes partial files.

    Names of single files are read from standard input, where no character is special.
    """
    options = ["--append", "--times", "--perms", "--chmod=u=rwX,go=", "--no-motd"]
    options += [f"--timeout={IO_TIMEOUT}", "--contimeout=10"]
    options += ["--recursive"] if route.kind == "folder" else ["--from0", "--files-from=-"]
    host = f"[{route.host}]" if ":" in route.host else route.host
    return [program, *options, f"rsync://{route.user}@{host}:{route.port}/{route.module}/", f"{folder}/"]


async def run_rsync(
    route: Route, name: str, folder: Path, tick: Callable[[], bool], program: str = RSYNC
) -> RsyncOutcome:
    """Run rsync to its end; call ``tick``, which returns whether bytes have arrived, all the while.

    Raise ``RsyncMissing``. Kill rsync if cancelled. If this process is killed, the kernel closes the writing end of
    ``lifeline``: the tunnel, which holds the other end, exits then, and rsync with it.
    """
    lifeline, writing_end = os.pipe()
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "RSYNC_PASSWORD": route.password}
    environment |= tunnel_environment(route.host, route.port, route.certificate, lifeline)
    try:
        process = await asyncio.create_subprocess_exec(
            *drop_capabilities(*rsync_command(route, folder, program)),
            env=environment,
            cwd="/",
            start_new_session=True,
            pass_fds=(lifeline,),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        os.close(writing_end)
        raise RsyncMissing(error.strerror) from error
    finally:
        os.close(lifeline)
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
        os.close(writing_end)
        await asyncio.gather(talking, return_exceptions=True)


async def _talk(process: asyncio.subprocess.Process, names: bytes) -> bytes:
    """Send the names to pull; return the last whole lines of the errors at the end."""
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


class TransferCut(Exception):
    """The transfer was cut and may be resumed."""


class TooManyBytes(Exception):
    """More bytes have arrived than the file has."""


@dataclass(kw_only=True)
class TransferTools:
    """The shared parts that every stage of a cluster uses; ``pulls`` limits how many run at once."""

    cluster: str
    replicas: Replicas
    questions: Questions
    daemon_files: DaemonFiles
    pulls: int
    disk_sync: DiskSync | None = None
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS
    clock: Clock = SYSTEM_CLOCK
    rsync_program: str = RSYNC
    shared_tasks: SharedTasks = field(default_factory=SharedTasks)

    def __post_init__(self) -> None:
        self.running_pulls = asyncio.Semaphore(self.pulls)
        # A hanging daemon, or the reading of a replica, must not block all threads of the agent.
        self.digest_threads = ThreadPoolExecutor(MAX_DIGESTS + self.pulls, "digest")
        self.bundle_threads = ThreadPoolExecutor(MAX_BUNDLES, "bundle")
        self.replica_threads = ThreadPoolExecutor(MAX_REPLICAS, "replica")

    def close(self) -> None:
        for pool in (self.digest_threads, self.bundle_threads, self.replica_threads):
            pool.shutdown(wait=False, cancel_futures=True)


class Pull:
    """Brings a file or folder of another cluster into the private ``folder``, which survives restarts of the agent."""

    def __init__(self, file: StageFile, folder: Path, progress: Callable[[], object], means: TransferTools) -> None:
        """Set up. ``progress`` is called regularly."""
        self._file, self._folder, self._progress = file, folder, progress
        self._means, self._clock = means, means.clock
        self._name = file.part if file.part is not None else Path(file.path).name
        self._kind = ""
        self._digest: GrowingDigest | None = None
        self._digesting: asyncio.Future[Content] | None = None
        self._looking: asyncio.Future[None] | None = None
        self._next_look = 0.0
        self.arrived_bytes = 0
        """Bytes that have arrived."""
        self.moved_bytes = 0
        """Bytes that arrived during this agent's run."""
        self.seconds = 0.0
        """Duration of the transfers, without waiting for other pulls."""
        self.flowed, self.flowing = 0, 0.0
        """Bytes and seconds without start-up and without the time to notice a cut."""
        self._first: tuple[float, int] | None = None
        """Time and size when the first bytes of this attempt were seen."""
        self._last = 0.0, 0
        """Time and size when the last bytes were seen, or at the start."""
        self._arrived_at_start = 0
        """Bytes before this attempt."""

    async def fetch_input(self) -> Path:
        """Return the path of the complete and verified content. Raise ``StageError``."""
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
            raise site_error(self._means.cluster, error) from error
        finally:
            self._stop_digest()
        raise await self._diagnose_mismatch()

    async def _pull_with_retries(self) -> None:
        """Pull until all bytes have arrived; keep partial files over all attempts."""
        failures, pause = 0, self._means.timeouts.transfer_retry_s
        while True:
            arrived_before = self.arrived_bytes
            try:
                # Wait before asking for a ticket, since a source has few.
                async with self._means.running_pulls:
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
                raise self._error(
                    f"the agent of {self._file.source} sent an answer that cannot be read", "source"
                ) from error
            except (SiteError, TransferCut) as error:
                problem = str(error)
                if isinstance(error, SiteUnavailable) and self._means.questions.is_recently_connected:
                    failures = 0  # the source's agent may have to reconnect as well
            if self.arrived_bytes > arrived_before:
                failures, pause = 0, self._means.timeouts.transfer_retry_s
            failures += 1
            log.info(
                "transfer cut", action="transfer-cut", file=self._file.name, source=self._file.source, reason=problem
            )
            if failures > MAX_TRIES:
                raise self._error(f"gave up after {failures} tries: {problem}", "source")
            await asyncio.sleep(pause)
            pause = min(self._means.timeouts.max_transfer_retry_s, 2 * pause)

    async def _pull_once(self) -> None:
        """Request a route from the source and run rsync once. Raise ``TransferCut`` if rsync fails.

        Raise ``StageError`` if another try cannot help.
        """
        file = self._file
        # Agents of earlier versions must be asked to encrypt.
        request = {"path": file.path, "part": file.part, "size": file.size, "encrypted": True}
        route = Route.model_validate(await self._means.questions.ask_cluster(file.source, "export", request))
        self._kind = route.kind
        if self._kind == "folder":
            self._stop_digest()  # a source that called it a file before must not add other entries
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
        self._start_measuring(began)
        try:
            outcome = await run_rsync(route, self._name, self._folder, self._tick, self._means.rsync_program)
        except RsyncMissing as error:
            problem = "rsync is missing on its head node: install it there"
            raise StageError(f"{self._means.cluster} cannot pull files: {problem}", "site") from error
        finally:
            ended = self._clock.monotonic()
            self.seconds += ended - began
            first = self._first  # before the last measurement
            await self._measure_now()
            self.moved_bytes += max(0, self.arrived_bytes - self._arrived_at_start)
            if first is not None:
                # A cut is noticed long after the last bytes, which arrived before the last measurement.
                self.flowing += max(0.0, min(ended, self._last[0]) - first[0])
                self.flowed += max(0, self.arrived_bytes - first[1])
            # The ticket is returned without waiting for that; it also expires.
            returning = self._means.questions.ask_cluster(file.source, "unexport", {"module": route.module})
            asyncio.ensure_future(returning).add_done_callback(_forget)
        if outcome.local_error:
            raise StageError(f"the disk of {self._means.cluster} is full: {outcome.local_error}", "site")
        if outcome.code:
            raise TransferCut(outcome.reason)

    # How far it is

    def _start_measuring(self, now: float) -> None:
        """Reset the times and sizes that measure the speed of one attempt."""
        self._arrived_at_start, self._first, self._next_look = self.arrived_bytes, None, now
        self._last = now, self.arrived_bytes

    def _tick(self) -> bool:
        """Return whether any bytes have arrived. Raise ``TooManyBytes``, or ``SiteRejected`` for too many entries."""
        if self._clock.monotonic() >= self._next_look and (self._looking is None or self._looking.done()):
            if self._looking is not None:
                self._looking.result()
            self._looking = asyncio.get_running_loop().run_in_executor(None, self._measure_folder)
            self._looking.add_done_callback(_forget)
        self._progress()
        if self.arrived_bytes > self._file.size:
            raise TooManyBytes
        return self._first is not None

    async def _measure_now(self) -> None:
        """Measure the folder after a measurement that is running has ended."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        await asyncio.to_thread(self._measure_folder)

    def _measure_folder(self) -> None:
        """Measure the arrived bytes, update the times of progress, and schedule the next measurement.

        Raise ``SiteRejected`` if the folder has more entries or levels than a replica.
        """
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
        """Cancel the checksum that is computed while the file arrives."""
        if self._digest is not None and self._digesting is not None:
            self._digest.cancel()
            self._digesting.add_done_callback(_forget)
        self._digest = self._digesting = None

    async def _is_right(self) -> bool:
        """Return whether size and checksum of the pulled files are those of the catalogue."""
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
        """Return why the checksum was wrong twice: has the replica changed?"""
        file = self._file
        path = file.path if file.part is None else f"{file.path}/{file.part}"
        try:
            content = await self._means.questions.ask_cluster(
                file.source, "stat", {"path": path, "checksum": True}, 600.0
            )
        except SiteError as error:
            return self._error(f"its checksum is wrong, and {file.source} cannot check its replica: {error}", "source")
        if content.get("checksum") != file.checksum:
            return self._error("its checksum differs from the catalogue's: it was changed", "file")
        return self._error(
            f"it arrives on {self._means.cluster} with a wrong checksum, though its own is right", "site"
        )

    def _error(self, reason: str, fault: StageFault) -> StageError:
        """Return the error of this transfer; ``fault`` is the responsible side."""
        message = f"{self._file.name} from {self._file.source}: {reason}"
        return StageError(message, fault, source=self._file.source, file=self._file.name)


def _forget(future: "asyncio.Future[Any]") -> None:
    """Read the exception of a future that is not awaited, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def _empty(folder: Path) -> None:
    """Remove everything in a folder of pulled files, so that the next pull starts at 0."""
    remove_tree(folder)
    folder.mkdir(mode=0o700)


def _measure(folder: Path) -> Content:
    """Measure a folder of pulled files; return ``NO_CONTENT`` if it has an entry that no replica can have."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return measure_content(descriptor, checksum=True)
    except SiteRejected:
        return NO_CONTENT  # A replica cannot contain such files, so this is not the input.
    finally:
        os.close(descriptor)


def _size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder. Raise ``OSError``.

    Raise ``SiteRejected`` if it has more than ``MAX_ENTRIES`` or ``MAX_DEPTH`` levels. Paths may exceed the length that
    the system allows, so that folders are opened one by one.
    """

    def fail(error: OSError) -> None:
        raise error

    total = count = 0
    for path, folders, files, descriptor in os.fwalk(folder, onerror=fail):
        count += len(folders) + len(files)
        if count > MAX_ENTRIES or path.count("/") - str(folder).count("/") > MAX_DEPTH:
            raise SiteRejected(
                f"it has more than {MAX_ENTRIES:,} entries or {MAX_DEPTH} levels: pack it into fewer files",
                fault=SiteFault.IRREGULAR,
            )
        total += sum(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size for name in files)
    return total
