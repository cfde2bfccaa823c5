"""Timelines: lanes with bars of jobs over time, up to now and beyond. Of the grid, and of one job.

In the grid's timeline a lane is a cluster, or a site with several, and its height is its nodes. A bar is a component:
its height is its nodes. Long ranges have sums of the nodes by use in place of bars. In a job's timeline a lane is its
queue or one of its components. Times are positions in percent of the width, so that lanes and texts have the same
size on a phone; labels hang out at the left, into a margin that the style sheet leaves. ``parts/timeline.html`` draws
them as SVG.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import ceil

from markupsafe import Markup, escape

from koalapy.dashboard.charts import TITLES
from koalapy.model.cluster import Drain
from koalapy.model.history import USES, PastComponent, UseSum
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobId, JobState, TimelineEntry
from koalapy.model.wording import format_duration, format_time

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
"""Classes of a picture with labels of at most this many letters."""
AXIS_HEIGHT, LANE_GAP = 22, 6
LANE_HEIGHTS = ((6, 90), (20, 40), (60, 20))
"""Height of a lane for at most this many lanes; ``JOB_LANE_HEIGHT`` in a job's timeline."""
JOB_LANE_HEIGHT, MIN_LANE_HEIGHT = 18, 14
MIN_BAR_WIDTH, MIN_BAR_HEIGHT = 0.15, 2.0
LETTER_WIDTH, PHONE_LETTER_WIDTH = 0.65, 2.6
"""Percent of the width of a picture that a letter takes, on a laptop and on a phone."""
MIN_TEXT_HEIGHT = 11.0
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 604800)
MAX_TICKS = 9
MAX_RELATIVE_S = 900.0
"""Span up to which a job's timeline shows the time since its submission instead of the time of day."""


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
    """Number of nodes that the height of the lane represents."""
    bars: Sequence[TimelineBar]
    page: str = ""
    """The path that the label links to; empty for none."""
    uses: Sequence[UseSum] = ()
    """The sums of its nodes by use, oldest first; a slot without samples is missing."""
    drains: Sequence[Drain] = ()
    """Its drains in force and planned."""

    @property
    def is_used(self) -> bool:
        """Whether jobs or local users had nodes of the lane, or it is drained."""
        return bool(self.bars or self.drains) or any(use.ours or use.local for use in self.uses)

    @property
    def mean_uses(self) -> list[tuple[str, float]]:
        """Return the uses of its nodes with their percentages over the whole time."""
        sums = {TITLES.get(name, name): sum(getattr(use, name) for use in self.uses) for name in USES}
        total = sum(sums.values())
        return [(title, 100 * count / total) for title, count in sums.items() if count]


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """The 80 % interval of the start of a waiting job, in seconds since the epoch."""

    job: JobId
    nodes: int
    low: float
    middle: float
    high: float

    @property
    def label(self) -> str:
        return f"job {self.job} · {self.nodes}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """The content of a timeline from ``start`` to ``end``, in seconds since the epoch, and its layout."""

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

    @property
    def has_content(self) -> bool:
        return bool(self.expected) or any(lane.is_used for lane in self.lanes)

    @property
    def lane_height(self) -> int:
        if self.is_of_job:
            return JOB_LANE_HEIGHT
        return next((height for count, height in LANE_HEIGHTS if len(self.lanes) <= count), MIN_LANE_HEIGHT)

    @property
    def bottom(self) -> int:
        """Return the lower edge of the lanes."""
        return AXIS_HEIGHT + len(self.lanes) * (self.lane_height + LANE_GAP)

    @property
    def label_class(self) -> str:
        """Return the class for the width of the labels."""
        labels = [lane.label for lane in self.lanes] + [start.label for start in self.expected]
        longest = max(map(len, labels), default=0)
        return next((name for letters, name in LABELS if longest <= letters), "long-labels")

    def x(self, timestamp: float) -> float:
        """Return the position of a time in percent of the width."""
        span = max(self.end - self.start, 0.001)
        return round(min(1.0, max(0.0, (timestamp - self.start) / span)) * 100, 2)

    def ticks(self) -> Iterator[tuple[float, float, str, bool, bool]]:
        """Yield round times with their positions and labels (empty where they do not fit), whether the label is the
        time since the start, and whether phones leave it out."""
        span = max(self.end - self.start, 0.001)
        step = next((step for step in STEPS if span / step <= MAX_TICKS), ceil(span / MAX_TICKS / 604800) * 604800)
        is_relative = self.is_of_job and span <= MAX_RELATIVE_S
        free_on_phone = 0.0
        first = self.start if is_relative else ceil(self.start / step) * step
        for number in range(int((self.start + span - first) / step) + 1):
            time = first + number * step
            elapsed = f"{round(time - first, 1):g} s" if time - first < 60 else format_duration(time - first)
            text, x = elapsed if is_relative else format_time(time, self.now), self.x(time)
            if x + len(text) * LETTER_WIDTH > 100:
                yield time, x, "", is_relative, False
                continue
            end_on_phone = x + len(text) * PHONE_LETTER_WIDTH
            is_minor = x < free_on_phone or end_on_phone > 100
            free_on_phone = free_on_phone if is_minor else end_on_phone + PHONE_LETTER_WIDTH
            yield time, x, text, is_relative, is_minor

    def draw_bars(self, lane: TimelineLane, top: float) -> Markup:
        """Return the bars of a lane as SVG, the first node at the bottom. There may be hundreds, so no template draws
        them; they have no title, which would double the size of the page: a script shows the label below the picture.
        """
        height, nodes, parts = self.lane_height, max(1, lane.nodes), list[str]()
        for bar, offset in pack(lane.bars, lane.nodes):
            tall = min(height, max(MIN_BAR_HEIGHT, height * bar.size / nodes))
            y = max(top, top + height - height * offset / nodes - tall)
            parts += self._draw_bar(bar, lane, y, tall)
        return Markup("".join(parts))

    def _draw_bar(self, bar: TimelineBar, lane: TimelineLane, y: float, height: float) -> Iterator[str]:
        """Yield a bar with its phases, a mark for a restart and one for an early end. It links to its job."""
        attempt = f", attempt {bar.attempt}" if bar.attempt > 1 else ""
        ended = f"; ended early: {bar.error[:200]}" if bar.error else ""
        name = lane.label if self.is_of_job else f"job {bar.job}, {bar.size} nodes on {lane.label}"
        opening = '<g class="bar-of-job" role="img"' if self.is_of_job else f'<a href="/jobs/{bar.job}"'
        yield f'{opening} aria-label="{escape(f"{name}{attempt}: {bar.text}{ended}")}">'
        middle, colour = f'y="{y + height / 2 + 4:.1f}"', " shared" if bar.is_shared else ""
        for phase in bar.phases:
            x = self.x(phase.start)
            width = round(max(MIN_BAR_WIDTH, self.x(phase.end) - x), 2)
            shape = f'x="{x}%" y="{y:.1f}" width="{width}%" height="{height:.1f}"'
            yield f'<rect class="{phase.what}{colour}" {shape}/>'
            inside = phase.what if self.is_of_job else str(bar.job) if phase.what == "running" else ""
            if inside and height >= MIN_TEXT_HEIGHT and width > LETTER_WIDTH * (len(inside) + 1):
                narrow = " minor" if width < PHONE_LETTER_WIDTH * (len(inside) + 1) else ""
                yield f'<text class="in{narrow}" x="{x + width / 2:.2f}%" {middle}>{inside}</text>'
        if self.is_of_job:
            yield f'<text class="bad" x="{self.x(bar.end)}%" dx="6" {middle}>✕</text></g>' if bar.error else "</g>"
            return
        if attempt:
            yield f'<text class="restart" x="{self.x(bar.start)}%" {middle}>▸</text>'
        if bar.error:
            end = self.x(bar.end)
            yield f'<line class="early" x1="{end}%" x2="{end}%" y1="{y:g}" y2="{y + height:g}"/>'
        yield "</a>"

    def place_uses(self, lane: TimelineLane) -> tuple[float, float, float, float]:
        """Return the position and width of the use of a lane's nodes, and the part of its paths in minutes."""
        first, end = lane.uses[0].start, min(self.now, lane.uses[-1].start + self.slot_s)
        x, offset = self.x(max(self.start, first)), max(0.0, self.start - first)
        return x, self.x(end) - x, offset / 60, max(0.01, (end - first - offset) / 60)

    def use_paths(self, lane: TimelineLane) -> list[tuple[str, str]]:
        """Return the outlines of the uses: those of jobs from the bottom, unless bars show them, others from the top.
        They do not depend on the current time, so that they are computed once for many pages."""
        return _use_paths(tuple(lane.uses), self.slot_s, self.with_bars)


