"""Pictures as SVG, made by pure functions; with classes and no styles, as the security policy of pages requires."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry
from koalapy.model.wording import format_time

BAR_WIDTH, BAR_HEIGHT = 160, 10


def bar(value: float, most: float) -> Markup:
    """SVG: so much of the most there could be. The number itself stands beside it."""
    length = 0.0 if most <= 0 else min(1.0, max(0.0, value / most)) * BAR_WIDTH
    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    track = f'<rect class="track" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" rx="2"/>'
    filled = f'<rect class="filled" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2"/>' if length else ""
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{filled}</svg>')


def interval(low: float, middle: float, high: float, most: float) -> Markup:
    """SVG: from the low to the high, on a scale from 0 to the most, with a mark at the middle."""

    def place(value: float) -> float:
        return 0.0 if most <= 0 else min(1.0, max(0.0, value / most)) * (BAR_WIDTH - 2)

    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    track = f'<rect class="track" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" rx="2"/>'
    length = place(high) - place(low) + 2
    span = f'<rect class="span" x="{place(low):.1f}" y="2" width="{length:.1f}" height="{BAR_HEIGHT - 4}"/>'
    mark = f'<rect class="filled" x="{place(middle):.1f}" width="2" height="{BAR_HEIGHT}"/>'
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{span}{mark}</svg>')


@dataclass(frozen=True, slots=True)
class Span:
    """How many took so long."""

    said: str
    count: int


SPAN_WIDTH, SPAN_GAP, SPANS_HEIGHT, SPANS_FOOT = 36, 6, 90, 22


def distribution(spans: Sequence[Span], *, of: str) -> Markup:
    """SVG; ``spans`` in their order, ``of`` what."""
    counts = [(span.said, span.count) for span in spans]
    total = sum(count for _, count in counts)
    most = max((count for _, count in counts), default=0)
    told = "; ".join(f"{count} {span}" for span, count in counts if count) or "none yet"
    width, height = len(counts) * (SPAN_WIDTH + SPAN_GAP), SPANS_HEIGHT + SPANS_FOOT
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [Markup('<svg class="distribution" {} role="img" aria-label="{}: {}">').format(Markup(size), of, told)]
    for index, (span, count) in enumerate(counts):
        # One among very many is still to be seen.
        tall = max(2.0, count / most * (SPANS_HEIGHT - 14)) if count else 0.0
        x, top = index * (SPAN_WIDTH + SPAN_GAP), SPANS_HEIGHT - tall
        if count:
            parts.append(Markup(f'<rect x="{x}" y="{top:.1f}" width="{SPAN_WIDTH}" height="{tall:.1f}" rx="2"/>'))
            parts.append(
                Markup(f'<text x="{x + SPAN_WIDTH / 2:g}" y="{top - 3:.1f}">{escape(share(count, total))}</text>')
            )
        parts.append(Markup(f'<text x="{x + SPAN_WIDTH / 2:g}" y="{SPANS_HEIGHT + 14}">{escape(_short(span))}</text>'))
    parts.append(Markup(f'<path d="M0 {SPANS_HEIGHT} H{width}"/></svg>'))
    return Markup("").join(parts)


def _short(span: str) -> str:
    return span.removeprefix("≤").replace(" ", "")


def share(count: int, total: int) -> str:
    """In percent, short; what there is is never 0."""
    percent = 100 * count / total if total else 0.0
    return f"{percent:.0f}%" if percent >= 1 or not count else "<1%"


NODE_SIZE, NODE_GAP, NODE_COLUMNS = 14, 2, 32
MAX_SQUARES = 512
"""Of a larger cluster a square stands for several nodes."""
LETTERS = {"running": "r", "claimed": "c", "local": "l", "down": "×", "idle": ""}

WORDS = {"running": "running", "claimed": "claimed", "local": "of local users", "down": "down", "idle": "idle"}


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes by what they do, each in one place: ours running, ours claimed, local users', down, idle."""

    running: int = 0
    claimed: int = 0
    local: int = 0
    down: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return self.running + self.claimed + self.local + self.down + self.idle


