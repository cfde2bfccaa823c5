"""How many nodes jobs and local users had over time, of all that there were."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 640, 190
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 24


@dataclass(frozen=True, slots=True)
class Held:
    """Mean nodes from a moment of the run, in seconds, until another."""

    start: float
    end: float
    total: float
    jobs: float
    local: float


def nodes_over_time(spans: Sequence[Held], label: str, told: Callable[[float], str]) -> Markup:
    """SVG: local users' nodes on top of the jobs', below the line of all; ``told`` writes seconds. Empty where nothing
    is known."""
    if not spans or spans[-1].end <= spans[0].start:
        return Markup()
    first, last = spans[0].start, spans[-1].end
    top = max(max(max(span.total, span.jobs + span.local) for span in spans), 1.0)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: float) -> str:
        return f"{LEFT + wide * (at - first) / (last - first):.1f}"

    def y(value: float) -> str:
        return f"{TOP + high * (1 - value / top):.1f}"

    most = max(span.jobs for span in spans)
    said = escape(f"{label}: jobs had at most {most:.3g} of {top:.3g} nodes")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg class="held" {size} role="img" aria-label="{said}">']
    for share in (0.0, 0.5, 1.0):
        at = y(share * top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{float(at) + 3:.1f}">{share * top:.3g}</text>')
        kind = "start" if not share else "end" if share == 1 else "middle"
        moment = first + share * (last - first)
        parts.append(f'<text class="{kind}" x="{x(moment)}" y="{HEIGHT - 6}">{escape(told(moment))}</text>')
    jobs = [(span, 0.0, span.jobs) for span in spans]
    local = [(span, span.jobs, span.jobs + span.local) for span in spans]
    for kind, bands in (("jobs", jobs), ("local", local)):
        up = "".join(f"{'L' if index else 'M'}{x(s.start)} {y(b)}H{x(s.end)}" for index, (s, _, b) in enumerate(bands))
        down = "".join(f"L{x(s.end)} {y(a)}H{x(s.start)}" for s, a, _ in reversed(bands))
        parts.append(f'<path class="{kind}" d="{up}{down}Z"/>')
    line = "".join(f"{'L' if index else 'M'}{x(s.start)} {y(s.total)}H{x(s.end)}" for index, s in enumerate(spans))
    parts.append(f'<path class="total" d="{line}"/>')
    for index, (kind, name) in enumerate((("jobs", "jobs"), ("local", "local users"), ("total", "all nodes"))):
        left = LEFT + index * wide / 4
        shape = f"M{left:.1f} 12h22" if kind == "total" else f"M{left:.1f} 6h22v12h-22Z"
        parts.append(f'<path class="{kind}" d="{shape}"/><text class="start" x="{left + 28:.1f}" y="15">{name}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))
