"""The working folder of each component: prepared for its account, and read back at its end."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.transfers.stages import Stages
from koalapy.model.errors import SiteError, SiteUnavailable
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

FETCH_TRIES = 3
RETRY_DELAY = 2.0
"""Seconds between two attempts."""


class ComponentFolders:
    """The working folder of each component: a folder in the account that it runs as.

    A component that runs as the agent's account works in the folder of its journal.
    """

    def __init__(self, folders: JobFolders, stages: Stages, reporter: Reporter) -> None:
        self._folders, self._stages, self._reporter = folders, stages, reporter
        self._taking_back: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    def work_path(self, component: Component) -> Path:
        """Return the working folder. Raise ``SiteRejected`` for an account that can have none."""
        own = component.folder.path
        return self._folders.folder_path(component.user, f"work-{component.name}") if component.user else own

    def stage_path(self, component: Component) -> Path | None:
        """Return the folder with a component's input files; None if it has no stage."""
        if component.stage is None:
            return None
        if component.user:
            return self._folders.stage_path(component.user, component.instance, component.stage)
        return self._stages.folder_path(component.instance, component.stage)

    def start_fetch(self, component: Component, then: Callable[[], object]) -> bool:
        """Return whether the runners' files were copied from the account; else copy them and then call ``then``."""
        if not component.fetched and component.name not in self._taking_back:
            task = self._taking_back[component.name] = asyncio.create_task(self._fetch_results(component))

            def done(_: object) -> None:
                self._taking_back.pop(component.name, None)
                component.fetched = True
                then()

            task.add_done_callback(done)
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

    def remove_work_folder(self, component: Component) -> None:
        if component.user:
            self._tasks.spawn(self._remove_folder(component))

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
        for user in sorted(self._folders.list_accounts()):
            try:
                for name in await self._folders.list_names(user) - self._known(user):
                    if name not in self._known(user):
                        await self._folders.remove_folder(user, self._folders.folder_path(user, name))
            except SiteError as error:
                log.info(
                    "cannot list the folders of an account", action="folders-not-swept", user=user, reason=str(error)
                )

    def _known(self, user: str) -> set[str]:
        """Return the names of an account's folders that are in use."""
        components = [component for component in self._reporter.components.values() if component.user == user]
        stages = {f"stage-{instance}-{token}" for instance, token in self._stages.known_keys()}
        return stages | {self.work_path(component).name for component in components}

    async def close(self) -> None:
        """Cancel all running copies and removals, and wait until they have ended."""
        tasks = [*self._tasks.running, *self._taking_back.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._folders.close()
