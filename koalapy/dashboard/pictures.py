"""Charts as SVG, rendered by pure functions; with CSS classes only, since the pages' policy forbids inline styles."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry
from koalapy.model.wording import format_time, shorten

BAR_WIDTH, BAR_HEIGHT = 160, 10


def bar(value: float, maximum: float) -> Markup:
    """Return a bar for the fraction of a value in the maximum. The page shows the number next to it."""
    length = 0.0 if maximum <= 0 else min(1.0, max(0.0, value / maximum)) * BAR_WIDTH
    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    track = f'<rect class="track" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" rx="2"/>'
    filled = f'<rect class="filled" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2"/>' if length else ""
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{filled}</svg>')


def interval(low: float, middle: float, high: float, maximum: float) -> Markup:
    """Return a bar from ``low`` to ``high`` on a scale from 0 to ``maximum``, with a mark at ``middle``."""

    def position(value: float) -> float:
        return 0.0 if maximum <= 0 else min(1.0, max(0.0, value / maximum)) * (BAR_WIDTH - 2)

    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    track = f'<rect class="track" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" rx="2"/>'
    length = position(high) - position(low) + 2
    span = f'<rect class="span" x="{position(low):.1f}" y="2" width="{length:.1f}" height="{BAR_HEIGHT - 4}"/>'
    mark = f'<rect class="filled" x="{position(middle):.1f}" width="2" height="{BAR_HEIGHT}"/>'
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{span}{mark}</svg>')


@dataclass(frozen=True, slots=True)
class Span:
    """The number of operations in a range of durations."""

    label: str
    count: int


SPAN_WIDTH, SPAN_GAP, SPANS_HEIGHT, SPANS_FOOT = 36, 6, 90, 22


def distribution(spans: Sequence[Span], *, operation: str) -> Markup:
    """Return a histogram of durations of an operation."""
    total = sum(span.count for span in spans)
    maximum = max((span.count for span in spans), default=0)
    description = "; ".join(f"{span.count} {span.label}" for span in spans if span.count) or "none yet"
    width, height = len(spans) * (SPAN_WIDTH + SPAN_GAP), SPANS_HEIGHT + SPANS_FOOT
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        Markup('<svg class="distribution" {} role="img" aria-label="{}: {}">').format(
            Markup(size), operation, description
        )
    ]
    for index, span in enumerate(spans):
        # A single operation among many stays visible.
        tall = max(2.0, span.count / maximum * (SPANS_HEIGHT - 14)) if span.count else 0.0
        x, top = index * (SPAN_WIDTH + SPAN_GAP), SPANS_HEIGHT - tall
        label = span.label.removeprefix("≤").replace(" ", "")
        if span.count:
            parts.append(Markup(f'<rect x="{x}" y="{top:.1f}" width="{SPAN_WIDTH}" height="{tall:.1f}" rx="2"/>'))
            percent = escape(format_share(span.count, total))
            parts.append(Markup(f'<text x="{x + SPAN_WIDTH / 2:g}" y="{top - 3:.1f}">{percent}</text>'))
        parts.append(Markup(f'<text x="{x + SPAN_WIDTH / 2:g}" y="{SPANS_HEIGHT + 14}">{escape(label)}</text>'))
    parts.append(Markup(f'<path d="M0 {SPANS_HEIGHT} H{width}"/></svg>'))
    return Markup("").join(parts)


def format_share(count: int, total: int) -> str:
    """Return ``count`` in percent of ``total``; ``<1%`` instead of 0 for a positive count."""
    percent = 100 * count / total if total else 0.0
    return f"{percent:.0f}%" if percent >= 1 or not count else "<1%"


NODE_SIZE, NODE_GAP, NODE_COLUMNS = 14, 2, 32
MAX_SQUARES = 512
"""Maximum number of squares. In a larger cluster, each square represents several nodes."""
LETTERS = {"running": "r", "claimed": "c", "local": "l", "down": "×", "idle": ""}

STATE_NAMES = {"running": "running", "claimed": "claimed", "local": "of local users", "down": "down", "idle": "idle"}


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes of a cluster by state: running or claimed components, local users' jobs, down, idle."""

    running: int = 0
    claimed: int = 0
    local: int = 0
    down: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return self.running + self.claimed + self.local + self.down + self.idle


