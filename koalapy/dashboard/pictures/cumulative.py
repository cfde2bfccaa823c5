"""Which part of many things took no longer than so long, as a curve for each of several times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 640, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 24
MAX_CURVES = 4
"""Each has a colour and a dash of its own."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A time of many jobs: ``spans`` in seconds and in order, each no less than an equal share of all."""

    name: str
    count: int
    spans: Sequence[float]

    def within(self, share: float) -> float:
        """What no more than this share of all took."""
        return self.spans[max(0, min(len(self.spans) - 1, round(share * len(self.spans)) - 1))]


def cumulative(spreads: Sequence[Spread], label: str, told: Callable[[float], str]) -> Markup:
    """SVG, from no time to the longest; ``told`` writes seconds. Empty where there is none."""
    drawn = [spread for spread in spreads if spread.spans][:MAX_CURVES]
    if not drawn:
        return Markup()
    top = max(max(spread.spans[-1] for spread in drawn), 1e-9)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    medians = "; ".join(f"half of all within {told(spread.within(0.5))} ({spread.name})" for spread in drawn)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg class="cumulative" {size} role="img" aria-label="{escape(f"{label}: {medians}")}">']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + high * (1 - share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 3:.1f}">{share:.0%}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        kind = "start" if not share else "end" if share == 1 else "middle"
        parts.append(
            f'<text class="{kind}" x="{LEFT + wide * share:.1f}" y="{HEIGHT - 6}">{escape(told(top * share))}</text>'
        )
    for index, spread in enumerate(drawn):
        path, before = [f"M{LEFT} {TOP + high}"], 0.0
        for number, span in enumerate(spread.spans, 1):
            x = LEFT + wide * max(0.0, min(1.0, span / top))
            path.append(f"H{x:.1f}V{TOP + high * (1 - number / len(spread.spans)):.1f}")
            before = x
        path.append(f"H{max(before, WIDTH - RIGHT):.1f}")
        parts.append(f'<path class="curve curve-{index}" d="{"".join(path)}"/>')
        x = LEFT + index * (wide / MAX_CURVES)
        parts.append(f'<path class="curve curve-{index}" d="M{x:.1f} 12h26"/>')
        parts.append(f'<text class="start" x="{x + 32:.1f}" y="15">{escape(spread.name)}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))
