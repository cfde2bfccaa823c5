"""A resource manager in memory that cannot tell of changes, and that may be out of order."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from koalapy.agents.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteError


class MemoryLrm:
    """Two nodes; jobs start at once and end when the test says so."""

    def __init__(self) -> None:
        self.fault: SiteError | None = None
        self.unopened: SiteError | None = None
        self.opened = 0
        self.looks = 0
        self.jobs: dict[str, LrmJob] = {}
        self.changed = asyncio.Event()

    async def open(self) -> None:
        if self.unopened is not None:
            raise self.unopened
        self.opened += 1

    async def close(self) -> None:
        pass

    async def submit(self, submission: LrmSubmission) -> str:
        assert self.opened
        self._check()
        ident = str(len(self.jobs) + 1)
        self.jobs[ident] = LrmJob(ident, submission.name, LrmJobState.RUNNING, ("a",) * submission.nodes)
        return ident

    async def find(self, name: str) -> str | None:
        assert self.opened
        self._check()
        return next((job.id for job in self.jobs.values() if job.name == name), None)

    async def cancel(self, job: str, name: str) -> None:
        self._check()

    def end(self, job: str) -> None:
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, exit_code=0)

    async def snapshot(self) -> LrmSnapshot:
        self.looks += 1
        self._check()
        held = sum(len(job.nodes) for job in self.jobs.values() if job.state is LrmJobState.RUNNING)
        return LrmSnapshot(2, 2 - held, 0, 0, tuple(self.jobs.values()))

    async def check(self) -> Sequence[Finding]:
        return []

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self.changed.wait()
            self.changed.clear()

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault
