"""What a policy that learns is told of a job: the experience with its application, and when nodes will be free."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import inf

from koalapy.model.advice import size_of
from koalapy.model.application import application_of
from koalapy.model.cluster import GridView
from koalapy.model.job import Attempt, Job, JobSpec, parse_token
from koalapy.model.request import ClusterName, Request
from koalapy.placement.knowledge import Knowledge, Release, Room
from koalapy.scheduling.experience import Experience
from koalapy.scheduling.grid import GridBook
from koalapy.scheduling.ledger import Ledger

Rooms = Mapping[ClusterName, Room]


class Advising:
    """Looks up what is known at this moment; what holds for the whole grid once for each view."""

    def __init__(
        self, experience: Experience, ledger: Ledger, grid: GridBook, waiting: Callable[[], Iterable[Request]],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self.experience = experience
        self._ledger = ledger
        self._grid = grid
        self._waiting = waiting
        self._now = now

    def shape(self, spec: JobSpec) -> tuple[object, ...]:
        """What of a job the knowledge depends on, beside its request and its inputs."""
        return (application_of(spec), spec.processes_per_node, spec.communication)

    def knowledge(self, spec: JobSpec, view: GridView) -> Knowledge:
        """Of one job, as far as it bears on its placement on a view."""
        application = application_of(spec)
        first_two = view.once(("first two that wait",), lambda view: tuple(islice(self._waiting(), 2)))
        return Knowledge(
            application,
            self.experience.times(application, size_of(spec), spec.communication),
            self.experience.ratios(application),
            spec.communication,
            spec.inputs,
            view.once(("rooms",), lambda view: self._rooms()),
            any(request != spec.request for request in first_two) or len(first_two) > 1,
            self._now(),
        )

    def _rooms(self) -> Rooms:
        now = self._now()
        lefts: dict[int, tuple[float | None, float]] = {}
        rooms = {}
        for book in self._grid.books():
            releases = []
            for token, size in book.live.items():
                ident = parse_token(token)[0]
                if ident not in lefts:
                    job = self._ledger.get(ident)
                    lefts[ident] = self._left(job, now) if job is not None else (None, 0.0)
                left, age = lefts[ident]
                releases.append(Release(left, size, age))
            releases.sort(key=_rank)
            rooms[book.name] = Room(max(0, book.total - book.background - book.down), tuple(releases))
        return rooms

    def _left(self, job: Job, now: float) -> tuple[float | None, float]:
        """Seconds until a job gives its nodes back, None when nobody knows; and for how long it has run."""
        attempt = job.attempt
        if attempt is None:
            return None, 0.0
        if job.ending is not None:
            return 0.0, 0.0
        began = attempt.barrier_at
        age = 0.0 if began is None else max(0.0, now - began)
        if began is None:
            began = max(now, attempt.start_estimate or now)
        ends = [end for end in (self._expected(job, attempt, began), _latest(job, began)) if end > now]
        return (None if min(ends, default=inf) == inf else min(ends) - now), age

    def _expected(self, job: Job, attempt: Attempt, began: float) -> float:
        run = self.experience.expected(job.spec, {component.cluster for component in attempt.gang})
        return inf if run is None else began + run


def _latest(job: Job, began: float) -> float:
    """When its walltime is over."""
    return inf if job.spec.walltime is None else began + job.spec.walltime


def _rank(release: Release) -> tuple[float, float, int]:
    return inf if release.seconds is None else release.seconds, release.age, release.nodes
