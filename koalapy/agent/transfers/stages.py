"""The agent's file services as a whole: stages, the collection of results (``--collect``), and working folders.

Stages are started, reported, resumed after a restart of the agent, and removed. Results are sent when the program has
ended, before the end is reported. The working folder of a component is prepared for its account, and read back at its
end.
"""

import asyncio
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog
from pydantic import ValidationError

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.core.spool import DamagedJournal, DiskSync, JournalFolder
from koalapy.agent.runners.uplink import Questions
from koalapy.agent.transfers.daemon_files import BUSY_TIMEOUT, DaemonFiles, retry_transfer
from koalapy.agent.transfers.exports import Exports
from koalapy.agent.transfers.pull import TransferTools
from koalapy.agent.transfers.roots import printable
from koalapy.agent.transfers.stage import StageRun
from koalapy.model.errors import SiteError, SiteUnavailable
from koalapy.model.replica import StageFile
from koalapy.model.reports import StageStatus
from koalapy.protocol.messages import Stage
from koalapy.runner.result_archive import FoldersTooDeep, Patterns, write_archive
from koalapy.system.event_loop import BackgroundTasks
from koalapy.system.process import read_boot_id

log = structlog.get_logger()

STATUS_INTERVAL = 0.5
"""Minimum seconds between two progress reports of a transfer."""
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Key = tuple[str, str]
"""Daemon instance and token."""


class Stages:
    """Carries out ``Stage`` and ``Unstage``.

    ``publish`` sends a status to the daemon of an instance; ``in_use`` returns whether a component still uses a stage.
    """

    def __init__(
        self,
        directory: Path,
        means: TransferTools,
        publish: Callable[[str, StageStatus], bool],
        in_use: Callable[[str, str], bool],
        folders: JobFolders | None = None,
    ) -> None:
        self._directory, self._means = directory, means
        self._publish_status, self._in_use = publish, in_use
        self._folders = folders or JobFolders.for_own_account()
        self._stages: dict[Key, StageRun] = {}
        self._unwanted: set[Key] = set()
        self._tasks = BackgroundTasks()

    def folder_path(self, instance: str, token: str) -> Path:
        run = self._stages.get((instance, token))
        return run.folder if run else self._directory / f"{instance}-{token}"

    def input_names(self, instance: str, token: str) -> frozenset[str]:
        run = self._stages.get((instance, token))
        return run.input_names if run else frozenset()

    def current_statuses(self, instance: str) -> list[StageStatus]:
        """Return the statuses of an instance's stages, and mark them as published."""
        runs = [run for key, run in self._stages.items() if key[0] == instance and key not in self._unwanted]
        for run in runs:
            run.published = run.current_status()
        return [run.published for run in runs if run.published]

    def load_stages(self) -> None:
        """Resume the stages of an earlier agent."""
        records = []
        for path in sorted(self._directory.glob(".*/journal")):
            try:
                records.append((path.parent, JournalFolder(path.parent).load_entries()))
            except (OSError, DamagedJournal) as error:  # the daemon orders the stages that it needs again
                log.warning("unreadable record", action="record-unreadable", folder=str(path.parent), error=str(error))
        # First the discarded ones: another stage may have the same token. The others in their original order.
        records.sort(key=lambda record: (not record[1].get("unwanted"), record[1].get("since", 0.0)))
        for work_folder, entries in records:
            try:
                instance, order = str(entries["instance"]), Stage.model_validate(entries["order"])
            except (KeyError, ValidationError):
                log.warning("a stage's record cannot be read", action="record-unreadable", folder=str(work_folder))
                continue
            run = self._add(instance, order, work_folder.name.removeprefix("."))
            run.load_journal()
            if entries.get("unwanted"):
                self._unwanted.add((instance, order.token))
                self.release_stage(instance, order.token)
            else:
                run.start_task()

    def start_stage(self, instance: str, order: Stage) -> str:
        """Start a stage, or report an existing one once more. Return an error, empty on success."""
        key = instance, order.token
        if not all(PLAIN.fullmatch(part) for part in key):
            return f"{order.token!r} is not a valid stage"
        run = self._stages.get(key)
        if run is None or key in self._unwanted:
            run = self._add(instance, order, self._free_name(f"{instance}-{order.token}"))
            run.note_entry(instance=instance, order=order.model_dump(), since=time.time(), boot=read_boot_id())
            run.start_task()
        run.published = None
        self._publish(run)
        return ""

    def discard_stage(self, instance: str, token: str) -> None:
        """Remove a stage once no component uses it."""
        key = instance, token
        if key in self._stages and key not in self._unwanted:
            self._unwanted.add(key)
            self._stages[key].note_entry(unwanted=True)
            self.release_stage(instance, token)

    def release_stage(self, instance: str, token: str) -> None:
        """Remove a discarded stage if no component uses it any more."""
        key = instance, token
        if key in self._unwanted and not self._in_use(instance, token):
            self._unwanted.discard(key)
            self._tasks.spawn(self._stages.pop(key).remove_files())

    def known_instances(self) -> set[str]:
        return {instance for instance, _ in self._stages}

    def known_keys(self) -> set[Key]:
        return set(self._stages)

    def discard_stages(self, instance: str) -> None:
        """Remove all stages of a daemon."""
        for token in [token for owner, token in self._stages if owner == instance]:
            self.discard_stage(instance, token)
            self.release_stage(instance, token)

    async def close(self) -> None:
        """Stop all transfers. The next agent resumes them."""
        await asyncio.gather(*(run.stop_task() for run in self._stages.values()))
        await self._tasks.wait()
        self._means.close()

    def _copies(self, file: StageFile) -> list[Path]:
        return [place for run in self._stages.values() for place in run.find_copies(file)]

    def _free_name(self, name: str) -> str:
        """Return a folder name that no stage of the same token, which is being removed, still uses."""
        names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
        in_use = (os.path.lexists(self._directory / n) or os.path.lexists(self._directory / f".{n}") for n in names)
        return next((n for n, is_taken in zip(names, in_use, strict=True) if not is_taken), name)

    def _add(self, instance: str, order: Stage, name: str) -> StageRun:
        """Create the run of a stage order, and remove an earlier stage of the same token."""
        folder, work_folder = self._directory / name, self._directory / f".{name}"
        run = StageRun(instance, order, folder, work_folder, self._means, self._folders, self._publish, self._copies)
        earlier = self._stages.get((instance, order.token))
        if earlier is not None:
            # A token is reused only if its component never started a program: the folder is unused.
            self._unwanted.discard((instance, order.token))
            self._tasks.spawn(earlier.remove_files())
        self._stages[instance, order.token] = run
        return run

    def _publish(self, run: StageRun) -> None:
        """Send a changed status: final ones at once, progress at most every ``STATUS_INTERVAL``."""
        now = asyncio.get_running_loop().time()
        status = run.current_status()
        early = status.state == "running" and run.published is not None and now - run.published_at < STATUS_INTERVAL
        if status != run.published and not early and self._publish_status(run.instance, status):
            run.published, run.published_at = status, now


