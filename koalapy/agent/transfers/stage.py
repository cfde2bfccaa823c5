"""One stage: the working folder of a component, and how its files are placed there."""

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.spool import JournalFolder, sync_file_system, sync_tree
from koalapy.agent.transfers.daemon_files import BUSY_TIMEOUT, DaemonBusy, retry_transfer
from koalapy.agent.transfers.pull import Pull, StageError, TransferTools, content_key, site_error
from koalapy.agent.transfers.replicas import ReplicaRequest, make_read_only
from koalapy.agent.transfers.roots import (
    CONTENT,
    BadBundle,
    GrowingDigest,
    copy_tree,
    is_plain_name,
    remove_tree,
    unpack_bundle,
)
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.replica import StageFile
from koalapy.model.reports import StageFault, StageState, StageStatus, TransferMeasurement
from koalapy.protocol.messages import Stage, StageBundle
from koalapy.runner.folders import sync_folder
from koalapy.system.process import read_boot_id

log = structlog.get_logger()

Made = TypeVar("Made")

RESULTS = "its inputs from other jobs"
RESULTS_FILE = "results.tar"

USERS_FAULTS = (SiteFault.JOB, SiteFault.UNSUITABLE, SiteFault.UNKNOWN)
"""Rejections by an account for which the job's user is responsible."""
MAX_COPY_TRIES = 2
"""Stages from which a copy is tried, the newest first: programs may have changed all of them."""


