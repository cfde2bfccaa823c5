"""A resource manager in memory that can fail and does not announce changes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from koalapy.agent.lrm.port import Finding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission, ReservationOrder
from koalapy.model.errors import SiteError
from koalapy.model.job_sizes import SizeRanges
from koalapy.model.reports import ListedNode
from tests.signals import pass_time


class MemoryLrm:
    """A resource manager of two nodes. Jobs start at once and end when the test ends them."""

    product = "the local resource manager"

    def __init__(self) -> None:
        self.error: SiteError | None = None
        self.open_error: SiteError | None = None
        self.opened = 0
        self.settling_s = 0.01
        self.max_snapshot_age_s = 0.0
        self.submit_rejection: SiteError | None = None
        """The error of a submission."""
        self.find_error: SiteError | None = None
        """The error of a search for a job."""
        self.force_error: SiteError | None = None
        """The error of a cancellation by force."""
        self.accepts_late = False
        """Whether a rejected submission becomes a job after the next search for its name."""
        self.is_answering = asyncio.Event()
        self.is_answering.set()
        self.searches = 0
        self.is_finding = asyncio.Event()
        """Set while searches for jobs are answered."""
        self.is_finding.set()
        self.version_known = asyncio.Event()
        """Set when the version can be read."""
        self.version_known.set()
        self.submit_error = ""
        self.background = self.down = 0
        self.job_sizes: SizeRanges = ()
        self.unreadable = 0
        """Lines on jobs that cannot be read."""
        self.nodes: tuple[ListedNode, ...] = ()
        self.snapshot_s = 0.0
        """Duration of a snapshot."""
        self._late_submissions: list[LrmSubmission] = []
        self.cancelled: list[tuple[str, bool]] = []
        self.expected: list[str] = []
        self.is_reserving = asyncio.Event()
        self.submissions: list[LrmSubmission] = []
        self.reservations: dict[str, ReservationOrder] = {}
        self.polls = 0
        self.jobs: dict[str, LrmJob] = {}
        self.on_start: dict[str, Any] = {}
        """Fields of jobs that start from now on."""
        self.changed = asyncio.Event()

    async def open(self) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.opened += 1

    async def close(self) -> None:
        pass

    async def submit_job(self, submission: LrmSubmission) -> str:
        assert self.opened
        self._check()
        if self.submit_rejection is not None:
            if self.accepts_late:
                self._late_submissions.append(submission)
            raise self.submit_rejection
        return self.start_job(submission)

    def start_job(self, submission: LrmSubmission) -> str:
        """Start a job that any user submits."""
        self.submissions.append(submission)
        ident = str(len(self.jobs) + 1)
        job = LrmJob(ident, submission.name, LrmJobState.RUNNING, ("a",) * submission.nodes, user=submission.user)
        self.jobs[ident] = replace(job, **self.on_start)
        return ident

    async def find_job(self, name: str, user: str = "") -> str | None:
        assert self.opened
        self.searches += 1
        await self.is_finding.wait()
        self._check()
        if self.find_error is not None:
            raise self.find_error
        job_id = next((job.id for job in self.jobs.values() if job.name == name), None)
        if self._late_submissions:
            self.start_job(self._late_submissions.pop(0))
        return job_id

    def expect_job(self, job: str, name: str, user: str = "") -> None:
        self.expected.append(job)

    async def settling_time(self) -> float:
        return self.settling_s

    async def read_version(self) -> str:
        await self.version_known.wait()
        return "memory 1.0"

    async def reserve_nodes(self, order: ReservationOrder) -> Sequence[str]:
        self.is_reserving.set()
        is_known = order.name in self.reservations
        await self.is_answering.wait()
        self._check()
        if not is_known:
            self.reservations[order.name] = order
        return [f"n{number}" for number in range(self.reservations[order.name].nodes)]

    async def release_reservation(self, name: str) -> None:
        self._check()
        self.reservations.pop(name, None)

    async def list_reservations(self, prefix: str) -> Sequence[str]:
        return list(self.reservations)

    async def cancel_job(self, job: str, name: str, user: str = "", *, by_force: bool = False) -> None:
        self.cancelled.append((job, by_force))
        self._check()
        if by_force and self.force_error is not None:
            raise self.force_error

    def end_job(self, job: str) -> None:
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, exit_code=0)

    def lose_job(self, job: str, reason: str) -> None:
        """End a job because one of its nodes is lost."""
        self.jobs[job] = replace(self.jobs[job], state=LrmJobState.ENDED, lost=True, reason=reason)

    def runners_key(self) -> bytes:
        return b""

    async def take_snapshot(self) -> LrmSnapshot:
        self.polls += 1
        await self.is_answering.wait()
        if self.snapshot_s:
            await pass_time(self.snapshot_s)
        self._check()
        used_nodes = sum(len(job.nodes) for job in self.jobs.values() if job.state is LrmJobState.RUNNING)
        idle = 2 - used_nodes - self.background - self.down
        return LrmSnapshot(
            2,
            idle,
            self.background,
            self.down,
            tuple(self.jobs.values()),
            self.submit_error,
            job_sizes=self.job_sizes,
            unreadable=self.unreadable,
            nodes=self.nodes,
        )

    async def check_setup(self) -> Sequence[Finding]:
        return []

    async def watch_changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self.changed.wait()
            self.changed.clear()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
