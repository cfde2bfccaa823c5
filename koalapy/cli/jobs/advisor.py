"""Commands for the advisor: its statistics about applications, and the accuracy of its predictions."""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from koalapy.cli.terminal.arguments import Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer
from koalapy.cli.terminal.tables import signed_duration, table
from koalapy.client.answers import Json
from koalapy.model.wording import format_duration

KINDS = {"start": "start", "end": "end", "run-time": "run time", "advised": "run time by auto"}


def advisor(as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Show how long applications run on one cluster and on several, and what is decided for them."""
    print_answer(daemon.client().get("/api/v1/advisor"), as_json, applications_table)


def record(
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
    """Return a table with a row for each size and set of clusters. The first row of an application has the verdict."""
    if not answer["applications"]:
        return "nothing is known yet: no job whose program has a name has run to its end"
    rows = []
    for application in answer["applications"]:
        name, verdict = application["application"], application["verdict"]
        for runs in application["runs"]:
            per_node = runs["processes_per_node"]
            nodes = f"{runs['nodes']}x{per_node}" if per_node else runs["nodes"]
            where = "+".join(runs["where"]) or "one"
            ran = f"{runs['runs']} ({runs['killed']} killed)" if runs["killed"] else runs["runs"]
            time = f"{_seconds(runs['seconds'])} ({_between(runs['seconds_between'], '.1f')})"
            slower = "-"
            if runs["slowdown"] is not None:
                slower = f"{runs['slowdown']:.2f} ({_between(runs['slowdown_between'], '.2f')})"
            rows.append([name, nodes, where, ran, time, slower, verdict])
            name = verdict = ""
    return table(["APPLICATION", "NODES", "CLUSTERS", "RUNS", "TIME", "SLOWDOWN", "VERDICT"], rows)


def record_page(answer: Json) -> str:
    page = record_table(answer["record"])
    return f"{page}\n\n{coverage_table(answer['coverage'])}" if answer["coverage"] else page


def record_table(found: Sequence[Json]) -> str:
    """Return a table of predictions, newest first, followed by their mean error."""
    if not found:
        return "the policy auto has placed no job yet"
    rows = [
        [
            *(given["job"], given["at"], given["application"] or "-", given["clusters"]),
            *(_seconds(given["predicted"]), _seconds(given["actual"]), _formatted(given["error"], "+.0%")),
            given["reason"],
        ]
        for given in found
    ]
    shown = table(["JOB", "PLACED", "APPLICATION", "CLUSTERS", "PREDICTED", "ACTUAL", "ERROR", "REASON"], rows)
    errors = [abs(given["error"]) for given in found if given["error"] is not None]
    if not errors:
        return shown
    times = f"{len(errors)} run time{'s' if len(errors) > 1 else ''}"
    return f"{shown}\n\nPredictions of {times} were off by {fmean(errors):.0%} on average."


COVERAGE = "FORETOLD,LAST,DECIDED,JOBS,WITHIN,EARLY,LATE,MEDIAN ERROR,BIAS,OPEN,CENSORED"


def coverage_table(found: Sequence[Json]) -> str:
    """Return a table of the accuracy of predictions, by kind and period. Omit periods without further predictions."""
    rows, before = [], None
    for each in found:
        same = [each[name] for name in ("kind", "predictions", "open", "censored")]
        if same == before or not any(same[1:]):
            continue
        before = same
        median = "-" if each["median_error"] is None else format_duration(each["median_error"])
        shares = (_share(each), _formatted(each["early"], ".0%"), _formatted(each["late"], ".0%"))
        counts = (KINDS[each["kind"]], f"{each['days']:g} d", each["predictions"], each["jobs"])
        rows.append([*counts, *shares, median, signed_duration(each["bias"]), each["open"], each["censored"]])
    return table(COVERAGE.split(","), rows)


def _share(told: Json) -> str:
    if told["within"] is None:
        return "-"
    low, high = told["within_between"]
    return f"{told['within']:.0%} ({low:.0%} to {high:.0%})"


def _between(bounds: Sequence[float], form: str) -> str:
    return " to ".join(format(bound, form) for bound in bounds)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


advisor_group = Group(
    "Show the run times that the policy auto has learned, or its record.", {"record": record}, default=advisor
)
