"""An interval beside its numbers in a table."""

from markupsafe import Markup

WIDTH, HEIGHT = 160, 10


def interval(low: float, middle: float, high: float, most: float) -> Markup:
    """SVG: from the low to the high, on a scale from 0 to the most, with a mark at the middle."""

    def place(value: float) -> float:
        return 0.0 if most <= 0 else min(1.0, max(0.0, value / most)) * (WIDTH - 2)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    track = f'<rect class="track" width="{WIDTH}" height="{HEIGHT}" rx="2"/>'
    length = place(high) - place(low) + 2
    span = f'<rect class="span" x="{place(low):.1f}" y="2" width="{length:.1f}" height="{HEIGHT - 4}"/>'
    mark = f'<rect class="filled" x="{place(middle):.1f}" width="2" height="{HEIGHT}"/>'
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{span}{mark}</svg>')
