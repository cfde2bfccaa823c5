"""A chart of a job's attempts for the terminal: one lane for the queue, and one for each component."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from koalapy.cli.terminal.text import align_left, cell_len, cut_text
from koalapy.client.errors import printable
from koalapy.client.http import Json
from koalapy.model.wording import format_time

MEANINGS = {
    "queued": "queued",
    "held": "held",
    "placed": "placed, no nodes yet",
    "waiting": "waits in the cluster's own queue",
    "claimed": "has nodes, waits for the others",
    "running": "running",
    "stopping": "stopping",
}
UNICODE = dict(zip(MEANINGS, "─╌·░▒█≈", strict=True)) | {"begin": "├", "tick": "┼", "rule": "─", "cut": "…"}
ASCII = dict(zip(MEANINGS, "-_.:+#~", strict=True)) | {"begin": "+", "tick": "+", "rule": "-", "cut": "~"}
MAX_LABEL_COLUMNS = 28
MIN_COLUMNS = 20
TICK_COLUMNS = 10
"""Minimum distance of two ticks in columns."""
STEPS = (
    *(base * power for power in (0.001, 0.01, 0.1, 1) for base in (1, 2, 5)),
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    *(3600 * hours for hours in (0.5, 1, 2, 3, 6, 12)),
    *(86400 * days for days in (1, 2, 7, 14, 28, 91, 182, 365)),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A state of a job or component from ``start`` to ``end`` in Unix time; ``state`` is a key of ``MEANINGS``."""

    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Row:
    """A labelled line of the chart: a lane, which shows phases over time, or a text."""

    label: str
    phases: Sequence[Phase] = ()
    text: str = ""


def draw_chart(
    job: Json, attempts: Sequence[Json], *, width: int, now: float, limit: int = 5, unicode: bool = True
) -> str:
    """Return the chart of the last ``limit`` attempts, with lines of at most ``width`` columns if possible."""
    marks = UNICODE if unicode else ASCII
    start, end = _chart_span(job, attempts, limit, now)
    rows = [Row("queued", _queue_phases(job, start, end)), *_attempt_rows(job, attempts, limit, end, marks["cut"])]
    if not unicode:
        rows = [replace(row, label=_to_ascii(row.label), text=_to_ascii(row.text)) for row in rows]
    origin = f"{format_time(start, now, exact=True)} UTC"
    margin = max(cell_len(label) for label in (origin, *(row.label for row in rows))) + 2
    columns = max(MIN_COLUMNS, width - margin)
    scale = Scale(start, end, columns)
    lines = [origin.ljust(margin) + scale.format_labels(), " " * margin + scale.draw_ruler(marks)]
    for row in rows:
        lane = (
            _draw_lane(row.phases, scale, marks) if row.phases else cut_text(printable(row.text), columns, marks["cut"])
        )
        lines.append(align_left(row.label, margin) + lane)
    lines += ["", *_legend_lines((phase.state for row in rows for phase in row.phases), margin + columns, marks)]
    return "\n".join(line.rstrip() for line in lines)


def _to_ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


class Scale:
    """A mapping of times, as Unix timestamps, to columns of the chart."""

    def __init__(self, start: float, end: float, columns: int) -> None:
        self._start = start
        self._span = max(end - start, 0.001)
        self.columns = columns

    def column_of(self, timestamp: float) -> int:
        return min(self.columns, max(0, round((timestamp - self._start) / self._span * self.columns)))

    def _iterate_ticks(self) -> Iterable[tuple[int, float]]:
        """Yield the column of each tick, and its time in seconds since the start of the chart."""
        step = next((s for s in STEPS if s * self.columns >= TICK_COLUMNS * self._span), self._span)
        number = 0
        while (column := round(number * step / self._span * self.columns)) < self.columns:
            yield column, number * step
            number += 1

    def format_labels(self) -> str:
        """Return the line above the ruler: the elapsed time at each tick that has enough space."""
        line = ""
        for column, seconds in self._iterate_ticks():
            label = _format_elapsed(seconds)
            if len(line) < column + (column == 0) and column + len(label) <= self.columns:
                line = line.ljust(column) + label
        return line

    def draw_ruler(self, marks: dict[str, str]) -> str:
        ticks = {column for column, _ in self._iterate_ticks()}
        line = [marks["tick"] if column in ticks else marks["rule"] for column in range(self.columns)]
        return marks["begin"] + "".join(line[1:])


def _format_elapsed(seconds: float) -> str:
    """Return a time since the start as text: ``0.25s``, ``7s``, ``1:30``, ``2:00:00``, ``3d`` or ``3d 12:00``."""
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}" if hours or minutes else f"{days}d"
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


# From the API's JSON to phases


