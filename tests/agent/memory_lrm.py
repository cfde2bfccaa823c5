"""A resource manager in memory that cannot tell of changes, and that may be out of order."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from koalapy.agent.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteError
from tests.signals import pass_time


class MemoryLrm:
    """Two nodes; jobs start at once and end when the test says so."""

    def __init__(self) -> None:
        self.fault: SiteError | None = None
        self.unopened: SiteError | None = None
        self.opened = 0
        self.settling = 0.01
        self.refusal: SiteError | None = None
        """What is said to a submission."""
        self.force_refusal: SiteError | None = None
        """The answer to a cancellation by force."""
        self.late = False
        """Whether a submission that is refused is taken all the same, once somebody has looked for it."""
        self.answering = asyncio.Event()
        self.answering.set()
        self.versions = asyncio.Event()
        """Set while it says its version."""
        self.versions.set()
        self.submit_error = ""
        self.background = self.down = 0
        self.smallest = 1
        self.takes = 0.0
        """Seconds of a look."""
        self._taken: list[LrmSubmission] = []
        self.cancelled: list[tuple[str, bool]] = []
        self.polls = 0
        self.jobs: dict[str, LrmJob] = {}
        self.changed = asyncio.Event()

    async def open(self) -> None:
        if self.unopened is not None:
            raise self.unopened
        self.opened += 1

    async def close(self) -> None:
        pass

    async def submit_job(self, submission: LrmSubmission) -> str:
        assert self.opened
        self._check()
        if self.refusal is not None:
            if self.late:
                self._taken.append(submission)
            raise self.refusal
        return self.take(submission)

    def take(self, submission: LrmSubmission) -> str:
        """Start a job, whoever hands it in."""
        ident = str(len(self.jobs) + 1)
        self.jobs[ident] = LrmJob(
            ident, submission.name, LrmJobState.RUNNING, ("a",) * submission.nodes, user=submission.user
        )
        return ident

    async def find_job(self, name: str, user: str = "") -> str | None:
        assert self.opened
        self._check()
        found = next((job.id for job in self.jobs.values() if job.name == name), None)
        if self._taken:
            self.take(self._taken.pop(0))
        return found

    async def settling_time(self) -> float:
        return self.settling

    async def read_version(self) -> str:
        await self.versions.wait()
        return "memory 1.0"

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        self.cancelled.append((job, by_force))
        self._check()
        if by_force and self.force_refusal is not None:
            raise self.force_refusal

    def end(self, job: str) -> None:
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, exit_code=0)

    def fails(self, job: str, reason: str) -> None:
        """A node of its is lost."""
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, lost=True, reason=reason)

    def runners_key(self) -> bytes:
        return b""

    async def take_snapshot(self) -> LrmSnapshot:
        self.polls += 1
        await self.answering.wait()
        if self.takes:
            await pass_time(self.takes)
        self._check()
        held = sum(len(job.nodes) for job in self.jobs.values() if job.state is LrmJobState.RUNNING)
        idle = 2 - held - self.background - self.down
        return LrmSnapshot(
            2,
            idle,
            self.background,
            self.down,
            tuple(self.jobs.values()),
            self.submit_error,
            min_job_nodes=self.smallest,
        )

    async def check_setup(self) -> Sequence[Finding]:
        return []

    async def watch_changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self.changed.wait()
            self.changed.clear()

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault
