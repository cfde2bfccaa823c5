"""What the daemon counts and times of itself since it began: for ``/metrics``, and for people.

Whatever is counted apart is of a kind that the code or the configuration names, so that nobody who submits, asks or
reports can make more of them.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from koalapy.daemon.engine.database import READ_TIMINGS, query
from koalapy.daemon.observability.timings import Timings
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import FINAL_STATES, JobState, Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.prediction import Outcome, PredictionKind
from koalapy.model.request import ClusterName
from koalapy.scheduler.claims.preemption import PREEMPTED, RECLAIMED
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure, Effects
from koalapy.scheduler.events import Event

SIZE_INTERVAL = 60.0
"""Seconds between two looks how large the database is."""


@dataclass(slots=True)
class Rounds:
    """The engine's: each takes in what came, decides, writes it down, and sends what follows."""

    whole: Timings = field(default_factory=Timings)
    step: Timings = field(default_factory=Timings)
    """The part of each that takes in and decides: nothing else is done meanwhile."""
    events: Counter[str] = field(default_factory=Counter)
    """Taken in, by kind."""
    refused: int = 0
    """Events that the scheduler did not take."""
    waiting: int = 0
    """What there was for the last one to take in."""


@dataclass(slots=True)
class Transferred:
    """Files that came from one cluster to another."""

    count: int = 0
    size: int = 0
    """Bytes."""
    seconds: float = 0.0


@dataclass(slots=True)
class Requests:
    """What came in by HTTP, but for what agents say on their connections."""

    answered: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """By route, method and status."""
    seconds: dict[str, Timings] = field(default_factory=dict)
    """Until the answer began, by route."""

    def note(self, route: str, method: str, status: int, seconds: float) -> None:
        """One more was answered."""
        self.answered[route, method, status] += 1
        if (timings := self.seconds.get(route)) is None:
            timings = self.seconds[route] = Timings()
        timings.note(seconds, failed=status >= 500)


@dataclass(slots=True)
class Instruments:
    """Lives in the engine's loop."""

    rounds: Rounds = field(default_factory=Rounds)
    writes: Timings = field(default_factory=Timings)
    """The engine's transactions."""
    reads: Timings = field(default_factory=lambda: READ_TIMINGS)
    """Questions to the database, of this process."""
    requests: Requests = field(default_factory=Requests)
    submitted: Counter[Priority] = field(default_factory=Counter)
    """Users' jobs, as all that follows but the daemon's own measurements of claims and failures."""
    ended: Counter[tuple[JobState, Priority]] = field(default_factory=Counter)
    placements: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By policy, and whether it was on several clusters."""
    requeued: int = 0
    """Attempts after which the job queued again."""
    preemptions: int = 0
    reclaims: int = 0
    refusals: Counter[RefusalKind] = field(default_factory=Counter)
    claims: Counter[ClusterName] = field(default_factory=Counter)
    """Components all of whose nodes have reported."""
    claims_failed: Counter[tuple[ClusterName, ClaimFailure]] = field(default_factory=Counter)
    attempts_failed: Counter[tuple[ClusterName, AttemptFailure]] = field(default_factory=Counter)
    transferred: dict[tuple[ClusterName, ClusterName], Transferred] = field(default_factory=dict)
    """By the clusters that files came from and to."""
    predictions: Mapping[tuple[PredictionKind, Outcome], int] = field(default_factory=dict)
    """Of the last week, by what they have come to, as they were last looked at."""
    database_size: int | None = None
    """Bytes, as they were last looked at."""

    def taken_in(self, events: Iterable[Event]) -> None:
        """The scheduler has taken these."""
        self.rounds.events.update(type(event).__name__ for event in events)

    def decided(self, effects: Effects) -> None:
        """What came of a round."""
        self.refusals.update(effects.refusals)
        self.claims_failed.update(effects.claims_failed)
        self.attempts_failed.update(effects.attempts_failed)
        for entry in effects.timeline:
            if entry.event == "claimed" and entry.cluster is not None:
                self.claims[entry.cluster] += 1
                continue
            job = effects.jobs.get(entry.job)
            if job is None or job.spec.internal:
                continue
            match entry.event:
                case "submitted":
                    self.submitted[job.spec.priority] += 1
                case "placed" if job.attempt is not None:
                    clusters = {component.cluster for component in job.attempt.components}
                    self.placements[job.spec.policy, len(clusters) > 1] += 1
                case "requeued":
                    self.requeued += 1
                case event if event == PREEMPTED:
                    self.preemptions += 1
                case event if event == RECLAIMED:
                    self.reclaims += 1
                case event if event in FINAL_STATES:
                    self.ended[entry.state, job.spec.priority] += 1

    async def look_at_size(self, size: Callable[[], int | None]) -> None:
        """How large the database is; what it was before where it does not say."""
        with suppress(StoreUnavailable):
            self.database_size = await query(size)

    async def look_at_predictions(
        self, counts: Callable[[], Awaitable[Mapping[tuple[PredictionKind, Outcome], int]]]
    ) -> None:
        """What they have come to; what it was before where the database does not say."""
        with suppress(StoreUnavailable):
            self.predictions = await counts()

    def moved(self, source: ClusterName, cluster: ClusterName, size: int, seconds: float) -> None:
        """A transfer is over; bytes."""
        known = self.transferred.setdefault((source, cluster), Transferred())
        known.count += 1
        known.size += size
        known.seconds += seconds
