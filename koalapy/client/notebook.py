"""How the Python client's objects show themselves: tables as text and HTML, and timelines of jobs as SVG pictures."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

from koalapy.client.client import FINAL
from koalapy.client.http import Json
from koalapy.client.tables import Columns, seconds_since
from koalapy.model.wording import format_duration

T = TypeVar("T")
WIDTH, BAR_HEIGHT, HEIGHT = 720, 20, 40
"""Pixels of a timeline."""
LABEL_WIDTH = 60
"""Minimum width of a bar with a label in pixels."""
COLORS = {
    "queued": "#b9c0c8",
    "held": "#b9c0c8",
    "placed": "#e9c46a",
    "claiming": "#e9c46a",
    "starting": "#8ab17d",
    "running": "#2a9d8f",
    "unknown": "#e76f51",
}
"""Color of the bar of each state of an unfinished job."""


class Table(list[T]):
    """A list that shows itself as a table, also in notebooks."""

    def __init__(self, items: Iterable[T], columns: Columns, records: Sequence[Json]) -> None:
        """``records``: the items with all fields of the REST API."""
        super().__init__(items)
        self._columns, self.records = columns, records

    def to_pandas(self) -> Any:
        """Return the items as a data frame of pandas, a row for each. Raise ``ImportError`` without pandas."""
        return import_module("pandas").DataFrame(self.records)

    def _rows(self) -> list[list[str]]:
        return [[str(cell(record)) for cell in self._columns.values()] for record in self.records]

    def __repr__(self) -> str:
        rows = [list(self._columns), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        return format_html_table(list(self._columns), self._rows())


def format_html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def draw_timeline(job: Json) -> str:
    """Return the states of a job over time as an SVG picture, until now or until the job has ended."""
    start, end = job["submitted_at"], job["ended_at"]
    total = max(seconds_since(start, end), 0.001)
    entries = [entry for entry in job["timeline"] if entry["state"] not in FINAL]
    moments = [*(seconds_since(start, entry["at"]) for entry in entries), total]
    parts = []
    for entry, (began, ended) in zip(entries, pairwise(moments), strict=True):
        x, width = WIDTH * began / total, WIDTH * max(0.0, ended - began) / total
        text = f"{entry['state']} for {format_duration(ended - began)}: {entry['reason'] or entry['event']}"
        parts.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{COLORS[entry["state"]]}">'
            f"<title>{escape(text)}</title></rect>"
        )
        if width >= LABEL_WIDTH:
            parts.append(f'<text x="{x + 4:.1f}" y="{BAR_HEIGHT - 6}">{escape(entry["state"])}</text>')
    parts.append(f'<text x="0" y="{HEIGHT - 5}">{escape(start[11:19])}</text>')
    last = f"{job['state']} after {format_duration(total)}"
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 5}" text-anchor="end">{escape(last)}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="currentColor"'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" {style}>{"".join(parts)}</svg>'
