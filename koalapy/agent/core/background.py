"""Load that looks like local users': jobs handed straight to the resource manager, which no scheduler has placed.

They count as background in every report, for their names do not begin as those of our components do.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import structlog
from pydantic import BaseModel, ConfigDict, Field

from koalapy.agent.lrm.port import KINDS, Lrm, LrmSubmission
from koalapy.model.errors import SiteError, SiteRejected
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

NAME_PREFIX = "local-"
MAX_SECONDS = 600.0
MAX_CONCURRENT_JOBS = 100
MAX_QUEUED_SECONDS = 3600.0
"""Seconds that one may have waited for its nodes, for which it is remembered beyond its time."""
WALLTIME_ALLOWANCE = 60.0
"""Seconds beyond its time after which the resource manager is to end one."""
FOLDER_RETENTION = 24 * 3600.0
"""Seconds for which a folder is kept at most: a job may wait for long before it runs."""


class BackgroundOrder(BaseModel):
    """Keep ``nodes`` nodes busy for ``seconds`` seconds, as soon as the resource manager has them."""

    model_config = ConfigDict(strict=True)

    nodes: int = Field(ge=1)
    seconds: float = Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """One such job: its number in the resource manager, and until when it could run had it started at once."""

    job: str
    until: float


class Background:
    """Answers the questions ``background`` and ``background-stop``. Both raise ``SiteError``."""

    def __init__(
        self, lrm: Lrm, kind: str, directory: Path, *, refused: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """``kind``, by name, of the resource manager; ``directory`` is where its jobs have their folders; ``refused``
        where they would be root's."""
        self._refused, self._clock = refused, clock
        self._lrm, self._kind, self._directory = lrm, kind, directory
        self._started: dict[str, BackgroundJob] = {}
        self._lock = asyncio.Lock()
        """Held while jobs are submitted or ended: what is on its way to the resource manager counts, too."""

    async def start_job(self, payload: Mapping[str, object]) -> dict[str, object]:
        if not KINDS[self._kind].sees_local_users:
            seeing = [name for name, kind in KINDS.items() if kind.sees_local_users and not kind.on_this_host]
            raise SiteRejected(
                f"a cluster of the kind {self._kind} does not tell of local users' load",
                hint=f"use the kind {' or '.join(seeing)}",
            )
        if self._refused:
            raise SiteRejected(
                "this cluster's agent is root, and runs no jobs of its own",
                hint="run it as an account of its own with CAP_SETUID, CAP_SETGID and CAP_KILL",
            )
        order = BackgroundOrder.model_validate({name: payload.get(name) for name in BackgroundOrder.model_fields})
        async with self._lock:
            return await self._submit(order.nodes, order.seconds)

    async def _submit(self, nodes: int, seconds: float) -> dict[str, object]:
        self._forget_ended()
        now = self._clock.monotonic()
        if sum(one.until > now for one in self._started.values()) >= MAX_CONCURRENT_JOBS:
            raise SiteRejected(
                f"{MAX_CONCURRENT_JOBS} background jobs are under way already", hint="wait for some to end"
            )
        name = f"{NAME_PREFIX}{uuid4().hex[:12]}"
        folder = self._directory / name
        self._clean()
        folder.mkdir(parents=True, mode=0o700)
        submission = LrmSubmission(
            name=name,
            nodes=nodes,
            argv=("/bin/sleep", f"{seconds:g}"),
            environment={},
            workdir=folder,
            output=folder / "output",
            walltime=seconds + WALLTIME_ALLOWANCE,
        )
        job = await self._lrm.submit_job(submission)
        self._started[name] = BackgroundJob(job, self._clock.monotonic() + seconds)
        log.info("background started", action="background-started", name=name, nodes=nodes, seconds=seconds)
        return {"name": name, "lrm_job": job}

    async def stop_jobs(self, payload: Mapping[str, object]) -> dict[str, object]:
        """End whatever was started here and has not ended; return how many jobs were told to."""
        async with self._lock:
            self._forget_ended()
            stopped, failed = 0, None
            for name, started in list(self._started.items()):
                try:
                    await self._lrm.cancel_job(started.job, name)
                except SiteError as error:
                    failed = error
                    continue
                del self._started[name]
                stopped += 1
        if failed is not None:
            raise failed
        return {"stopped": stopped}

    def _forget_ended(self) -> None:
        """Resource managers remember ended jobs for long: what must have ended is not asked about for ever."""
        now = self._clock.monotonic()
        self._started = {name: one for name, one in self._started.items() if one.until + MAX_QUEUED_SECONDS > now}

    def _clean(self) -> None:
        with contextlib.suppress(OSError):
            for folder in self._directory.iterdir():
                if folder.name not in self._started and folder.stat().st_mtime + FOLDER_RETENTION < self._clock.now():
                    shutil.rmtree(folder, ignore_errors=True)
