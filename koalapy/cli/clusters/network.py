"""``koala network``: a matrix of the links between clusters, their measurement, and the history of a link."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated

from koalapy.cli.jobs.waiting import WaitReporter
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Timeout, print_answer, show_json
from koalapy.cli.terminal.tables import format_columns
from koalapy.cli.terminal.text import align_left, cell_len, terminal_size
from koalapy.client.client import Absence, Client, in_path
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.tables import Columns
from koalapy.model.wording import format_duration, format_three_digits, format_time

UNMEASURED = "–"
UNREACHABLE = "unreachable"
STALE = "*"
RELAYED = "relayed"
RELAYED_MARK = "^"
MIN_COLUMN_WIDTH = 8
"""Minimum width of a column, so that a small matrix is readable."""


def network_page(answer: Json, columns: int | None = None) -> str:
    """Return the matrix, its legend and notes on single links. ``columns``: width of the terminal, if any."""
    links = {(link["one"], link["other"]): link for link in answer["links"]}
    parts = [format_matrix(answer["clusters"], links, columns)]
    parts += ["\n".join(legend)] if (legend := _legend_lines(answer)) else []
    parts += ["\n".join(notes)] if (notes := _link_notes(answer["links"])) else []
    return "\n\n".join(parts)


def format_matrix(clusters: Sequence[str], links: dict[tuple[str, str], Json], columns: int | None = None) -> str:
    """Return a table with two lines for each cluster: bandwidth in MB/s, and below it latency in ms.

    Split the table into parts that fit ``columns``.
    """
    rows = [["MB/s, ms", *(printable(name) for name in clusters)]]
    for cluster in clusters:
        cells = [_format_cell(links[min(cluster, peer), max(cluster, peer)], back=cluster > peer) for peer in clusters]
        rows.append([printable(cluster), *(top for top, _ in cells)])
        rows.append(["", *(bottom for _, bottom in cells)])
    first = max(cell_len(row[0]) for row in rows)
    width = max([MIN_COLUMN_WIDTH, *(cell_len(cell) for row in rows for cell in row[1:])])
    columns_per_part = len(clusters) if columns is None else max(1, (columns - first) // (width + 2))
    parts = [
        range(start, min(start + columns_per_part, len(clusters) + 1))
        for start in range(1, len(clusters) + 1, columns_per_part or 1)
    ]
    blocks = []
    for part in parts or [range(0)]:
        joined = ["".join(" " * (2 + width - cell_len(row[column])) + row[column] for column in part) for row in rows]
        texts = [f"{align_left(row[0], first)}{cell}".rstrip() for row, cell in zip(rows, joined, strict=True)]
        blocks.append("\n".join(texts))
    return "\n\n".join(blocks)


def _format_cell(link: Json, *, back: bool) -> tuple[str, str]:
    """Return bandwidth in MB/s and latency in ms of a link as texts, marked if outdated or only configured.

    ``back``: use the bandwidth of the opposite direction.
    """
    is_relayed = link.get("relayed", False)
    if link["state"] == "unreachable":
        return RELAYED if is_relayed else UNREACHABLE, ""
    bandwidth = link.get("bandwidth_back", link["bandwidth"]) if back else link["bandwidth"]
    texts = (_format_number(bandwidth, 1e-6), _format_number(link["latency"], 1e3))
    if marks := (STALE if link["state"] == "stale" else "") + (RELAYED_MARK if is_relayed else ""):
        return texts[0] + marks, texts[1] + marks
    if link["state"] == "configured":
        return tuple(text if text == UNMEASURED else f"({text})" for text in texts)  # type: ignore[return-value]
    return texts


def _format_number(value: float | None, factor: float) -> str:
    return UNMEASURED if value is None else format_three_digits(value * factor)


def _legend_lines(answer: Json) -> list[str]:
    """Explain each mark that occurs in the matrix in one line."""
    relayed = [link for link in answer["links"] if link.get("relayed")]
    states = {link["state"] for link in answer["links"] if link not in relayed or link["state"] != UNREACHABLE}
    relayed_states = {link["state"] for link in relayed}
    partly = any((link["latency"] is None) != (link["bandwidth"] is None) for link in answer["links"])
    meanings = {
        UNMEASURED: "not measured: koala network measure" if "unmeasured" in states or partly else "",
        "( )": "configured, not measured" if "configured" in states else "",
        STALE: f"measured more than {format_duration(answer['stale_after'])} ago; used all the same"
        if "stale" in states
        else "",
        RELAYED_MARK: "MPI messages go over relays" if relayed_states - {UNREACHABLE} else "",
        RELAYED: "MPI messages go over relays, not measured: koala network measure"
        if UNREACHABLE in relayed_states
        else "",
        UNREACHABLE: "the nodes do not reach each other: never combined" if UNREACHABLE in states else "",
    }
    return [f"{mark}  {meaning}" for mark, meaning in meanings.items() if meaning]


def _link_notes(links: Sequence[Json]) -> list[str]:
    """Return a line for each link that is being measured, and for each failed measurement."""
    notes = []
    for link in links:
        name = f"{link['one']} - {link['other']}"
        if link["under_way"]:
            job = link["under_way"]["job"]
            notes.append(f"{name}: {'waits to be measured' if job is None else f'is being measured by job {job}'}")
        if link.get("relayed_reason"):
            since = f" since {_format_clock(link['relayed_since'])} UTC" if link["relayed_since"] else ""
            retry = link["direct_retry_at"]
            again = f"; tried directly again from {_format_clock(retry)} UTC" if retry else ""
            notes.append(f"{name}: relayed{since}: {link['relayed_reason']}{again}")
        if link["error"]:
            problem = UNREACHABLE if link["state"] == "unreachable" else "the last try came to nothing"
            notes.append(f"{name}: {problem}, {_format_clock(link['tried_at'])} UTC: {link['error']}")
    return [printable(note) for note in notes]


def measurement_text(result: Json | None, reason: str = "") -> str:
    """Return the result of a measurement as text, or the ``reason`` why there is none."""
    if reason:
        return f"not measured, {reason}"
    if result is None:
        return "the daemon has lost it; measure again"
    if result["error"]:
        return f"{UNREACHABLE if result['kind'] == 'pingpong' else 'not measured'}: {result['error']}"
    return f"{_format_number(result['latency'], 1e3)} ms, {_format_number(result['bandwidth'], 1e-6)} MB/s"


def _format_clock(moment: str) -> str:
    timestamp = datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
    return format_time(timestamp, datetime.now(UTC).timestamp(), exact=True)


HISTORY: Columns = {
    "UTC": lambda line: _format_clock(line["at"]),
    "KIND": itemgetter("kind"),
    "LATENCY (ms)": lambda line: _format_number(line["latency"], 1e3),
    "BANDWIDTH (MB/s)": lambda line: _format_number(line["bandwidth"], 1e-6),
    "JOB": lambda line: "-" if line["job"] is None else line["job"],
    "ERROR": lambda line: line["error"] or "-",
}
POLL_INTERVAL_S = 0.5


def show_network(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show bandwidth and latency between and within the clusters, as they are known."""
    answer = daemon.client().get("/api/v1/network")
    terminal = terminal_size(sys.stdout)
    print_answer(answer, as_json, lambda answer: network_page(answer, terminal[0] if terminal else None))


