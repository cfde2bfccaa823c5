"""Count and time the daemon's work since its start, for ``/metrics`` and for operators.

All labels come from the code or the configuration, so that requests and reports cannot add further ones.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from koalapy.daemon.engine.database import READ_TIMINGS, query
from koalapy.daemon.observability.timings import Timings
from koalapy.model.errors import StoreUnavailable
from koalapy.model.job import FINAL_STATES, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName
from koalapy.scheduler.claims.preemption import PREEMPTED, RECLAIMED
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure, Effects
from koalapy.scheduler.events import Event

SIZE_INTERVAL = 60.0
"""Seconds between two measurements of the database's size."""
HUB_INTERVAL = 10.0
"""Seconds between two looks at the hub of relayed links."""


@dataclass(slots=True)
class EngineCycles:
    """The engine cycles: each reads the waiting events, decides, stores the decisions and sends the effects."""

    total: Timings = field(default_factory=Timings)
    step: Timings = field(default_factory=Timings)
    """The part of a cycle that reads events and decides; it blocks the event loop."""
    events: Counter[str] = field(default_factory=Counter)
    """Events read, by type."""
    refused: int = 0
    """Events that the scheduler rejected."""
    waiting: int = 0
    """Events that the last cycle found waiting."""


@dataclass(slots=True)
class Transferred:
    """The files transferred from one cluster to another."""

    count: int = 0
    size: int = 0
    """Bytes transferred."""
    seconds: float = 0.0


@dataclass(slots=True)
class Requests:
    """The HTTP requests, without messages on the connections of agents."""

    answered: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """Answered requests by route, method and status."""
    seconds: dict[str, Timings] = field(default_factory=dict)
    """Time until the response began, by route."""

    def note_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Record an answered request; ``seconds`` is the time until its response began."""
        self.answered[route, method, status] += 1
        if (timings := self.seconds.get(route)) is None:
            timings = self.seconds[route] = Timings()
        timings.note(seconds, failed=status >= 500)


@dataclass(slots=True)
class Instruments:
    """All counters and timings of the daemon, changed in the engine's loop only."""

    cycles: EngineCycles = field(default_factory=EngineCycles)
    writes: Timings = field(default_factory=Timings)
    """Transactions of the engine."""
    reads: Timings = field(default_factory=lambda: READ_TIMINGS)
    """Queries of this process to the database."""
    requests: Requests = field(default_factory=Requests)
    submitted: Counter[Priority] = field(default_factory=Counter)
    """Submitted jobs of users; like all counters below but those of claims and failures, without internal jobs."""
    ended: Counter[tuple[JobState, Priority]] = field(default_factory=Counter)
    placements: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By policy, and whether the placement spans several clusters."""
    requeued: int = 0
    """Attempts after which the job was queued again."""
    preemptions: int = 0
    reclaims: int = 0
    refusals: Counter[RefusalKind] = field(default_factory=Counter)
    claims: Counter[ClusterName] = field(default_factory=Counter)
    """Components with all nodes reported."""
    claims_failed: Counter[tuple[ClusterName, ClaimFailure]] = field(default_factory=Counter)
    attempts_failed: Counter[tuple[ClusterName, AttemptFailure]] = field(default_factory=Counter)
    transferred: dict[tuple[ClusterName, ClusterName], Transferred] = field(default_factory=dict)
    """By source and target cluster."""
    relayed: Counter[tuple[ClusterName, ClusterName]] = field(default_factory=Counter)
    """Bytes of ended attempts that went through the hub, by sending and receiving cluster."""
    hub: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the hub of relayed links by name, as of the last look at it; none while it is away."""
    database_size: int | None = None
    """Bytes, as of the last measurement; None before the first."""

    def count_events(self, events: Iterable[Event]) -> None:
        """Count events that the scheduler has accepted."""
        self.cycles.events.update(type(event).__name__ for event in events)

    def count_effects(self, effects: Effects) -> None:
        """Count the effects of an engine cycle."""
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

    async def measure_size(self, size: Callable[[], int | None]) -> None:
        """Measure the size of the database; keep the last value while the database is unavailable."""
        with suppress(StoreUnavailable):
            self.database_size = await query(size)

    async def read_hub(self, read: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        """Read the metrics of the hub of relayed links."""
        self.hub = await read()

    def count_transfer(self, source: ClusterName, cluster: ClusterName, size: int, seconds: float) -> None:
        """Count a finished transfer of ``size`` bytes."""
        transferred = self.transferred.setdefault((source, cluster), Transferred())
        transferred.count += 1
        transferred.size += size
        transferred.seconds += seconds
