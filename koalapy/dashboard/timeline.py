"""Timelines as SVG: lanes with bars of jobs over time, up to now and beyond. Of the grid, and of one job.

In the grid's timeline a lane is a cluster, or a site with several, and its height is its nodes. A bar is a component:
its height is its nodes. Long ranges have sums of the nodes by use in place of bars. In a job's timeline a lane is its
queue or one of its components. Times are positions in percent of the width, so that lanes and texts have the same
size on a phone; labels hang out at the left, into a margin that the style sheet leaves.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import ceil

from markupsafe import Markup, escape

from koalapy.dashboard.charts import TITLES
from koalapy.model.cluster import Drain
from koalapy.model.history import USES, PastComponent, UseSum
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState, TimelineEntry
from koalapy.model.wording import format_duration, format_nodes, format_time, shorten

MEANINGS = {
    "queued": "waits for placement",
    "held": "held",
    "placed": "placed, nodes not requested yet",
    "files": "input files are transferred",
    "claiming": "waits for its nodes in the cluster's queue",
    "claimed": "has its nodes, waits at the barrier for other components",
    "starting": "all components have their nodes, the program starts",
    "running": "the program runs",
    "stopping": "nodes are returned",
}
LABELS = ((8, "short-labels"), (14, "middle-labels"))
"""Classes of a picture whose labels have at most this many letters."""
AXIS_HEIGHT, LANE_GAP, EXPECTED_HEIGHT = 22, 6, 18
LANE_HEIGHTS = ((6, 90), (20, 40), (60, 20))
"""Height of a lane for at most this many lanes; ``JOB_LANE_HEIGHT`` in a job's timeline."""
JOB_LANE_HEIGHT = 18
MIN_BAR_WIDTH, MIN_BAR_HEIGHT = 0.15, 2.0
LETTER_WIDTH, PHONE_LETTER_WIDTH = 0.65, 2.6
"""Percent of the width of a picture that a letter takes, on a laptop and on a phone."""
MIN_TEXT_HEIGHT = 11.0
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 604800)
MAX_TICKS = 9
MAX_RELATIVE_S = 900.0
"""Span up to which a job's timeline shows the time since its submission instead of the time of day."""
ToPosition = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Phase:
    """The phase of a job or component from ``start`` to ``end``, in seconds since the epoch."""

    what: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def build_lanes(
    job: Job, attempts: Sequence[Attempt], timeline: Sequence[TimelineEntry], now: float
) -> "list[TimelineLane]":
    """Return the phases of a job and its components until ``now``, or until the end of the job."""
    end = job.ended_at if job.ended_at is not None else now
    lanes = [_make_lane(job.id, "queue", 0, list(_queue_phases(job, timeline, end)))]
    for attempt in attempts:
        attempt_end = end if attempt is attempts[-1] and job.ended_at is None else attempt.ended_at
        for component in sorted(attempt.components, key=lambda component: (component.rank, component.index)):
            label = f"{component.cluster} · {component.size}"
            if len(attempts) > 1 or attempt.generation > 1:
                label = f"{attempt.generation}: {label}"
            phases = list(_component_phases(component, attempt, attempt_end))
            lanes.append(_make_lane(job.id, label, attempt.generation, phases, component.error))
    return lanes


def _make_lane(job: JobId, label: str, attempt: int, phases: Sequence[Phase], error: str = "") -> "TimelineLane":
    """Return a lane with the phases of a job in the queue (attempt 0) or of a component of an attempt."""
    return TimelineLane(label, 1, [TimelineBar(job, 1, phases, attempt, error=error)] if phases else [])


def _queue_phases(job: Job, timeline: Sequence[TimelineEntry], end: float) -> Iterator[Phase]:
    """Yield the spans in which a job was queued or held, up to ``end``. Without a timeline, yield one span from its
    submission."""
    entries = [(entry.at, entry.state) for entry in timeline] or [(job.submitted_at, job.state)]
    start, phase = None, ""
    for (entered_at, state), (until, next_state) in pairwise([*entries, (end, None)]):
        if state not in (JobState.QUEUED, JobState.HELD):
            continue
        start, phase = (entered_at, str(state)) if start is None or phase != state else (start, phase)
        if next_state is not state:
            yield Phase(phase, start, max(start, until))
            start = None


