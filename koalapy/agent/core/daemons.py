"""What an agent remembers of the daemons it served, and what it removes of those that are never heard of again.

It remembers longer than their databases, which may be put back from copies.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from koalapy.agent.components.job_places import ComponentFolders
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import Spool
from koalapy.agent.transfers.results import FileService
from koalapy.protocol.messages import KnownDaemon
from koalapy.runner.atomic_files import replace_file, sync_folder

log = structlog.get_logger()

MAX_KNOWN_DAEMONS = 50
"""Of how many daemons a new one is told; those that were heard of last."""
EPOCH_FILE, JOB_FILE = "daemon", "job"
"""Files in each daemon's folder."""


class Daemons:
    """The highest epoch of each daemon, on the disk before anything of that epoch is done, and its highest job.

    The job's number is not synced: what may get lost of it by a power failure costs no more than a number given twice,
    for what belongs together is told by the nonces of attempts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = {known.instance: known for known in _remembered(directory)}

    def known_daemons(self) -> list[KnownDaemon]:
        return list(self._known.values())[-MAX_KNOWN_DAEMONS:]

    def accept_epoch(self, instance: str, epoch: int, life: str) -> bool:
        """Whether a daemon may be served: it is not older than one that was; it is the newest from now on."""
        known = self._known.pop(instance, KnownDaemon(instance=instance, epoch=0))
        self._known[instance] = known
        if epoch < known.epoch or (epoch == known.epoch and life != known.life):
            return False
        fresh = {"epoch": epoch, "life": life}
        if (epoch, life) != (known.epoch, known.life) and self._write(instance, EPOCH_FILE, fresh, sync=True):
            self._known[instance] = known.model_copy(update=fresh)
        return True

    def record_job(self, instance: str, job: int) -> None:
        """A job of a daemon's."""
        known = self._known.get(instance)
        if known is not None and job > known.job and self._write(instance, JOB_FILE, {"job": job}, sync=False):
            self._known[instance] = known.model_copy(update={"job": job})

    def _write(self, instance: str, name: str, fields: dict[str, Any], *, sync: bool) -> bool:
        """False when there is no room: it is tried again with the next word."""
        folder = self._directory / instance
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(folder / name, json.dumps(fields).encode(), sync=sync)
            if sync:
                sync_folder(self._directory)
        except OSError as error:
            log.warning("cannot note epoch or job", action="daemon-not-noted", instance=instance, reason=str(error))
            return False
        return True


def _remembered(directory: Path) -> Iterator[KnownDaemon]:
    """From the one that was last met longest ago to the latest."""
    files = [path for path in directory.glob(f"*/{EPOCH_FILE}") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        fields: dict[str, object] = {}
        for part in (path, path.with_name(JOB_FILE)):
            with contextlib.suppress(OSError, ValueError, TypeError):
                fields |= json.loads(part.read_bytes())
        with contextlib.suppress(ValueError):
            yield KnownDaemon.model_validate({"epoch": 0, **fields, "instance": path.parent.name})


class ExpiredDaemons:
    """Removes what is left of a daemon that has been silent for ``after`` seconds while there is another."""

    def __init__(
        self,
        spool: Spool,
        reporter: Reporter,
        jobs: LrmJobs,
        places: ComponentFolders,
        files: FileService,
        after: float,
        check_interval_s: float,
    ) -> None:
        self._spool, self._reporter, self._jobs, self._places, self._files = spool, reporter, jobs, places, files
        self._after, self._check_interval_s = after, check_interval_s

    async def watch_daemons(self) -> None:
        while True:
            await asyncio.sleep(self._check_interval_s)
            try:
                self.remove_expired()
            except OSError as error:
                log.warning("cannot remove a daemon's remains", action="daemon-not-forgotten", reason=str(error))

    def record_contact(self) -> None:
        """The daemon has spoken. Where that cannot be noted we forget none too early: it is the present one."""
        with contextlib.suppress(OSError):
            self._spool.record_contact(self._reporter.instance)

    def remove_expired(self) -> None:
        """What is left of who was silent for too long; never of the daemon that spoke last, however long ago."""
        present = self._reporter.instance
        if not present:
            return
        if self._reporter.uplink.online.is_set():
            self.record_contact()
        known = {component.instance for component in self._reporter.components.values()}
        for instance in (known | self._files.stages.known_instances()) - {present}:
            if self._spool.silence_of(instance) > self._after:
                self._remove(instance)

    def _remove(self, instance: str) -> None:
        log.warning("what is left of a daemon is removed", action="daemon-forgotten", instance=instance)
        own = [component for component in self._reporter.components.values() if component.instance == instance]
        for component in own:
            if component.ended:
                self._files.collector.cancel_collection(component)
                del self._reporter.components[component.name]
                component.folder.remove_folder()
                self._places.remove_work_folder(component)
            elif component.plan is None and component.stop is None:
                component.stop = "its daemon has not been heard of for too long"
                self._jobs.end_component(component)
                component.folder.note_entry(stop=component.stop)
        self._files.stages.discard_stages(instance)