def measure_links(
    clusters: Annotated[
        list[str] | None, Argument(help="clusters to measure; default: all", completes="clusters")
    ] = None,
    wait: Annotated[bool, Option("--wait/--no-wait", help="wait for the results")] = True,
    timeout: Timeout = None,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> int:
    """Measure links within and between clusters by MPI ping-pong jobs of low priority."""
    client = daemon.client()
    deadline = None if timeout is None else time.monotonic() + timeout
    order = {"clusters": clusters} if clusters else None
    started = client.post("/api/v1/network/measure", order)
    if not wait:
        states = [
            (link, measurement_text(None, link["reason"]) if link["reason"] else "under way")
            for link in started["links"]
        ]
        page = "\n".join(printable(f"{_link_name(link)}: {state}") for link, state in states)
        print_answer(started, as_json, lambda _: page)
        return _code_of(started["links"])
    try:
        results = _follow_measurements(client, started, deadline, quiet=as_json)
    except KeyboardInterrupt:
        raise GridError("the measurements continue", Exit.INTERRUPTED, "see koala network") from None
    if as_json:
        show_json({"since": started["since"], "links": results})
    if any(link["result"] is None or link["result"]["error"] for link in results if not link["reason"]):
        return Exit.FAILED
    return _code_of(results)


def _code_of(links: list[Json]) -> Exit:
    """Return the exit code. If no link can be measured, print an error and return ``Exit.FAILED``."""
    if any(not link["reason"] for link in links):
        return Exit.OK
    print("koala: no link is measured; see the reasons above and koala clusters", file=sys.stderr)
    return Exit.FAILED


def _follow_measurements(client: Client, started: Json, deadline: float | None, *, quiet: bool) -> list[Json]:
    """Print the result of each link when it is measured; return all requested links with their results."""
    waiting = {(link["one"], link["other"]): link for link in started["links"]}
    results: list[Json] = []
    with closing(WaitReporter(client.timeouts)) as reporter:
        while True:
            links = _request_links(client)
            under_way = {(link["one"], link["other"]) for link in links if link["under_way"]}
            for link in [link for pair, link in waiting.items() if link["reason"] or pair not in under_way]:
                del waiting[link["one"], link["other"]]
                result = None if link["reason"] else _request_result(client, link, started["since"])
                results.append({**link, "job": result["job"] if result else link["job"], "result": result})
                if not quiet:
                    print(printable(f"{_link_name(link)}: {measurement_text(result, link['reason'])}"), flush=True)
            if not waiting:
                return results
            if deadline is not None and time.monotonic() >= deadline:
                unmeasured = ", ".join(_link_name(link) for link in waiting.values())
                raise GridError(
                    f"timeout: not measured: {unmeasured}", Exit.TIMEOUT, "the measurements continue; see koala network"
                )
            measured = [link["under_way"] for link in links if (link["one"], link["other"]) in waiting]
            if job := next((entry["job"] for entry in measured if entry and entry["job"]), None):
                with suppress(GridError):  # the daemon is away, or the job was removed
                    reporter.update(client.job(job), is_reported=False)
            client.timeouts.sleep(POLL_INTERVAL_S)


def _request_links(client: Client) -> list[Json]:
    """Return all links. Wait for the daemon if it is unreachable."""
    absence = Absence(client)
    while True:
        try:
            links: list[Json] = client.get("/api/v1/network")["links"]
            return links
        except GridError as error:
            absence.tolerate(error)
            client.timeouts.sleep(POLL_INTERVAL_S)


def _request_result(client: Client, link: Json, since: str) -> Json | None:
    """Return the requested ping-pong of a link; None if the daemon has lost it."""
    lines: list[Json] = client.get(_history_path(link["one"], link["other"]))["measurements"]
    return next((line for line in lines if line["kind"] != "transfer" and line["at"] >= since), None)


def show_history(
    cluster: Annotated[str, Argument(help="a cluster", completes="clusters")],
    peer: Annotated[str, Argument(help="another cluster, or the same for the network within it", completes="clusters")],
    limit: Annotated[int, Option(help="maximum number of rows", min=1, max=1000)] = 20,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """List measurements between two clusters, newest first."""
    answer = daemon.client().get(_history_path(cluster, peer), limit=limit)
    if not answer["measurements"] and not as_json:
        print(f"koala: there are no measurements; use koala network measure {cluster} {peer}", file=sys.stderr)
    print_answer(answer, as_json, lambda answer: format_columns(HISTORY, answer["measurements"]))


def _history_path(cluster: str, peer: str) -> str:
    return f"/api/v1/network/{in_path(cluster)}/{in_path(peer)}/history"


def _link_name(link: Json) -> str:
    return f"{link['one']} - {link['other']}"


network_group = Group(
    "Show or measure the network between clusters.",
    {"measure": measure_links, "history": show_history},
    default=show_network,
)