STOPPED_BUSY_TIMEOUT = 20.0
"""Seconds for which a stopped component waits for a busy daemon."""
MAX_SENDERS = 16
"""Components that send results at once, so that a hanging daemon does not block all threads."""


class Collector:
    """Sends the results of each component once; calls ``collected`` when they are sent or lost.

    ``in_reach`` returns whether the daemon of an instance is connected: other daemons have other jobs with the same
    tokens.
    """

    def __init__(
        self,
        daemon_files: DaemonFiles,
        stages: Stages,
        collected: Callable[[Component], object],
        in_reach: Callable[[str], bool],
        folders: JobFolders,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._daemon_files, self._stages, self._collected, self._in_reach = daemon_files, stages, collected, in_reach
        self._folders, self._timeouts = folders, timeouts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(MAX_SENDERS, "results")
        self._closing = threading.Event()

    def collect_results(self, component: Component) -> None:
        """Start to send an ended component's results, unless there are none or that has begun."""
        if component.awaits_collection and component.name not in self._tasks:
            task = asyncio.create_task(self._collect(component))
            self._tasks[component.name] = task
            task.add_done_callback(lambda task: self._ran(component, task))

    def cancel_collection(self, component: Component) -> None:
        """Stop the collection of a component that was forgotten."""
        if component.name in self._tasks:
            self._tasks[component.name].cancel()

    def _ran(self, component: Component, task: "asyncio.Task[None]") -> None:
        """Forget the ended task of a component; after an unexpected error, mark its results as collected."""
        del self._tasks[component.name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Otherwise the job would never end.
            log.error(
                "results lost by an error in the agent", action="results-lost", token=component.token, exc_info=error
            )
            component.collected = True
            self._collected(component)

    async def close(self) -> None:
        """Stop. The next agent sends the remaining results."""
        self._closing.set()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _collect(self, component: Component) -> None:
        """Send the results of a component to the daemon and mark it as collected, with the problem if that failed."""
        assert component.stage is not None
        folder = self._stages.folder_path(component.instance, component.stage)
        inputs = self._stages.input_names(component.instance, component.stage)
        problem = await self._send_with_retries(component, folder, inputs)
        if problem:
            log.warning("results lost", action="results-lost", token=component.token, reason=problem)
            problem = f"its results could not be collected: {problem}"
        component.mark_collected(problem)
        self._collected(component)

    async def _send_with_retries(self, component: Component, folder: Path, inputs: Collection[str]) -> str:
        """Send results with retries. Return why they are lost; empty on success."""

        def max_wait_s() -> float:
            return BUSY_TIMEOUT if component.stop is None else STOPPED_BUSY_TIMEOUT

        async def transfer() -> None:
            while not self._in_reach(component.instance):  # noqa: ASYNC110
                await asyncio.sleep(self._timeouts.transfer_retry_s)
            send = partial(self._send, component, folder, inputs)
            if component.user:
                await self._folders.run_in_turn(component.user, self._threads, send)
            else:
                await asyncio.get_running_loop().run_in_executor(self._threads, send)

        try:
            await retry_transfer(
                transfer,
                self._timeouts,
                component.token,
                is_counted=lambda _: self._in_reach(component.instance),
                max_wait_s=max_wait_s,
            )
            return ""
        except SiteError as error:
            return error.message
        except FoldersTooDeep as error:
            return str(error)
        except OSError as error:
            name = f"{printable(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
            return f"{name}{error.strerror or error}"

    def _send(self, component: Component, folder: Path, inputs: Collection[str]) -> None:
        """Write the results of a component as an archive to the daemon, read as the owner if jobs run as accounts."""
        token, patterns = component.stage or "", component.collect

        def write(archive: tarfile.TarFile) -> None:
            if component.user:
                place = self._folders.stage_path(component.user, component.instance, token)
                self._folders.collect_files(component.user, place, patterns, inputs, archive)
            else:
                write_archive(archive, folder, Patterns(patterns), inputs)

        self._daemon_files.put_results(token, write, self._closing)


FETCH_TRIES = 3
RETRY_DELAY = 2.0
"""Seconds between two attempts."""


class ComponentFiles:
    """The files of components: stages, working folders and the collection of results.

    A component that runs as the agent's account works in the folder of its journal, another one in a folder of its
    account.
    """

    def __init__(
        self,
        settings: AgentSettings,
        exports: Exports,
        questions: Questions,
        reporter: Reporter,
        disk_sync: DiskSync,
        folders: JobFolders,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._exports, self._reporter, self._folders = exports, reporter, folders
        reporter.on_ended.append(self.on_component_ended)
        self._daemon_files = daemon_files = DaemonFiles(settings.url, settings.cluster, settings.token, settings.trust)
        means = TransferTools(
            cluster=settings.cluster,
            replicas=exports.replicas,
            questions=questions,
            daemon_files=daemon_files,
            pulls=settings.transfer_limit,
            disk_sync=disk_sync,
            timeouts=timeouts,
        )
        self.stages = Stages(settings.stages, means, reporter.publish_stage, self._is_in_use, folders)
        self._collector = Collector(
            daemon_files, self.stages, self._collected, reporter.is_connected_to, folders, timeouts
        )
        self._taking_back: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    def use_daemon(self, url: str) -> None:
        """Fetch and send files from and to the daemon at another URL."""
        self._daemon_files.url = url

    def on_component_ended(self, component: Component) -> None:
        """Collect a component's results, and release its stage."""
        self._collector.collect_results(component)
        if component.stage is not None:
            self.stages.release_stage(component.instance, component.stage)

    def forget_component(self, component: Component) -> None:
        """Remove the record and the folders of an ended component."""
        self._collector.cancel_collection(component)
        del self._reporter.components[component.name]
        component.folder.remove_folder()
        if component.user:
            self._tasks.spawn(self._remove_folder(component))

    def _collected(self, component: Component) -> None:
        """Report a component with sent or lost results as ended, and release its stage."""
        self._reporter.publish_status(component)
        self.on_component_ended(component)

    def _is_in_use(self, instance: str, token: str) -> bool:
        """Return whether a component still needs a stage: it has not ended, or its results are not sent."""
        return any(
            (component.instance, component.stage) == (instance, token)
            and (component.awaits_collection or not component.ended)
            for component in self._reporter.components.values()
        )

    def work_path(self, component: Component) -> Path:
        """Return the working folder. Raise ``SiteRejected`` for an account that can have none."""
        folder = component.folder.path
        return self._folders.folder_path(component.user, f"work-{component.name}") if component.user else folder

    def stage_path(self, component: Component) -> Path | None:
        """Return the folder with a component's input files; None if it has no stage."""
        if component.stage is None:
            return None
        if component.user:
            return self._folders.stage_path(component.user, component.instance, component.stage)
        return self.stages.folder_path(component.instance, component.stage)

    def start_fetch(self, component: Component, then: Callable[[], object]) -> bool:
        """Return whether the runners' files were copied from the account; else copy them and then call ``then``."""
        if not component.fetched and component.name not in self._taking_back:
            task = self._taking_back[component.name] = asyncio.create_task(self._fetch_results(component))

            def mark_fetched(_: object) -> None:
                self._taking_back.pop(component.name, None)
                component.fetched = True
                then()

            task.add_done_callback(mark_fetched)
        return component.fetched

    def fetch_early(self, component: Component) -> None:
        """Copy results from the account of a component that may have ended while no agent ran."""
        if not component.fetched:
            self._tasks.spawn(self._fetch_results(component))

    async def _fetch_results(self, component: Component) -> None:
        """Copy results and output of a component from its account, in up to ``FETCH_TRIES`` attempts. Log errors."""
        for attempt in range(1, FETCH_TRIES + 1):
            try:
                work, limit = self.work_path(component), component.output_limit
                await self._folders.fetch_results(component.user, work, component.folder, component.size, limit)
                component.collect_results()
                self._reporter.publish_output(component)
                return
            except (SiteError, OSError) as error:
                log.warning(
                    "cannot fetch the files of runners",
                    action="left-files-lost",
                    token=component.token,
                    reason=str(error),
                )
                if not isinstance(error, SiteUnavailable) or attempt == FETCH_TRIES:
                    return
            await asyncio.sleep(RETRY_DELAY)

    async def _remove_folder(self, component: Component) -> None:
        """Remove the working folder in a component's account. Log an error."""
        try:
            await self._folders.remove_folder(component.user, self.work_path(component))
        except SiteError as error:
            log.warning(
                "cannot remove a job folder", action="folder-not-removed", token=component.token, reason=str(error)
            )

    async def remove_leftovers(self) -> None:
        """Remove folders in accounts that earlier agents left."""
        try:
            users = sorted(await asyncio.to_thread(self._folders.list_accounts))
        except SiteError as error:
            log.warning("folders of accounts are not removed", action="folders-not-swept", user="", reason=str(error))
            return
        for user in users:
            try:
                for name in await self._folders.list_names(user) - self._used_names(user):
                    if name not in self._used_names(user):
                        await self._folders.remove_folder(user, self._folders.folder_path(user, name))
            except SiteError as error:
                log.info(
                    "cannot list the folders of an account", action="folders-not-swept", user=user, reason=str(error)
                )

    def _used_names(self, user: str) -> set[str]:
        """Return the names of an account's folders that are in use."""
        components = [component for component in self._reporter.components.values() if component.user == user]
        stages = {f"stage-{instance}-{token}" for instance, token in self.stages.known_keys()}
        return stages | {self.work_path(component).name for component in components}

    async def close(self) -> None:
        """Stop all transfers, copies and removals, and wait until they have ended. The next agent resumes them."""
        self._exports.replicas.close()
        await self._collector.close()
        await self.stages.close()
        await self._exports.close()
        tasks = [*self._tasks.running, *self._taking_back.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._folders.close()
