"""Cancel interactive jobs without a client."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from koalapy.daemon.engine.engine import Engine, WorkItem
from koalapy.model.job import Job, JobId, JobState
from koalapy.scheduler.events import JobCancelled
from koalapy.scheduler.queries import Queries

log = structlog.get_logger()

CHECK_INTERVAL = 5.0
ABSENCE_GRACE = 60.0
"""Seconds that an interactive job goes on without a client: a daemon or a client may need as long to come back."""
ACTOR = "koala"
"""The user that cancels such jobs, in their timeline."""


class Attendance:
    """The clients of unfinished interactive jobs."""

    def __init__(
        self, engine: Engine, queries: Queries, clock: Callable[[], float], grace: float = ABSENCE_GRACE
    ) -> None:
        """``clock`` is monotonic; ``grace``: seconds that a job goes on without a client."""
        self._engine, self._queries, self._clock, self._grace = engine, queries, clock, grace
        self._clients: Counter[JobId] = Counter()
        self._absent_since: dict[JobId, float] = {}
        """By interactive job without a client: when it was submitted, or its last client left."""
        for job in queries.jobs():  # clients come back after a restart of the daemon
            self._note_change(job, None)
        engine.subscribe(self._note_change)

    def _note_change(self, job: Job, previous_state: JobState | None) -> None:
        """Begin the grace of a new interactive job."""
        if job.spec.interactive and previous_state is None and job.id not in self._clients:
            self._absent_since[job.id] = self._clock()

    @contextmanager
    def attend(self, job: JobId) -> Iterator[None]:
        """Count a client of a job while the block runs."""
        self._clients[job] += 1
        self._absent_since.pop(job, None)
        try:
            yield
        finally:
            self._clients[job] -= 1
            if not self._clients[job]:
                del self._clients[job]
                self._absent_since[job] = self._clock()

    async def cancel_unattended(self) -> None:
        """Cancel the jobs whose grace is over; called periodically."""
        now = self._clock()
        for job in [job for job, since in self._absent_since.items() if now - since > self._grace]:
            if self._queries.job(job) is None:
                self._absent_since.pop(job, None)
                continue
            log.info("job without a client", action="job-unattended", job=job)
            reason = f"its client (koala run or koala shell) was not connected for {self._grace:g} s"
            await self._engine.commit(WorkItem(events=(JobCancelled(job, reason, ACTOR, False),)))
            self._absent_since.pop(job, None)
