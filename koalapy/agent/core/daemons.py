"""The daemons that an agent has served, and the removal of what expired daemons left.

The agent remembers daemons for longer than their databases, which may be restored from backups.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import Spool, has_failed_disk, open_regular
from koalapy.agent.transfers.stages import ComponentFiles
from koalapy.model.errors import SiteUnavailable
from koalapy.protocol.messages import KnownDaemon
from koalapy.runner.folders import replace_file, sync_folder

log = structlog.get_logger()

MAX_KNOWN_DAEMONS = 50
"""Daemons reported to a new one; the most recent ones."""
EPOCH_FILE, JOB_FILE = "daemon", "job"
"""Files in each daemon's folder."""
JOB_FILE_SIZE = 40
"""Bytes of the file with the job's number, more than the longest number needs."""


class Daemons:
    """The highest epoch and the highest job of each daemon. The epoch counts the runs of a daemon.

    The epoch is on the disk before anything of that epoch is done, unless the disk is full. The job's number is not
    synced. If a power failure loses it, a number is only used twice, and nonces distinguish the attempts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._records = {daemon.instance: daemon for daemon in _load_records(directory)}
        self._unsaved: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Fields that a file of a daemon lacks, by instance and file name."""

    def known_daemons(self) -> list[KnownDaemon]:
        return list(self._records.values())[-MAX_KNOWN_DAEMONS:]

    def accept_epoch(self, instance: str, epoch: int, run_id: str) -> bool:
        """Record the run (``epoch``) of a daemon that connects.

        Return False if a newer run was served before, or another one with the same number.
        """
        record = self._records.pop(instance, KnownDaemon(instance=instance, epoch=0))
        self._records[instance] = record
        if epoch < record.epoch or (epoch == record.epoch and run_id != record.life):
            return False
        if (epoch, run_id) != (record.epoch, record.life):
            self._change_record(record, EPOCH_FILE, {"epoch": epoch, "life": run_id})
        self._save_changes(instance)
        return True

    def record_job(self, instance: str, job: int) -> None:
        """Record the highest job number of a daemon."""
        record = self._records.get(instance)
        if record is not None and job > record.job:
            self._change_record(record, JOB_FILE, {"job": job})
        self._save_changes(instance)

    def _change_record(self, record: KnownDaemon, file: str, fields: Mapping[str, Any]) -> None:
        self._records[record.instance] = record.model_copy(update=fields)
        self._unsaved[record.instance, file] = fields

    def _save_changes(self, instance: str) -> None:
        """Save what changed of a daemon. If the disk is full, the daemon's next command retries it."""
        for file, write in ((EPOCH_FILE, self._write_epoch), (JOB_FILE, self._write_job)):
            if (fields := self._unsaved.get((instance, file))) is None:
                continue
            try:
                write(self._directory / instance, json.dumps(fields).encode())
            except OSError as error:
                text = "cannot save a daemon's epoch or job"
                log.warning(text, action="daemon-not-noted", instance=instance, reason=str(error))
            else:
                del self._unsaved[instance, file]

    @staticmethod
    def _write_job(folder: Path, content: bytes) -> None:
        """Overwrite the number of a job in place, which is as safe as a new file and takes a tenth of the time."""
        try:
            descriptor = open_regular(folder / JOB_FILE)
        except FileNotFoundError:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = open_regular(folder / JOB_FILE)
        try:
            os.pwrite(descriptor, content.ljust(JOB_FILE_SIZE), 0)
            os.ftruncate(descriptor, JOB_FILE_SIZE)
        finally:
            os.close(descriptor)

    @staticmethod
    def _write_epoch(folder: Path, content: bytes) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(folder / EPOCH_FILE, content)
        sync_folder(folder.parent)


def _load_records(directory: Path) -> Iterator[KnownDaemon]:
    """Yield the known daemons, the most recently served last. Raise ``SiteUnavailable`` if the disk fails."""
    files = [path for path in directory.glob(f"*/{EPOCH_FILE}") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        fields: dict[str, object] = {}
        for part in (path, path.with_name(JOB_FILE)):
            try:
                fields |= json.loads(part.read_bytes())
            except (OSError, ValueError, TypeError) as error:
                if has_failed_disk(error):
                    raise SiteUnavailable(f"cannot read {part}: {error}", hint="the next start tries again") from error
        with contextlib.suppress(ValueError):
            yield KnownDaemon.model_validate({"epoch": 0, **fields, "instance": path.parent.name})


@dataclass(eq=False, slots=True)
class ExpiredDaemons:
    """Removes the remains of daemons that were silent for ``_expire_after_s`` seconds while another one was served."""

    _spool: Spool
    _reporter: Reporter
    _jobs: LrmJobs
    _files: ComponentFiles
    _expire_after_s: float
    _check_interval_s: float

    async def watch_daemons(self) -> None:
        """Remove the remains of expired daemons every ``_check_interval_s`` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._check_interval_s)
            try:
                self.remove_expired()
            except OSError as error:
                log.warning("cannot remove the remains of a daemon", action="daemon-not-forgotten", reason=str(error))

    def record_contact(self) -> None:
        """Record a message of the present daemon. An error is harmless, since the present daemon never expires."""
        with contextlib.suppress(OSError):
            self._spool.record_contact(self._reporter.instance)

    def remove_expired(self) -> None:
        """Remove the remains of expired daemons, except the one that was served last."""
        present = self._reporter.instance
        if not present:
            return
        if self._reporter.uplink.online.is_set():
            self.record_contact()
        instances = {component.instance for component in self._reporter.components.values()}
        for instance in (instances | self._files.stages.known_instances()) - {present}:
            if self._spool.silence_of(instance) > self._expire_after_s:
                self._remove_daemon(instance)

    def _remove_daemon(self, instance: str) -> None:
        """Remove a daemon's stages and ended components. End the components with programs that were never started."""
        log.warning("removing the remains of an expired daemon", action="daemon-forgotten", instance=instance)
        components = [component for component in self._reporter.components.values() if component.instance == instance]
        for component in components:
            if component.ended:
                self._files.forget_component(component)
            elif component.plan is None and component.stop is None:
                component.stop = "its daemon was silent for too long"
                self._jobs.end_component(component)
                component.folder.note_entry(stop=component.stop)
        self._files.stages.discard_stages(instance)