def _component_phases(component: Component, attempt: Attempt, attempt_end: float | None) -> Iterator[Phase]:
    """Yield the spans of a component from its placement to its end, such as file transfer and running. ``attempt_end``
    replaces the end of a component that has recorded none; None if unknown."""
    start = attempt.placed_at
    has_run = component.claimed_at is not None and not component.superseded
    starts = [
        ("placed", start),
        ("files", component.staging_since),
        ("placed", component.staged_at),
        ("claiming", component.submitted_at),
        ("claimed", component.claimed_at),
        ("starting", attempt.barrier_at if has_run else None),
        ("running", attempt.launched_at if has_run else None),
        ("stopping", attempt.ended_at),
    ]
    end = component.ended_at if component.ended_at is not None else attempt_end if attempt_end is not None else start
    if component.state is ComponentState.ENDED and component.ended_at is None and attempt_end is None:
        end = start
    known_starts = sorted(
        (max(phase_start, start), order, phase)
        for order, (phase, phase_start) in enumerate(starts)
        if phase_start is not None
    )
    for (phase_start, _, phase), (until, _, _) in pairwise([*known_starts, (max(end, start), 99, "")]):
        if min(until, end) > phase_start:
            yield Phase(phase, phase_start, min(until, end))


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A component of an attempt, or a job's time in the queue."""

    job: JobId
    size: int
    """Number of nodes."""
    phases: Sequence[Phase]
    attempt: int = 1
    is_shared: bool = False
    """Whether the attempt has nodes on several clusters."""
    error: str = ""
    """Why the attempt ended early; empty if it did not."""

    @property
    def start(self) -> float:
        return self.phases[0].start

    @property
    def end(self) -> float:
        return self.phases[-1].end

    @property
    def text(self) -> str:
        """Return the phases with their durations."""
        return ", ".join([f"{phase.what} {format_duration(phase.seconds)}" for phase in self.phases])


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """The bars of a cluster, or of one component of a job. Each bar has at least one phase."""

    label: str
    nodes: int
    """Number of nodes that the height of the lane stands for."""
    bars: Sequence[TimelineBar]
    page: str = ""
    """The path that the label links to; empty for none."""
    uses: Sequence[UseSum] = ()
    """The sums of its nodes by use, oldest first; a slot without samples is missing."""
    drains: Sequence[Drain] = ()
    """Its drains in force and planned."""


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """The 80 % interval of the start of a waiting job, in seconds since the epoch."""

    job: JobId
    nodes: int
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The content of a timeline from ``start`` to ``end``, in seconds since the epoch."""

    start: float
    end: float
    now: float
    lanes: Sequence[TimelineLane]
    expected: Sequence[ExpectedStart] = field(default=())
    is_of_job: bool = False
    slot_s: int = 0
    """Length of the slots of ``TimelineLane.uses``."""
    with_bars: bool = True
    """Whether the nodes of jobs are shown as bars, not as sums."""


def component_phases(component: PastComponent, now: float) -> list[Phase]:
    """Return the time of a component at the barrier, and its run time. Empty for one that never had its nodes."""
    if component.claimed_at is None:
        return []
    start, launched = component.claimed_at, component.launched_at
    end = max(start, now if component.ended_at is None else component.ended_at)
    run = end if launched is None else min(max(start, launched), end)
    phases = [Phase("claimed", start, run)] if run > start else []
    if end > run:
        phases.append(Phase("running", run, end))
    return phases


def job_timeline(lanes: Sequence[TimelineLane], now: float, expected: Sequence[ExpectedStart] = ()) -> Timeline:
    """Return the timeline of one job, with the expected start of a waiting job."""
    bars = [bar for lane in lanes for bar in lane.bars]
    start = min((bar.start for bar in bars), default=now)
    end = max([bar.end for bar in bars] + [one.high for one in expected], default=now)
    return Timeline(start, end, now, lanes, expected, is_of_job=True)


def draw_timeline(content: Timeline) -> Markup:
    """Return the picture of a timeline; empty without any lane that is in use or drained, and any expected start. The
    page also has a table with the same values."""
    if not content.expected and not any(map(is_used, content.lanes)):
        return Markup()
    start, span = content.start, max(content.end - content.start, 0.001)

    def x(timestamp: float) -> float:
        return round(min(1.0, max(0.0, (timestamp - start) / span)) * 100, 2)

    lane_height = next((height for count, height in LANE_HEIGHTS if len(content.lanes) <= count), 14)
    lane_height = JOB_LANE_HEIGHT if content.is_of_job else lane_height
    bottom = AXIS_HEIGHT + len(content.lanes) * (lane_height + LANE_GAP)
    height = bottom + len(content.expected) * EXPECTED_HEIGHT + 4
    zoom = "" if content.is_of_job else f' data-since="{start:.0f}" data-until="{content.end:.0f}"'  # for a script
    label = "Timeline of the job" if content.is_of_job else f"Timeline of {len(content.lanes)} clusters"
    parts = [
        f'<svg class="timeline {_label_class(content)}" width="100%" height="{height}" role="group"{zoom} '
        f'aria-label="{label}; the page has the same values as a table">',
        *_draw_ticks(content, span, height, x),
    ]
    for row, lane in enumerate(content.lanes):
        top = AXIS_HEIGHT + row * (lane_height + LANE_GAP)
        parts += _draw_lane(lane, top, lane_height, x, content)
    for row, expected in enumerate(content.expected):
        parts.append(_draw_expected(expected, bottom + row * EXPECTED_HEIGHT, x))
    if start < content.now < content.end:
        parts.append(_draw_line("now", x(content.now), AXIS_HEIGHT - 6, height))
    parts.append("</svg>")
    return Markup("".join(parts))


def is_used(lane: TimelineLane) -> bool:
    """Return whether jobs or local users had nodes of a lane, or it is drained."""
    return bool(lane.bars or lane.drains) or any(one.ours or one.local for one in lane.uses)


def _draw_line(name: str, position: float, top: float, bottom: float) -> str:
    return f'<line class="{name}" x1="{position}%" x2="{position}%" y1="{top:g}" y2="{bottom:g}"/>'


def _label_class(content: Timeline) -> str:
    """Return the class for the width of the labels."""
    labels = [lane.label for lane in content.lanes] + [_expected_label(expected) for expected in content.expected]
    longest = max((len(label) for label in labels), default=0)
    return next((name for letters, name in LABELS if longest <= letters), "long-labels")


def _draw_ticks(content: Timeline, span: float, height: int, x: ToPosition) -> Iterator[str]:
    """Yield lines at round times with their labels. A script converts times of day to the viewer's zone."""
    step = next((step for step in STEPS if span / step <= MAX_TICKS), ceil(span / MAX_TICKS / 604800) * 604800)
    is_relative = content.is_of_job and span <= MAX_RELATIVE_S
    free_on_phone = 0.0
    first = content.start if is_relative else ceil(content.start / step) * step
    for number in range(int((content.start + span - first) / step) + 1):
        at = first + number * step
        yield _draw_line("tick", x(at), AXIS_HEIGHT - 6, height)
        elapsed = f"{round(at - first, 1):g} s" if at - first < 60 else format_duration(at - first)
        text = elapsed if is_relative else format_time(at, content.now)
        if x(at) + len(text) * LETTER_WIDTH > 100:
            continue
        end_on_phone = x(at) + len(text) * PHONE_LETTER_WIDTH
        is_minor = x(at) < free_on_phone or end_on_phone > 100
        free_on_phone = free_on_phone if is_minor else end_on_phone + PHONE_LETTER_WIDTH
        instant = "" if is_relative else f' data-at="{at:.0f}"'
        yield f'<text class="tick{" minor" if is_minor else ""}"{instant} x="{x(at)}%" y="11">{text}</text>'


