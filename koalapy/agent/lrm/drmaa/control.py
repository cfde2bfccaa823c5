"""The one DRMAA session that an agent has: jobs are submitted and ended through it, and it tells of their ends."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from koalapy.agent.lrm.drmaa.codes import NO_SUCH_JOB, DrmaaEnding
from koalapy.agent.lrm.drmaa.process import Become, DrmaaProcess
from koalapy.agent.lrm.port import Finding, LrmSubmission
from koalapy.agent.lrm.timeouts import DEFAULT_TIMEOUTS, LrmTimeouts
from koalapy.model.errors import SiteError, SiteRejected

RETRY_INTERVAL = 30.0
"""Seconds between two tries to load a library that cannot be loaded."""
_MAX_RETAINED_ENDINGS = 1000
_DEFAULT_LIBRARIES = ("/usr/lib/gridengine-drmaa/lib/libdrmaa.so.1.0", "/usr/lib/slurm-drmaa/lib/libdrmaa.so.1")


class DrmaaControl:
    """Implements ``JobControl`` over the one session that an agent has."""

    def __init__(
        self,
        library: str | None,
        *,
        contact: str = "",
        environment: Mapping[str, str] = {},
        timeouts: LrmTimeouts = DEFAULT_TIMEOUTS,
        become: Become | None = None,
    ) -> None:
        self.library = (
            library or os.environ.get("DRMAA_LIBRARY_PATH") or next(filter(os.path.exists, _DEFAULT_LIBRARIES), None)
        )
        self._process = DrmaaProcess(self.library, contact, environment, self._ended, timeouts, become)
        self._start_wait_s = timeouts.drmaa_start_wait_s
        self._listeners: list[Callable[[], None]] = []
        self._endings: dict[str, DrmaaEnding] = {}
        self._order: deque[str] = deque()
        self._error = ""
        self._retry_at = 0.0
        self._starting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Nothing is done before the first request: a library that fails now may work later."""

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._process.close()

    async def submit(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        job: str = await self._process.request(
            "submit",
            script=str(script),
            name=submission.name,
            workdir=str(submission.workdir),
            output=str(submission.output),
            native=_quoted(native),
        )
        return job

    async def cancel(self, job: str, user: str = "") -> None:
        try:
            await self._process.request("cancel", job=job)
        except SiteRejected as error:
            if error.value != NO_SUCH_JOB:
                raise

    async def status(self, jobs: Sequence[str], user: str = "") -> Mapping[str, str]:
        """Of each job its DRMAA state, or the name of the error that the question gave. Raises ``SiteError``."""
        states: dict[str, str] = await self._process.request("status", jobs=list(jobs))
        return states

    def on_ended(self, listener: Callable[[], None]) -> None:
        """Have it called whenever the library tells of an ended job."""
        self._listeners.append(listener)

    def ending(self, job: str) -> DrmaaEnding | None:
        """What the library has told of the end of a job of this session."""
        return self._endings.get(job)

    async def submit_error(self) -> str:
        """Whether there can be a session at all, as far as that is known: a library may take its time to tell."""
        if self._starting is None and time.monotonic() >= self._retry_at:
            self._starting = asyncio.create_task(self._start())
        if self._starting is not None:
            done, _ = await asyncio.wait((self._starting,), timeout=self._start_wait_s)
            self._starting = None if done else self._starting
        return self._error

    async def _start(self) -> None:
        try:
            await self._process.about()
            self._error = ""
        except SiteError as error:
            self._error = f"{error.message}; {error.hint}" if error.hint else error.message
            if isinstance(error, SiteRejected):
                self._retry_at = time.monotonic() + RETRY_INTERVAL

    async def version(self) -> str:
        """What the library says of itself and its resource manager; ``SiteError``."""
        about = await self._process.about()
        return f"{about['system']}, DRMAA {about['version']}"

    async def check(self, nodes: int = 1) -> Sequence[Finding]:
        try:
            about = await self._process.about()
        except SiteError as error:
            hint = error.hint or "see that the resource manager runs and that this host may hand in jobs"
            return [Finding("DRMAA library", False, error.message, hint)]
        found = f"{about['implementation']}, DRMAA {about['version']}, {self.library or 'libdrmaa'}"
        return [Finding("DRMAA library", True, found)]

    def _ended(self, ending: DrmaaEnding) -> None:
        self._endings[ending.job] = ending
        self._order.append(ending.job)
        if len(self._order) > _MAX_RETAINED_ENDINGS:
            self._endings.pop(self._order.popleft(), None)
        for listener in self._listeners:
            listener()


def _quoted(native: Sequence[str]) -> str:
    """As libraries take it apart again: at blanks outside of quotes."""
    return " ".join(f'"{word}"' if any(c.isspace() for c in word) or not word else word for word in native)
