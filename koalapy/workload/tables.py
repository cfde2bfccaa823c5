"""Markdown tables of reports, which are also readable on a terminal."""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

SPANS = ("wait_time", "execution_time", "response_time")


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
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


def report(told: Json, title: str) -> str:
    """Return the full report of one run."""
    parts = [f"# {title}", _how(told), "## Response time", *_response(told), "## Placing and claiming", _sizes(told)]
    parts += ["## Utilisation", _utilisation(told["utilisation"])]
    return "\n\n".join(parts) + "\n"


def _how(told: Json) -> str:
    run, workload, summary = told["run"], told["workload"], told["summary"]
    states = ", ".join(f"{count} {state}" for state, count in summary["states"].items())
    policies = ", ".join(sorted({job["policy"] for job in told["jobs"] if job["policy"]})) or "-"
    lines = [f"{summary['jobs']} jobs in {run['seconds']:.0f} s ({states}); policy {policies}; began {run['began']}."]
    if run["background_target"]:
        measured = told["utilisation"]["all"]["background"]
        lines.append(f"Background load: {percent(run['background_target'])} asked for, {percent(measured)} measured.")
    if "seed" in workload:
        lines.append(f"Workload: seed {workload['seed']}, {workload.get('arrivals', '-')} arrivals.")
    if run["late"]:
        lines.append(f"Submissions more than 1 s late: {run['late']}, the latest by {run['latest']:.1f} s.")
    if run["daemon_away"]:
        lines.append(f"The daemon was away for {run['daemon_away']:.0f} s.")
    if not run["complete"]:
        lines.append(f"**Incomplete**: {run['interrupted']}. Means are over the jobs that had ended.")
    return "\n".join(lines)


def _response(told: Json) -> list[str]:
    groups = [*told["by_application"], {"application": "all", **told["summary"]}]
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
            *(span(g[n]) for n in ("queue_time", "startup_overhead", *SPANS)),
            span(g["response_quantiles"]["0.95"]),
            percent(g["coallocated"]),
            span(g["clusters_combined"]),
        ]
        for g in (groups if len(told["by_application"]) > 1 else groups[:-1])
    ]
    return [
        markdown(header, rows),
        "Means over jobs that ran to an end of their own. Response = wait + execution; wait ends when the barrier "
        "opens. Start-up goes from the placement until the barrier opens.",
    ]


def _sizes(told: Json) -> str:
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
            percent(g["failures"]),
            span(g["queue_time"]),
            span(g["start_delay"]),
            span(g["placement_tries"]),
            span(g["claiming_tries"]),
            percent(g["coallocated"]),
        ]
        for g in told["by_size"]
    ]
    return markdown(header, rows)


def _utilisation(told: Json) -> str:
    groups = [*told["clusters"].items(), ("all", told["all"])]
    rows = [[name, u["nodes"], percent(u["ours"]), percent(u["background"])] for name, u in groups]
    return markdown(["cluster", "nodes", "jobs", "background"], rows)


# Comparison of runs


def comparison(told: Json) -> str:
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
            *(span(g[name]) for name in SPANS),
            change(g["change"]),
            percent(g["coallocated"]),
            span(g["clusters_combined"]),
            percent(g["failures"]),
        ]
        for g in told["rows"]
    ]
    used = [
        [
            run["label"],
            f"{run['seconds']:.0f}",
            percent(run["ours"]),
            percent(run["background"]),
            run["incomplete"] or "-",
        ]
        for run in told["runs"]
    ]
    return (
        "\n\n".join(
            [
                "# Runs compared",
                markdown(header, rows),
                f"Means per job in seconds; change: of the mean response time against {told['runs'][0]['label']}.",
                "## Utilisation",
                markdown(["run", "seconds", "jobs", "background", "incomplete"], used),
            ]
        )
        + "\n"
    )


# Single values


def span(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def change(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.removesuffix(" %").lstrip("+-").replace(".", "", 1).isdigit()
