"""Commands for the advisor: its statistics about applications, and the placements by its advice."""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import format_table
from koalapy.client.http import Json


def show_advisor(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show how long applications run on one cluster and on several, and the decisions for them."""
    print_answer(daemon.client().get("/api/v1/advisor"), as_json, applications_table)


def show_record(
    application: Annotated[str, Option("--application", help="only this application")] = "",
    limit: Annotated[int, Option("--limit", help="maximum number of rows, the newest", min=1, max=1000)] = 20,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Show the jobs placed by advice, with their predicted and actual run times."""
    answer = daemon.client().get("/api/v1/advisor/record", application=application, limit=limit)
    print_answer(answer, as_json, lambda answer: record_table(answer["record"]))


def applications_table(answer: Json) -> str:
    """Return a table with a row for each size and set of clusters. VERDICT: when to use several clusters."""
    if not answer["applications"]:
        return "nothing is known yet: no job whose program has a name has run to its end"
    rows = []
    for application in answer["applications"]:
        name, verdict = application["application"], application["verdict"]
        for runs in application["runs"]:
            per_node = runs["processes_per_node"]
            nodes = f"{runs['nodes']}x{per_node}" if per_node else runs["nodes"]
            clusters = "+".join(runs["where"]) or "one"
            ran = f"{runs['runs']} ({runs['killed']} killed)" if runs["killed"] else runs["runs"]
            time = f"{_format_seconds(runs['seconds'])} ({_format_bounds(runs['seconds_between'], '.1f')})"
            slower = "-"
            if runs["slowdown"] is not None:
                slower = f"{runs['slowdown']:.2f} ({_format_bounds(runs['slowdown_between'], '.2f')})"
            rows.append([name, nodes, clusters, ran, time, slower, verdict])
            name = verdict = ""
    return format_table(["APPLICATION", "NODES", "CLUSTERS", "RUNS", "TIME", "SLOWDOWN", "VERDICT"], rows)


def record_table(predictions: Sequence[Json]) -> str:
    """Return a table of predictions, newest first, followed by their mean error."""
    if not predictions:
        return "the policy auto has placed no job yet"
    rows = [
        [
            *(prediction["job"], prediction["at"], prediction["application"] or "-", prediction["clusters"]),
            *(
                _format_seconds(prediction["predicted"]),
                _format_seconds(prediction["actual"]),
                _format_value(prediction["error"], "+.0%"),
            ),
            prediction["reason"],
        ]
        for prediction in predictions
    ]
    text = format_table(["JOB", "PLACED", "APPLICATION", "CLUSTERS", "PREDICTED", "ACTUAL", "ERROR", "REASON"], rows)
    errors = [abs(prediction["error"]) for prediction in predictions if prediction["error"] is not None]
    if not errors:
        return text
    times = f"{len(errors)} run time{'s' if len(errors) > 1 else ''}"
    return f"{text}\n\nPredictions of {times} were off by {fmean(errors):.0%} on average."


def _format_bounds(bounds: Sequence[float], form: str) -> str:
    return " to ".join(format(bound, form) for bound in bounds)


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _format_value(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


advisor_group = Group(
    "Show the run times that the policy auto has learned, or its record.", {"record": show_record}, default=show_advisor
)
