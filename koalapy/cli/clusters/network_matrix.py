"""The network as a matrix (as Table II of sonmez-2010: bandwidth above latency), and a link's history as a table."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.cells import cell_len

from koalapy.cli.terminal.tables import table
from koalapy.cli.terminal.width import left, right
from koalapy.client.client import Json
from koalapy.client.errors import printable
from koalapy.model.wording import clock, duration, three_digits

UNMEASURED = "–"
UNREACHABLE = "unreachable"
STALE = "*"
MIN_COLUMN_WIDTH = 8
"""Of a column at least, so that a short matrix can be read too."""


def network_page(answer: Json, columns: int | None = None) -> str:
    """The matrix, its legend, and what there is to be said of single links; ``columns`` of the terminal if any."""
    links = {(link["one"], link["other"]): link for link in answer["links"]}
    parts = [matrix(answer["clusters"], links, columns)]
    parts += ["\n".join(legend)] if (legend := _legend(answer)) else []
    parts += ["\n".join(notes)] if (notes := _notes(answer["links"])) else []
    return "\n\n".join(parts)


def matrix(clusters: Sequence[str], links: dict[tuple[str, str], Json], columns: int | None = None) -> str:
    """Two lines for each cluster: bandwidth in MB/s above, latency in ms below; in parts that have room."""
    rows = [["MB/s, ms", *(printable(name) for name in clusters)]]
    for one in clusters:
        cells = [_cell(links[min(one, other), max(one, other)], back=one > other) for other in clusters]
        rows.append([printable(one), *(top for top, _ in cells)])
        rows.append(["", *(bottom for _, bottom in cells)])
    first = max(cell_len(row[0]) for row in rows)
    width = max([MIN_COLUMN_WIDTH, *(cell_len(cell) for row in rows for cell in row[1:])])
    most = len(clusters) if columns is None else max(1, (columns - first) // (width + 2))
    parts = [range(start, min(start + most, len(clusters) + 1)) for start in range(1, len(clusters) + 1, most or 1)]
    return "\n\n".join(_part(rows, part, first, width) for part in parts or [range(0)])


def _part(rows: Sequence[Sequence[str]], part: range, first: int, width: int) -> str:
    lines = [left(row[0], first) + "".join(f"  {right(row[column], width)}" for column in part) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _cell(link: Json, *, back: bool) -> tuple[str, str]:
    """The way from the line's cluster to the column's."""
    if link["state"] == "unreachable":
        return UNREACHABLE, ""
    bandwidth = link.get("bandwidth_back", link["bandwidth"]) if back else link["bandwidth"]
    texts = (_number(bandwidth, 1e-6), _number(link["latency"], 1e3))
    if link["state"] == "stale":
        return texts[0] + STALE, texts[1] + STALE
    if link["state"] == "configured":
        return tuple(text if text == UNMEASURED else f"({text})" for text in texts)  # type: ignore[return-value]
    return texts


def _number(value: float | None, factor: float) -> str:
    return UNMEASURED if value is None else three_digits(value * factor)


def _legend(answer: Json) -> list[str]:
    states = {link["state"] for link in answer["links"]}
    partly = any((link["latency"] is None) != (link["bandwidth"] is None) for link in answer["links"])
    meanings = {
        UNMEASURED: "not measured: koala network measure" if "unmeasured" in states or partly else "",
        "( )": "configured, not measured" if "configured" in states else "",
        STALE: f"measured more than {duration(answer['stale_after'])} ago; used all the same"
        if "stale" in states
        else "",
        UNREACHABLE: "the nodes do not reach each other: never combined" if UNREACHABLE in states else "",
    }
    return [f"{mark}  {meaning}" for mark, meaning in meanings.items() if meaning]


def _notes(links: Sequence[Json]) -> list[str]:
    notes = []
    for link in links:
        name = f"{link['one']} - {link['other']}"
        if link["under_way"]:
            job = link["under_way"]["job"]
            notes.append(f"{name}: {'waits to be measured' if job is None else f'is being measured by job {job}'}")
        if link["error"]:
            what = UNREACHABLE if link["state"] == "unreachable" else "the last try came to nothing"
            notes.append(f"{name}: {what}, {_clock(link['tried_at'])} UTC: {link['error']}")
    return [printable(note) for note in notes]


def measurement_text(result: Json | None, reason: str = "") -> str:
    """What became of one measurement."""
    if reason:
        return f"not measured, {reason}"
    if result is None:
        return "the daemon has lost it; measure again"
    if result["error"]:
        return f"{UNREACHABLE if result['kind'] == 'pingpong' else 'not measured'}: {result['error']}"
    return f"{_number(result['latency'], 1e3)} ms, {_number(result['bandwidth'], 1e-6)} MB/s"


def history_table(lines: Sequence[Json]) -> str:
    rows = [
        [
            _clock(line["at"]),
            line["kind"],
            _number(line["latency"], 1e3),
            _number(line["bandwidth"], 1e-6),
            "-" if line["job"] is None else line["job"],
            line["error"] or "-",
        ]
        for line in lines
    ]
    return table(["UTC", "KIND", "LATENCY (ms)", "BANDWIDTH (MB/s)", "JOB", "ERROR"], rows)


def _clock(moment: str) -> str:
    at = datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
    return clock(at, datetime.now(UTC).timestamp(), exact=True)