class StageRun:
    """A stage that is being prepared, or is ready."""

    def __init__(
        self,
        instance: str,
        order: Stage,
        folder: Path,
        work_folder: Path,
        means: TransferTools,
        accounts: JobFolders,
        changed: Callable[["StageRun"], object],
        copies: Callable[[StageFile], Sequence[Path]],
    ) -> None:
        """Set up. ``work_folder`` holds the journal and partial files, ``folder`` is the component's.

        ``copies`` returns paths with the same content in other stages, the newest last.
        """
        self._accounts, self._find_copies = accounts, copies
        self._user = accounts.run_as.accounts.account_for(order.local_user)
        self.instance, self.token = instance, order.token
        self.folder = folder
        self._work_folder, self._journal = work_folder, JournalFolder(work_folder, means.disk_sync)
        self._order, self._means, self._changed = order, means, changed
        self._state: StageState = "running"
        self._failure: StageError | None = None
        self._ready: set[int] = set()
        self._moving: int | None = None
        self._unpacked = False
        self._results: Literal["", "unpacking", "ready"] = ""
        """State of the results of other jobs."""
        self._result_bytes = 0
        self._pull: Pull | None = None
        self._fetched = 0
        self._moved: list[TransferMeasurement] = []
        self._given_up = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._making: asyncio.Future[Any] | None = None
        """Running call of a thread in the stage's folders, which continues when the task is cancelled."""
        self.published: StageStatus | None = None
        """The last published status and its time (the loop's clock)."""
        self.published_at = 0.0

    def load_journal(self) -> None:
        """Restore what an earlier agent had prepared, from the journal in the work folder.

        After a restart of the machine, begin again unless all was prepared, and so flushed to the disk.
        """
        entries, boot = self._journal.load_entries(), read_boot_id()
        if not entries.get("done") and entries.get("boot", boot) != boot:
            remove_tree(self.folder)
            (self._work_folder / RESULTS_FILE).unlink(missing_ok=True)
            entries = {"boot": boot, "unpacked": False, "results": "", "ready": [], "moving": None}
            self.note_entry(**entries)
        self._unpacked, self._results = entries.get("unpacked", False), entries.get("results", "")
        self._ready, self._moving = set(entries.get("ready", [])), entries.get("moving")
        if entries.get("done"):
            self._state = "done"

    def start_task(self) -> None:
        """Start to prepare the stage, unless it is done or has failed."""
        if self._state == "running":
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ran)

    def note_entry(self, **entry: Any) -> None:
        """Write to the journal; fail the stage if that is not possible."""
        try:
            _make_private_folder(self._work_folder)
            self._journal.write_entry(**entry)
        except OSError as error:
            self._fail(site_error(self._means.cluster, error))

    def find_copies(self, file: StageFile) -> list[Path]:
        """Return paths of an input's content that was pulled here. Programs may have changed it since."""
        same = [
            self._order.files[index]
            for index in self._ready
            if content_key(self._order.files[index]) == content_key(file)
        ]
        return [self.folder / file.target for file in same]

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset((*(file.target for file in self._order.files), *self._order.result_names))

    async def stop_task(self) -> None:
        """Stop the preparation; keep partial files."""
        self._given_up.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)

    async def _run_in_thread(self, work: Callable[..., Made], *args: Any, threads: Executor | None = None) -> Made:
        """Run a blocking call that ``stop_task`` waits for, so that it cannot write into removed folders."""
        making = self._making = asyncio.get_running_loop().run_in_executor(threads, partial(work, *args))
        return await asyncio.shield(making)

    async def remove_files(self) -> None:
        """Stop the preparation, and remove the stage's folders, including the one of its account."""
        await self.stop_task()
        if self._has_account:
            try:
                await self._accounts.remove_folder(self._user, self._account_folder)
            except SiteError as error:
                log.warning(
                    "cannot remove a stage folder", action="folder-not-removed", token=self.token, reason=error.message
                )
        await asyncio.to_thread(self._remove_folders)

    def _remove_folders(self) -> None:
        """Remove the folders. The one with the journal is last, also after a loss of power: only it tells the other."""
        remove_tree(self.folder)
        with contextlib.suppress(OSError):
            sync_folder(self.folder.parent)
        remove_tree(self._work_folder)

    @property
    def _has_account(self) -> bool:
        """Whether the stage is copied into a folder of another account."""
        return bool(self._user) or self._accounts.is_mapped

    @property
    def _account_folder(self) -> Path:
        return self._accounts.stage_path(self._user, self.instance, self.token)

    def current_status(self) -> StageStatus:
        """Return the state, progress and failure of the stage, as the agent reports them to the daemon."""
        failure = self._failure or StageError("", "site")
        bundle = (self._order.bundle.size if self._order.bundle else 0) + self._result_bytes
        sizes = {i: file.size for i, file in enumerate(self._order.files) if file.source != self._means.cluster}
        staged = sum(size for index, size in sizes.items() if index in self._ready)
        staged += bundle if self._unpacked else self._fetched + self._result_bytes
        is_done = self._state == "done"
        return StageStatus(
            token=self.token,
            state=self._state,
            size=bundle + sum(sizes.values()),
            staged=bundle + sum(sizes.values())
            if is_done
            else staged + (self._pull.arrived_bytes if self._pull else 0),
            error=failure.message,
            fault=failure.fault,
            source=failure.source,
            file=failure.file,
            moved=tuple(self._moved) if is_done else (),
        )

    async def _run(self) -> None:
        """Fetch the bundle and all inputs that are not ready, then report the stage as done or failed."""
        try:
            self._check()
            await self._run_in_thread(_make_private_folder, self.folder)
            if self._order.bundle is not None and not self._unpacked:
                await self._place_bundle(self._order.bundle)
            if self._order.result_names and self._results != "ready":
                await self._place_results()
            for index, file in enumerate(self._order.files):
                if index not in self._ready:
                    await self._place_input(index, file)
            if self._has_account:
                self._accounts.run_as.accounts.admit(self._user)
                await self._accounts.copy_to_account(self._user, self.folder, self._account_folder)
                await self._run_in_thread(sync_file_system, self._account_folder.parents[1])
            else:
                await self._run_in_thread(sync_tree, self.folder, self._given_up)
            self._journal.write_entry(done=True)
            self._state = "done"
        except SiteError as error:
            concerns_user = isinstance(error, SiteRejected) and error.fault in USERS_FAULTS
            self._fail(StageError(error.message, "source" if concerns_user else "site"))
        except OSError as error:
            self._fail(site_error(self._means.cluster, error))
        except StageError as failure:
            self._fail(failure)
        self._changed(self)

    def _ran(self, task: asyncio.Task[None]) -> None:
        """Fail the stage if its task ended by an unexpected error."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("stage failed by an error in the agent", action="stage-failed", token=self.token, exc_info=error)
            self._fail(StageError(f"{type(error).__name__}: {error}", "site"))
            self._changed(self)

    def _fail(self, failure: StageError) -> None:
        """Set the stage as failed with this error, and log it."""
        log.warning(
            "stage failed", action="stage-failed", token=self.token, fault=failure.fault, reason=failure.message
        )
        self._state, self._failure = "failed", failure

    def _check(self) -> None:
        """Reject names that lead outside the folder, before any file is created."""
        targets: set[str] = set()
        for file in self._order.files:
            if not is_plain_name(file.target):
                raise StageError(f"{file.name}: {file.target!r} is not a plain file name", "file", file=file.name)
            if file.target in targets:
                raise StageError(f"two inputs have the name {file.target!r}", "file", file=file.name)
            if file.part is not None and not is_plain_name(file.part):
                raise _bad(file, f"{file.part!r} is not an entry of a folder")
            if not is_plain_name(Path(file.path).name) or not file.checksum:
                raise _bad(file, f"the catalogue has no such replica on {file.source}")
            targets.add(file.target)
        for name in self._order.result_names:
            if not is_plain_name(name) or name in targets:
                raise StageError(f"a result of another job cannot be named {name!r}", "job")
            targets.add(name)

    # Inputs

    async def _place_input(self, index: int, file: StageFile) -> None:
        """Link a local replica into the stage folder, or copy or pull a remote one, and record it as ready."""
        if file.source == self._means.cluster:
            place = await self._run_in_thread(self._lend_replica, file, threads=self._means.replica_threads)
            await self._run_in_thread(self._link, file, place)
        elif index != self._moving or not await asyncio.to_thread(os.path.lexists, self.folder / file.target):
            await self._copy_or_pull(index, file)
        self._ready.add(index)
        self._journal.write_entry(ready=sorted(self._ready))
        self._changed(self)

    async def _copy_or_pull(self, index: int, file: StageFile) -> None:
        """Copy an input from another stage, or pull it. One stage at a time pulls; the next may copy."""
        tried: set[Path] = set()
        while True:
            async with self._means.shared_tasks.run_exclusively(file):
                copies = [place for place in self._find_copies(file) if place not in tried]
                if not copies or len(tried) == MAX_COPY_TRIES:
                    pulled = self._work_folder / f"input-{index}"
                    pull = self._pull = Pull(file, pulled, lambda: self._changed(self), self._means)
                    await self._take(index, file, await pull.fetch_input())
                    flow = pull.flowed, pull.flowing
                    self._moved.append(TransferMeasurement(file.source, pull.moved_bytes, pull.seconds, *flow))
                    self._pull = None
                    return
            place = self._work_folder / f"copy-{index}"
            await self._run_in_thread(remove_tree, place)  # It exists only after a restart at this point.
            if await self._run_in_thread(self._copy_right, file, copies[-1], place, threads=self._means.digest_threads):
                await self._take(index, file, place)
                return
            await self._run_in_thread(remove_tree, place)
            tried.add(copies[-1])

    async def _take(self, index: int, file: StageFile, place: Path) -> None:
        """Move a copied or pulled input into the stage folder, where other stages may copy it."""
        self._must_be_free(file)
        self._journal.write_entry(moving=index)
        await self._run_in_thread(self._move, file, place, self._work_folder / f"input-{index}")
        self._ready.add(index)

    def _copy_right(self, file: StageFile, source: Path, place: Path) -> bool:
        """Copy an input of another stage. Return False if that fails or the copy is not the catalogue's content."""
        try:
            content = copy_tree(source, place, self._given_up)
        except (OSError, SiteError):
            return False
        return (content.size, content.checksum) == (file.size, file.checksum)

    def _lend_replica(self, file: StageFile) -> Path:
        """Return the path of a local replica after its verification; raise ``StageError`` if it is unusable."""
        request = ReplicaRequest(path=file.path, part=file.part, size=file.size)
        try:
            return self._means.replicas.lend_replica(request, file.checksum, self._given_up)
        except SiteRejected as error:
            raise _bad(file, error.message) from error
        except SiteUnavailable as error:
            raise StageError(f"{file.name}: {error.message}", "site") from error

    def _link(self, file: StageFile, place: Path) -> None:
        """Link a local replica into the stage folder. Raise ``StageError`` if the name is in use."""
        target = self.folder / file.target
        if target.is_symlink() and os.readlink(target) == str(place):
            return  # done before a restart
        self._must_be_free(file)
        target.symlink_to(place)

    def _move(self, file: StageFile, place: Path, work: Path) -> None:
        """Make a pulled input read-only and move it into the stage folder."""
        descriptor = os.open(place, CONTENT)
        try:
            make_read_only(descriptor)
        finally:
            os.close(descriptor)
        place.rename(self.folder / file.target)
        shutil.rmtree(work, ignore_errors=True)

    def _must_be_free(self, file: StageFile) -> None:
        """Raise ``StageError`` if the submitter's own files already contain the name of an input."""
        if os.path.lexists(self.folder / file.target):
            raise StageError(
                f"{file.name}: the submitter's own files also contain {file.target!r}", "file", file=file.name
            )

    # The submitter's own files

    async def _place_bundle(self, bundle: StageBundle) -> None:
        """Fetch and unpack the submitter's bundle; fetch it a second time if its checksum is wrong."""
        path = self._work_folder / "bundle.tar"
        for _ in range(2):
            if await self._fetch(bundle, path):
                break
            await asyncio.to_thread(path.unlink)
        else:
            raise StageError("the submitter's own files arrive with a wrong checksum", "source")
        try:
            await self._run_in_thread(self._unpack, path)
        except BadBundle as error:
            raise StageError(f"the submitter's own files: {error}", "source") from error
        self._unpacked = True
        self._journal.write_entry(unpacked=True)
        await asyncio.to_thread(path.unlink)

    async def _fetch(self, bundle: StageBundle, path: Path) -> bool:
        """Download the bundle with retries. Return whether its checksum is right."""

        def note_progress(size: int) -> None:
            self._fetched = size

        digest = GrowingDigest(path)
        digesting = asyncio.get_running_loop().run_in_executor(self._means.digest_threads, digest.compute_content)
        try:
            await self._download("bundles", bundle.id, path, note_progress, "the submitter's own files", "source")
            digest.mark_complete()
            return (await asyncio.shield(digesting)).checksum == bundle.id
        finally:
            digest.cancel()
            digesting.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is not awaited

    async def _download(
        self,
        resource: str,
        ident: str,
        path: Path,
        note_progress: Callable[[int], None],
        files: str,
        absence_fault: StageFault,
    ) -> None:
        """Download an archive from the daemon with retries.

        ``files`` names its content in errors; ``absence_fault``: the responsible side if the daemon does not have it.
        """
        means, loop = self._means, asyncio.get_running_loop()
        fetch = partial(means.daemon_files.fetch_archive, resource, ident, path, self._given_up, note_progress)
        try:
            await retry_transfer(
                lambda: loop.run_in_executor(means.bundle_threads, fetch),
                means.timeouts,
                self.token,
                is_counted=lambda error: isinstance(error, DaemonBusy),
                max_wait_s=lambda: BUSY_TIMEOUT,
            )
        except SiteError as error:
            is_missing = isinstance(error, SiteRejected) and error.value == HTTPStatus.NOT_FOUND
            raise StageError(f"{files}: {error.message}", absence_fault if is_missing else "source") from error

    # Results of other jobs

    async def _place_results(self) -> None:
        """Fetch the results of other jobs and unpack them into the stage folder, which contains no links yet."""
        path = self._work_folder / RESULTS_FILE

        def note_progress(size: int) -> None:
            self._result_bytes = size

        await self._download("inputs", self.token, path, note_progress, RESULTS, "job")
        try:
            await self._run_in_thread(self._remove_partial_results)
            self._set_results("unpacking")
            await self._run_in_thread(unpack_bundle, path, self.folder, self._given_up)
            self._set_results("ready")
        except BadBundle as error:
            raise StageError(f"{RESULTS}: {error}", "source") from error
        await asyncio.to_thread(path.unlink)

    def _remove_partial_results(self) -> None:
        """Remove what an interrupted agent has unpacked of the results."""
        for name in self._order.result_names:
            target = self.folder / name
            if self._results == "unpacking":
                remove_tree(target)
                target.unlink(missing_ok=True)
            elif os.path.lexists(target):
                raise StageError(f"{RESULTS}: the submitter's own files also contain {name!r}", "job")

    def _set_results(self, state: Literal["unpacking", "ready"]) -> None:
        self._results = state
        self._journal.write_entry(results=state)

    def _unpack(self, path: Path) -> None:
        """Unpack a bundle into the work folder, and replace the stage folder by the result."""
        tree = self._work_folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(mode=0o700)
        unpack_bundle(path, tree, self._given_up)
        if self._given_up.is_set():
            return
        shutil.rmtree(self.folder)  # It exists only after a restart at this point.
        tree.rename(self.folder)


def _bad(file: StageFile, reason: str) -> StageError:
    """Return the error of an input that the catalogue or its source describes wrongly."""
    return StageError(f"{file.name}: {reason}", "file", source=file.source, file=file.name)


def _make_private_folder(folder: Path) -> None:
    """Create a folder and its parent for this account only. Raise ``OSError``."""
    with contextlib.suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700, parents=True)
    folder.mkdir(mode=0o700, exist_ok=True)