def pack(bars: Sequence[TimelineBar], nodes: int) -> list[tuple[TimelineBar, int]]:
    """Return the bars in the order of time, each with the first of its nodes, so that bars overlap only if they have
    more nodes together than the lane."""
    placed: list[tuple[TimelineBar, int]] = []
    active: list[tuple[int, float, int]] = []  # first node, end and size, sorted
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.job)):
        start, size, free = bar.start, bar.size, 0
        active = [entry for entry in active if entry[1] > start]
        for offset, _, other_size in active:
            if offset - free >= size:
                break
            if offset + other_size > free:
                free = offset + other_size
        offset = max(0, min(free, nodes - size))
        insort(active, (offset, bar.end, size))
        placed.append((bar, offset))
    return placed


def _draw_lane(lane: TimelineLane, top: float, height: float, x: ToPosition, content: Timeline) -> Iterator[str]:
    """Yield the label of a lane, its background and its bars, the first node at the bottom."""
    label = shorten(lane.label, 24)
    text = f'<text class="label" x="-8" y="{top + height / 2 + 4:.1f}">{escape(label)}</text>'
    yield f'<a href="{escape(lane.page)}">{text}</a>' if lane.page else text
    yield f'<rect class="lane-back" x="0%" y="{top}" width="100%" height="{height}"/>'
    for drain in lane.drains:
        if (left := x(drain.since)) < (right := 100.0 if drain.ends_at is None else x(drain.ends_at)):
            label = escape(f"{lane.label} is drained {drain.author}")
            shape = f'x="{left}%" y="{top}" width="{right - left:.2f}%" height="{height}"'
            yield f'<a href="/maintenance" aria-label="{label}"><rect class="drain" {shape}/></a>'
    if lane.uses:
        yield _draw_uses(lane, content, top, height, x)
    for bar, offset in pack(lane.bars, lane.nodes):
        tall = min(height, max(MIN_BAR_HEIGHT, height * bar.size / max(1, lane.nodes)))
        y = max(top, top + height - height * offset / max(1, lane.nodes) - tall)
        yield _draw_bar(bar, lane, y, tall, x, is_of_job=content.is_of_job)


