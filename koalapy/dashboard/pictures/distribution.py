"""How many of many things took how long, as bars: the longer ones to the right."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True, slots=True)
class Span:
    """How many took so long."""

    said: str
    count: int


BAR, GAP, HEIGHT, FOOT = 36, 6, 90, 22


def distribution(spans: Sequence[Span], *, of: str) -> Markup:
    """SVG; ``spans`` in their order, ``of`` what."""
    counts = [(span.said, span.count) for span in spans]
    total = sum(count for _, count in counts)
    most = max((count for _, count in counts), default=0)
    told = "; ".join(f"{count} {span}" for span, count in counts if count) or "none yet"
    width, height = len(counts) * (BAR + GAP), HEIGHT + FOOT
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [Markup('<svg class="distribution" {} role="img" aria-label="{}: {}">').format(Markup(size), of, told)]
    for index, (span, count) in enumerate(counts):
        # One among very many is still to be seen.
        tall = max(2.0, count / most * (HEIGHT - 14)) if count else 0.0
        x, top = index * (BAR + GAP), HEIGHT - tall
        if count:
            parts.append(Markup(f'<rect x="{x}" y="{top:.1f}" width="{BAR}" height="{tall:.1f}" rx="2"/>'))
            parts.append(Markup(f'<text x="{x + BAR / 2:g}" y="{top - 3:.1f}">{escape(share(count, total))}</text>'))
        parts.append(Markup(f'<text x="{x + BAR / 2:g}" y="{HEIGHT + 14}">{escape(_short(span))}</text>'))
    parts.append(Markup(f'<path d="M0 {HEIGHT} H{width}"/></svg>'))
    return Markup("").join(parts)


def _short(span: str) -> str:
    """As there is room for below a bar."""
    return span.removeprefix("≤").replace(" ", "")


def share(count: int, total: int) -> str:
    """In percent, short; what there is is never 0."""
    percent = 100 * count / total if total else 0.0
    return f"{percent:.0f}%" if percent >= 1 or not count else "<1%"