def _to_timestamp(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _chart_span(job: Json, attempts: Sequence[Json], limit: int, now: float) -> tuple[float, float]:
    """Return start and end of the chart. It starts at the submission, or at the end of the last attempt not shown."""
    submitted = _to_timestamp(job["submitted_at"]) or 0.0
    hidden, charted = attempts[: -limit or None], attempts[-limit:]
    start = max([submitted, *_attempt_times(hidden)]) if len(attempts) > limit else submitted
    times = [
        start,
        *_attempt_times(charted),
        *(timestamp for entry in job["timeline"] if (timestamp := _to_timestamp(entry["at"])) is not None),
    ]
    return start, max([*times, now] if job["ended_at"] is None else times)


def _attempt_times(attempts: Sequence[Json]) -> list[float]:
    """Return all recorded times of attempts and their components, as Unix timestamps."""
    times: list[str | None] = []
    for attempt in attempts:
        times += [attempt["placed_at"], attempt["barrier_at"], attempt["launched_at"], attempt["ended_at"]]
        for component in attempt["components"]:
            times += [component["submitted_at"], component["claimed_at"], component["ended_at"]]
    return [timestamp for text in times if (timestamp := _to_timestamp(text)) is not None]


def _queue_phases(job: Json, start: float, end: float) -> list[Phase]:
    """Return the periods after ``start`` in which the job was queued or held; merge adjacent ones."""
    entries = [(_to_timestamp(entry["at"]) or 0.0, entry["state"]) for entry in job["timeline"]]
    phases: list[Phase] = []
    for (since, state), (until, _) in zip(entries, [*entries[1:], (end, "")], strict=True):
        if state not in ("queued", "held") or until <= max(since, start):
            continue
        if phases and phases[-1].state == state and phases[-1].end == since:
            phases[-1] = replace(phases[-1], end=until)
        else:
            phases.append(Phase(state, max(since, start), until))
    return phases


def _attempt_rows(job: Json, attempts: Sequence[Json], limit: int, end: float, mark: str) -> list[Row]:
    """Return the rows of the last ``limit`` attempts: a title for each, and a lane for each component.

    ``end``: end of the chart as a Unix timestamp; ``mark``: the character that ends a shortened name.
    """
    rows: list[Row] = []
    if (hidden := attempts[-limit:][0]["generation"] - 1 if attempts else 0) > 0:
        count_text = "1 earlier attempt" if hidden == 1 else f"{hidden} earlier attempts"
        rows.append(Row("", text=f"{count_text} not shown; --attempts {attempts[-1]['generation']} shows all"))
    for attempt in attempts[-limit:]:
        is_last = attempt is attempts[-1]
        result = attempt["end_reason"] or (job["state"] if is_last else "over")
        rows.append(Row(f"attempt {attempt['generation']}", text=result))
        # Only the last attempt of an unfinished job can still run.
        attempt_end = end if is_last and job["ended_at"] is None else _to_timestamp(attempt["ended_at"])
        components = sorted(attempt["components"], key=lambda c: (c["rank"], c["index"]))
        begun = _to_timestamp(attempt["placed_at"]) or 0.0
        for predecessor, component in zip([None, *components[:-1]], components, strict=True):
            stands_in = predecessor is not None and predecessor["rank"] == component["rank"]
            since = (
                (_to_timestamp(predecessor["ended_at"]) or begun) if predecessor is not None and stands_in else begun
            )
            phases = _component_phases(component, attempt, since, attempt_end)
            rows.append(Row(_lane_label(component, stands_in, mark), phases))
    return rows


def _component_phases(component: Json, attempt: Json, begun: float, attempt_end: float | None) -> list[Phase]:
    """Return the states of a component during an attempt as phases, in order; at least one."""
    claimed, submitted = _to_timestamp(component["claimed_at"]), _to_timestamp(component["submitted_at"])
    ended = _to_timestamp(component["ended_at"]) or attempt_end or begun
    if submitted is None and component["state"] != "placed":
        submitted = begun
    serves = claimed is not None and not component["superseded"]
    begins = [
        ("placed", begun),
        ("waiting", submitted),
        ("claimed", claimed),
        ("running", _to_timestamp(attempt["barrier_at"]) if serves else None),
        ("stopping", _to_timestamp(attempt["ended_at"])),
    ]
    transitions = [(state, max(since, begun)) for state, since in begins if since is not None]
    phases = []
    for index, (state, since) in enumerate(transitions):
        until = min([ended, *(later for _, later in transitions[index + 1 :])])
        if until > since:
            phases.append(Phase(state, since, until))
    return phases or [Phase(transitions[-1][0], begun, begun)]


def _lane_label(component: Json, stands_in: bool, mark: str) -> str:
    """Return the label of a component's lane: index, cluster, size, and the component that it replaces, if any.

    For example ``  2 north:4 (for 0)``. ``mark``: the character that ends a shortened name.
    """
    prefix, suffix = f"  {component['index']} ", f":{component['size']}" + f" (for {component['rank']})" * stands_in
    return (
        prefix + cut_text(printable(component["cluster"]), MAX_LABEL_COLUMNS - len(prefix) - len(suffix), mark) + suffix
    )


# From phases to text


def _draw_lane(phases: Sequence[Phase], scale: Scale, marks: dict[str, str]) -> str:
    """Draw the phases as one line over the time scale, with at least one column for each phase."""
    if len(phases) > scale.columns:
        longest = sorted(phases, key=lambda phase: phase.start - phase.end)[: scale.columns]
        phases = [phase for phase in phases if phase in longest][: scale.columns]
    edges = []
    free = 0
    for phase in phases:
        first = max(free, scale.column_of(phase.start))
        free = max(first + 1, scale.column_of(phase.end))
        edges.append((first, free))
    lane = [" "] * scale.columns
    room = scale.columns
    for phase, (first, last) in reversed(list(zip(phases, edges, strict=True))):
        last = min(last, room)
        room = min(first, last - 1)
        lane[room:last] = marks[phase.state] * (last - room)
    return "".join(lane)


def _legend_lines(used: Iterable[str], width: int, marks: dict[str, str]) -> list[str]:
    """Explain the characters of the states in ``used``, in lines of at most ``width`` columns."""
    states = set(used)
    lines = [""]
    for item in (f"{marks[state]} {meaning}" for state, meaning in MEANINGS.items() if state in states):
        if lines[-1] and len(lines[-1]) + 2 + len(item) > width:
            lines.append("")
        lines[-1] += f"  {item}" if lines[-1] else item
    return lines
