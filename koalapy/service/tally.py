"""How many jobs there are in which state, kept by what changes, so that nobody has to count them all."""

from collections import Counter
from collections.abc import Iterable

from koalapy.model.job import Job, JobId, JobState


class Tally:
    """Of the jobs that are not over."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._states: dict[JobId, JobState] = {}
        self._counts: Counter[JobState] = Counter()
        self.update(jobs)

    def update(self, jobs: Iterable[Job]) -> None:
        """Take in jobs as they are now."""
        for job in jobs:
            if (before := self._states.pop(job.id, None)) is not None:
                self._counts[before] -= 1
            if not job.state.is_final:
                self._states[job.id] = job.state
                self._counts[job.state] += 1

    @property
    def queued(self) -> int:
        return self._counts[JobState.QUEUED]

    @property
    def active(self) -> int:
        """Placed, and not over."""
        return sum(count for state, count in self._counts.items() if state.is_active)