def component_phases(component: PastComponent, now: float) -> list[Phase]:
    """Return the time of a component at the barrier, and its run time; none if it never had its nodes."""
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
    end = max([bar.end for bar in bars] + [interval.high for interval in expected], default=now)
    return Timeline(start, end, now, lanes, expected, is_of_job=True)


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
            free = max(free, offset + other_size)
        offset = max(0, min(free, nodes - size))
        insort(active, (offset, bar.end, size))
        placed.append((bar, offset))
    return placed


HANGING = ("local", "withheld", "unknown", "down")
"""The uses that are drawn from the upper edge of a lane, the last one at the edge."""


@lru_cache(maxsize=2000)
def _use_paths(uses: tuple[UseSum, ...], slot_s: int, with_bars: bool) -> list[tuple[str, str]]:
    """Return the outline of each use in percent of the nodes over minutes since the first slot, in drawing order."""
    totals = [sum(getattr(use, name) for name in USES) or 1 for use in uses]
    starts, paths = [use.start for use in uses], list[tuple[str, str]]()
    for index, name in enumerate(HANGING):
        if any(getattr(use, name) for use in uses):
            depths = [
                100 * sum(getattr(use, below) for below in HANGING[index:]) / total
                for use, total in zip(uses, totals, strict=True)
            ]
            paths.append((name, _outline(starts, depths, slot_s, 0)))
    if not with_bars and any(use.ours for use in uses):
        heights = [100 - 100 * use.ours / total for use, total in zip(uses, totals, strict=True)]
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
