"""Charts as SVG, rendered by pure functions; with CSS classes only, since the pages' policy forbids inline styles."""

from dataclasses import asdict, dataclass

from markupsafe import Markup

from koalapy.model.job import JobId

BAR_WIDTH, BAR_HEIGHT = 160, 10
JOB_COLOURS = 6


def job_series(job: JobId) -> str:
    """Return the class with the colour of a job, the same in all pictures: ``series-1`` to ``series-6``."""
    return f"series-{job % JOB_COLOURS + 1}"


def bar(value: float, maximum: float) -> Markup:
    """Return a bar for the fraction of a value in the maximum. The page shows the number next to it."""
    length = _position(value, maximum)
    return _draw_bar(f'<rect class="filled" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2"/>' if length else "")


def interval(low: float, middle: float, high: float, maximum: float) -> Markup:
    """Return a bar from ``low`` to ``high`` on a scale from 0 to ``maximum``, with a mark at ``middle``."""
    start, mark, end = (_position(value, maximum, BAR_WIDTH - 2) for value in (low, middle, high))
    span = f'<rect class="span" x="{start:.1f}" y="2" width="{end - start + 2:.1f}" height="{BAR_HEIGHT - 4}"/>'
    return _draw_bar(f'{span}<rect class="filled" x="{mark:.1f}" width="2" height="{BAR_HEIGHT}"/>')


def _position(value: float, maximum: float, width: int = BAR_WIDTH) -> float:
    return 0.0 if maximum <= 0 else min(1.0, max(0.0, value / maximum)) * width


def _draw_bar(content: str) -> Markup:
    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    track = f'<rect class="track" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" rx="2"/>'
    return Markup(f'<svg class="bar" {size} aria-hidden="true">{track}{content}</svg>')


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

    def __str__(self) -> str:
        """Return the states that nodes are in: ``12 running, 3 idle``."""
        counts = asdict(self).items()
        return ", ".join(f"{count} {STATE_NAMES[state]}" for state, count in counts if count) or "none"
