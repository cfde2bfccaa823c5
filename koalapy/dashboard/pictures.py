"""Charts as SVG, rendered by pure functions; with CSS classes only, since the pages' policy forbids inline styles."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from markupsafe import Markup, escape

from koalapy.model.job import JobId
from koalapy.model.wording import format_time

BAR_WIDTH, BAR_HEIGHT = 160, 10
JOB_COLOURS = 6


def job_series(job: JobId) -> str:
    """Return the class with the colour of a job, the same in all pictures: ``series-1`` to ``series-6``."""
    return f"series-{job % JOB_COLOURS + 1}"


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
    """Return a histogram of durations of an operation, from the first range with any to the last."""
    counted = [index for index, span in enumerate(spans) if span.count] or [0]
    spans = spans[max(0, min(counted[0], counted[-1] - 4)) : max(counted[-1] + 1, 5)]
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
LETTERS = {"running": "r", "claimed": "c", "local": "l", "down": "×", "idle": "", "withheld": "w", "unknown": "?"}

STATE_NAMES = {name: name for name in LETTERS} | {"local": "of local users"}


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes by state: those of ``NodeUse``, with the used ones as running or claimed components."""

    running: int = 0
    claimed: int = 0
    local: int = 0
    down: int = 0
    idle: int = 0
    withheld: int = 0
    unknown: int = 0

    @property
    def ours(self) -> int:
        return self.running + self.claimed

    @property
    def total(self) -> int:
        return self.ours + self.local + self.down + self.idle + self.withheld + self.unknown


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
    is_daily = all(point.at % 86_400 == 0 for point in points)
    dates = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in (first, last)]
    first_text, last_text = dates if is_daily else (format_time(first, last), format_time(last, last))
    parts.append(f'<text class="start" x="{LEFT}" y="{SERIES_HEIGHT - 5}">{first_text}</text>')
    if last > first:
        parts.append(f'<text class="end" x="{SERIES_WIDTH - RIGHT}" y="{SERIES_HEIGHT - 5}">{last_text}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))