HANGING = ("local", "withheld", "unknown", "down")
"""The uses that are drawn from the upper edge of a lane, the last one at the edge."""


def _draw_uses(lane: TimelineLane, content: Timeline, top: float, height: float, x: ToPosition) -> str:
    """Return the use of a lane's nodes: those of jobs from the bottom, unless bars show them, others from the top. Its
    paths do not depend on the current time, so that they are computed once for many pages."""
    shares: dict[str, float] = {}
    total = sum(sum(getattr(one, name) for name in USES) for one in lane.uses) or 1
    for name in USES:
        shares[TITLES.get(name, name)] = 100 * sum(getattr(one, name) for one in lane.uses) / total
    label = escape(
        f"{lane.label}, mean: " + ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share)
    )
    first, slot = lane.uses[0].start, content.slot_s
    end = min(content.now, lane.uses[-1].start + slot)
    left, width = x(max(content.start, first)), x(end) - x(max(content.start, first))
    offset = max(0.0, content.start - first)
    paths = [
        f'<path class="{name}" d="{path}"/>' for name, path in _use_paths(tuple(lane.uses), slot, content.with_bars)
    ]
    return (
        f'<svg class="uses" role="img" aria-label="{label}" x="{left}%" y="{top}" width="{width:.2f}%" '
        f'height="{height}" viewBox="{offset / 60:.2f} 0 {max(0.01, (end - first - offset) / 60):.2f} 100" '
        f'preserveAspectRatio="none"><title>{label}</title>{"".join(paths)}</svg>'
    )


@lru_cache(maxsize=2000)
def _use_paths(uses: tuple[UseSum, ...], slot_s: int, with_bars: bool) -> list[tuple[str, str]]:
    """Return the outline of each use in percent of the nodes over minutes since the first slot, in drawing order."""
    totals = [sum(getattr(one, name) for name in USES) or 1 for one in uses]
    starts, paths = [one.start for one in uses], list[tuple[str, str]]()
    for index, name in enumerate(HANGING):
        if any(getattr(one, name) for one in uses):
            depths = [
                100 * sum(getattr(one, below) for below in HANGING[index:]) / total
                for one, total in zip(uses, totals, strict=True)
            ]
            paths.append((name, _outline(starts, depths, slot_s, 0)))
    if not with_bars and any(one.ours for one in uses):
        heights = [100 - 100 * one.ours / total for one, total in zip(uses, totals, strict=True)]
        paths.append(("ours", _outline(starts, heights, slot_s, 100)))
    return paths


