"""The agent's file services as a whole, and the collection of results (``--collect``).

Results are sent when the program has ended, before the end is reported.
"""

import asyncio
import os
import tarfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.questions import Questions
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, AgentSettings, AgentTimeouts
from koalapy.agent.core.spool import DiskSync
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.exports import Exports
from koalapy.agent.transfers.pull import TransferTools
from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.roots import printable
from koalapy.agent.transfers.stages import Stages
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.runner.result_archive import FoldersTooDeep, Patterns, write_archive

log = structlog.get_logger()

STOPPED_BUSY_TIMEOUT = 20.0
"""Seconds for which a stopped component waits for a busy daemon."""
BUSY_TIMEOUT = 60.0
"""The same for other components; a daemon that cannot be reached is awaited without limit."""
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
        pause, waited = self._timeouts.transfer_retry_s, 0.0
        while True:
            if not self._in_reach(component.instance):
                await asyncio.sleep(self._timeouts.transfer_retry_s)
                continue
            try:
                send = partial(self._send, component, folder, inputs)
                if component.user:
                    await self._folders.run_in_turn(component.user, self._threads, send)
                else:
                    await asyncio.get_running_loop().run_in_executor(self._threads, send)
                return ""
            except SiteUnavailable as error:
                if waited >= (BUSY_TIMEOUT if component.stop is None else STOPPED_BUSY_TIMEOUT):
                    return error.message
                log.info("results delayed", action="results-delayed", token=component.token, reason=error.message)
            except SiteRejected as error:
                return error.message
            except FoldersTooDeep as error:
                return str(error)
            except OSError as error:
                name = f"{printable(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
                return f"{name}{error.strerror or error}"
            await asyncio.sleep(pause)
            waited += pause if self._in_reach(component.instance) else 0.0
            pause = min(self._timeouts.max_transfer_retry_s, 2 * pause)

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


class FileService:
    """The agent's stages, exports and collection of results."""

    def __init__(
        self,
        settings: AgentSettings,
        replicas: Replicas,
        exports: Exports,
        questions: Questions,
        reporter: Reporter,
        disk_sync: DiskSync,
        folders: JobFolders,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._replicas, self._exports, self._reporter = replicas, exports, reporter
        daemon_files = DaemonFiles(settings.url, settings.cluster, settings.token, settings.trust)
        means = TransferTools(
            cluster=settings.cluster,
            replicas=replicas,
            questions=questions,
            daemon_files=daemon_files,
            pulls=settings.transfer_limit,
            disk_sync=disk_sync,
            encrypts=settings.requires_encryption,
            timeouts=timeouts,
        )
        self.stages = Stages(settings.stages, means, reporter.publish_stage, self._is_in_use, folders)
        self.collector = Collector(
            daemon_files, self.stages, self._collected, reporter.is_connected_to, folders, timeouts
        )

    def on_component_ended(self, component: Component) -> None:
        """Collect a component's results, and release its stage."""
        self.collector.collect_results(component)
        if component.stage is not None:
            self.stages.release_stage(component.instance, component.stage)

    async def close(self) -> None:
        self._replicas.close()
        await self.collector.close()
        await self.stages.close()
        await self._exports.close()

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
