"""Charts as SVG, rendered by pure functions; with CSS classes only, since the pages' policy forbids inline styles."""

from dataclasses import dataclass

from markupsafe import Markup

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


STATE_NAMES = {
    name: "of local users" if name == "local" else name
    for name in ("running", "claimed", "local", "down", "idle", "withheld", "unknown")
}
"""The states of nodes in the order of ``NodeCounts``, as texts."""


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
    def by_state(self) -> dict[str, int]:
        """Return the number of nodes in each state."""
        return {name: getattr(self, name) for name in STATE_NAMES}

    @property
    def ours(self) -> int:
        return self.running + self.claimed

    @property
    def total(self) -> int:
        return sum(self.by_state.values())