def _outline(starts: Sequence[int], levels: Sequence[float], slot_s: int, edge: int) -> str:
    """Return a path of steps between an edge and the level of each slot, with gaps for missing slots."""
    end, parts = None, list[str]()
    for start, level in zip(starts, levels, strict=True):
        if start != end:
            parts.append(f"{f'V{edge}Z' if parts else ''}M{(start - starts[0]) / 60:.6g} {edge}")
        end = start + slot_s
        parts.append(f"V{level:.4g}H{(end - starts[0]) / 60:.6g}")
    return "".join([*parts, f"V{edge}Z"])


def _draw_bar(bar: TimelineBar, lane: TimelineLane, y: float, height: float, x: ToPosition, *, is_of_job: bool) -> str:
    """Return a bar with its phases, a mark for a restart and one for an early end. It links to its job."""
    ended = f"; ended early: {bar.error[:200]}" if bar.error else ""
    what = lane.label if is_of_job else f"job {bar.job}, {bar.size} nodes on {lane.label}"
    label = f"{what}{f', attempt {bar.attempt}' if bar.attempt > 1 else ''}: {bar.text}{ended}"
    # Formatted without Markup, since there may be hundreds of bars; the label is the only text that is not a number.
    # There is no title, which would double the size of the page: a script shows the label below the picture.
    text = escape(label)
    opening = '<g class="bar-of-job" role="img"' if is_of_job else f'<a href="/jobs/{bar.job}"'
    parts = [f'{opening} aria-label="{text}">']
    colour = " shared" if bar.is_shared else ""
    for phase in bar.phases:
        first = x(phase.start)
        width = round(max(MIN_BAR_WIDTH, x(phase.end) - first), 2)
        shape = f'x="{first}%" y="{y:.1f}" width="{width}%" height="{height:.1f}"'
        parts.append(f'<rect class="{phase.what}{colour}" {shape}/>')
        inside = phase.what if is_of_job else str(bar.job) if phase.what == "running" else ""
        if inside and height >= MIN_TEXT_HEIGHT and width > LETTER_WIDTH * (len(inside) + 1):
            narrow = " minor" if width < PHONE_LETTER_WIDTH * (len(inside) + 1) else ""
            middle = f'x="{first + width / 2:.2f}%" y="{y + height / 2 + 4:.1f}"'
            parts.append(f'<text class="in{narrow}" {middle}>{inside}</text>')
    if bar.attempt > 1 and not is_of_job:
        parts.append(f'<text class="restart" x="{x(bar.start)}%" y="{y + height / 2 + 4:.1f}">▸</text>')
    if bar.error and is_of_job:
        parts.append(f'<text class="bad" x="{x(bar.end)}%" dx="6" y="{y + height / 2 + 4:.1f}">✕</text>')
    elif bar.error:
        parts.append(_draw_line("early", x(bar.end), y, y + height))
    parts.append("</g>" if is_of_job else "</a>")
    return "".join(parts)


def _expected_label(expected: ExpectedStart) -> str:
    return f"job {expected.job} · {expected.nodes}"


def _draw_expected(expected: ExpectedStart, top: float, x: ToPosition) -> str:
    """Return the interval of a job's start, with a mark in its middle."""
    low, middle, high = x(expected.low), x(expected.middle), x(expected.high)
    low_time, middle_time, high_time = (
        format_time(at, expected.low) for at in (expected.low, expected.middle, expected.high)
    )
    label = escape(
        f"job {expected.job}, {format_nodes(expected.nodes)}: starts about {middle_time} UTC, with 80 % "
        f"probability from {low_time} to {high_time}"
    )
    return (
        f'<a href="/jobs/{expected.job}" aria-label="{label}"><text class="label" x="-8" y="{top + 13}">'
        f'{_expected_label(expected)}</text><rect class="range" x="{low}%" y="{top + 6}" '
        f'width="{max(MIN_BAR_WIDTH, high - low):.2f}%" height="6"/>'
        f"{_draw_line('middle', middle, top + 3, top + 15)}</a>"
    )
