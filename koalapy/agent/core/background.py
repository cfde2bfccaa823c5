"""Artificial load of local users: jobs submitted directly to the resource manager.

They count as background in every report, since their names differ from those of components.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
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
"""Seconds that a job may have waited for its nodes; it is remembered for so much longer."""
WALLTIME_ALLOWANCE = 60.0
"""Seconds beyond a job's duration after which the resource manager ends it."""
FOLDER_RETENTION = 24 * 3600.0
"""Maximum seconds for which a folder is kept, since a job may wait before it runs."""


class BackgroundOrder(BaseModel):
    """Occupy ``nodes`` nodes for ``seconds`` seconds, as soon as the resource manager has them."""

    model_config = ConfigDict(strict=True)

    nodes: int = Field(ge=1)
    seconds: float = Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)


class Background:
    """Answers the questions ``background`` and ``background-stop``. Both raise ``SiteError``."""

    def __init__(
        self, lrm: Lrm, kind: str, directory: Path, *, refused: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Set up. ``kind`` of the resource manager, ``directory`` for the jobs' folders, ``refused`` if they would run
        as root."""
        self._refused, self._clock = refused, clock
        self._lrm, self._kind, self._directory = lrm, kind, directory
        self._started: dict[str, tuple[str, float]] = {}
        """By name: number in the resource manager, and when it would end (monotonic) had it started at once."""
        self._lock = asyncio.Lock()
        """Held while jobs are submitted or ended, so that jobs being submitted count."""

    async def start_job(self, payload: Mapping[str, object]) -> dict[str, object]:
        """Submit a local user's job as the payload says (``BackgroundOrder``); return its name and number."""
        if not KINDS[self._kind].sees_local_users:
            seeing = [name for name, kind in KINDS.items() if kind.sees_local_users and not kind.on_this_host]
            raise SiteRejected(
                f"a cluster of the kind {self._kind} does not report the load of local users",
                hint=f"use the kind {' or '.join(seeing)}",
            )
        if self._refused:
            raise SiteRejected(
                "this cluster's agent runs as root and starts no jobs of its own",
                hint="run the agent as an account of its own with CAP_SETUID, CAP_SETGID and CAP_KILL",
            )
        order = BackgroundOrder.model_validate({name: payload.get(name) for name in BackgroundOrder.model_fields})
        async with self._lock:
            return await self._submit_job(order.nodes, order.seconds)

    async def _submit_job(self, nodes: int, seconds: float) -> dict[str, object]:
        """Submit a job that sleeps, and remove old folders. Raise ``SiteRejected`` if too many are running."""
        self._forget_ended()
        now = self._clock.monotonic()
        if sum(until > now for _, until in self._started.values()) >= MAX_CONCURRENT_JOBS:
            raise SiteRejected(
                f"{MAX_CONCURRENT_JOBS} background jobs are running already", hint="wait for some to end"
            )
        name = f"{NAME_PREFIX}{uuid4().hex[:12]}"
        folder = self._directory / name
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                if path.name not in self._started and path.stat().st_mtime + FOLDER_RETENTION < self._clock.now():
                    shutil.rmtree(path, ignore_errors=True)
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
        self._started[name] = job, self._clock.monotonic() + seconds
        log.info("background started", action="background-started", name=name, nodes=nodes, seconds=seconds)
        return {"name": name, "lrm_job": job}

    async def stop_jobs(self, payload: Mapping[str, object]) -> dict[str, object]:
        """End all jobs that were started here; return how many were ended."""
        async with self._lock:
            self._forget_ended()
            stopped, failed = 0, None
            for name, (job, _) in list(self._started.items()):
                try:
                    await self._lrm.cancel_job(job, name)
                except SiteError as error:
                    failed = error
                    continue
                del self._started[name]
                stopped += 1
        if failed is not None:
            raise failed
        return {"stopped": stopped}

    def _forget_ended(self) -> None:
        """Forget jobs that must have ended, since resource managers remember them for long."""
        now = self._clock.monotonic()
        self._started = {name: job for name, job in self._started.items() if job[1] + MAX_QUEUED_SECONDS > now}