def node_grid(counts: NodeCounts, *, stale: bool = False, drained: bool = False) -> Markup:
    """SVG; ``stale``: what is shown is old."""
    each = max(1, -(-counts.total // MAX_SQUARES))
    squares = [kind for kind, count in asdict(counts).items() for _ in range(-(-count // each))]
    rows = max(1, -(-len(squares) // NODE_COLUMNS))
    columns = min(NODE_COLUMNS, max(1, len(squares)))
    width, height = columns * (NODE_SIZE + NODE_GAP), rows * (NODE_SIZE + NODE_GAP)
    told = ", ".join(f"{count} {WORDS[kind]}" for kind, count in asdict(counts).items() if count) or "no nodes"
    if each > 1:
        told += f"; a square is {each} nodes"
    if stale:
        told += ", as last told"
    classes = " ".join(filter(None, ("nodes", "stale" if stale else "", "drained" if drained else "")))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'<svg class="{classes}" {size} role="img" aria-label="{told}">']
    # There may be thousands, and nothing in them is of anybody's making.
    for index, kind in enumerate(squares):
        x, y = index % NODE_COLUMNS * (NODE_SIZE + NODE_GAP), index // NODE_COLUMNS * (NODE_SIZE + NODE_GAP)
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{NODE_SIZE}" height="{NODE_SIZE}" rx="2"/>')
        if LETTERS[kind]:
            parts.append(f'<text x="{x + NODE_SIZE / 2:g}" y="{y + 10.5}">{LETTERS[kind]}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))


SERIES_WIDTH, SERIES_HEIGHT = 640, 150
LEFT, RIGHT, TOP, BOTTOM = 84, 10, 10, 20
MARK = 2.5


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a moment, in seconds since the epoch."""

    at: float
    value: float


def series(points: Sequence[Point], label: str, told: Callable[[float], str]) -> Markup:
    """SVG from 0 to the largest value; ``points`` by time, ``told`` writes a value. Empty where there is none."""
    if not points:
        return Markup()
    first, last, top = points[0].at, points[-1].at, max(point.value for point in points) or 1.0
    wide, high = SERIES_WIDTH - LEFT - RIGHT, SERIES_HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + (wide / 2 if last <= first else (at - first) / (last - first) * wide)

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    title = Markup.escape(f"{label}: {len(points)} measured, the last {told(points[-1].value)}")
    size = f'viewBox="0 0 {SERIES_WIDTH} {SERIES_HEIGHT}" width="{SERIES_WIDTH}" height="{SERIES_HEIGHT}"'
    parts = [f'<svg class="series" {size} role="img" aria-label="{title}">']
    for share in (0.0, 0.5, 1.0):
        at = y(share * top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{SERIES_WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{at + 3:.1f}">{Markup.escape(told(share * top))}</text>')
    places = [(x(point.at), y(point.value)) for point in points]
    parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>')
    parts += [f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="{MARK}"/>' for a, b in places]
    parts.append(f'<text class="start" x="{LEFT}" y="{SERIES_HEIGHT - 5}">{format_time(first, last)}</text>')
    if last > first:
        parts.append(
            f'<text class="end" x="{SERIES_WIDTH - RIGHT}" y="{SERIES_HEIGHT - 5}">{format_time(last, last)}</text>'
        )
    parts.append("</svg>")
    return Markup("".join(parts))


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
LANES_WIDTH, LABEL, ROW, LANE_HEIGHT = 960, 190, 24, 16
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
            LANES_WIDTH, height, LANES_WIDTH, height, "what each component went through; the table below has the same"
        )
    ]

    def x(at: float) -> float:
        return round(LABEL + (at - start) / span * (LANES_WIDTH - LABEL - 10), 1)

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
                    phase.what, left, top, round(width, 1), LANE_HEIGHT, f"{phase.what} {phase.seconds:.1f} s"
                )
            )
            if width > LETTER_WIDTH * len(phase.what):
                middle = round(left + width / 2, 1)
                parts.append(Markup('<text class="in" x="{}" y="{}">{}</text>').format(middle, top + 12, phase.what))
        if lane.ended and lane.phases:
            parts.append(
                Markup('<text class="bad" x="{}" y="{}">✕<title>{}</title></text>').format(
                    min(LANES_WIDTH - 8, x(lane.phases[-1].end) + 4), top + 12, lane.ended[:200]
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
