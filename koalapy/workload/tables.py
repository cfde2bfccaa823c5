"""Markdown tables of reports, which are also readable on a terminal."""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

SPANS = ("wait_time", "execution_time", "response_time")


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
    header = [
        "application",
        "ran",
        "queue s",
        "start-up s",
        "wait s",
        "execution s",
        "response s",
        "95 % within s",
        "co-allocated",
        "clusters",
    ]
    rows = [
        [
            g["application"],
            g["ran"],
            *(format_span(g[n]) for n in ("queue_time", "startup_overhead", *SPANS)),
            format_span(g["response_quantiles"]["0.95"]),
            format_percent(g["coallocated"]),
            format_span(g["clusters_combined"]),
        ]
        for g in (groups if len(content["by_application"]) > 1 else groups[:-1])
    ]
    return [
        markdown_table(header, rows),
        "Means over jobs that ran to an end of their own. Response = wait + execution; wait ends when the barrier "
        "opens. Start-up goes from the placement until the barrier opens.",
    ]


def _format_sizes(content: Json) -> str:
    """Return a table of placement and claiming tries, delays and failures, by job size and priority."""
    header = [
        "nodes",
        "components",
        "priority",
        "ran",
        "failures",
        "placement s",
        "start delay s",
        "placement tries",
        "claiming tries",
        "co-allocated",
    ]
    rows = [
        [
            g["nodes"],
            g["components"] or "flexible",
            g["priority"],
            g["ran"],
            format_percent(g["failures"]),
            format_span(g["queue_time"]),
            format_span(g["start_delay"]),
            format_span(g["placement_tries"]),
            format_span(g["claiming_tries"]),
            format_percent(g["coallocated"]),
        ]
        for g in content["by_size"]
    ]
    return markdown_table(header, rows)


def _format_utilisation(content: Json) -> str:
    """Return a table of nodes and of the fractions that jobs and local users used, by cluster and in all."""
    groups = [*content["clusters"].items(), ("all", content["all"])]
    rows = [[name, u["nodes"], format_percent(u["ours"]), format_percent(u["background"])] for name, u in groups]
    return markdown_table(["cluster", "nodes", "jobs", "background"], rows)


# Comparison of runs


def format_comparison(content: Json) -> str:
    """Return a comparison of several runs; changes are relative to the mean response time of the first run."""
    header = [
        "run",
        "application",
        "ran",
        "wait s",
        "execution s",
        "response s",
        "change",
        "co-allocated",
        "clusters",
        "failures",
    ]
    rows = [
        [
            g["run"],
            g["application"],
            g["ran"],
            *(format_span(g[name]) for name in SPANS),
            format_change(g["change"]),
            format_percent(g["coallocated"]),
            format_span(g["clusters_combined"]),
            format_percent(g["failures"]),
        ]
        for g in content["rows"]
    ]
    used = [
        [
            run["label"],
            f"{run['seconds']:.0f}",
            format_percent(run["ours"]),
            format_percent(run["background"]),
            run["incomplete"] or "-",
        ]
        for run in content["runs"]
    ]
    return (
        "\n\n".join(
            [
                "# Runs compared",
                markdown_table(header, rows),
                f"Means per job in seconds; change: of the mean response time against {content['runs'][0]['label']}.",
                "## Utilisation",
                markdown_table(["run", "seconds", "jobs", "background", "incomplete"], used),
            ]
        )
        + "\n"
    )


# Single values


def format_span(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def format_change(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.removesuffix(" %").lstrip("+-").replace(".", "", 1).isdigit()
