"""All stages of a cluster: started, reported, resumed after a restart of the agent, and removed."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
from pydantic import ValidationError

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.spool import DamagedJournal, JournalFolder
from koalapy.agent.transfers.pull import TransferTools
from koalapy.agent.transfers.stage import AccountStage, StageRun
from koalapy.model.errors import SiteError
from koalapy.model.reports import StageStatus
from koalapy.protocol.messages import Stage, StageFile
from koalapy.system.event_loop import BackgroundTasks

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
        # First the discarded ones: another stage may have the same token.
        # The others in their original order, since they wait for turns again.
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
            run.note_entry(instance=instance, order=order.model_dump(), since=time.time())
            run.start_task()
        run.published = None
        self._publish(instance, run)
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
            self._tasks.spawn(self._remove(self._stages.pop(key)))

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
        user = self._folders.run_as.accounts.account_for(order.local_user)
        has_owner = bool(user) or self._folders.is_mapped
        owner = AccountStage(self._folders, user, instance, order.token) if has_owner else None
        run = StageRun(order, folder, work_folder, self._means, partial(self._publish, instance), self._copies, owner)
        earlier = self._stages.get((instance, order.token))
        if earlier is not None:
            # A token is reused only if its component never started a program: the folder is unused.
            self._unwanted.discard((instance, order.token))
            self._tasks.spawn(self._remove(earlier))
        self._stages[instance, order.token] = run
        return run

    def _publish(self, instance: str, run: StageRun) -> None:
        """Send a changed status: final ones at once, progress at most every ``STATUS_INTERVAL``."""
        now = asyncio.get_running_loop().time()
        status = run.current_status()
        early = status.state == "running" and run.published is not None and now - run.published_at < STATUS_INTERVAL
        if status != run.published and not early and self._publish_status(instance, status):
            run.published, run.published_at = status, now

    async def _remove(self, run: StageRun) -> None:
        """Stop a stage and remove its folders, including the one of its owner."""
        await run.stop_task()
        if run.owner is not None:
            try:
                await run.owner.remove_folder()
            except SiteError as error:
                log.warning(
                    "cannot remove a stage folder", action="folder-not-removed", token=run.token, reason=error.message
                )
        await asyncio.to_thread(run.remove_files)
