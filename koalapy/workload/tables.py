"""Markdown tables of reports, which are also readable on a terminal."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Json = dict[str, Any]

Columns = Mapping[str, Callable[[Json], object]]
"""Headers of a table, and the functions that return the cell of a group of jobs or of a run."""
SPAN_COLUMNS: Columns = {
    "wait s": lambda group: format_span(group["wait_time"]),
    "execution s": lambda group: format_span(group["execution_time"]),
    "response s": lambda group: format_span(group["response_time"]),
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; columns of numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}:" if is_right else "-" * width for width, is_right in zip(widths, right, strict=True)]
    return "\n".join([line(list(header)), line(rule), *(line(row) for row in cells)])


def format_columns(columns: Columns, groups: Sequence[Json]) -> str:
    return markdown_table(list(columns), [[cell(group) for cell in columns.values()] for group in groups])


def format_report(content: Json, title: str) -> str:
    """Return the full report of one run."""
    parts = [
        f"# {title}",
        _format_summary(content),
        "## Response time",
        *_format_response(content),
        "## Placing and claiming",
        _format_sizes(content),
    ]
    parts += ["## Utilisation", _format_utilisation(content["utilisation"])]
    return "\n\n".join(parts) + "\n"


def _format_summary(content: Json) -> str:
    """Return the opening lines of a report: jobs, policy, background load, delays and interruptions."""
    run, workload, summary = content["run"], content["workload"], content["summary"]
    states = ", ".join(f"{count} {state}" for state, count in summary["states"].items())
    policies = ", ".join(sorted({job["policy"] for job in content["jobs"] if job["policy"]})) or "-"
    lines = [f"{summary['jobs']} jobs in {run['seconds']:.0f} s ({states}); policy {policies}; began {run['began']}."]
    if run["background_target"]:
        target = format_percent(run["background_target"])
        measured = format_percent(content["utilisation"]["all"]["background"])
        lines.append(f"Background load: {target} asked for, {measured} measured.")
    if "seed" in workload:
        lines.append(f"Workload: seed {workload['seed']}, {workload.get('arrivals', '-')} arrivals.")
    if run["late"]:
        lines.append(f"Submissions more than 1 s late: {run['late']}, the latest by {run['latest']:.1f} s.")
    if run["daemon_away"]:
        lines.append(f"The daemon was away for {run['daemon_away']:.0f} s.")
    if not run["complete"]:
        lines.append(f"**Incomplete**: {run['interrupted']}. Means are over the jobs that had ended.")
    return "\n".join(lines)


def _format_response(content: Json) -> list[str]:
    """Return a table of mean times in seconds by application, and a note that defines them."""
    groups = [*content["by_application"], {"application": "all", **content["summary"]}]
    columns: Columns = {
        "application": itemgetter("application"),
        "ran": itemgetter("ran"),
        "queue s": lambda group: format_span(group["queue_time"]),
        "start-up s": lambda group: format_span(group["startup_overhead"]),
        **SPAN_COLUMNS,
        "95 % within s": lambda group: format_span(group["response_quantiles"]["0.95"]),
        "co-allocated": lambda group: format_percent(group["coallocated"]),
        "clusters": lambda group: format_span(group["clusters_combined"]),
    }
    return [
        format_columns(columns, groups if len(content["by_application"]) > 1 else groups[:-1]),
        "Means over jobs that ran to an end of their own. Response = wait + execution; wait ends when the barrier "
        "opens. Start-up goes from the placement until the barrier opens.",
    ]


def _format_sizes(content: Json) -> str:
    """Return a table of placement and claiming tries, delays and failures, by job size and priority."""
    columns: Columns = {
        "nodes": itemgetter("nodes"),
        "components": lambda group: group["components"] or "flexible",
        "priority": itemgetter("priority"),
        "ran": itemgetter("ran"),
        "failures": lambda group: format_percent(group["failures"]),
        "placement s": lambda group: format_span(group["queue_time"]),
        "start delay s": lambda group: format_span(group["start_delay"]),
        "placement tries": lambda group: format_span(group["placement_tries"]),
        "claiming tries": lambda group: format_span(group["claiming_tries"]),
        "co-allocated": lambda group: format_percent(group["coallocated"]),
    }
    return format_columns(columns, content["by_size"])


def _format_utilisation(content: Json) -> str:
    """Return a table of nodes and of the fractions that jobs and local users used, by cluster and in all."""
    groups = [*content["clusters"].items(), ("all", content["all"])]
    rows = [[name, u["nodes"], format_percent(u["ours"]), format_percent(u["background"])] for name, u in groups]
    return markdown_table(["cluster", "nodes", "jobs", "background"], rows)


# Comparison of runs


def format_comparison(content: Json) -> str:
    """Return a comparison of several runs; changes are relative to the mean response time of the first run."""
    columns: Columns = {
        "run": itemgetter("run"),
        "application": itemgetter("application"),
        "ran": itemgetter("ran"),
        **SPAN_COLUMNS,
        "change": lambda group: format_change(group["change"]),
        "co-allocated": lambda group: format_percent(group["coallocated"]),
        "clusters": lambda group: format_span(group["clusters_combined"]),
        "failures": lambda group: format_percent(group["failures"]),
    }
    use: Columns = {
        "run": itemgetter("label"),
        "seconds": lambda run: f"{run['seconds']:.0f}",
        "jobs": lambda run: format_percent(run["ours"]),
        "background": lambda run: format_percent(run["background"]),
        "incomplete": lambda run: run["incomplete"] or "-",
    }
    parts = [
        "# Runs compared",
        format_columns(columns, content["rows"]),
        f"Means per job in seconds; change: of the mean response time against {content['runs'][0]['label']}.",
        "## Utilisation",
        format_columns(use, content["runs"]),
    ]
    return "\n\n".join(parts) + "\n"


# Single values


def format_span(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def format_change(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.removesuffix(" %").lstrip("+-").replace(".", "", 1).isdigit()
