"""The page Scheduler: how fast it goes round, what it decided, what kept jobs back, and the rules it goes by."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise

from koalapy.daemon.engine.engine import Engine
from koalapy.daemon.observability.instruments import Instruments
from koalapy.daemon.observability.timings import BUCKETS, RECENT_SPAN, Timings
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.pictures import Span
from koalapy.dashboard.rendering import seconds
from koalapy.model.job import FINAL_STATES, Priority
from koalapy.model.placement import RefusalKind
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure
from koalapy.scheduler.rules import Rules

REASONS = {
    RefusalKind.NODES: "too few nodes are idle where the job may run",
    RefusalKind.CLUSTERS: "no cluster is usable",
    RefusalKind.FILES: "an input cannot be had",
    RefusalKind.ELIGIBILITY: "the job may not run there: accounts, folders, Open MPI, constraints",
    RefusalKind.LIMIT: "its user has as much as he may",
    RefusalKind.ADVICE: "it is expected to end sooner if it waits",
    RefusalKind.POLICY: "its policy is unknown or broken",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Something that is done again and again; seconds, and lately is the last five minutes."""

    what: str
    meaning: str
    count: int
    failures: int
    per_second: float
    mean: float
    most: float
    """95 of 100 lately took no longer."""
    largest: float
    """The longest lately."""
    spans: Sequence[Span]
    """Since the daemon began."""


@dataclass(frozen=True, slots=True)
class Counted:
    what: str
    count: int
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    policy: str
    on_one: int
    on_several: int


@dataclass(frozen=True, slots=True)
class Claims:
    """What came of claims on one cluster."""

    cluster: str
    held: int
    lost: int
    lost_by: Sequence[Counted]
    failed: int
    failed_by: Sequence[Counted]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A rule as it is in force."""

    name: str
    value: str
    default: str

    @property
    def is_set(self) -> bool:
        return self.value != self.default


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """All of it, counted since the daemon began."""

    queued: int
    active: int
    waiting: int
    """What the next round will take in."""
    last_round: int
    """What the last one took in."""
    timed: Sequence[Timed]
    events: Sequence[Counted]
    events_refused: int
    submitted: int
    ended: Sequence[Counted]
    requeued: int
    preemptions: int
    reclaims: int
    placements: Sequence[Placed]
    refusals: Sequence[Counted]
    claims: Sequence[Claims]
    database_problem: str
    database_size: int | None
    epoch: int
    recent_span: float
    parameters: Sequence[Parameter]


def timed(what: str, meaning: str, timings: Timings) -> Timed:
    recent = timings.recent()
    return Timed(
        what=what,
        meaning=meaning,
        count=timings.count,
        failures=timings.failures,
        per_second=recent.per_second,
        mean=recent.mean,
        most=recent.most,
        largest=recent.largest,
        spans=spans_of(timings),
    )


def spans_of(timings: Timings) -> list[Span]:
    """How many took up to each limit and longer than the one before, and how many longer than all."""
    within = [0, *timings.buckets, timings.count]
    said = [*(f"≤{seconds(limit)}" for limit in BUCKETS), f">{seconds(BUCKETS[-1])}"]
    return [Span(each, after - before) for each, (before, after) in zip(said, pairwise(within), strict=True)]


def parameters_of(rules: Rules) -> list[Parameter]:
    """Each rule, and what it is where nobody says otherwise."""
    return [
        Parameter(rule.name, _said(getattr(rules, rule.name)), _said(rule.default))
        for rule in fields(rules)
        if rule.default is not MISSING
    ]


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)


def _claims(instruments: Instruments, cluster: str) -> Claims:
    lost = [Counted(why, count) for why in ClaimFailure if (count := instruments.claims_failed[cluster, why])]
    failed = [Counted(why, count) for why in AttemptFailure if (count := instruments.attempts_failed[cluster, why])]
    return Claims(
        cluster=cluster,
        held=instruments.claims[cluster],
        lost=sum(each.count for each in lost),
        lost_by=lost,
        failed=sum(each.count for each in failed),
        failed_by=failed,
    )


def scheduler_view(engine: Engine) -> SchedulerView:
    instruments, queries = engine.instruments, engine.queries
    rounds = instruments.rounds
    return SchedulerView(
        queued=engine.stored_queued,
        active=engine.stored_active,
        waiting=engine.pending_items,
        last_round=rounds.waiting,
        timed=[
            timed("Rounds", "each takes in what came, decides, writes it down, and sends what follows", rounds.whole),
            timed("Steps", "the part of a round in which the daemon does nothing else", rounds.step),
            timed("Transactions", "what a round writes to the database", instruments.writes),
            timed("Questions", "what is read from the database", instruments.reads),
        ],
        events=[Counted(kind, count) for kind, count in rounds.events.most_common()],
        events_refused=rounds.refused,
        submitted=sum(instruments.submitted.values()),
        ended=[
            Counted(state, sum(instruments.ended[state, priority] for priority in Priority))
            for state in sorted(FINAL_STATES)
        ],
        requeued=instruments.requeued,
        preemptions=instruments.preemptions,
        reclaims=instruments.reclaims,
        placements=[
            Placed(policy, instruments.placements[policy, False], instruments.placements[policy, True])
            for policy in sorted({policy for policy, _ in instruments.placements})
        ],
        refusals=[Counted(kind, instruments.refusals[kind], meaning) for kind, meaning in REASONS.items()],
        claims=[_claims(instruments, cluster.name) for cluster in queries.grid.clusters()],
        database_problem=engine.database.problem,
        database_size=instruments.database_size,
        epoch=engine.epoch,
        recent_span=RECENT_SPAN,
        parameters=parameters_of(queries.rules),
    )


def add_scheduler(dashboard: Dashboard) -> None:
    @dashboard.page("/scheduler", "scheduler.html", operation="scrape", title="Scheduler", key="s")
    async def scheduler() -> SchedulerView:
        return scheduler_view(dashboard.engine)
