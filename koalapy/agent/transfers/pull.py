"""One input on its way from another site: pulled by rsync, gone on with after every cut, verified at the end."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from koalapy.agent.core.questions import Questions
from koalapy.agent.core.spool import DiskSync
from koalapy.agent.core.timeouts import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.transfers import rsync
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.digest import Content, GrowingDigest, measure
from koalapy.agent.transfers.encryption import Encrypts, always
from koalapy.agent.transfers.exports import RSYNC, Route
from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.sharing import Fault, SharedTasks, StageError, Turns, site_error
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.protocol.messages import StageFile
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

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

NOTHING = Content(0, "")


class Cut(Exception):
    """The transfer was cut, and may be gone on with."""


class TooMuch(Exception):
    """More has come than there should be: it is not what was wanted."""


@dataclass(kw_only=True)
class Means:
    """What every stage of a cluster uses; ``pulls`` is how many may run at once."""

    cluster: str
    replicas: Replicas
    questions: Questions
    daemon_files: DaemonFiles
    pulls: int
    disk_sync: DiskSync | None = None
    encrypts: Encrypts = always
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

    def __init__(self, file: StageFile, folder: Path, place: int, progress: Callable[[], object], means: Means) -> None:
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
        self.there = 0
        """Bytes that have arrived."""
        self.moved = 0
        """Bytes that this agent has seen arrive."""
        self.seconds = 0.0
        """In which they did; no wait for a turn is among them."""
        self.flowed, self.flowing = 0, 0.0
        """The same without what it took until the first of them was here, and until it was noticed that none came."""
        self._first: tuple[float, int] | None = None
        """When bytes were first seen to have come in this try, and how many were there."""
        self._last = 0.0, 0
        """The same of the last ones, or of the beginning."""
        self._before = 0
        """Bytes that were there before it."""

    async def run(self) -> Path:
        """The path of what came, whole and verified; ``StageError``."""
        try:
            await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            for _ in range(2):
                await self._bring()
                if await self._is_right():
                    return self._folder / self._name if self._kind == "file" else self._folder
                log.warning("a wrong checksum", action="checksum-wrong", file=self._file.name, source=self._file.source)
                await asyncio.to_thread(_empty, self._folder)
                self.there = 0
        except OSError as error:
            raise site_error(self._cluster, error) from error
        finally:
            self._stop_digest()
        raise await self._blame()

    async def _bring(self) -> None:
        """Pull until all is there; what has come is kept over all tries."""
        failures, pause = 0, self._timeouts.transfer_retry_s
        while True:
            before = self.there
            try:
                # Who waits for a turn has no ticket: those that a source gives out are few.
                async with self._means.turns.turn(self._place):
                    await self._once()
                return
            except TooMuch:
                return
            except SiteRejected as error:
                if error.fault in FILE_FAULTS:
                    raise self._error(error.message, "file") from error
                if error.fault in FINAL_FAULTS:
                    raise self._error(error.message, "source") from error
                problem = error.message
            except ValidationError as error:
                raise self._error(f"{self._file.source} answers what we do not understand", "source") from error
            except (SiteError, Cut) as error:
                problem = str(error)
                if isinstance(error, SiteUnavailable) and self._questions.are_new:
                    failures = 0  # the source's agent may have to come back, too
            if self.there > before:
                failures, pause = 0, self._timeouts.transfer_retry_s
            failures += 1
            log.info(
                "transfer cut", action="transfer-cut", file=self._file.name, source=self._file.source, reason=problem
            )
            if failures > MAX_TRIES:
                raise self._error(f"gave up after {failures} tries: {problem}", "source")
            await asyncio.sleep(pause)
            pause = min(self._timeouts.max_transfer_retry_s, 2 * pause)

    async def _once(self) -> None:
        file = self._file
        wanted = {"path": file.path, "part": file.part, "size": file.size, "encrypted": self._encrypted}
        route = Route.model_validate(await self._questions.ask(file.source, "export", wanted))
        if self._encrypted and not route.certificate:
            self._return_ticket(file.source, route)
            reason = f"nothing comes to {self._cluster} in clear, and the agent there encrypts nothing: update that one"
            raise self._error(reason, "source")
        self._kind = route.kind
        await self._measure_now()
        if self.there > file.size:
            self._stop_digest()
            await asyncio.to_thread(_empty, self._folder)
            self.there = 0
        if self._kind == "file" and self._digest is None:
            self._digest = GrowingDigest(self._folder / self._name)
            follow = self._digest.follow
            self._digesting = asyncio.get_running_loop().run_in_executor(self._means.digest_threads, follow)
        began = self._clock.monotonic()
        self._expect_first(began)
        try:
            outcome = await rsync.pull(route, self._name, self._folder, self._tick, self._means.rsync_program)
        except rsync.RsyncMissing as error:
            words = "there is no rsync on its head node: install it there"
            raise StageError(f"{self._cluster} cannot pull files: {words}", "site") from error
        finally:
            ended = self._clock.monotonic()
            self.seconds += ended - began
            first = self._first  # not what the last look sees
            await self._measure_now()
            self.moved += max(0, self.there - self._before)
            if first is not None:
                # A cut is noticed long after the last bytes; what only the last look sees came before the end.
                self.flowing += max(0.0, min(ended, self._last[0]) - first[0])
                self.flowed += max(0, self.there - first[1])
            self._return_ticket(file.source, route)
        if outcome.local_error:
            raise StageError(f"there is no room left on {self._cluster}: {outcome.local_error}", "site")
        if outcome.code:
            raise Cut(outcome.reason)

    def _return_ticket(self, source: str, route: Route) -> None:
        """Nobody waits for it: a ticket that stays ends by itself."""
        task = asyncio.ensure_future(self._questions.ask(source, "unexport", {"module": route.module}))
        task.add_done_callback(_forget)

    # How far it is

    def _expect_first(self, now: float) -> None:
        self._before, self._first, self._next_look = self.there, None, now
        self._last = now, self.there

    def _tick(self) -> bool:
        """Whether anything has come yet; ``TooMuch``."""
        if self._clock.monotonic() >= self._next_look and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().run_in_executor(None, self._look)
        self._progress()
        if self.there > self._file.size:
            raise TooMuch
        return self._first is not None

    async def _measure_now(self) -> None:
        """After a look that is still under way, lest it has the last word."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        began = self._clock.monotonic()
        with contextlib.suppress(OSError):
            self.there = _size_of(self._folder)
        now = self._clock.monotonic()
        if self.there > self._last[1]:
            self._last = now, self.there
            self._first = self._first or self._last
        self._next_look = now + SHARE * (now - began)

    # Whether it is right

    def _stop_digest(self) -> None:
        if self._digest is not None and self._digesting is not None:
            self._digest.give_up()
            self._digesting.add_done_callback(_forget)
        self._digest = self._digesting = None

    async def _is_right(self) -> bool:
        if self._digest is not None and self._digesting is not None:
            self._digest.finish()
            try:
                content = await asyncio.shield(self._digesting)
            except FileNotFoundError:
                content = NOTHING
            self._digest = self._digesting = None
        else:
            threads = self._means.digest_threads
            content = await asyncio.get_running_loop().run_in_executor(threads, _measure, self._folder)
        return (content.size, content.checksum) == (self._file.size, self._file.checksum)

    async def _blame(self) -> StageError:
        """Twice the wrong bytes came: is the replica another now?"""
        file = self._file
        path = file.path if file.part is None else f"{file.path}/{file.part}"
        try:
            found = await self._questions.ask(file.source, "stat", {"path": path, "checksum": True}, 600.0)
        except SiteError as error:
            return self._error(f"its checksum is wrong, and {file.source} cannot tell why: {error}", "source")
        if found.get("checksum") != file.checksum:
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
        return measure(descriptor, checksum=True)
    except SiteRejected:
        return NOTHING  # What a replica cannot hold is not what was wanted.
    finally:
        os.close(descriptor)


def _size_of(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            total += _size_of(Path(entry)) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total
