"""A chart of a job's attempts for the terminal: one lane for the queue, and one for each component."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rich.cells import cell_len

from koalapy.cli.terminal.width import cut, left
from koalapy.client.answers import Attempt, AttemptComponent, Job
from koalapy.client.errors import printable
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
    """A state from ``start`` to ``end``, in seconds since the epoch; ``what`` is a key of ``MEANINGS``."""

    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Row:
    """A lane of phases, or a line of text."""

    label: str
    phases: Sequence[Phase] = ()
    text: str = ""


def chart(
    job: Job, attempts: Sequence[Attempt], *, width: int, now: float, limit: int = 5, unicode: bool = True
) -> str:
    """Return the chart of the last ``limit`` attempts, with lines of at most ``width`` columns if possible."""
    marks = UNICODE if unicode else ASCII
    start, end = _span(job, attempts, limit, now)
    rows = [Row("queued", _queue_phases(job, start, end)), *_attempt_rows(job, attempts, limit, end, marks["cut"])]
    if not unicode:
        rows = [replace(row, label=_ascii(row.label), text=_ascii(row.text)) for row in rows]
    origin = f"{format_time(start, now, exact=True)} UTC"
    margin = max(cell_len(label) for label in (origin, *(row.label for row in rows))) + 2
    columns = max(MIN_COLUMNS, width - margin)
    scale = Scale(start, end, columns)
    lines = [origin.ljust(margin) + scale.labels(), " " * margin + scale.ruler(marks)]
    for row in rows:
        shown = _paint(row.phases, scale, marks) if row.phases else cut(printable(row.text), columns, marks["cut"])
        lines.append(left(row.label, margin) + shown)
    lines += ["", *_legend((phase.what for row in rows for phase in row.phases), margin + columns, marks)]
    return "\n".join(line.rstrip() for line in lines)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


class Scale:
    """A mapping of times to columns."""

    def __init__(self, start: float, end: float, columns: int) -> None:
        self._start = start
        self._span = max(end - start, 0.001)
        self.columns = columns

    def column(self, at: float) -> int:
        return min(self.columns, max(0, round((at - self._start) / self._span * self.columns)))

    def _ticks(self) -> Iterable[tuple[int, float]]:
        """Yield the column of each tick, and its time in seconds since the start of the chart."""
        step = next((s for s in STEPS if s * self.columns >= TICK_COLUMNS * self._span), self._span)
        number = 0
        while (column := round(number * step / self._span * self.columns)) < self.columns:
            yield column, number * step
            number += 1

    def labels(self) -> str:
        line = ""
        for column, seconds in self._ticks():
            label = _elapsed(seconds)
            if len(line) < column + (column == 0) and column + len(label) <= self.columns:
                line = line.ljust(column) + label
        return line

    def ruler(self, marks: dict[str, str]) -> str:
        ticks = {column for column, _ in self._ticks()}
        line = [marks["tick"] if column in ticks else marks["rule"] for column in range(self.columns)]
        return marks["begin"] + "".join(line[1:])


def _elapsed(seconds: float) -> str:
    """Return a time since the start as text: ``0.25s``, ``7s``, ``1:30``, ``2:00:00``, ``3d`` or ``3d 12:00``."""
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}" if hours or minutes else f"{days}d"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


# From the API's JSON to phases


def _at(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _span(job: Job, attempts: Sequence[Attempt], limit: int, now: float) -> tuple[float, float]:
    """Return start and end of the chart. It starts at the submission, or at the end of the last attempt not shown."""
    submitted = _at(job["submitted_at"]) or 0.0
    hidden, shown = attempts[: -limit or None], attempts[-limit:]
    start = max([submitted, *_moments(hidden)]) if len(attempts) > limit else submitted
    known = [start, *_moments(shown), *(at for entry in job["timeline"] if (at := _at(entry["at"])) is not None)]
    return start, max([*known, now] if job["ended_at"] is None else known)


def _moments(attempts: Sequence[Attempt]) -> list[float]:
    found: list[str | None] = []
    for attempt in attempts:
        found += [attempt["placed_at"], attempt["barrier_at"], attempt["launched_at"], attempt["ended_at"]]
        for each in attempt["components"]:
            found += [each["submitted_at"], each["claimed_at"], each["ended_at"]]
    return [at for moment in found if (at := _at(moment)) is not None]


def _queue_phases(job: Job, start: float, end: float) -> list[Phase]:
    entries = [(_at(entry["at"]) or 0.0, entry["state"]) for entry in job["timeline"]]
    phases: list[Phase] = []
    for (at, state), (until, _) in zip(entries, [*entries[1:], (end, "")], strict=True):
        if state not in ("queued", "held") or until <= max(at, start):
            continue
        if phases and phases[-1].what == state and phases[-1].end == at:
            phases[-1] = replace(phases[-1], end=until)
        else:
            phases.append(Phase(state, max(at, start), until))
    return phases


def _attempt_rows(job: Job, attempts: Sequence[Attempt], limit: int, end: float, mark: str) -> list[Row]:
    rows: list[Row] = []
    if (hidden := attempts[-limit:][0]["generation"] - 1 if attempts else 0) > 0:
        said = "1 earlier attempt" if hidden == 1 else f"{hidden} earlier attempts"
        rows.append(Row("", text=f"{said} not shown; --attempts {attempts[-1]['generation']} shows all"))
    for attempt in attempts[-limit:]:
        is_last = attempt is attempts[-1]
        result = attempt["end_reason"] or (job["state"] if is_last else "over")
        rows.append(Row(f"attempt {attempt['generation']}", text=result))
        # Only the last attempt of an unfinished job can still run.
        over = end if is_last and job["ended_at"] is None else _at(attempt["ended_at"])
        components = sorted(attempt["components"], key=lambda c: (c["rank"], c["index"]))
        begun = _at(attempt["placed_at"]) or 0.0
        for before, component in zip([None, *components[:-1]], components, strict=True):
            stands_in = before is not None and before["rank"] == component["rank"]
            since = (_at(before["ended_at"]) or begun) if before is not None and stands_in else begun
            phases = _component_phases(component, attempt, since, over)
            rows.append(Row(_label(component, stands_in, mark), phases))
    return rows


def _component_phases(component: AttemptComponent, attempt: Attempt, begun: float, over: float | None) -> list[Phase]:
    """Return at least one phase of a component, in order."""
    claimed, submitted = _at(component["claimed_at"]), _at(component["submitted_at"])
    ended = _at(component["ended_at"]) or over or begun
    if submitted is None and component["state"] != "placed":
        submitted = begun
    serves = claimed is not None and not component["superseded"]
    begins = [
        ("placed", begun),
        ("waiting", submitted),
        ("claimed", claimed),
        ("running", _at(attempt["barrier_at"]) if serves else None),
        ("stopping", _at(attempt["ended_at"])),
    ]
    known = [(what, max(at, begun)) for what, at in begins if at is not None]
    phases = []
    for index, (what, at) in enumerate(known):
        until = min([ended, *(later for _, later in known[index + 1 :])])
        if until > at:
            phases.append(Phase(what, at, until))
    return phases or [Phase(known[-1][0], begun, begun)]


def _label(component: AttemptComponent, stands_in: bool, mark: str) -> str:
    """Return the label of a lane, for example ``  2 north:4 (for 0)``. Cut a long name."""
    before, after = f"  {component['index']} ", f":{component['size']}" + f" (for {component['rank']})" * stands_in
    return before + cut(printable(component["cluster"]), MAX_LABEL_COLUMNS - len(before) - len(after), mark) + after


# From phases to text


def _paint(phases: Sequence[Phase], scale: Scale, marks: dict[str, str]) -> str:
    """Draw the phases as a lane of characters, with at least one column for each phase."""
    if len(phases) > scale.columns:
        longest = sorted(phases, key=lambda phase: phase.start - phase.end)[: scale.columns]
        phases = [phase for phase in phases if phase in longest][: scale.columns]
    edges = []
    free = 0
    for phase in phases:
        first = max(free, scale.column(phase.start))
        free = max(first + 1, scale.column(phase.end))
        edges.append((first, free))
    lane = [" "] * scale.columns
    room = scale.columns
    for phase, (first, last) in reversed(list(zip(phases, edges, strict=True))):
        last = min(last, room)
        room = min(first, last - 1)
        lane[room:last] = marks[phase.what] * (last - room)
    return "".join(lane)


def _legend(used: Iterable[str], width: int, marks: dict[str, str]) -> list[str]:
    found = set(used)
    lines = [""]
    for item in (f"{marks[what]} {meaning}" for what, meaning in MEANINGS.items() if what in found):
        if lines[-1] and len(lines[-1]) + 2 + len(item) > width:
            lines.append("")
        lines[-1] += f"  {item}" if lines[-1] else item
    return lines