def node_grid(counts: NodeCounts, *, stale: bool = False, drained: bool = False) -> Markup:
    """Return a square for each node, coloured by its state. ``stale``: the states are not current."""
    nodes_per_square = max(1, -(-counts.total // MAX_SQUARES))
    squares = [kind for kind, count in asdict(counts).items() for _ in range(-(-count // nodes_per_square))]
    rows = max(1, -(-len(squares) // NODE_COLUMNS))
    columns = min(NODE_COLUMNS, max(1, len(squares)))
    width, height = columns * (NODE_SIZE + NODE_GAP), rows * (NODE_SIZE + NODE_GAP)
    states = [f"{count} {STATE_NAMES[kind]}" for kind, count in asdict(counts).items() if count]
    description = ", ".join(states) or "no nodes"
    if nodes_per_square > 1:
        description += f"; a square is {nodes_per_square} nodes"
    if stale:
        description += ", as last reported"
    classes = " ".join(filter(None, ("nodes", "stale" if stale else "", "drained" if drained else "")))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'<svg class="{classes}" {size} role="img" aria-label="{description}">']
    # Not escaped, since there may be thousands of squares and they contain no text of users.
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
    """A value at a time, in seconds since the epoch."""

    at: float
    value: float


def series(points: Sequence[Point], label: str, format_value: Callable[[float], str]) -> Markup:
    """Return a line chart of points in the order of time, from 0 to the largest value; empty without points."""
    if not points:
        return Markup()
    first, last, top = points[0].at, points[-1].at, max(point.value for point in points) or 1.0
    wide, high = SERIES_WIDTH - LEFT - RIGHT, SERIES_HEIGHT - TOP - BOTTOM

    def x(timestamp: float) -> float:
        return LEFT + (wide / 2 if last <= first else (timestamp - first) / (last - first) * wide)

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    title = Markup.escape(f"{label}: {len(points)} measured, the last {format_value(points[-1].value)}")
    size = f'viewBox="0 0 {SERIES_WIDTH} {SERIES_HEIGHT}" width="{SERIES_WIDTH}" height="{SERIES_HEIGHT}"'
    parts = [f'<svg class="series" {size} role="img" aria-label="{title}">']
    for share in (0.0, 0.5, 1.0):
        height = y(share * top)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{SERIES_WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(
            f'<text class="end" x="{LEFT - 6}" y="{height + 3:.1f}">{Markup.escape(format_value(share * top))}</text>'
        )
    positions = [(x(point.at), y(point.value)) for point in points]
    parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in positions)}"/>')
    parts += [f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="{MARK}"/>' for a, b in positions]
    parts.append(f'<text class="start" x="{LEFT}" y="{SERIES_HEIGHT - 5}">{format_time(first, last)}</text>')
    if last > first:
        parts.append(
            f'<text class="end" x="{SERIES_WIDTH - RIGHT}" y="{SERIES_HEIGHT - 5}">{format_time(last, last)}</text>'
        )
    parts.append("</svg>")
    return Markup("".join(parts))


MEANINGS = {
    "queued": "waits for placement",
    "held": "held",
    "placed": "placed, nodes not requested yet",
    "files": "input files are transferred",
    "claiming": "waits for its nodes in the cluster's queue",
    "claimed": "has its nodes, waits at the barrier for other components",
    "starting": "all components have their nodes, the program starts",
    "running": "the program runs",
    "stopping": "nodes are returned",
}
LANES_WIDTH, LABEL, ROW, LANE_HEIGHT = 960, 190, 24, 16
MIN_WIDTH = 2.0
LETTER_WIDTH = 9.0
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 604800)
MAX_TICKS = 10


@dataclass(frozen=True, slots=True)
class Phase:
    """The phase of a job or component from ``start`` to ``end``, in seconds since the epoch."""

    what: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class JobLane:
    """The phases of a job in the queue (attempt 0) or of a component of an attempt."""

    label: str
    attempt: int
    phases: Sequence[Phase]
    error: str = ""


def build_lanes(job: Job, attempts: Sequence[Attempt], timeline: Sequence[TimelineEntry], now: float) -> list[JobLane]:
    """Return the phases of a job and its components until ``now``, or until the end of the job."""
    end = job.ended_at if job.ended_at is not None else now
    lanes = [JobLane("queue", 0, list(_queue_phases(job, timeline, end)))]
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        attempt_end = end if is_last and job.ended_at is None else attempt.ended_at
        for component in sorted(attempt.components, key=lambda component: (component.rank, component.index)):
            label = f"{component.cluster} · {component.size}"
            if len(attempts) > 1 or attempt.generation > 1:
                label = f"{attempt.generation}: {label}"
            phases = list(_component_phases(component, attempt, attempt_end))
            lanes.append(JobLane(label, attempt.generation, phases, component.error))
    return lanes


def _queue_phases(job: Job, timeline: Sequence[TimelineEntry], end: float) -> Iterator[Phase]:
    """Yield the spans in which a job was queued or held, up to ``end``.

    Without a timeline, yield one span from its submission.
    """
    entries = [(entry.at, entry.state) for entry in timeline] or [(job.submitted_at, job.state)]
    start, phase = None, ""
    for (entered_at, state), (until, next_state) in pairwise([*entries, (end, None)]):
        if state not in (JobState.QUEUED, JobState.HELD):
            continue
        start, phase = (entered_at, str(state)) if start is None or phase != state else (start, phase)
        if next_state is not state:
            yield Phase(phase, start, max(start, until))
            start = None


def _component_phases(component: Component, attempt: Attempt, attempt_end: float | None) -> Iterator[Phase]:
    """Yield the spans of a component from its placement to its end, such as file transfer and running.

    ``attempt_end`` replaces the end of a component that has recorded none; None if unknown.
    """
    start = attempt.placed_at
    has_run = component.claimed_at is not None and not component.superseded
    starts = [
        ("placed", start),
        ("files", component.staging_since),
        ("placed", component.staged_at),
        ("claiming", component.submitted_at),
        ("claimed", component.claimed_at),
        ("starting", attempt.barrier_at if has_run else None),
        ("running", attempt.launched_at if has_run else None),
        ("stopping", attempt.ended_at),
    ]
    end = component.ended_at if component.ended_at is not None else attempt_end if attempt_end is not None else start
    if component.state is ComponentState.ENDED and component.ended_at is None and attempt_end is None:
        end = start
    known_starts = sorted(
        (max(phase_start, start), order, phase)
        for order, (phase, phase_start) in enumerate(starts)
        if phase_start is not None
    )
    for (phase_start, _, phase), (until, _, _) in pairwise([*known_starts, (max(end, start), 99, "")]):
        if min(until, end) > phase_start:
            yield Phase(phase, phase_start, min(until, end))


def job_lanes(lanes: Sequence[JobLane]) -> Markup:
    """Return the lanes of a job as a Gantt chart. The page also has a table with the same content."""
    phases = [phase for lane in lanes for phase in lane.phases]
    if not phases:
        return Markup("")
    start, end = min(phase.start for phase in phases), max(phase.end for phase in phases)
    span, height = max(end - start, 0.001), len(lanes) * ROW + 24
    parts = [
        Markup('<svg class="lanes" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">').format(
            LANES_WIDTH, height, LANES_WIDTH, height, "phases of each component; the table below has the same values"
        )
    ]

    def x(timestamp: float) -> float:
        return round(LABEL + (timestamp - start) / span * (LANES_WIDTH - LABEL - 10), 1)

    step = next((step for step in STEPS if span / step <= MAX_TICKS), span / MAX_TICKS)
    for number in range(int(span / step) + 1):
        position = x(start + number * step)
        parts.append(Markup('<path class="tick" d="M{} 16V{}"/>').format(position, height))
        parts.append(
            Markup('<text class="tick" x="{}" y="11">{}</text>').format(position, _format_elapsed(number * step))
        )
    for row, lane in enumerate(lanes):
        top = 24 + row * ROW
        parts.append(Markup('<text class="label" x="0" y="{}">{}</text>').format(top + 12, shorten(lane.label, 28)))
        for phase in lane.phases:
            x_start, width = x(phase.start), max(MIN_WIDTH, x(phase.end) - x(phase.start))
            parts.append(
                Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                    phase.what, x_start, top, round(width, 1), LANE_HEIGHT, f"{phase.what} {phase.seconds:.1f} s"
                )
            )
            if width > LETTER_WIDTH * len(phase.what):
                middle = round(x_start + width / 2, 1)
                parts.append(Markup('<text class="in" x="{}" y="{}">{}</text>').format(middle, top + 12, phase.what))
        if lane.error and lane.phases:
            parts.append(
                Markup('<text class="bad" x="{}" y="{}">✕<title>{}</title></text>').format(
                    min(LANES_WIDTH - 8, x(lane.phases[-1].end) + 4), top + 12, lane.error[:200]
                )
            )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _format_elapsed(seconds: float) -> str:
    """Format the seconds since the start of a chart: ``12.5 s``, ``5:30``, ``1:05:00`` or ``3 d``."""
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    minutes, remaining = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{remaining:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remaining:02}" if hours < 48 else f"{hours / 24:g} d"
