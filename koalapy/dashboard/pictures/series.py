"""What was measured at some moments, as a line; the table beside it has the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from koalapy.model.wording import clock

WIDTH, HEIGHT = 640, 150
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
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + (wide / 2 if last <= first else (at - first) / (last - first) * wide)

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    title = Markup.escape(f"{label}: {len(points)} measured, the last {told(points[-1].value)}")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg class="series" {size} role="img" aria-label="{title}">']
    for share in (0.0, 0.5, 1.0):
        at = y(share * top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{at + 3:.1f}">{Markup.escape(told(share * top))}</text>')
    places = [(x(point.at), y(point.value)) for point in points]
    parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>')
    parts += [f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="{MARK}"/>' for a, b in places]
    parts.append(f'<text class="start" x="{LEFT}" y="{HEIGHT - 5}">{clock(first, last)}</text>')
    if last > first:
        parts.append(f'<text class="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 5}">{clock(last, last)}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))
