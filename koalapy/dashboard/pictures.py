"""Charts as SVG, rendered by pure functions; with CSS classes only, since the pages' policy forbids inline styles."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from koalapy.model.job import JobId

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


STATE_NAMES = {name: name for name in ("running", "claimed", "down", "idle", "withheld", "unknown")} | {
    "local": "of local users"
}


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
