"""A job's way as lanes: its wait, and each component of each attempt, from its place to its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry

MEANINGS = {
    "queued": "waits to be placed",
    "held": "held",
    "placed": "placed, no nodes asked for yet",
    "files": "its files are brought",
    "claiming": "waits for its nodes in the cluster's own queue",
    "claimed": "has its nodes, waits at the barrier for the others",
    "starting": "all are there, the program is started",
    "running": "runs",
    "stopping": "gives its nodes back",
}
WIDTH, LABEL, ROW, BAR = 960, 190, 24, 16
MIN_WIDTH = 2.0
LETTER_WIDTH = 9.0
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 604800)
MAX_TICKS = 10


@dataclass(frozen=True, slots=True)
class Phase:
    """What something was in from ``start`` to ``end``, in seconds since the epoch."""

    what: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class JobLane:
    """``attempt`` is 0 of the wait; ``label`` is for people."""

    label: str
    attempt: int
    phases: Sequence[Phase]
    ended: str = ""
    """How it ended, if badly."""


def lanes_of(job: Job, attempts: Sequence[Attempt], timeline: Sequence[TimelineEntry], now: float) -> list[JobLane]:
    """All that is known of a job's way until ``now``, or its end."""
    end = job.ended_at if job.ended_at is not None else now
    lanes = [JobLane("queue", 0, list(_waits(job, timeline, end)))]
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        over = end if is_last and job.ended_at is None else attempt.ended_at
        for component in sorted(attempt.components, key=lambda each: (each.rank, each.index)):
            where = f"{component.cluster} · {component.size}"
            label = f"{attempt.generation}: {where}" if len(attempts) > 1 or attempt.generation > 1 else where
            phases = list(_way(component, attempt, over))
            lanes.append(JobLane(label, attempt.generation, phases, component.error))
    return lanes


def _waits(job: Job, timeline: Sequence[TimelineEntry], end: float) -> Iterator[Phase]:
    entries = [(entry.at, entry.state) for entry in timeline] or [(job.submitted_at, job.state)]
    begin, what = None, ""
    for (at, state), (until, following) in pairwise([*entries, (end, None)]):
        if state not in (JobState.QUEUED, JobState.HELD):
            continue
        begin, what = (at, str(state)) if begin is None or what != state else (begin, what)
        if following is not state:
            yield Phase(what, begin, max(begin, until))
            begin = None


def _way(component: Component, attempt: Attempt, over: float | None) -> Iterator[Phase]:
    """What a component went through, in order."""
    begun = attempt.placed_at
    serves = component.claimed_at is not None and not component.superseded
    submitted = component.submitted_at
    begins = [
        ("placed", begun),
        ("files", component.staging_since),
        ("placed", component.staged_at),
        ("claiming", submitted),
        ("claimed", component.claimed_at),
        ("starting", attempt.barrier_at if serves else None),
        ("running", attempt.launched_at if serves else None),
        ("stopping", attempt.ended_at),
    ]
    last = component.ended_at if component.ended_at is not None else over if over is not None else begun
    if component.state is ComponentState.ENDED and component.ended_at is None and over is None:
        last = begun
    known = sorted(((max(at, begun), place, what) for place, (what, at) in enumerate(begins) if at is not None))
    for (at, _, what), (until, _, _) in pairwise([*known, (max(last, begun), 99, "")]):
        if min(until, last) > at:
            yield Phase(what, at, min(until, last))


def job_lanes(lanes: Sequence[JobLane]) -> Markup:
    """SVG; its table is beside it."""
    phases = [phase for lane in lanes for phase in lane.phases]
    if not phases:
        return Markup("")
    start, end = min(phase.start for phase in phases), max(phase.end for phase in phases)
    span, height = max(end - start, 0.001), len(lanes) * ROW + 24
    parts = [
        Markup('<svg class="lanes" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">').format(
            WIDTH, height, WIDTH, height, "what each component went through; the table below has the same"
        )
    ]

    def x(at: float) -> float:
        return round(LABEL + (at - start) / span * (WIDTH - LABEL - 10), 1)

    step = next((step for step in STEPS if span / step <= MAX_TICKS), span / MAX_TICKS)
    for number in range(int(span / step) + 1):
        at = x(start + number * step)
        parts.append(Markup('<path class="tick" d="M{} 16V{}"/>').format(at, height))
        parts.append(Markup('<text class="tick" x="{}" y="11">{}</text>').format(at, _elapsed(number * step)))
    for row, lane in enumerate(lanes):
        top = 24 + row * ROW
        parts.append(Markup('<text class="label" x="0" y="{}">{}</text>').format(top + 12, _cut(lane.label)))
        for phase in lane.phases:
            left, width = x(phase.start), max(MIN_WIDTH, x(phase.end) - x(phase.start))
            parts.append(
                Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                    phase.what, left, top, round(width, 1), BAR, f"{phase.what} {phase.seconds:.1f} s"
                )
            )
            if width > LETTER_WIDTH * len(phase.what):
                middle = round(left + width / 2, 1)
                parts.append(Markup('<text class="in" x="{}" y="{}">{}</text>').format(middle, top + 12, phase.what))
        if lane.ended and lane.phases:
            parts.append(
                Markup('<text class="bad" x="{}" y="{}">✕<title>{}</title></text>').format(
                    min(WIDTH - 8, x(lane.phases[-1].end) + 4), top + 12, lane.ended[:200]
                )
            )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _cut(label: str, most: int = 28) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{left:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours < 48 else f"{hours / 24:g} d"
