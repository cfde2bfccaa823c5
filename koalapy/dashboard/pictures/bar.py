"""A length beside a number in a table."""

from markupsafe import Markup

WIDTH, HEIGHT = 160, 10


def bar(value: float, most: float) -> Markup:
    """SVG: so much of the most there could be. The number itself stands beside it."""
    length = 0.0 if most <= 0 else min(1.0, max(0.0, value / most)) * WIDTH
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    track = f'<rect class="track" width="{WIDTH}" height="{HEIGHT}" rx="2"/>'
    filled = f'<rect class="filled" width="{length:.1f}" height="{HEIGHT}" rx="2"/>' if length else ""
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{filled}</svg>')
