"""Small charts of the last hours, as SVG of pure functions; the page has the same values as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

from markupsafe import Markup, escape

from koalapy.dashboard.pictures import NodeCounts
from koalapy.model.history import Sample

WIDTH, HEIGHT = 240, 56
SLOTS = 72
"""Number of points of a chart: one for five minutes of six hours."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The means of the samples of a part of the period; empty without any."""

    start: float
    """Seconds since the epoch."""
    means: Mapping[str, float]
    """By field of ``Sample``; ``started`` and ``ended`` are per minute, and ``startup`` is of the jobs that started."""


_NAMES = ("ours", "local", "idle", "queued", "started", "ended")
_VALUES = attrgetter(*_NAMES)


def make_slots(samples: Sequence[Sample], until: float, period: float, count: int = SLOTS) -> list[Slot]:
    """Return the means of samples over ``count`` equal parts of the ``period`` that ends at ``until``."""
    start, length = until - period, period / count
    groups: list[list[Sample]] = [[] for _ in range(count)]
    for sample in samples:
        if 0 <= (index := int((sample.at - start) / length)) < count:
            groups[index].append(sample)
    slots = []
    for index, group in enumerate(groups):
        means = {
            name: sum(values) / len(group) for name, *values in zip(_NAMES, *map(_VALUES, group), strict=True) if values
        }
        starts = [sample for sample in group if sample.startup is not None]
        if weight := sum([sample.started for sample in starts]):
            means["startup"] = sum([(s.startup or 0.0) * s.started for s in starts]) / weight
        slots.append(Slot(start + index * length, means))
    return slots


Mark = tuple[float, str]
"""An event at a time in seconds since the epoch, and its description."""


def stacked_chart(slots: Sequence[Slot], names: Sequence[str], label: str, marks: Sequence[Mark] = ()) -> Markup:
    """Return stacked areas of the named values, the first at the bottom, with events as vertical lines; empty without a
    value."""
    top = max((sum(slot.means.get(name, 0.0) for name in names) for slot in slots), default=0.0)
    if top <= 0:
        return Markup()
    parts = []
    for run in _runs(slots, names[0]):
        base = [0.0] * len(run)
        for name in names:
            heights = [low + (slot.means.get(name, 0.0)) for low, slot in zip(base, run, strict=True)]
            upper = [_point(slots, slot.start, value, top) for slot, value in zip(run, heights, strict=True)]
            lower = [_point(slots, slot.start, value, top) for slot, value in zip(run, base, strict=True)]
            width = WIDTH / len(slots)
            ends = (f"{upper[-1][0] + width:.1f},{upper[-1][1]:.1f}", f"{lower[-1][0] + width:.1f},")
            path = [*(f"{x:.1f},{y:.1f}" for x, y in upper), ends[0], f"{ends[1]}{lower[-1][1]:.1f}"]
            path += [f"{x:.1f},{y:.1f}" for x, y in reversed(lower)]
            parts.append(f'<polygon class="{name}" points="{" ".join(path)}"/>')
            base = heights
    for at, text in marks:
        if 0 <= (x := _point(slots, at, 0.0, top)[0]) <= WIDTH:
            parts.append(f'<path class="event" d="M{x:.1f} 0V{HEIGHT}"><title>{escape(text)}</title></path>')
    return _chart(parts, label)


def line_chart(slots: Sequence[Slot], names: Sequence[str], label: str) -> Markup:
    """Return a line for each of the named values, on one scale from 0; empty without a value."""
    values = [value for slot in slots for name in names if (value := slot.means.get(name)) is not None]
    if not values:
        return Markup()
    top, parts = max(values) or 1.0, []
    for name in names:
        for run in _runs(slots, name):
            points = [_point(slots, slot.start, slot.means[name], top) for slot in run]
            points.append((points[-1][0] + WIDTH / len(slots), points[-1][1]))
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{name}" points="{text}"/>')
    return _chart(parts, label)


def _runs(slots: Sequence[Slot], name: str) -> list[list[Slot]]:
    """Return the runs of successive slots with a value."""
    runs: list[list[Slot]] = [[]]
    for slot in slots:
        if slot.means.get(name) is not None:
            runs[-1].append(slot)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _point(slots: Sequence[Slot], at: float, value: float, top: float) -> tuple[float, float]:
    """Return where a value at a time is drawn. The last slot has the mean length of the others."""
    period = (slots[-1].start - slots[0].start) * len(slots) / max(1, len(slots) - 1)
    return (at - slots[0].start) / (period or 1.0) * WIDTH, 1 + (HEIGHT - 2) * (1 - value / top)


def _chart(parts: Sequence[str], label: str) -> Markup:
    head = f'<svg class="small-chart" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
    base = f'<path class="base" d="M0 {HEIGHT - 0.5}H{WIDTH}"/>'
    return Markup(f'{head} aria-label="{escape(label)}">{base}{"".join(parts)}</svg>')


def describe_range(slots: Sequence[Slot], name: str, format_value: Callable[[float], str]) -> str:
    """Return the smallest and largest mean of a value in the period, as text: ``3 to 40``; empty without a value."""
    values = [value for slot in slots if (value := slot.means.get(name)) is not None]
    ends = [format_value(end) for end in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))


def use_bar(nodes: NodeCounts) -> Markup:
    """Return a bar of a cluster's nodes by state; the page shows the numbers next to it."""
    parts, x = [], 0.0
    for name, count in asdict(nodes).items():
        if count and name != "idle":
            width = 100 * count / nodes.total
            parts.append(f'<rect class="{name}" x="{x:.1f}" width="{width:.1f}" height="8"/>')
            x += width
    head = '<svg class="use-bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
    return Markup(f'{head}<rect class="track" width="100" height="8"/>{"".join(parts)}</svg>')
