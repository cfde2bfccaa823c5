"""What pages tell of all jobs that are not over, looked at once for all who ask, in pieces that let others go on."""

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from koalapy.daemon.engine.engine import Engine
from koalapy.model.job import Attempt, ComponentState, Job, JobState
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.system.event_loop import iterate_in_slices

REST = 20.0
"""So many times as long as a look took, it is told again though something has changed since, until that is told."""


@dataclass(slots=True)
class Homes:
    """What a site's users have, and who else is there, of jobs that have home sites."""

    waiting: int = 0
    """Jobs of its users."""
    at_home: int = 0
    """Nodes of its users' jobs there."""
    elsewhere: int = 0
    """Nodes that they have on other sites."""
    guests: int = 0
    """Nodes that other sites' users' jobs have there."""


@dataclass(slots=True)
class Survey:
    """Nodes and jobs by cluster, as they were at one moment or a few milliseconds later."""

    running: Counter[ClusterName] = field(default_factory=Counter)
    """Nodes of components whose program runs."""
    named: Counter[ClusterName] = field(default_factory=Counter)
    """Waiting jobs that name the cluster."""
    anywhere: int = 0
    """Waiting jobs that name none."""
    waiting: int = 0
    """Jobs in the placement queues, and those that come back to them after a pause."""
    oldest: Job | None = None
    """Of those that wait."""
    homes: defaultdict[ClusterName, Homes] = field(default_factory=lambda: defaultdict(Homes))
    """By site."""

    def may_run_on(self, cluster: ClusterName) -> int:
        """How many jobs wait that might be placed there, as far as their requests say."""
        return self.anywhere + self.named[cluster]

    def note(self, job: Job) -> None:
        """Count one job that is not over."""
        if job.state is JobState.QUEUED:
            self._note_waiting(job)
        elif job.attempt is not None and job.state.is_active:
            for component in job.attempt.components:
                if component.state is ComponentState.RUNNING:
                    self.running[component.cluster] += component.size
            if job.spec.home_site:
                self._note_places(job.spec.home_site, job.attempt)

    def _note_places(self, home: ClusterName, attempt: Attempt) -> None:
        for component in attempt.gang:
            if component.has_ended:
                continue
            if component.cluster == home:
                self.homes[home].at_home += component.size
            else:
                self.homes[home].elsewhere += component.size
                self.homes[component.cluster].guests += component.size

    def _note_waiting(self, job: Job) -> None:
        self.waiting += 1
        if job.spec.home_site:
            self.homes[job.spec.home_site].waiting += 1
        request = job.spec.request
        if isinstance(request, FixedRequest):
            self.named.update({component.cluster or "" for component in request.components})
        else:
            self.anywhere += 1
        if not job.spec.internal and (self.oldest is None or job.submitted_at < self.oldest.submitted_at):
            self.oldest = job


class Surveyor:
    """Looks when somebody asks, and with many jobs not each time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looking: asyncio.Task[Survey] | None = None
        self._version, self._at, self._took = "", 0.0, 0.0

    async def survey(self) -> Survey:
        """As it is now, or was a moment ago."""
        now, looking = asyncio.get_running_loop().time(), self._looking
        failed = looking is not None and looking.done() and (looking.cancelled() or looking.exception() is not None)
        if looking is None or failed or not self._is_good(now):
            looking = self._looking = asyncio.ensure_future(self._look())
            self._version, self._at = self._engine.changes.version, now
        return await asyncio.shield(looking)

    def _is_good(self, now: float) -> bool:
        changes = self._engine.changes
        return self._version == changes.version or changes.told_at < self._at > now - REST * self._took

    async def _look(self) -> Survey:
        survey, began = Survey(), time.thread_time()
        async for some in iterate_in_slices(self._engine.queries.jobs()):
            for job in some:
                survey.note(job)
        self._took = time.thread_time() - began
        return survey
