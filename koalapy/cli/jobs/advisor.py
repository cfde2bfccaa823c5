"""Commands for the advisor: its statistics about applications, and the accuracy of its predictions."""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import format_table, signed_duration
from koalapy.client.http import Json
from koalapy.model.wording import format_duration

KINDS = {"start": "start", "end": "end", "run-time": "run time", "advised": "run time by auto"}


def show_advisor(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show how long applications run on one cluster and on several, and what is decided for them."""
    print_answer(daemon.client().get("/api/v1/advisor"), as_json, applications_table)


def show_record(
    application: Annotated[str, Option("--application", help="only this application")] = "",
    limit: Annotated[int, Option("--limit", help="maximum number of rows, the newest", min=1, max=1000)] = 20,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Compare predictions with outcomes.

    WITHIN: share of outcomes within the interval, to be 80 %, with its 95 % interval.
    """
    answer = daemon.client().get("/api/v1/advisor/record", application=application, limit=limit)
    print_answer(answer, as_json, record_page)


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


def record_page(answer: Json) -> str:
    page = record_table(answer["record"])
    return f"{page}\n\n{coverage_table(answer['coverage'])}" if answer["coverage"] else page


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


COVERAGE = "FORETOLD,LAST,DECIDED,JOBS,WITHIN,EARLY,LATE,MEDIAN ERROR,BIAS,OPEN,CENSORED"


def coverage_table(periods: Sequence[Json]) -> str:
    """Return a table of the accuracy of predictions, by kind and period. Omit periods without further predictions."""
    rows, previous = [], None
    for period in periods:
        key = [period[name] for name in ("kind", "predictions", "open", "censored")]
        if key == previous or not any(key[1:]):
            continue
        previous = key
        median = "-" if period["median_error"] is None else format_duration(period["median_error"])
        shares = (_format_share(period), _format_value(period["early"], ".0%"), _format_value(period["late"], ".0%"))
        counts = (KINDS[period["kind"]], f"{period['days']:g} d", period["predictions"], period["jobs"])
        rows.append([*counts, *shares, median, signed_duration(period["bias"]), period["open"], period["censored"]])
    return format_table(COVERAGE.split(","), rows)


def _format_share(period: Json) -> str:
    if period["within"] is None:
        return "-"
    low, high = period["within_between"]
    return f"{period['within']:.0%} ({low:.0%} to {high:.0%})"


def _format_bounds(bounds: Sequence[float], form: str) -> str:
    return " to ".join(format(bound, form) for bound in bounds)


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _format_value(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


advisor_group = Group(
    "Show the run times that the policy auto has learned, or its record.", {"record": show_record}, default=show_advisor
)
